"""Train a layer through its factors on a CPU, as one autograd node, while its columns are known to be unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.cp.tensor import UnitTerms, khatri_rao, unit_columns
from cpnorm.nn.planner import overlap
from cpnorm.nn.products import product

# One node is faster than several from this rank, and for convolutions up to this number of positions.
LEAST_RANK = 128
MOST_POSITIONS = 1024

Window = tuple[Sequence[int], Sequence[int], Sequence[int]]  # stride, padding and dilation of the filters


def train_linear(x: Tensor, scales: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias, (..., I) -> (..., O), for two factors with unit columns."""
    y: Tensor = _ThroughFactors.apply(x.reshape(-1, x.shape[-1], 1, 1), scales, *factors, None)
    y = y.reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def train_conv(x: Tensor, scales: Tensor, factors: Sequence[Tensor], conv: nn.Conv2d) -> Tensor:
    """Return the convolution of x, (N, I, H, W) -> (N, O, H', W'), for factors with unit columns."""
    out, into, *kernels = factors
    scales, *kernels = UnitTerms.apply(scales, *kernels)
    sizes: Any = zip(kernels, x.shape[2:], conv.padding, conv.dilation, strict=True)
    pairs = [overlap(*given) for given in sizes]
    kernels, padding = [kernel for kernel, _ in pairs], [rows for _, rows in pairs]
    filters = khatri_rao(kernels) * scales
    if len(filters) == 1 and not any(padding):
        x = x[:, :, :: conv.stride[0], :: conv.stride[1]]
        y: Tensor = _ThroughFactors.apply(x, filters[0], out, into, None)
    else:
        filters = filters.mT.reshape(-1, 1, *(len(kernel) for kernel in kernels))
        y = _ThroughFactors.apply(x, filters, out, into, (conv.stride, padding, conv.dilation))
    return y if conv.bias is None else y + conv.bias.reshape(-1, 1, 1)


class _ThroughFactors(torch.autograd.Function):
    """Multiply by the vectors of the inputs, filter each term, and multiply by the vectors of the outputs.

    Filters include the scales of the terms. Without a window there is one number for each term. The gradients of both
    matrices of vectors, which have unit columns, are those of a/|a|.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, I, H, W)
        filters: Tensor,  # (R, 1, k1, k2) or (R,)
        out: Tensor,  # (O, R)
        into: Tensor,  # (I, R)
        window: Window | None,
    ) -> Tensor:  # (N, O, H', W')
        terms = _images(product(_rows(x), into), x)
        filtered = _filtered(terms, filters, window)
        last = x.stride(1) == 1 and not x.is_contiguous()
        ctx.window, ctx.layout = window, torch.channels_last if last else torch.contiguous_format
        ctx.save_for_backward(x, filters, out, into, terms, filtered)
        # Strides are made those of the layout also where a length is 1: other layers choose their code by them.
        return _images(product(_rows(filtered), out.mT), filtered).clone(memory_format=ctx.layout)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, filters, out, into, terms, filtered = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True
            terms = (x.movedim(1, -1) @ unit_columns(into)).movedim(-1, 1)
            y = (_filtered(terms, filters, ctx.window).movedim(1, -1) @ unit_columns(out).mT).movedim(-1, 1)
            wanted = [tensor for tensor, asked in zip((x, filters, out, into), needed, strict=True) if asked]
            found = iter(torch.autograd.grad(y, wanted, d_y, create_graph=True))
            return *(next(found) if asked else None for asked in needed), None
        d_y = _rows(d_y)
        d_terms, d_filters = _filter_gradients(_images(product(d_y, out), filtered), terms, filters, ctx.window)
        # A term is linear in its filter and in each vector, so that <a, dL/da> is the same for all of them (UnitTerms).
        radial = (d_filters * filters).reshape(len(filters), -1).sum(1)
        d_terms = _rows(d_terms)
        d_x = d_out = d_into = None
        if needed[0]:
            d_x = _images(product(d_terms, into.mT), x).clone(memory_format=ctx.layout)
        if needed[2]:
            d_out = product(d_y.mT, _rows(filtered)).addcmul_(out, radial, value=-1)
        if needed[3]:
            d_into = product(_rows(x).mT, d_terms).addcmul_(into, radial, value=-1)
        return d_x, d_filters, d_out, d_into, None


def _rows(images: Tensor) -> Tensor:  # (N, C, H, W) -> (N * H * W, C)
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:  # (N * H * W, C), (N, _, H, W) -> (N, C, H, W)
    return rows.reshape(like.shape[0], *like.shape[2:], rows.shape[1]).movedim(-1, 1)


def _filtered(terms: Tensor, filters: Tensor, window: Window | None) -> Tensor:  # (N, R, H, W) -> (N, R, H', W')
    if window is None:
        return terms * filters[:, None, None]
    return F.conv2d(terms, filters, None, *window, groups=len(filters))


def _filter_gradients(
    d_filtered: Tensor, terms: Tensor, filters: Tensor, window: Window | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of terms and filters."""
    if window is None:
        return d_filtered * filters[:, None, None], (_rows(d_filtered) * _rows(terms)).sum(0)
    # For images smaller than the filter, the library takes many times longer than sums over images do.
    small = any(length < size for length, size in zip(terms.shape[2:], filters.shape[2:], strict=True))
    stride, padding, dilation = window
    settings = None, stride, padding, dilation, False, (0, 0), len(filters), (True, not small, False)
    d_terms, d_filters, _ = torch.ops.aten.convolution_backward(d_filtered, terms, filters, *settings)
    if small:
        d_filters, products = torch.empty_like(filters), terms.new_empty(len(terms), len(filters))
        for row in range(filters.shape[2]):
            for column in range(filters.shape[3]):
                products.zero_()
                for there, here in _meeting(row, 0, terms, d_filtered, window):
                    for across, along in _meeting(column, 1, terms, d_filtered, window):
                        products.addcmul_(d_filtered[:, :, there, across], terms[:, :, here, along])
                d_filters[:, 0, row, column] = products.sum(0)
    return d_terms, d_filters


def _meeting(place: int, axis: int, terms: Tensor, filtered: Tensor, window: Window) -> list[tuple[int, int]]:
    """Return which outputs meet an input at this place of the filter, each with this input."""
    stride, padding, dilation = (numbers[axis] for numbers in window)
    inputs = [index * stride + place * dilation - padding for index in range(filtered.shape[2 + axis])]
    return [(output, index) for output, index in enumerate(inputs) if 0 <= index < terms.shape[2 + axis]]
