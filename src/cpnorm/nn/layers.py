"""Canonical layers: torch's own, with the weight kept as sigma, lambdas and unit vectors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.nn import planner
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.factor_training import LEAST_RANK, MOST_POSITIONS, train_conv, train_linear
from cpnorm.nn.planner import CONV_TRANSPOSE
from cpnorm.nn.terms import CanonicalTerms


def _fx_call(layer: nn.Module, *args: Any) -> Any:
    """Record one call of the layer, as ``torch.fx.symbolic_trace`` does for torch's own: the path depends on sizes."""
    tracer: Any = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, {})


class CPLinear(CPLayer, nn.Linear):  # type: ignore[override]
    """``nn.Linear`` with a canonical weight."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:  # (..., I) -> (..., O)
        """Compute what nn.Linear computes."""
        if (ready := self._ready_weight()) is not None:
            return F.linear(input, ready, self.bias)
        if isinstance(input, torch.fx.Proxy):
            return _fx_call(self, input)
        prebuilt = self._form.prebuilt
        if prebuilt is not None and len(prebuilt.tensors) == 2:
            left, right = prebuilt.tensors  # (O, R), (I, R)
            return F.linear(input @ right, left, self.bias)
        weight = self._dense_for(input)
        if weight is not None:
            return F.linear(input, weight, self.bias)
        if self._trains_as_one_node(input):
            return train_linear(input, self.sigma * self.lambdas, [*self.factors], self.bias)
        return planner.through_linear(input, *self._terms(), self.out_features, self.bias)

    def _fits(self, x: Tensor) -> bool:  # (..., I)
        return x.ndim > 0 and x.shape[-1] == self.in_features

    def _fits_one_node(self, x: Tensor) -> bool:
        return len(self.modes) == 2 and self.rank >= LEAST_RANK


class _CPConv(CPLayer):
    def forward(self, input: Tensor) -> Tensor:  # (N, I, ...) or (I, ...)
        """Compute what the plain convolution computes."""
        if (ready := self._ready_weight()) is not None:
            return self._conv_forward(input, ready, self.bias)  # type: ignore[operator]
        if isinstance(input, torch.fx.Proxy):
            return _fx_call(self, input)
        conv = cast(nn.Conv2d, self)
        prebuilt = self._form.prebuilt
        if prebuilt is not None and len(prebuilt.tensors) == 2:
            return planner.through_two_convolutions(input, *prebuilt.tensors, conv, self.rank)
        batched = input if input.ndim == len(conv.kernel_size) + 2 else input[None]
        weight = self._dense_for(batched)
        if weight is not None:
            return conv._conv_forward(input, weight, conv.bias)
        if isinstance(self, CPConv2d) and self._trains_as_one_node(batched):
            y = train_conv(batched, self.sigma * self.lambdas, [*self.factors], self)
            return y if batched.ndim == input.ndim else y[0]
        padding: Any = conv.padding
        if conv.padding_mode != "zeros":
            batched = F.pad(batched, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
            padding = [0] * len(conv.kernel_size)
        scales, factors = self._terms()
        y = planner.through_conv(batched, scales, factors, conv.bias, conv.stride, padding, conv.dilation, conv.groups)
        return y if batched.ndim == input.ndim else y[0]


class CPConv1d(_CPConv, nn.Conv1d):  # type: ignore[override]
    """``nn.Conv1d`` with a canonical weight."""

    plain = nn.Conv1d


class CPConv2d(_CPConv, nn.Conv2d):  # type: ignore[override]
    """``nn.Conv2d`` with a canonical weight.

    >>> layer = CPConv2d(3, 8, kernel_size=3, padding=1, rank=5, init="kaiming_normal")
    >>> layer(torch.randn(2, 3, 16, 16)).shape, sorted(layer.state_dict())[:3]
    (torch.Size([2, 8, 16, 16]), ['bias', 'factors.0', 'factors.1'])
    """

    plain = nn.Conv2d

    def _fits_one_node(self, x: Tensor) -> bool:
        usual = self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str)
        return usual and self.rank >= LEAST_RANK and x[:, 0].numel() <= MOST_POSITIONS


class CPConv3d(_CPConv, nn.Conv3d):  # type: ignore[override]
    """``nn.Conv3d`` with a canonical weight."""

    plain = nn.Conv3d


class _CPConvTranspose(CPLayer):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # (N, I, ...) or (I, ...)
        """Compute what the plain transposed convolution computes."""
        if isinstance(input, torch.fx.Proxy):
            return _fx_call(self, input, output_size)
        conv: Any = self
        dims = len(conv.kernel_size)
        extra = conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, dims, conv.dilation
        )
        batched = input if input.ndim == dims + 2 else input[None]
        geometry = (conv.stride, conv.padding, extra, conv.groups, conv.dilation)
        weight = self._dense_for(batched)
        if weight is not None:
            y = CONV_TRANSPOSE[dims - 1](batched, weight, conv.bias, *geometry)
        else:
            y = planner.through_conv_transpose(batched, *self._terms(), conv.bias, *geometry)
        return y if batched.ndim == input.ndim else y[0]


class CPConvTranspose1d(_CPConvTranspose, nn.ConvTranspose1d):  # type: ignore[override]
    """``nn.ConvTranspose1d`` with a canonical weight."""

    plain = nn.ConvTranspose1d


class CPConvTranspose2d(_CPConvTranspose, nn.ConvTranspose2d):  # type: ignore[override]
    """``nn.ConvTranspose2d`` with a canonical weight."""

    plain = nn.ConvTranspose2d


class CPConvTranspose3d(_CPConvTranspose, nn.ConvTranspose3d):  # type: ignore[override]
    """``nn.ConvTranspose3d`` with a canonical weight."""

    plain = nn.ConvTranspose3d


CANONICAL_TYPES: tuple[type[CPLayer], ...] = (
    CPLinear,
    CPConv1d,
    CPConv2d,
    CPConv3d,
    CPConvTranspose1d,
    CPConvTranspose2d,
    CPConvTranspose3d,
)


# The names that a canonical layer uses beside those of the plain one: a layer that has one of them stays dense.
RESERVED = {
    name
    for kind in (CanonicalTerms, CPLayer, _CPConv, _CPConvTranspose)
    for name in (*vars(kind), *kind.__annotations__)
    if not name.startswith("__") and not hasattr(nn.Module, name)
} - {"weight", "reset_parameters"}
