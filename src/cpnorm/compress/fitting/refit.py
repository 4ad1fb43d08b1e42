"""Refit the terms that a truncation keeps, so that they make up for the dropped ones as far as they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from cpnorm.compress.probe import by_position, output_vectors, term_responses, with_terms
from cpnorm.cp.als import solve_with_ridge
from cpnorm.cp.decompose import cp_als
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.canonical import CPLayer

REFITS = ("none", "lambdas", "als", "outputs", "calibrated")
RIDGE = 1e-5  # relative to the mean diagonal: nearly equal terms would otherwise have undetermined coefficients


@dataclass(frozen=True, eq=False)
class Fitted:
    """The terms and bias of a layer after a truncation."""

    cp: CPTensor
    kept: Tensor | None  # indices of the old terms that these are; None if the terms are new
    bias: Tensor | None = None  # None if the bias does not change

    def instead(self, layer: CPLayer) -> dict[Tensor, Tensor]:
        """Return the new tensor for each parameter of the layer, for a run with replaced parameters."""
        old: list[Tensor] = [*layer.canonical_parameters(), *([] if self.bias is None else [cast(Tensor, layer.bias)])]
        new = [self.cp.sigma, self.cp.lambdas, *self.cp.factors, *([] if self.bias is None else [self.bias])]
        return dict(zip(old, new, strict=True))


def fit(layer: CPLayer, kept: Tensor, refit: str) -> Fitted:
    """Return the kept terms of a layer, refitted to its weight; refits to outputs start from the result of "als"."""
    cp, kept = layer.cp, kept.to(layer.lambdas.device)
    if refit in ("als", "outputs", "calibrated"):
        return Fitted(refit_als(cp, kept), None)
    return Fitted(refit_lambdas(cp, kept) if refit == "lambdas" else cp.select(kept), kept)


def refit_lambdas(cp: CPTensor, kept: Tensor) -> CPTensor:
    """Return the kept terms with the lambdas of least squared error to the weight of all terms.

    The solution is in closed form, from the inner products of the unit terms. It solves for the change of lambda, with
    a ridge on it, so that the error never grows.
    """
    wide = cp.to(torch.float64)
    overlaps = reduce(torch.mul, [f.mT @ f for f in wide.factors])
    gone = torch.ones(cp.rank, dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
    change = solve_with_ridge(overlaps[kept][:, kept], (overlaps[kept][:, gone] @ wide.lambdas[gone])[:, None], RIDGE)[
        :, 0
    ]
    left = wide.select(kept)
    return CPTensor(left.sigma, left.lambdas + change, left.factors).to(cp.lambdas.dtype)


def refit_als(cp: CPTensor, kept: Tensor, sweeps: int = 10) -> CPTensor:
    """Return the kept terms after sweeps of alternating least squares towards the weight of all terms."""
    target, start = cp.to_dense(), cp.select(kept)
    fitted = cp_als(target, start.rank, init=start, sweeps=sweeps)
    if fitted.fit(target) <= start.fit(target):
        return start
    return CPTensor(cp.sigma, fitted.lambdas * (fitted.sigma / cp.sigma), fitted.factors)


def regress_outputs(
    layer: CPLayer, form: Fitted, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any], Tensor]], *, shift: bool
) -> Fitted:
    """Return the form with the output vectors, and with ``shift`` the bias, of least squared error in the outputs.

    With the responses z of the terms and their scaled output vectors B, y = B z + bias is a linear regression.
    ``calls`` are arguments of the new layer with the outputs that it should give.
    """
    changed = with_terms(layer, form.cp)
    squares = products = torch.zeros((), dtype=torch.float64)
    bias = cast(Tensor | None, layer.bias)
    for args, kwargs, y in calls:
        wanted = by_position(layer, y)
        wanted = (wanted if bias is None else wanted - bias.reshape(wanted.shape[1:]).to(wanted)).transpose(0, 1)
        counted = 0
        for z in term_responses(changed, *args, **kwargs):
            part = wanted[:, counted : counted + len(z)]
            counted += len(z)
            if part.shape[1] != len(z):
                return form  # responses and outputs differ in their positions
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
    if len(squares) > len(columns):  # groups share their output vectors
        squares, products = squares.sum(0, keepdim=True), products.sum(0, keepdim=True)
    free = slice(None) if shift else slice(-1)  # with or without the constant
    left = (products - columns @ squares)[:, :, free]
    change = solve_with_ridge(squares[:, free, free], left.mT, RIDGE).mT
    bias = form.bias
    if shift:
        old, moved = cast(Tensor, layer.bias), change[:, :, -1].flatten()
        bias = (old.double() + moved.repeat(len(old) // len(moved))).to(old.dtype)

    # A term of scale 0 may get an output vector: it starts from a zero vector at scale 1.
    alive = scales != 0
    mode = 1 if getattr(layer, "transposed", False) else 0
    factors = list(cp.factors)
    vectors = change[:, :, : cp.rank].flatten(0, 1) / torch.where(alive, scales, 1.0)
    factors[mode] = torch.where(alive, factors[mode], 0.0) + vectors
    refitted = CPTensor(cp.sigma, torch.where(alive, cp.lambdas, 1 / cp.sigma), tuple(factors)).normalize()
    return Fitted(refitted.to(layer.lambdas.dtype), form.kept, bias)
