"""Trace a model once: the calls of its canonical layers, its graphs of modules, its outputs and its memory layout."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.utils import _pytree as pytree

from cpnorm._checks import Inputs
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import canonical_layers, fold
from cpnorm.nn.running import run, to_device_of

Shape = tuple[int, ...]
_TRACING = threading.Lock()  # torch.fx patches nn.Module for the whole process while it traces


@dataclass(frozen=True)
class Call:
    """One call of a layer: the shape and dtype of its input, and why a chain of layers cannot take it, if so."""

    shape: Shape
    dtype: torch.dtype
    obstacle: str

    def random_input(self, device: torch.device, layout: torch.memory_format) -> Tensor:
        """Return a random input like the one of this call, in this memory layout if it has one."""
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.shape, generator=generator, device=device).to(self.dtype)
        return x.contiguous(memory_format=layout) if x.ndim == len(_dimensions(layout)) else x


@dataclass(frozen=True)
class Part:
    """A module of the model that torch.fx can trace in eval mode, by name, with its graph of modules and functions."""

    name: str
    graph: Graph

    def path(self, node: Node) -> str:
        """Return the name in the whole model of the module that a node calls."""
        return f"{self.name}.{node.target}" if self.name else str(node.target)


@dataclass(frozen=True)
class Trace:
    """The results of tracing a model on its example input."""

    dense: nn.Module  # a folded copy in eval mode
    inputs: Inputs
    calls: dict[str, list[Call]]  # of every canonical layer and those tied to it
    parts: tuple[Part, ...]
    parts_in_training: tuple[Part, ...]
    outputs: list[Any]  # of the dense model, flat
    stable: list[bool]  # which outputs come out the same a second time

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.dense.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's first parameter."""
        return next(self.dense.parameters()).dtype


def trace(model: nn.Module, example_input: Inputs) -> Trace:
    """Fold a copy of the model, run it once on the example input, and trace its graphs."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("expected a model with values, got parameters on the meta device")
    dense = fold(copy.deepcopy(model)).eval()
    # Moved once: a CUDA graph cannot capture the copy, and timings should not include it.
    example_input = pytree.tree_map_only(Tensor, partial(to_device_of, dense), example_input)
    calls, outputs = _observe(model, dense, example_input)
    again = pytree.tree_leaves(run(dense, example_input))
    stable = [not isinstance(y, Tensor) or torch.equal(y, z) for y, z in zip(outputs, again, strict=True)]
    layers = [name for name, layer in model.named_modules() if isinstance(layer, CPLayer)]
    parts, in_training = (tuple(_parts(dense, layers, training)) for training in (False, True))
    return Trace(dense, example_input, calls, parts, in_training, outputs, stable)


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module has hooks or a patched forward."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in module.__dict__ or any(getattr(module, kind) for kind in kinds)


def count_places(model: nn.Module) -> Counter[int]:
    """Count the names of each module in the model, by its id: shared modules have several."""
    return Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))


def _dimensions(layout: torch.memory_format) -> str:
    return {torch.channels_last: "NCHW", torch.channels_last_3d: "NCDHW"}.get(layout, "")


# --- calls --------------------------------------------------------------------------------------------------------


def _observe(model: nn.Module, dense: nn.Module, example_input: Inputs) -> tuple[dict[str, list[Call]], list[Any]]:
    """Return the calls of every canonical layer, and the outputs of the folded model, in one pass through it."""
    layers = canonical_layers(model)
    first = {tie_key(layer): name for name, layer in layers.items()}
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    reads: dict[str, str] = {}

    def observe(name: str, layer: CPLayer) -> None:
        leader = first[tie_key(layer)]
        fixed = "" if layer.extra_repr() == layers[leader].extra_repr() else "tied to a layer with other settings"
        fixed = "it has hooks" if has_hooks(layer) else fixed
        accepted = ("input", "output_size") if getattr(layer, "transposed", False) else ("input",)

        def note(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(accepted, args, strict=False)) | kwargs
            x, more = given.get("input", torch.empty(0)), args[len(accepted) :]
            obstacle = "" if x.numel() else "called on an empty tensor"
            obstacle = "called in another precision than its own" if x.dtype != layer.lambdas.dtype else obstacle
            obstacle = "called with more than one tensor" if more or given.keys() - set(accepted) else obstacle
            calls[leader].append(Call(tuple(x.shape), x.dtype, fixed or obstacle))

        def read(attribute: str) -> None:
            reads[leader] = f"other code reads its {attribute}"

        module = dense.get_submodule(name)
        module.__class__ = _observed(module, note, read)

    # A module with several names is observed once.
    observed = {name: layer for name, layer in model.named_modules() if isinstance(layer, CPLayer)}
    for name, layer in observed.items():
        observe(name, layer)
    try:
        outputs = pytree.tree_leaves(run(dense, example_input))
    finally:
        for name in observed:
            module = dense.get_submodule(name)
            module.__class__ = type(module).__mro__[1]
    found = {name: [replace(c, obstacle=c.obstacle or reads.get(name, "")) for c in calls[name]] for name in layers}
    return found, outputs


def _observed(layer: nn.Module, note: Callable[..., None], read: Callable[[str], None]) -> type[nn.Module]:
    """Return the layer's class, changed to report calls, and reads of attributes that a chain of layers lacks.

    Hooks would not do: with them torch's transformer layers take another path than the one that reads the weights.
    """
    kind: Any = type(layer)
    absent, running = set(dir(layer)) - set(dir(nn.Sequential())), False

    class Observed(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal running
            note(*args, **kwargs)
            running = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                running = False

        def __getattribute__(self, name: str) -> Any:
            if name in absent and not running:
                read(name)
            return super().__getattribute__(name)

    return Observed


# --- graphs -------------------------------------------------------------------------------------------------------


class _LayerTracer(Tracer):
    """Trace down to the layers of torch, and to modules with hooks, which see what they are called with."""

    def __init__(self, leaves: set[nn.Module]) -> None:
        super().__init__()
        self.leaves, self.thread = leaves, threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:  # a model that another thread runs meanwhile
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _parts(dense: nn.Module, layers: list[str], training: bool) -> Iterator[Part]:
    """Yield the model if torch.fx can trace it, else those of its modules that it can."""
    # Traced in a copy that shares all tensors, since a forward may leave its symbolic values in attributes.
    shared = {id(tensor): tensor for tensor in (*dense.parameters(), *dense.buffers())}
    copied = copy.deepcopy(dense, dict(shared)).train(training)
    leaves = {copied.get_submodule(name) for name in layers}

    def visit(name: str, module: nn.Module) -> Iterator[Part]:
        if module in leaves or not module._modules:
            return
        inside = dict(module.named_children())
        if not has_hooks(module):
            try:
                with _TRACING:
                    graph = _LayerTracer(leaves).trace(module)
            except Exception:  # forwards with control flow fail in many ways; the modules inside them may not
                pass
            else:
                yield Part(name, graph)
                called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
                inside = {key: child for key in sorted(called) if has_hooks(child := module.get_submodule(key))}
        for key, child in inside.items():
            yield from visit(f"{name}.{key}" if name else key, child)

    yield from visit("", copied)
