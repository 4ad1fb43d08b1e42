"""After truncation: let the terms that stay take over what they can of those that went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn

from cpnorm.decompose import cp_als
from cpnorm.layers import CPLayer
from cpnorm.observe import Responses, output_modes, output_vectors
from cpnorm.tensor import CPTensor

REFITS = ("none", "lambdas", "als", "outputs")
RIDGE = 1e-6  # of the mean diagonal: for terms so alike that their shares are not determined


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a layer should hold after a truncation."""

    cp: CPTensor
    kept: Tensor | None  # which of the old terms these are; None for new ones
    bias: Tensor | None = None  # None: the old one

    def named(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        """As parameters of a model in which the layer has this name."""
        values = {"sigma": self.cp.sigma, "lambdas": self.cp.lambdas}
        values |= {f"factors.{mode}": factor for mode, factor in enumerate(self.cp.factors)}
        values |= {} if self.bias is None else {"bias": self.bias}
        return ((f"{layer}.{key}" if layer else key, value) for key, value in values.items())


def fit(layer: CPLayer, kept: Tensor, refit: str, responses: Responses | None) -> Fitted:
    """The kept terms of a layer, after this refit."""
    cp, kept = layer.cp, kept.to(layer.lambdas.device)
    if refit == "outputs" and responses is not None:
        return refit_outputs(layer, kept, responses)
    if refit == "als":
        return Fitted(refit_als(cp, kept), None)
    return Fitted(refit_lambdas(cp, kept) if refit == "lambdas" else cp.select(kept), kept)


def refit_lambdas(cp: CPTensor, kept: Tensor, overlaps: Tensor | None = None) -> CPTensor:
    """The kept terms with the lambdas of least squared error against all of them.

    ``overlaps`` (R, R) are the inner products of the terms without their lambdas: those of the weights by default,
    or of the outputs. Solves for the change only, with a ridge on it, so that the error never grows.
    """
    wide = cp.to(torch.float64)
    overlaps = reduce(torch.mul, [f.mT @ f for f in wide.factors]) if overlaps is None else overlaps
    gone = _others(kept, cp.rank)
    change = _solve(overlaps[kept][:, kept], overlaps[kept][:, gone] @ wide.lambdas[gone])
    left = wide.select(kept)
    return CPTensor(left.sigma, left.lambdas + change, left.factors).to(cp.lambdas.dtype)


def refit_als(cp: CPTensor, kept: Tensor, sweeps: int = 10) -> CPTensor:
    """The kept terms after sweeps of alternating least squares towards the weight that all of them made."""
    target, start = cp.to_dense(), cp.select(kept)
    fitted = cp_als(target, start.rank, init=start, sweeps=sweeps)
    if fitted.fit(target) <= start.fit(target):
        return start
    return CPTensor(cp.sigma, fitted.lambdas * (fitted.sigma / cp.sigma), fitted.factors)


def refit_outputs(layer: CPLayer, kept: Tensor, responses: Responses) -> Fitted:
    """The kept terms with the output vectors and the bias of least squared error against the layer's old outputs.

    y = B z with z what the terms make of the input and B their scaled output vectors, so that this is a regression of
    what went, B_gone z_gone, on the z that stays. A linear layer whose outputs are several modes has no free output
    vectors: its lambdas alone are refitted, in the same sense.
    """
    cp = layer.cp.to(torch.float64)
    if isinstance(layer, nn.Linear) and output_modes(layer) > 1:
        return Fitted(refit_lambdas(layer.cp, kept, output_overlaps(layer, responses)), kept)
    gone, scales = _others(kept, cp.rank), cp.sigma * cp.lambdas
    outputs = output_vectors(layer).double() * scales  # (G, O / G, R)
    moments = responses.moments.to(outputs.device)
    if len(moments) > len(outputs):  # groups that share their output vectors
        moments = moments.sum(0, keepdim=True)
    bias = cast(Tensor | None, layer.bias)
    stays = kept if bias is None else torch.cat([kept, kept.new_tensor([cp.rank])])  # the constant is the last row
    lost = outputs[:, :, gone] @ moments[:, gone][:, :, stays]  # (G, O / G, S)
    change = _solve(moments[:, stays][:, :, stays], lost.mT).mT
    if bias is not None:
        shift = change[:, :, -1].flatten()
        bias = (bias.double() + shift.repeat(len(bias) // len(shift))).to(bias.dtype)

    # A term of scale 0 may come to life: it starts from a zero vector at scale 1.
    alive = scales[kept] != 0
    mode = 1 if getattr(layer, "transposed", False) else 0
    factors = [f[:, kept] for f in cp.factors]
    columns = change[:, :, : len(kept)].flatten(0, 1) / torch.where(alive, scales[kept], 1.0)  # (O, r)
    factors[mode] = torch.where(alive, factors[mode], 0.0) + columns
    lambdas = torch.where(alive, cp.lambdas[kept], 1 / cp.sigma)
    return Fitted(CPTensor(cp.sigma, lambdas, tuple(factors)).normalize().to(layer.lambdas.dtype), kept, bias)


def output_overlaps(layer: CPLayer, responses: Responses) -> Tensor:  # -> (R, R)
    """Inner products of the terms' outputs over the inputs seen, without sigma and lambdas."""
    outputs = output_vectors(layer).double()
    moments = responses.moments[:, :-1, :-1].to(outputs.device)
    return ((outputs.mT @ outputs) * moments).sum(0)


def _others(kept: Tensor, rank: int) -> Tensor:
    mask = torch.ones(rank, dtype=torch.bool, device=kept.device)
    mask[kept] = False
    return mask.nonzero()[:, 0]


def _solve(normal: Tensor, right: Tensor) -> Tensor:  # (..., r, r), (..., r[, n])
    """Least squares through the normal equations, with a ridge."""
    size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
    normal = normal + RIDGE * size * torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    vector = right.ndim == normal.ndim - 1
    solved = torch.linalg.solve(normal, right[..., None] if vector else right)
    return solved[..., 0] if vector else solved
