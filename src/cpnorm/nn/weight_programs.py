"""Weights from terms, and gradients of terms from those of weights, for several canonical layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cpnorm.cp.tensor import khatri_rao, split_modes
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.planner import weight_shape
from cpnorm.nn.products import product


def make_program(layers: Sequence[CPLayer], dtype: torch.dtype) -> Program:
    """Return kernels for the whole network where they can run, and torch's operations elsewhere."""
    if all(layer.lambdas.is_cuda for layer in layers):
        try:
            from cpnorm.gpu.network_program import KernelProgram

            return KernelProgram(layers, dtype, lambda others: TorchProgram(others, dtype))
        except (ImportError, ValueError):
            pass
    return TorchProgram(layers, dtype)


class Program(Protocol):
    """Weights from terms, and gradients of the terms from those of the weights, for several layers at once.

    Attributes:
        in_place: whether the weights are the same tensors at each build.
        captured: whether a CUDA graph of the caller's has recorded the build, and goes on using its buffers.
    """

    in_place: bool

    @property
    def captured(self) -> bool: ...

    def build(self) -> list[Tensor]:
        """Return the weight of every layer."""

    def gradients(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the terms of all layers in one list; a layer without a gradient has Nones."""


class TorchProgram:
    """``Program`` in torch's operations, for layers of any kind with unit columns."""

    in_place = captured = False  # a graph has its own memory for what is built here

    def __init__(self, layers: Sequence[CPLayer], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        self._sides: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def build(self) -> list[Tensor]:
        """Return the weight of every layer: one matrix product of two Khatri-Rao products each."""
        self._sides = []
        weights = []
        for layer in self.layers:
            modes = layer.modes
            left, right = split_modes(modes)
            scaled = [
                layer.factors[0] * (layer.sigma * layer.lambdas),
                *(layer.factors[m] for m in range(1, len(modes))),
            ]
            one, two = (khatri_rao([scaled[m] for m in side]).to(self.dtype) for side in (left, right))
            sides = one, two
            order = (*left, *right)
            matrix = product(sides[0], sides[1].mT).reshape([modes[m] for m in order])
            dense = matrix.permute([order.index(m) for m in range(len(modes))]).reshape(weight_shape(layer))
            last = layer._form.channels_last and dense.ndim == 4
            weights.append(dense.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))
            self._sides.append(sides)
        return weights

    def gradients(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of sigma, lambda and the vectors."""
        found: list[Tensor | None] = []
        for layer, sides, d_weight in zip(self.layers, self._sides, d_weights, strict=True):
            if d_weight is None:
                found += [None] * (2 + len(layer.modes))
            else:
                found += _term_gradients(layer, sides, d_weight)
        return found


@torch.no_grad()
def _term_gradients(layer: CPLayer, sides: tuple[Tensor, Tensor], d_weight: Tensor) -> list[Tensor]:
    modes, factors = layer.modes, [f.detach() for f in layer.factors]
    split = split_modes(modes)
    matrix = d_weight.reshape(modes).permute((*split[0], *split[1])).reshape(len(sides[0]), len(sides[1]))
    d_sides = product(matrix, sides[1]), product(matrix.mT, sides[0])
    scales = layer.sigma * layer.lambdas
    d_factors: dict[int, Tensor] = {}
    for side, d_side in zip(split, d_sides, strict=True):
        found = _factor_gradients(d_side.to(scales.dtype), [factors[m] for m in side])
        d_factors |= dict(zip(side, found, strict=True))
    # A term is linear in its scale and in each vector, so that <a, dL/da> is the same for all of them (UnitTerms).
    by_scale = (d_factors[0] * factors[0]).sum(0)
    radial = by_scale * scales
    left = set(split[0])
    for m, f in enumerate(factors):
        if m in left:
            d_factors[m].mul_(scales)
        d_factors[m].addcmul_(f, radial, value=-1)
    return [(by_scale * layer.lambdas).sum(), by_scale * layer.sigma, *(d_factors[m] for m in range(len(modes)))]


def _factor_gradients(d_side: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:  # (d1 * d2 * ..., R), [(d_i, R)]
    """Return the gradients of the factors of an unscaled Khatri-Rao product."""
    first, *rest = factors
    if not rest:
        return [d_side]
    others = khatri_rao(rest)
    parts = d_side.reshape(len(first), len(others), -1)
    if parts.numel() <= 2**16:
        return [(parts * others).sum(1), *_factor_gradients((parts * first[:, None]).sum(0), rest)]
    d_first, d_others = torch.zeros_like(first), torch.empty_like(others)
    for index, other in enumerate(others):  # a product of kernel lengths: few
        d_first.addcmul_(parts[:, index], other)
        torch.sum(parts[:, index] * first, 0, out=d_others[index])
    return [d_first, *_factor_gradients(d_others, rest)]
