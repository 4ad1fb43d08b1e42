"""Fuse canonical layers with what follows them into blocks with kernels of their own, wherever the graph shows how."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, iadd
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cpnorm._checks import Inputs
from cpnorm.deploy.rewrite import (
    DROPOUTS,
    Rewrites,
    halves_maps,
    is_fixed_norm,
    make_plain,
    output_layer,
    scale_and_shift,
)
from cpnorm.deploy.tracing import Part, count_places, has_hooks
from cpnorm.gpu.block_sizes import aligned
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue
from cpnorm.gpu.fused_layers import can_fuse, fused_block, fused_input
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.layers import CPConv2d, CPLinear
from cpnorm.nn.running import hooked, run

FUSED, FUSED_PATCHES = FUSED_FORMS = "fused", "fused-patches"
ROUNDING = 0.03  # of a block's output: bfloat16 is off by 0.003, one of sixteen terms left out by 0.25
WIDENS = 2  # times as many terms as channels are too many to write
RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
ADDS = (add, iadd, torch.add, "add", "add_")
FLATTENS = (torch.flatten, "flatten")


@torch.inference_mode(False)
def fused_copy(
    model: nn.Module,
    forms: Mapping[str, str],
    channels_last: bool,
    rewrites: Rewrites,
    parts: Sequence[Part],
    widest: int,
) -> tuple[nn.Module, dict[str, str], bool]:
    """Copy a model with fused blocks for canonical layers of at most this rank, and fused epilogues after the others.

    Returns:
        The copy, the forms of the layers that are fused in it, by name, and whether it has any kernels at all.
    """
    made = copy.deepcopy(model)
    fusing = [_Fusing(made, part) for part in parts]
    fused: dict[str, str] = {}
    for one in fusing:
        fused |= one.fuse_blocks(widest)
    rewrites = rewrites.without_swaps_of(set().union(*(one.erased for one in fusing)))
    made = make_plain(made, forms, channels_last, rewrites)
    for one in fusing:
        one.fuse_epilogues()
    for one in fusing:
        made = one.put_into(made)
    return made, fused, any(one.changed for one in fusing)


def kernels_match_torch(model: nn.Module, example_input: Inputs) -> bool:
    """Return True if every fused module computes what torch's operations compute of its input, up to rounding.

    A kernel that was compiled wrong may not show in the model's output, most of which may come from biases.
    """
    match: list[bool] = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...], _: dict[str, Any], output: Tensor) -> None:
        wanted = cast(FusedBlock | FusedEpilogue, module).by_torch(*inputs).double()
        match.append(bool((output.double() - wanted).norm() <= ROUNDING * wanted.norm()))

    with hooked([module for module in model.modules() if isinstance(module, FusedBlock | FusedEpilogue)], check):
        run(model, example_input)
    return all(match)


@dataclass
class _Tail:
    """What follows a layer and one kernel can do with it: batch norm, residual, ReLU and 2x2 max pooling."""

    nodes: list[Node]  # the layer, and all that the kernel does besides
    norm: _BatchNorm | None = None
    residual: Node | None = None
    relu: bool = False
    pool: bool = False

    @property
    def last(self) -> Node:
        return self.nodes[-1]


class _Fusing:
    """Fuse the layers of one traced part of a model, whose graph then replaces the part's forward."""

    def __init__(self, model: nn.Module, part: Part) -> None:
        self.name, self.root = part.name, model.get_submodule(part.name)
        self.graph: Graph = copy.deepcopy(part.graph)
        self.graph._tracer_cls = None  # it would be pickled with the model
        self.changed = False
        self.erased: set[str] = set()  # names of modules that fused blocks have taken over
        self.held = list(model.modules())  # so that no other module gets the id of one that is replaced
        self.places = count_places(model)
        self.tied = Counter(tie_key(module) for module in model.modules() if isinstance(module, CPLayer))
        self.calls = Counter(node.target for node in self.graph.nodes if node.op == "call_module")

    def put_into(self, model: nn.Module) -> nn.Module:
        """Replace the part by a module that runs the graph, if anything was fused; return the model."""
        if not self.changed:
            return model
        self.graph.lint()
        made = GraphModule(self.root, self.graph, type(self.root).__name__)
        if not self.name:
            return made
        model.set_submodule(self.name, made)
        return model

    # --- blocks ---------------------------------------------------------------------------------------------------

    def fuse_blocks(self, widest: int) -> dict[str, str]:
        """Make fused blocks of canonical layers of at most this rank; return their forms by name.

        A layer of few input channels runs on patches of the image, whatever its rank, unless the limit is 0. A layer
        that would have to write many more terms than it reads channels is left out, as a stem with a large kernel.
        """
        fused: dict[str, str] = {}
        terms: dict[Node, Node] = {}  # by layers: the node that makes their terms
        for node in list(self.graph.nodes):
            patches = widest > 0 and node not in terms and self._fits(node, widest, patches=True)
            if not patches and not self._fits(node, widest):
                continue
            layer = cast(CPLayer, self._module(node))
            conv = isinstance(layer, CPConv2d)
            if not patches and node not in terms and self._widens(layer):
                continue
            tail = self._tail(node, maps=conv, norms=conv, residuals=conv)
            then, flat = self._following(tail.last, layer, widest)
            source = node.args[0] if patches else terms[node] if node in terms else self._input(node, node.args[0])
            block = fused_block(
                layer,
                following=None if flat else cast(CPLayer | None, self._module(then)),
                affine=None if tail.norm is None else scale_and_shift(tail.norm),
                relu=tail.relu,
                pool=tail.pool,
                patches=patches,
                subsampled=not patches and node not in terms,
            )
            fused[f"{self.name}.{node.target}".lstrip(".")] = FUSED_PATCHES if patches else FUSED
            made = self._replace(tail.nodes, tail, cast(str, node.target), block, source)
            if then is not None:
                terms[then] = self._input(then, made, cast(CPConv2d, layer).out_channels) if flat else made
        return fused

    def _fits(self, node: Node | None, widest: int, *, patches: bool = False) -> bool:
        layer = self._module(node)
        if not isinstance(layer, CPLayer) or self.places[id(layer)] > 1 or self.tied[tie_key(layer)] > 1:
            return False
        return can_fuse(layer, patches=patches) and (patches or layer.rank <= widest)

    def _widens(self, layer: CPLayer) -> bool:
        return isinstance(layer, CPConv2d) and aligned(layer.rank) > WIDENS * layer.in_channels

    def _following(self, last: Node, layer: CPLayer, widest: int) -> tuple[Node | None, bool]:
        """Return the layer that can take this output as terms, if there is one, and whether it takes maps flattened."""
        conv, then = isinstance(layer, CPConv2d), _only_user(last)
        if self._fits(then, widest) and conv == isinstance(self._module(then), CPConv2d):
            return then, False
        if isinstance(layer, CPConv2d) and then is not None and self._flattens(then):
            after = _only_user(then)
            while after is not None and self._step(after) == "idle":
                after = _only_user(after)
            linear = self._module(after)
            if self._fits(after, widest) and isinstance(linear, CPLinear):
                return (after, True) if linear.in_features % layer.out_channels == 0 else (None, False)
        return None, False

    def _flattens(self, node: Node) -> bool:
        module = self._module(node)
        if module is not None:
            return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
        return node.target in FLATTENS and node.args[1:] in ((1,), (1, -1)) and not node.kwargs

    def _input(self, node: Node, source: Any, channels: int | None = None) -> Node:
        """Insert the step from channels to the terms of a layer; with ``channels``, from maps that are not yet flat."""
        name = f"{node.target}_input"
        layer = cast(CPLayer, self._module(node))
        self.root.set_submodule(name, fused_input(layer, channels, subsample=True))
        with self.graph.inserting_before(node):
            return self.graph.call_module(name, (source,))

    # --- epilogues ------------------------------------------------------------------------------------------------

    def fuse_epilogues(self) -> None:
        """Make one kernel of bias, residual, ReLU and pooling after convolutions and chains that end with one."""
        weights = Counter(id(p) for module in self.root.modules() for p in module._parameters.values() if p is not None)
        for node in list(self.graph.nodes):
            layer = self._module(node)
            conv = None if layer is None else output_layer(layer)
            if type(conv) is not nn.Conv2d or self.places[id(layer)] > 1 or weights[id(conv.weight)] > 1:
                continue
            tail, source = self._tail(node, maps=True, norms=False, residuals=True), node
            if len(tail.nodes) == 1 and self._pools(pooling := _only_user(node)):
                # The largest of several sums with one bias is the sum of the largest: fewer numbers after the pooling.
                source = cast(Node, pooling)
                tail = self._tail(source, maps=False, norms=False, residuals=False)
            if tail.pool or tail.residual is not None or (conv.bias is not None and tail.relu):
                epilogue = FusedEpilogue(conv.bias, relu=tail.relu, pool=tail.pool).train(conv.training)
                conv.register_parameter("bias", None)
                self._replace(tail.nodes[1:], tail, f"{node.target}_epilogue", epilogue, source)

    def _pools(self, node: Node | None) -> bool:
        module = self._module(node)
        return type(module) is nn.MaxPool2d and not module.return_indices

    # --- the graph ------------------------------------------------------------------------------------------------

    def _module(self, node: Node | None) -> nn.Module | None:
        """Return the module of a call, if it is the only call of it, with one argument, and it has no hooks."""
        if node is None or node.op != "call_module" or self.calls[node.target] > 1:
            return None
        if len(node.args) != 1 or node.kwargs:
            return None
        module = self.root.get_submodule(cast(str, node.target))
        return None if has_hooks(module) else module

    def _step(self, node: Node) -> str:
        """Return what a node does, if a kernel can do it too: "relu", "pool", "norm", "add", "idle", or nothing."""
        module = self._module(node)
        if module is not None:
            idle = type(module) is nn.Identity or (type(module) in DROPOUTS and not module.training)
            pool = type(module) is nn.MaxPool2d and halves_maps(module)
            norm = type(module) is nn.BatchNorm2d and is_fixed_norm(module)
            return "relu" if type(module) is nn.ReLU else "pool" if pool else "norm" if norm else "idle" if idle else ""
        if node.op == "call_module" and len(node.args) == 1:  # one ReLU may be called in several places
            called = self.root.get_submodule(cast(str, node.target))
            return "relu" if type(called) is nn.ReLU and not has_hooks(called) else ""
        if node.op not in ("call_function", "call_method"):
            return ""
        if node.target in RELUS:
            return "relu"
        operands = len(node.args) == 2 and all(isinstance(arg, Node) for arg in node.args) and not node.kwargs
        return "add" if node.target in ADDS and operands and node.args[0] is not node.args[1] else ""

    def _tail(self, node: Node, *, maps: bool, norms: bool, residuals: bool) -> _Tail:
        """Return what follows a node that a kernel can do with it, as long as nothing else reads what is between."""
        tail = _Tail([node])
        while (user := _only_user(tail.last)) is not None:
            step = self._step(user)
            bare = not (tail.relu or tail.pool or tail.residual)
            if step == "relu":
                tail.relu = True
            elif step == "pool" and maps and not tail.pool and tail.residual is None:
                tail.pool = True
            elif step == "norm" and norms and bare and tail.norm is None:
                tail.norm = cast(_BatchNorm, self._module(user))
            elif step == "add" and residuals and bare:
                tail.residual = cast(Node, user.args[1] if user.args[0] is tail.last else user.args[0])
            elif step != "idle":
                break
            tail.nodes.append(user)
        return tail

    def _replace(self, nodes: list[Node], tail: _Tail, name: str, module: nn.Module, source: Any) -> Node:
        """Call a module in the place of these nodes, the last ones of a tail; return its node."""
        self.root.set_submodule(name, module)
        unused = nodes[0].args[0]
        with self.graph.inserting_after(tail.last):  # where a residual is there
            made = self.graph.call_module(name, (source,) if tail.residual is None else (source, tail.residual))
        tail.last.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        self.erased |= {f"{self.name}.{node.target}".lstrip(".") for node in nodes if node.op == "call_module"}
        for node in reversed(nodes):
            self.graph.erase_node(node)
        while isinstance(unused, Node) and not unused.users and unused.op != "placeholder":  # maps that were flattened
            node, unused = unused, unused.args[0] if unused.args else None
            self.graph.erase_node(node)
        self.changed = True
        return made


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
