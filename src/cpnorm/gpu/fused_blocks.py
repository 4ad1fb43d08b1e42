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

from cpnorm.gpu.block_sizes import Blocks
from cpnorm.gpu.fused_launch import (
    launch_epilogue,
    launch_fused_block,
    register_operators,
    runs_kernel,
)

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
