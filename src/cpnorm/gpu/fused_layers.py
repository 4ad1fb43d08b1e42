"""Make fused blocks of canonical layers."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.cp.tensor import dense_from_terms, khatri_rao, split_scale, unit_columns
from cpnorm.gpu.block_sizes import aligned
from cpnorm.gpu.fused_blocks import FusedBlock, FusedInput, Pair
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import CPConv2d, CPLinear
from cpnorm.nn.planner import linear_modes

WIDEST = 256  # terms that fit into registers
LARGEST_PATCH = 64  # numbers under the kernel of a first layer
MOST_TAPS = 49  # the kernel is unrolled over them


def can_fuse(layer: nn.Module, *, patches: bool = False) -> bool:
    """Return True if a layer can be a fused block: canonical, linear or a plain 2-d convolution, of low rank.

    With ``patches`` it reads an image: at most 64 numbers may lie under its kernel, and the rank does not matter.
    """
    if type(layer) is not CPConv2d:  # subclasses may have another forward
        return type(layer) is CPLinear and aligned(layer.rank) <= WIDEST and not patches
    taps = math.prod(layer.kernel_size)
    few = layer.in_channels * taps <= LARGEST_PATCH if patches else taps <= MOST_TAPS and aligned(layer.rank) <= WIDEST
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and len(layer.modes) == 4
    return few and plain and _padding(layer) is not None


@torch.inference_mode(False)
@torch.no_grad()
def fused_block(
    layer: CPLayer,
    *,
    affine: tuple[Tensor, Tensor] | None = None,
    relu: bool = False,
    pool: bool = False,
    following: CPLayer | None = None,
    patches: bool = False,
    subsampled: bool = False,
) -> FusedBlock:
    """Return a layer and what follows it as one block.

    Args:
        layer: a layer that ``can_fuse``.
        affine: scale and shift of each channel right after the layer, as of a batch norm in eval mode.
        relu: end with a ReLU.
        pool: max pooling of 2x2 windows.
        following: the next layer, whose terms the block then returns instead of channels.
        patches: take an image, not the layer's terms, which come from the block before or from ``fused_input``.
        subsampled: take terms that ``fused_input`` has made of the pixels at strides only, if the layer allows that.

    >>> first = CPLinear(20, 30, rank=5, init="kaiming_normal")
    >>> second = CPLinear(30, 10, rank=3, init="kaiming_normal")
    >>> fused = fused_input(first), fused_block(first, relu=True, following=second), fused_block(second)
    >>> nn.Sequential(*fused)(torch.randn(4, 20)).shape
    torch.Size([4, 10])
    """
    for one, whole in ((layer, patches), (following, False)):
        if one is not None and not can_fuse(one, patches=whole):
            raise ValueError(f"expected a layer that can be a fused block, got {one}")
    _, taps, out = _steps(layer)
    into = None if following is None else _steps(following)[0]
    if into is not None and len(into) != len(out):
        raise ValueError(f"expected a following layer of {len(out)} inputs, got {following}")
    if patches:
        taps, out = None, _dense(layer)
    bias: Tensor | None = None if layer.bias is None else cast(Tensor, layer.bias).to(out.dtype)
    if affine is not None:
        scale, shift = affine
        out, bias = out * scale[:, None], shift if bias is None else bias * scale + shift
    dtype = layer.lambdas.dtype
    taps, into = (None if step is None else step.to(dtype) for step in (taps, into))
    bias = None if bias is None else bias.to(dtype, copy=True)
    moves: dict[str, Pair] = {}
    if isinstance(layer, CPConv2d):
        stride = (1, 1) if subsampled and can_subsample(layer) else layer.stride
        settings = {"kernel": layer.kernel_size, "stride": stride, "padding": _padding(layer)}
        moves = cast(dict[str, Pair], settings | {"dilation": layer.dilation})
    block = FusedBlock(
        out.mT.to(dtype), taps=taps, bias=bias, into=into, relu=relu, pool=pool, patches=patches, **moves
    )
    return block.train(layer.training)


@torch.inference_mode(False)
@torch.no_grad()
def fused_input(layer: CPLayer, channels: int | None = None, *, subsample: bool = False) -> FusedInput:
    """Return the step from a layer's input to the terms that its block takes.

    With ``channels`` a linear layer takes that many maps and flattens them itself. They lie channels last, and the
    weights are put in that order. With ``subsample``, pixels between the strides of a 1x1 convolution are left out.
    """
    into = _steps(layer)[0].mT  # (R, I)
    if channels is not None:
        into = into.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1)
    maps = channels is not None or isinstance(layer, CPConv2d)
    stride = cast(Pair, layer.stride) if subsample and can_subsample(layer) else (1, 1)
    flat = channels is not None
    return FusedInput(into.to(layer.lambdas.dtype), maps=maps, flat=flat, stride=stride).train(layer.training)


def can_subsample(layer: nn.Module) -> bool:
    """Return True for a convolution with a 1x1 kernel and no padding, which reads the pixels at its strides only."""
    return isinstance(layer, CPConv2d) and math.prod(layer.kernel_size) == 1 and _padding(layer) == (0, 0)


def _steps(layer: CPLayer) -> tuple[Tensor, Tensor | None, Tensor]:  # (I, R), (kh, kw, R) or None, (O, R)
    """Return the three steps of a layer, padded by zero terms; its scales are split between the first and the last."""
    scales, factors = _wide_terms(layer)
    if isinstance(layer, CPLinear):
        count = len(linear_modes(layer)[0])
        out, into, taps = khatri_rao(factors[:count]), khatri_rao(factors[count:]), None
    else:
        out, into, *kernels = factors
        taps = khatri_rao(kernels).unflatten(0, cast(CPConv2d, layer).kernel_size)
    first, last = split_scale(scales)
    zeros = (0, aligned(layer.rank) - layer.rank)
    return F.pad(into * first, zeros), None if taps is None else F.pad(taps, zeros), F.pad(out * last, zeros)


def _dense(layer: CPLayer) -> Tensor:  # (O, I * kh * kw rounded up)
    weight = dense_from_terms(*_wide_terms(layer)).flatten(1)
    return F.pad(weight, (0, aligned(weight.shape[1]) - weight.shape[1]))


def _wide_terms(layer: CPLayer) -> tuple[Tensor, list[Tensor]]:  # (R,), [(d_i, R)]
    wide = torch.float64 if layer.lambdas.dtype == torch.float64 else torch.float32
    return (layer.sigma * layer.lambdas).to(wide), [unit_columns(factor.to(wide)) for factor in layer.factors]


def _padding(conv: CPConv2d) -> Pair | None:
    """Return the padding of rows and columns, or None if it differs at their two ends."""
    if not isinstance(conv.padding, str):
        return cast(Pair, tuple(conv.padding))
    reach = [d * (k - 1) if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return (reach[0] // 2, reach[1] // 2) if all(n % 2 == 0 for n in reach) else None
