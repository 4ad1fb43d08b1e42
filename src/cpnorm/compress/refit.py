"""Refit the terms that stay after a truncation, so that they take over what they can of those that went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from cpnorm.compress.probe import by_position, output_vectors, term_responses, with_terms
from cpnorm.cp.decompose import cp_als
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.canonical import CPLayer

REFITS = ("none", "lambdas", "als", "outputs", "calibrated")
RIDGE = 1e-5  # of the mean diagonal: for terms so alike that their shares are not determined


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a layer should hold after a truncation."""

    cp: CPTensor
    kept: Tensor | None  # which of the old terms these are; None for new ones
    bias: Tensor | None = None  # None for the old one

    def instead(self, layer: CPLayer) -> dict[Tensor, Tensor]:
        """Return what to put in place of the layer's parameters to try it."""
        old: list[Tensor] = [*layer.canonical_parameters(), *([] if self.bias is None else [cast(Tensor, layer.bias)])]
        new = [self.cp.sigma, self.cp.lambdas, *self.cp.factors, *([] if self.bias is None else [self.bias])]
        return dict(zip(old, new, strict=True))


def fit(layer: CPLayer, kept: Tensor, refit: str) -> Fitted:
    """Return the kept terms of a layer, refitted to its weight; fits to outputs start from what "als" finds."""
    cp, kept = layer.cp, kept.to(layer.lambdas.device)
    if refit in ("als", "outputs", "calibrated"):
        return Fitted(refit_als(cp, kept), None)
    return Fitted(refit_lambdas(cp, kept) if refit == "lambdas" else cp.select(kept), kept)


def refit_lambdas(cp: CPTensor, kept: Tensor) -> CPTensor:
    """Return the kept terms with the lambdas of least squared error against the weight that all of them make.

    Closed form through the inner products of the unit terms. Solves for the change only, with a ridge on it, so that
    the error never grows.
    """
    wide = cp.to(torch.float64)
    overlaps = reduce(torch.mul, [f.mT @ f for f in wide.factors])
    gone = torch.ones(cp.rank, dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
    change = _solve(overlaps[kept][:, kept], (overlaps[kept][:, gone] @ wide.lambdas[gone])[:, None])[:, 0]
    left = wide.select(kept)
    return CPTensor(left.sigma, left.lambdas + change, left.factors).to(cp.lambdas.dtype)


def refit_als(cp: CPTensor, kept: Tensor, sweeps: int = 10) -> CPTensor:
    """Return the kept terms after sweeps of alternating least squares towards the weight that all of them made."""
    target, start = cp.to_dense(), cp.select(kept)
    fitted = cp_als(target, start.rank, init=start, sweeps=sweeps)
    if fitted.fit(target) <= start.fit(target):
        return start
    return CPTensor(cp.sigma, fitted.lambdas * (fitted.sigma / cp.sigma), fitted.factors)


def regress_outputs(
    layer: CPLayer, form: Fitted, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any], Tensor]], *, shift: bool
) -> Fitted:
    """Return the form with the output vectors, and with ``shift`` the bias, of least squared error in the outputs.

    y = B z + bias with z what the terms make of the input and B their scaled output vectors: a linear regression.
    ``calls`` are arguments of the new layer with the outputs that it should give.
    """
    twin = with_terms(layer, form.cp)
    squares = products = torch.zeros((), dtype=torch.float64)
    bias = cast(Tensor | None, layer.bias)
    for args, kwargs, y in calls:
        wanted = by_position(layer, y)
        wanted = (wanted if bias is None else wanted - bias.reshape(wanted.shape[1:]).to(wanted)).transpose(0, 1)
        counted = 0
        for z in term_responses(twin, *args, **kwargs):
            part = wanted[:, counted : counted + len(z)]
            counted += len(z)
            if part.shape[1] != len(z):
                return form  # not the positions that the outputs have
            z = F.pad(z, (0, 1), value=1.0).transpose(0, 1)
            squares = squares.to(z.device) + (z.mT @ z).double()
            products = products.to(z.device) + (part.mT @ z).double()
        if counted != wanted.shape[1]:
            return form
    return _regress(layer, form, squares, products, shift) if squares.ndim else form


def _regress(layer: CPLayer, form: Fitted, squares: Tensor, products: Tensor, shift: bool) -> Fitted:
    cp = form.cp.to(torch.float64)
    scales = cp.sigma * cp.lambdas
    if not scales.any():
        return form  # the weight is zero
    columns = F.pad(output_vectors(layer, cp) * scales, (0, 1))  # (G, O / G, R + 1)
    if len(squares) > len(columns):  # groups that share their output vectors
        squares, products = squares.sum(0, keepdim=True), products.sum(0, keepdim=True)
    free = slice(None) if shift else slice(-1)  # with the constant, or without it
    left = (products - columns @ squares)[:, :, free]
    change = _solve(squares[:, free, free], left.mT).mT
    bias = form.bias
    if shift:
        old, moved = cast(Tensor, layer.bias), change[:, :, -1].flatten()
        bias = (old.double() + moved.repeat(len(old) // len(moved))).to(old.dtype)

    # A term of scale 0 may come to life: it starts from a zero vector at scale 1.
    alive = scales != 0
    mode = 1 if getattr(layer, "transposed", False) else 0
    factors = list(cp.factors)
    vectors = change[:, :, : cp.rank].flatten(0, 1) / torch.where(alive, scales, 1.0)
    factors[mode] = torch.where(alive, factors[mode], 0.0) + vectors
    refitted = CPTensor(cp.sigma, torch.where(alive, cp.lambdas, 1 / cp.sigma), tuple(factors)).normalize()
    return Fitted(refitted.to(layer.lambdas.dtype), form.kept, bias)


def _solve(normal: Tensor, right: Tensor) -> Tensor:  # (..., r, r), (..., r, n) -> (..., r, n)
    """Solve least squares through the normal equations, with a ridge."""
    size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
    eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    return torch.linalg.solve(normal + RIDGE * size * eye, right)
