"""Fused blocks: canonical layers between which only terms are stored, never all the channels.

A canonical layer maps its input channels to terms, weighs these by its taps and maps them to its output channels. What
follows it (batch norm, residual, ReLU, pooling) and the first step of the next layer are computed while the channels
are in registers: at low rank, writing and reading the channels is what takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.cp.tensor import dense_from_terms, khatri_rao, split_scale, unit_columns
from cpnorm.gpu.block_sizes import Blocks, aligned
from cpnorm.gpu.fused_launch import (
    launch_epilogue,
    launch_fused_block,
    register_operators,
    runs_kernel,
)
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import CPConv2d, CPLinear
from cpnorm.nn.planner import linear_modes

WIDEST = 256  # terms that fit into registers
LARGEST_PATCH = 64  # numbers under the kernel of a first layer
MOST_TAPS = 49  # the kernel is unrolled over them

Pair = tuple[int, int]


class _Fused(nn.Module):
    """A module with a kernel of its own, which is an operator that torch.compile knows."""

    def __init__(self) -> None:
        super().__init__()
        register_operators()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register_operators()  # unpickled in a process that has built no fused module


class FusedBlock(_Fused):
    """Terms -> taps -> channels -> 2x2 max pooling -> bias -> residual -> ReLU -> channels, or terms of the next layer.

    With ``taps`` (kh, kw, R) the input is terms (N, H, W, R). With ``patches`` it is an image (N, I, H, W) in any
    layout and ``out`` (I * kh * kw rounded up, O) a dense weight. With neither, rows of terms (..., R). ``out`` is
    (R, O), ``bias`` (O,); with ``into`` (O, R2) the output is terms (N, H2, W2, R2) or (..., R2), without it channels
    (N, O, H2, W2), channels last, or (..., O). R and R2 are multiples of 16.

    It is for inference: gradients reach the input, by torch's operations, and no weights. Set ``blocks`` to override
    the sizes that are chosen for the GPU.
    """

    taps: Tensor | None
    out: Tensor
    bias: Tensor | None
    into: Tensor | None
    blocks: Blocks | None = None

    def __init__(
        self,
        out: Tensor,
        *,
        taps: Tensor | None = None,
        bias: Tensor | None = None,
        into: Tensor | None = None,
        kernel: Pair = (1, 1),
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        relu: bool = False,
        pool: bool = False,
        patches: bool = False,
    ) -> None:
        super().__init__()
        if patches and taps is not None:
            raise ValueError("expected taps or patches, got both")
        if pool and taps is None and not patches:
            raise ValueError("expected taps or patches before a pooling, got neither")
        for name, value in (("taps", taps), ("out", out), ("bias", bias), ("into", into)):
            self.register_buffer(name, None if value is None else value.detach().contiguous())
        self.kernel, self.stride, self.padding, self.dilation = kernel, stride, padding, dilation
        self.relu, self.pool, self.patches = relu, pool, patches
        self.rows = taps is None and not patches

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the block, by the kernel if it can run, else by torch's operations; a residual is (N, O, H2, W2)."""
        out = self._buffers["out"]
        by_kernel = runs_kernel(x, out) and (residual is None or runs_kernel(residual, out))
        return self._in_shape(x, residual, self._by_kernel if by_kernel else self._by_torch)

    def by_torch(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the block by torch's operations."""
        return self._in_shape(x, residual, self._by_torch)

    def _in_shape(self, x: Tensor, residual: Tensor | None, way: Callable[..., Tensor]) -> Tensor:
        if self.rows:  # a way returns (N, H2, W2, O or R2)
            y = way(x.reshape(-1, 1, 1, x.shape[-1]), residual)
            return y.reshape(*x.shape[:-1], y.shape[-1])
        y = way(x, residual)
        return y.movedim(-1, 1) if self._buffers["into"] is None else y

    def _by_torch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        where = (self.stride, self.padding, self.dilation)
        if self.patches:
            shape = (-1, x.shape[1], *self.kernel)
            x = F.conv2d(x, self.out[: math.prod(shape[1:])].mT.reshape(shape), None, *where).movedim(1, -1)
        else:
            if self.taps is not None:
                taps = self.taps.permute(2, 0, 1)[:, None]  # (R, 1, kh, kw)
                x = F.conv2d(x.movedim(-1, 1), taps, None, *where, groups=len(taps)).movedim(1, -1)
            x = x @ self.out
        if self.pool:
            x = F.max_pool2d(x.movedim(-1, 1), 2).movedim(1, -1)
        if self.bias is not None:
            x = x + self.bias
        if residual is not None:
            x = x + residual.movedim(1, -1)
        if self.relu:
            x = F.relu(x)
        return x.contiguous() if self.into is None else x @ self.into

    def _by_kernel(self, x: Tensor, residual: Tensor | None) -> Tensor:
        launch = torch.ops.cpnorm.fused_block if torch.compiler.is_compiling() else launch_fused_block
        own = self._buffers  # found faster than as attributes
        tensors = own["taps"], own["out"], own["bias"], own["into"], residual
        moves = (*self.kernel, *self.stride, *self.padding, *self.dilation)
        rest: tuple[Any, ...] = *tensors, moves, self.relu, self.pool, self.patches, self.blocks or ()
        return cast(Tensor, launch(x if self.patches else x.contiguous(), *rest))

    def extra_repr(self) -> str:
        """Return the kind of input, the widths and what is fused."""
        entry = "patches" if self.patches else "rows" if self.rows else "terms"
        steps = [str(len(self.out)), str(self.out.shape[1]), *([] if self.into is None else [str(self.into.shape[1])])]
        parts = [f"{entry} {' -> '.join(steps)}", *(name for name in ("relu", "pool") if getattr(self, name))]
        return ", ".join([*parts, *([] if self.rows else [f"kernel={self.kernel}"])])


class FusedInput(nn.Module):
    """Channels -> terms of the layer in the next block, from the last dimension or from maps (N, I, H, W).

    With ``flat`` the maps are flattened first, for a linear layer.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, maps: bool = False, flat: bool = False, stride: Pair = (1, 1)) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous())  # (R, I)
        self.maps, self.flat, self.stride = maps, flat, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the terms, in the last dimension."""
        if self.maps:
            x = x[..., :: self.stride[0], :: self.stride[1]].movedim(1, -1)
        return F.linear(x.flatten(1) if self.flat else x, self.weight)

    def extra_repr(self) -> str:
        """Return the widths and the kind of input."""
        rank, channels = self.weight.shape
        return ", ".join([f"{channels} -> {rank}", *(name for name in ("maps", "flat") if getattr(self, name))])


class FusedEpilogue(_Fused):
    """2x2 max pooling -> bias -> residual -> ReLU of maps (N, C, H, W) in one kernel, after a layer that is none."""

    bias: Tensor | None

    def __init__(self, bias: Tensor | None, *, relu: bool, pool: bool) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.relu, self.pool = relu, pool

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute it by the kernel if it can run, else by torch's operations."""
        by_kernel = x.ndim == 4 and runs_kernel(x, self.bias) and (residual is None or runs_kernel(residual, x))
        return self._by_kernel(x, residual) if by_kernel else self.by_torch(x, residual)

    def by_torch(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute it by torch's operations."""
        if self.pool:
            x = F.max_pool2d(x, 2)
        if self.bias is not None:
            x = x + self.bias[:, None, None]
        if residual is not None:
            x = x + residual
        return F.relu(x) if self.relu else x

    def _by_kernel(self, x: Tensor, residual: Tensor | None) -> Tensor:
        launch = torch.ops.cpnorm.fused_epilogue if torch.compiler.is_compiling() else launch_epilogue
        return cast(Tensor, launch(x, self.bias, residual, self.relu, self.pool))

    def extra_repr(self) -> str:
        """Return what is fused."""
        names = [name for name in ("relu", "pool") if getattr(self, name)]
        return ", ".join(names + ["bias"] * (self.bias is not None))


# --- from canonical layers ----------------------------------------------------------------------------------------


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
