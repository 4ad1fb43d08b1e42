"""After truncation: let the terms that stay take over what they can of those that went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.compress.probe import by_position, output_vectors, term_responses
from cpnorm.cp.decompose import cp_als
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.layers import CPLayer, tie_key
from cpnorm.nn.planner import linear_modes
from cpnorm.nn.running import Instead, watch

REFITS = ("none", "lambdas", "als", "outputs")
RIDGE = 1e-5  # of the mean diagonal: for terms so alike that their shares are not determined


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a layer should hold after a truncation."""

    cp: CPTensor
    kept: Tensor | None  # which of the old terms these are; None for new ones
    bias: Tensor | None = None  # None: the old one

    def instead(self, layer: CPLayer) -> dict[Tensor, Tensor]:
        """What to put in place of the layer's parameters to try it."""
        old: list[Tensor] = [*layer.canonical_parameters(), *([] if self.bias is None else [cast(Tensor, layer.bias)])]
        new = [self.cp.sigma, self.cp.lambdas, *self.cp.factors, *([] if self.bias is None else [self.bias])]
        return dict(zip(old, new, strict=True))


def fit(layer: CPLayer, kept: Tensor, refit: str) -> Fitted:
    """The kept terms of a layer, refitted to its weight; "outputs" starts from what "als" finds."""
    cp, kept = layer.cp, kept.to(layer.lambdas.device)
    if refit in ("als", "outputs"):
        return Fitted(refit_als(cp, kept), None)
    return Fitted(refit_lambdas(cp, kept) if refit == "lambdas" else cp.select(kept), kept)


def refit_lambdas(cp: CPTensor, kept: Tensor) -> CPTensor:
    """The kept terms with the lambdas of least squared error against the weight that all of them make.

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
    """The kept terms after sweeps of alternating least squares towards the weight that all of them made."""
    target, start = cp.to_dense(), cp.select(kept)
    fitted = cp_als(target, start.rank, init=start, sweeps=sweeps)
    if fitted.fit(target) <= start.fit(target):
        return start
    return CPTensor(cp.sigma, fitted.lambdas * (fitted.sigma / cp.sigma), fitted.factors)


def refit_outputs(
    model: nn.Module, layers: Mapping[str, CPLayer], forms: Mapping[str, Fitted], inputs: Sequence[Any]
) -> dict[str, Fitted]:
    """The forms with the output vectors and the bias of least squared error against the old layer's outputs.

    y = B z + bias with z what the terms make of the input and B their scaled output vectors: a linear regression. Layer
    after layer in the order they run, each on the inputs that the truncated layers before it hand it, so that it also
    makes up for their errors. A linear layer whose outputs are several modes has no free output vectors and stays, and
    so does one that is called on another number of positions once layers before it are truncated. A model that picks or
    orders rows by their values (top-k, experts) wants another refit: old and new rows would not belong together.
    """
    names = {tie_key(layers[name]): name for name in forms}
    order: dict[str, None] = {}  # an ordered set
    for each in inputs:
        watch(model, each, lambda layer, *_: order.setdefault(names.get(tie_key(layer), "")))
    done = dict(forms)
    for name in (name for name in order if name in forms):
        layer = layers[name]
        if not (isinstance(layer, nn.Linear) and len(linear_modes(layer)[0]) > 1):
            twins = [module for module in model.modules() if tie_key(module) == tie_key(layer)]
            instead = {p: value for name, form in done.items() for p, value in form.instead(layers[name]).items()}
            sums = _sums(model, twins, instead, inputs)
            holders = [module for module in model.modules() if module._parameters.get("bias") is layer.bias]
            alone = layer.bias is not None and len(twins) == len(holders) == 1
            done[name] = _regress(layer, done[name], *sums, shift=alone) if sums else done[name]
    return done


def _sums(
    model: nn.Module, layers: Sequence[nn.Module], instead: Instead, inputs: Sequence[Any]
) -> tuple[Tensor, Tensor] | None:  # -> (G, R + 1, R + 1), (G, O / G, R + 1)
    """z z^T and y z^T over all inputs: z of the new form, then a constant 1; y of the old one less the bias.

    None if there is not a z for every y.
    """

    squares = products = torch.zeros(())
    old: list[Tensor] = []  # (positions, G, O / G) of each call
    counted = 0

    def see_old(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in layers:
            y, bias = by_position(module, module.forward(*args, **kwargs)), cast(Tensor | None, module.bias)
            old.append(y if bias is None else y - bias.reshape(y.shape[1:]).to(y))

    def see_new(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal squares, products, counted
        for z in term_responses(cast(CPLayer, module), *args, **kwargs) if module in layers else ():
            y = outputs[counted : counted + len(z)].transpose(0, 1)
            counted += len(z)
            if y.shape[1] == len(z):
                z = F.pad(z, (0, 1), value=1.0).transpose(0, 1)
                squares = squares.to(z.device) + (z.mT @ z).double()
                products = products.to(z.device) + (y.mT @ z).double()

    for x in inputs:
        old.clear()
        watch(model, x, see_old)
        outputs, counted = torch.cat(old) if old else torch.zeros(0, 1, 1), 0
        watch(model, x, see_new, instead)
        if counted != len(outputs):
            return None
    return squares, products


def _regress(layer: CPLayer, form: Fitted, squares: Tensor, products: Tensor, shift: bool) -> Fitted:
    cp = form.cp.to(torch.float64)
    scales = cp.sigma * cp.lambdas
    if not scales.any():
        return form  # of a weight that is zero
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
    """Least squares through the normal equations, with a ridge."""
    size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
    eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    return torch.linalg.solve(normal + RIDGE * size * eye, right)
