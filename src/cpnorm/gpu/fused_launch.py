"""Launch the kernels of fused blocks: whether they can run, the shape of the output, and the size of each program."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cpnorm.gpu.block_sizes import Blocks, aligned, choose_blocks, next_power_of_2, shared_memory

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
EPILOGUE_BLOCK = 1024  # numbers that one program writes


def runs_kernel(x: Tensor, weight: Tensor | None = None) -> bool:
    """Return True if the kernels can run on x: on a GPU or in triton's interpreter, dtypes they know, no gradients."""
    matches = weight is None or (x.dtype == weight.dtype and x.device == weight.device)
    fit = kernels_supported(x.device) and x.dtype in PRECISIONS and has_triton()
    return fit and matches and not (torch.is_grad_enabled() and x.requires_grad)


_FOUND: dict[str, bool] = {}  # whether packages are installed, once asked for


def has_triton() -> bool:
    """Return True if triton is installed; torch brings it along for GPUs on Linux."""
    if "triton" not in _FOUND:
        _FOUND["triton"] = find_spec("triton") is not None
    return _FOUND["triton"]


def kernels_supported(device: torch.device) -> bool:
    """Return True if the Triton kernels can run on this device."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launch_fused_block(
    x: Tensor,
    taps: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    into: Tensor | None,
    residual: Tensor | None,
    moves: Sequence[int],  # kernel, stride, padding, dilation: of rows and columns each
    relu: bool,
    pool: bool,
    patches: bool,
    blocks: Sequence[int],  # empty: chosen for the GPU
) -> Tensor:  # (N, H2, W2, O or R2)
    """Compute what ``FusedBlock`` computes, by the kernel."""
    from cpnorm.gpu.fused_kernels import block_kernel

    kind = x.shape, x.stride(), x.dtype, x.device, taps is None, bias is None, residual is None
    following = 0 if into is None else into.shape[1]
    tf32 = x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32
    plan = _plan(*kind, out.shape, following, tuple(moves), relu, pool, patches, tuple(blocks), tf32)
    y = x.new_empty(plan.output)
    if residual is not None:
        _check_residual(residual, (plan.output[0], out.shape[1], *plan.output[1:3]))
        residual = residual.contiguous(memory_format=torch.channels_last)
    _start(block_kernel, plan, (x, taps, out, bias, into, residual, y))
    return y


class Plan(NamedTuple):
    """The launch of a kernel for inputs of one size, layout and dtype: the number of programs, and all but tensors."""

    output: tuple[int, ...]  # its shape
    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]  # in the kernel's order
    options: dict[str, int]
    compiled: list[Any]  # the kernel, once there is one


# Computing a plan takes longer than a launch. Unused arguments are cache keys: they select the compiled kernel.
@lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    no_taps: bool,
    no_bias: bool,
    no_residual: bool,
    weight: torch.Size,
    following: int,
    moves: tuple[int, ...],
    relu: bool,
    pool: bool,
    patches: bool,
    blocks: tuple[int, ...],
    tf32: bool,
) -> Plan:
    kernel, stride, padding, dilation = (moves[i : i + 2] for i in range(0, 8, 2))
    (width, channels), terms = weight, shape[1] * math.prod(kernel) if patches else shape[-1]
    if (aligned(terms) if patches else terms) != width:  # the kernel would read beyond the tensors
        raise ValueError(f"expected an input for weights of {width} terms, got one of shape {tuple(shape)}")
    sizes = shape[2:] if patches else shape[1:3]
    after = _sizes_after(sizes, moves, pool)
    output = (shape[0], *after, following or channels)
    count = math.prod(output[:-1])
    term_block, following_block = next_power_of_2(width), next_power_of_2(following) if following else 0
    memory = dtype.itemsize, shared_memory(device)
    cut = Blocks(*blocks) if blocks else choose_blocks(count, channels, term_block, following_block, pool, *memory)
    each = -(-channels // cut.channels) * cut.channels if following else cut.each
    constants = {
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "patches": patches,
        "relu": relu,
        "pool": pool,
        "terms": terms,
        "width": width,
        "channels": channels,
        "following": following,
        "pixel_block": cut.pixels,
        "term_block": term_block,
        "channel_block": cut.channels,
        "channels_each": each,
        "following_block": following_block,
        "precision": "tf32" if tf32 else "ieee",
    }
    programs, numbers = -(-count // cut.pixels) * -(-channels // each), (count, *sizes, *after, strides)
    return Plan(output, programs, numbers, constants, {"num_warps": cut.warps, "num_stages": cut.stages}, [])


def _sizes_after(sizes: Sequence[int], moves: Sequence[int], pool: bool) -> list[int]:
    moved = zip(sizes, *(moves[i : i + 2] for i in range(0, 8, 2)), strict=True)
    after = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in moved]
    after = [n // 2 for n in after] if pool else after
    if min(after) < 1:
        raise ValueError(f"expected an image as large as the kernel {tuple(moves[:2])}, got {tuple(sizes)}, {pool=}")
    return after


def _fused_block_output(
    x: Tensor,
    taps: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    into: Tensor | None,
    residual: Tensor | None,
    moves: Sequence[int],
    relu: bool,
    pool: bool,
    patches: bool,
    blocks: Sequence[int],
) -> Tensor:
    """Return the output without values, for the compiler."""
    after = _sizes_after(x.shape[2:] if patches else x.shape[1:3], moves, pool)
    return x.new_empty(x.shape[0], *after, (out if into is None else into).shape[1])


def launch_epilogue(x: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, pool: bool) -> Tensor:
    """Compute what ``FusedEpilogue`` computes, by the kernel."""
    from cpnorm.gpu.fused_kernels import epilogue_kernel

    y = _epilogue_output(x, bias, residual, relu, pool)
    if residual is not None:
        _check_residual(residual, y.shape)
        residual = residual.contiguous(memory_format=_layout(x))
    kind = x.shape, x.stride(), x.dtype, x.device, bias is None, residual is None
    _start(epilogue_kernel, _epilogue_plan(*kind, relu, pool), (x, bias, residual, y))
    return y


def _check_residual(residual: Tensor, shape: Sequence[int]) -> None:
    if residual.shape != torch.Size(shape):
        raise ValueError(f"expected a residual of the output's shape {tuple(shape)}, got {tuple(residual.shape)}")


@lru_cache(maxsize=1024)
def _epilogue_plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    no_bias: bool,
    no_residual: bool,
    relu: bool,
    pool: bool,
) -> Plan:
    images, channels, height, width = shape
    if pool:
        height, width = height // 2, width // 2
    last = _lies_channels_last(shape, strides)
    outer, inner = (images * height * width, channels) if last else (images * channels * height, width)
    inner_block = min(128, next_power_of_2(max(1, inner)))
    constants = {
        "channels": channels,
        "channels_last": last,
        "relu": relu,
        "pool": pool,
        "outer_block": EPILOGUE_BLOCK // inner_block,
        "inner_block": inner_block,
    }
    programs = -(-outer // constants["outer_block"]) * -(-inner // inner_block)
    return Plan((images, channels, height, width), programs, (outer, height, width, strides), constants, {}, [])


def _epilogue_output(x: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, pool: bool) -> Tensor:
    """Return the output without values."""
    images, channels, *size = x.shape
    after = [n // 2 for n in size] if pool else size
    if min(after) < 1:
        raise ValueError(f"expected maps of 2 x 2 and more before a pooling, got {tuple(size)}")
    return torch.empty(images, channels, *after, dtype=x.dtype, device=x.device, memory_format=_layout(x))


def _start(kernel: Any, plan: Plan, tensors: Sequence[Tensor | None]) -> None:
    """Launch a kernel, by triton only the first time: its look at the arguments takes longer than most kernels.

    Triton compiles for the dtypes and for addresses that are multiples of 16 bytes, which those of slices may not be.
    """
    if not plan.programs:
        return
    x = cast(Tensor, tensors[0])
    usual = all(t is None or (t.data_ptr() % 16 == 0 and t.dtype == x.dtype) for t in tensors)
    with torch.cuda.device_of(x):
        if usual and plan.compiled:
            plan.compiled[0][plan.programs, 1, 1](*tensors, *plan.numbers, *plan.constants.values())
            return
        made = kernel[plan.programs,](*tensors, *plan.numbers, **plan.constants, **plan.options)
    if usual and made is not None and torch.version.cuda:  # the interpreter makes none; those for AMD depend on more
        plan.compiled.append(made)


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if _lies_channels_last(x.shape, x.stride()) else torch.contiguous_format


def _lies_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return strides[1] == 1 and shape[1] > 1


@cache
def register_operators() -> None:
    """Register the launchers as torch operators, which torch.compile and torch.export call without looking inside."""
    has_triton()  # asked here, since the compiler cannot trace the search
    tensors = "Tensor x, Tensor? taps, Tensor out, Tensor? bias, Tensor? into, Tensor? residual"
    torch.library.custom_op(
        "cpnorm::fused_block",
        launch_fused_block,
        mutates_args=(),
        schema=f"({tensors}, int[] moves, bool relu, bool pool, bool patches, int[] blocks) -> Tensor",
    ).register_fake(_fused_block_output)
    torch.library.custom_op(
        "cpnorm::fused_epilogue",
        launch_epilogue,
        mutates_args=(),
        schema="(Tensor x, Tensor? bias, Tensor? residual, bool relu, bool pool) -> Tensor",
    ).register_fake(_epilogue_output)
