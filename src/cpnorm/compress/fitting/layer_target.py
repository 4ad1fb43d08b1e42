"""Compute the target of a layer in the new network from what follows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm.compress.fitting.moments import Moments, choose_positions, outputs_at, patches_at, sampled_share, values_at
from cpnorm.compress.fitting.successors import Successors
from cpnorm.cp.calibrated import regression_target
from cpnorm.nn.canonical import CPLayer

KEPT_BYTES = 2**30  # of the samples of one layer; more of them are drawn again at each use
LEAST_SPREAD = 0.5  # a channel that the fit nearly gave up is not amplified without bound
STEADY = 1e-3  # relative to the mean squared scale: channels that a batch norm nearly switches off get no corrections


_Sample = tuple[Tensor, Tensor, Tensor | None]  # patches (g, n, D), wanted outputs (g, n, o), stream (g, n, o)


@dataclass(frozen=True, eq=False)
class Pair:
    """The input of a layer in the new network, and its output in the old one on the same data."""

    x: Tensor
    y: Tensor
    streams: tuple[Tensor, Tensor] | None = None  # what the output is added to, in the old and in the new network


@dataclass(frozen=True, eq=False)
class Target:
    """The target of a layer: a dense weight, and the moments that define the norm of its approximation."""

    weight: Tensor  # (g, o, D)
    squares: Tensor  # (g, D, D)
    moments: Moments | None  # if the mean of the outputs is free

    def missing(self, weight: Tensor) -> Tensor | None:  # (g, o, D) -> (g * o,)
        """Return what to add to the outputs of this weight so that they have the right mean; None if it is not free."""
        if self.moments is None:
            return None
        mean, output_mean = self.moments.means()
        return (output_mean - (weight.to(mean) @ mean[..., None]).squeeze(-1)).flatten()

    def spread(self, weight: Tensor) -> Tensor:  # (g, o, D) -> (g * o,)
        """Return the variance of this weight's outputs over that of the target weight's, for each output.

        Terms that are missing reduce the variance; over many layers, little of it would be left.
        """
        made, wanted = (((each.to(self.squares) @ self.squares) * each).sum(-1) for each in (weight, self.weight))
        return torch.where(wanted > 0, made / wanted.clamp_min(1e-30), 1.0).clamp(LEAST_SPREAD, 1.0).flatten()


@dataclass(eq=False)
class Samples:
    """Samples of a layer's inputs and wanted outputs, the same ones at each use."""

    layer: CPLayer
    pairs: Sequence[Pair]
    follows: Successors
    free: bool  # whether the mean of the outputs can be corrected
    _kept: list[_Sample] | None = None
    _first: Moments | None = None

    def target(self, old: Tensor, fitted: tuple[Tensor, Tensor | None] | None = None) -> Target:
        """Return the target; given a fitted weight and the mean it misses, the target after a rectifier.

        Where the old value is negative the rectifier gives 0, so that any negative value is as good. There the fitted
        layer's own outputs are the target if they are negative, and 0 otherwise.
        """
        moments = Moments(self._first)
        for patches, wanted, stream in self._samples():
            if fitted is not None:
                wanted = self._after_rectifier(patches, wanted, stream, *fitted)
            moments.add(patches, wanted)
        self._first = self._first or moments
        squares, products = moments.second(centered=self.free)
        weight = regression_target(old, squares, products)
        return Target(weight, squares, moments if self.free else None)

    def _samples(self) -> Iterable[_Sample]:
        """Return the samples; they are kept if they will be used again and are not too many."""
        if self._kept is not None or not self.follows.rectified:
            return self._read() if self._kept is None else self._kept
        kept, size = [], 0
        for sample in self._read():
            kept.append(sample)
            size += sum(part.numel() * part.element_size() for part in sample if part is not None)
            if size > KEPT_BYTES:
                return self._read()
        self._kept = kept
        return kept

    def _read(self) -> Iterator[_Sample]:
        layer, groups = self.layer, getattr(self.layer, "groups", 1)
        outputs = self.pairs[0].y.shape[-1 if isinstance(layer, nn.Linear) else -1 - len(cast(Any, layer).kernel_size)]
        share = sampled_share(layer, sum(pair.y.numel() for pair in self.pairs) * groups // outputs)
        for number, pair in enumerate(self.pairs, start=1):
            chosen = choose_positions(layer, pair.x, share, number)
            wanted = outputs_at(layer, pair.x, pair.y, chosen)
            stream = None
            if pair.streams is not None:
                old, stream = (values_at(layer, pair.x, values, chosen) for values in pair.streams)
                wanted = wanted + (old - stream) * self._affine(wanted)[2]
            yield patches_at(layer, pair.x, chosen), wanted, stream

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (g, 1, o) each
        """Return the scale and offset from the layer's outputs, less its bias, to what is rectified, and 1 / scale."""
        norm, bias = self.follows.norm, cast(Tensor | None, self.layer.bias)
        scale, offset = torch.ones_like(like[:1, 0]).expand(like.shape[0], -1).flatten(), torch.zeros(())
        if norm is not None:
            spread = (cast(Tensor, norm.running_var) + norm.eps).sqrt()
            scale = (1 / spread if norm.weight is None else norm.weight / spread).to(like)
            offset = -scale * cast(Tensor, norm.running_mean).to(like)
            offset = offset if norm.bias is None else offset + norm.bias
        offset = offset if bias is None else offset + scale * bias
        square = scale.square()
        damped = (square + STEADY * square.mean()).clamp_min(torch.finfo(square.dtype).tiny)
        inverse = scale / damped if norm is not None else scale
        shape = (like.shape[0], 1, -1)
        return scale.reshape(shape), offset.to(scale).expand_as(scale).reshape(shape), inverse.reshape(shape)

    def _after_rectifier(
        self, patches: Tensor, wanted: Tensor, stream: Tensor | None, weight: Tensor, missing: Tensor | None
    ) -> Tensor:
        scale, offset, inverse = self._affine(wanted)
        offset = offset if stream is None else offset + stream
        given = patches @ weight.to(patches).mT
        given = given if missing is None else given + missing.to(given).reshape(len(given), 1, -1)
        before, after = scale * wanted + offset, scale * given + offset
        change = torch.where(before > 0, 0.0, after.clamp_max(0.0) - before)
        return wanted + change * inverse
