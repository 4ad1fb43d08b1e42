"""How a model uses its canonical layers: what they are called with, and what else it reads from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm._checks import Inputs, as_arguments
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.layers import CPLayer, tie_key
from cpnorm.nn.running import uncompiled

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a layer, by what it is called with."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    odd: str  # why a chain of layers could not take the call

    def random_input(self, device: torch.device) -> Tensor:
        """Of this shape, and laid out in memory as the input was."""
        size = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.randn(size, generator=torch.Generator(device).manual_seed(0), device=device)
        return memory.to(self.dtype).as_strided(self.shape, self.stride)


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output."""
    args, kwargs = as_arguments(inputs)
    with uncompiled():
        return model(*args, **kwargs)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to hear of its calls, or to change them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in module.__dict__ or any(getattr(module, kind) for kind in kinds)


def places_in(model: nn.Module) -> Counter[int]:
    """In how many places of the model each module stands, by its id."""
    return Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))


def calls_of(model: nn.Module, dense: nn.Module, example_input: Inputs) -> dict[str, list[Call]]:
    """The calls of every canonical layer, and of those tied to it, in one pass through the folded model."""
    layers = canonical_layers(model)
    first = {tie_key(layer): name for name, layer in layers.items()}
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    reads: dict[str, str] = {}

    def watch(name: str, layer: CPLayer) -> None:
        leader = first[tie_key(layer)]
        tie = "" if layer.extra_repr() == layers[leader].extra_repr() else "tied to a layer with other settings"
        tie = "it has hooks" if has_hooks(layer) else tie

        def note(*args: Any, **kwargs: Any) -> None:
            x, *more = (*args, *kwargs.values()) or (torch.empty(0),)
            odd = "" if x.numel() else "called on an empty tensor"
            odd = "called in another precision than its own" if x.dtype != layer.lambdas.dtype else odd
            odd = "called with more than one tensor" if more or kwargs.keys() - {"input"} else odd
            calls[leader].append(Call(tuple(x.shape), x.stride(), x.dtype, tie or odd))

        def read(attribute: str) -> None:
            reads[leader] = f"other code reads its {attribute}"

        module = dense.get_submodule(name)
        module.__class__ = _telling(module, note, read)

    # One object may stand in several places: it is watched once.
    watched = {name: layer for name, layer in model.named_modules() if isinstance(layer, CPLayer)}
    for name, layer in watched.items():
        watch(name, layer)
    try:
        run(dense, example_input)
    finally:
        for name in watched:
            module = dense.get_submodule(name)
            module.__class__ = type(module).__mro__[1]
    return {name: [replace(c, odd=c.odd or reads.get(name, "")) for c in calls[name]] for name in layers}


def _telling(layer: nn.Module, note: Callable[..., None], read: Callable[[str], None]) -> type[nn.Module]:
    """The layer's class, telling of every call, and of every read by others of what a chain of layers does not have.

    Not by hooks: torch's transformer layers take another way where there are some, and read the weights where not.
    """
    kind: Any = type(layer)
    absent, running = set(dir(layer)) - set(dir(nn.Sequential())), False

    class Telling(kind):
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

    return Telling
