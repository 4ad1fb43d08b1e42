"""Weights rebuilt before the network runs, and their gradients taken after it.

So the network is compiled as if it were a plain one, and the rebuilding is left to kernels made for it. Layers could be
rebuilt on several streams at once: measured, that gains 2 % for a run alone on a GPU and nothing for several that share
it, and each stream would bring 64 MB of workspace for its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import CPLayer

AT_ONCE = 5  # layers in one launch: triton takes 4 s to compile that, and 50 s for 20
Rebuild = Callable[[CPLayer, str], Tensor]


def rebuilt_weight(layer: CPLayer, precision: str) -> Tensor:
    """W as the forward pass would build it."""
    with torch.autocast(layer.lambdas.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return layer.weight


@cache
def compiled_rebuild() -> Rebuild:
    """One for all layers and models of a process."""
    return torch.compile(rebuilt_weight, dynamic=False)


def kernel_rebuild(layers: Sequence[CPLayer], precision: str) -> tuple[Tensor, ...]:
    """The same for many by hand-written kernels: 2-d convolutions with unit columns on a GPU."""
    from cpnorm.kernels import RebuiltConv2d

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    terms = [term for layer in layers for term in (layer.sigma, layer.lambdas, *layer.factors)]
    return RebuiltConv2d.apply(dtype, *terms)


def has_kernel(layer: CPLayer) -> bool:
    """Whether ``kernel_rebuild`` can do this layer here."""
    if not (isinstance(layer, cpnorm.CPConv2d) and layer.columns_are_unit) or find_spec("triton") is None:
        return False
    return all(p.is_cuda and p.dtype == torch.float32 for p in layer.canonical_parameters())


@torch.no_grad()
def rebuilding_layers(model: nn.Module, images: Tensor) -> list[CPLayer]:
    """Those whose weight is rebuilt in training on a batch like this one: where the planner says so, or ``has_kernel``.

    The planner knows what torch's own operations cost; with kernels for it, rebuilding should be cheaper, which is
    measured at the paper's ranks and reasoned at lower ones.
    """
    found: list[CPLayer] = []

    def ask(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, CPLayer)
        path = layer.path
        if path == "auto":
            path = "rebuild" if has_kernel(layer) else layer.plan(inputs[0].shape, training=True).path
        if path == "rebuild":
            found.append(layer)

    handles = [layer.register_forward_pre_hook(ask) for layer in cpnorm.canonical_layers(model).values()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


class WeightsAhead:
    """``rebuild()`` before the forward pass and ``backward()`` after the loss's own, instead of forward's doing it."""

    def __init__(self, layers: Sequence[CPLayer], precision: str, rebuild: Rebuild) -> None:
        self.together = [layer for layer in layers if has_kernel(layer)]
        self.others = [layer for layer in layers if not has_kernel(layer)]
        self.layers, self.precision, self.rebuild_one = [*self.together, *self.others], precision, rebuild
        self.weights: list[Tensor] = []

    def rebuild(self) -> None:
        """Hold every layer's W ready."""
        for start in range(0, len(self.together), AT_ONCE):
            self.weights += kernel_rebuild(self.together[start : start + AT_ONCE], self.precision)
        self.weights += [self.rebuild_one(layer, self.precision) for layer in self.others]
        for layer, weight in zip(self.layers, self.weights, strict=True):
            layer.ahead = weight.detach().requires_grad_()

    def backward(self) -> None:
        """From the gradients of the weights to those of their terms."""
        torch.autograd.backward(self.weights, [layer.ahead.grad for layer in self.layers if layer.ahead is not None])
        self.release()

    def release(self) -> None:
        """Let the layers rebuild their weights themselves again."""
        for layer in self.layers:
            layer.ahead = None
        self.weights.clear()
