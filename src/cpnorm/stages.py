"""Canonical layers run as stages: between two of them only terms are in memory, never all the channels.

A canonical layer takes its input channels to terms, weighs these by its taps and goes out to its output channels. What
is behind it, a ReLU and a pooling, and the first step of the next layer are done while the channels are in registers:
with few terms left, to write and read the channels is what takes the time.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.forms import _linear_modes, _shared
from cpnorm.layers import CPConv2d, CPLayer, CPLinear
from cpnorm.tensor import dense_from_terms, khatri_rao, unit_columns

ALIGNMENT = 16  # terms that tensor cores take at once
WIDEST = 256  # terms that fit into registers
LARGEST_PATCH = 64  # numbers that the kernel of a first layer sees
MOST_TAPS = 49  # the kernel is unrolled over them
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
FEW_PIXELS = 4096  # too few for large tiles
CLOSING_BLOCK = 1024  # numbers that one program writes
HAS_TRITON = find_spec("triton") is not None

Pair = tuple[int, int]


class Blocks(NamedTuple):
    """What one program of the kernel makes, and what it makes it with."""

    pixels: int
    channels: int  # at once
    each: int  # channels of one program, a multiple of those; if it goes on to terms, it goes through all of them
    warps: int
    stages: int


class Stage(nn.Module):
    """Terms -> taps -> channels -> 2x2 max pooling -> bias -> ReLU -> channels, or terms of the next layer.

    With ``taps`` (kh, kw, R) the input is terms (N, H, W, R). With ``patches`` it is an image (N, I, H, W) in any
    layout and ``out`` (I * kh * kw rounded up, O) a dense weight. With neither, rows of terms (..., R). ``out`` is
    (R, O), ``bias`` (O,); with ``into`` (O, R2) the output is terms (N, H2, W2, R2) or (..., R2), without it channels
    (N, O, H2, W2), channels last, or (..., O). R and R2 are multiples of 16.

    For inference: gradients reach the input, through torch's operations, and nothing else. ``blocks`` may be set to
    overrule what is chosen for the GPU.
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

    def forward(self, x: Tensor) -> Tensor:
        """As the class says; by the kernel where that is possible, else by torch's operations."""
        if self.taps is None and not self.patches:
            y = self._run(x.reshape(-1, 1, 1, x.shape[-1]))
            return y.reshape(*x.shape[:-1], y.shape[-1])
        y = self._run(x)
        return y.movedim(-1, 1) if self.into is None else y

    def _run(self, x: Tensor) -> Tensor:  # -> (N, H2, W2, O or R2)
        if not runs_kernel(x, self.out):
            return self._by_torch(x)
        return self._by_kernel(x if self.patches else x.contiguous())

    def _by_torch(self, x: Tensor) -> Tensor:
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
        if self.relu:
            x = F.relu(x)
        return x.contiguous() if self.into is None else x @ self.into

    def _by_kernel(self, x: Tensor) -> Tensor:
        weights = self.taps, self.out, self.bias, self.into
        moves = [*self.kernel, *self.stride, *self.padding, *self.dilation]
        what = self.relu, self.pool, self.patches
        launch = torch.ops.cpnorm.stage if torch.compiler.is_compiling() else launch_stage
        return cast(Tensor, launch(x, *weights, moves, *what, list(self.blocks or ())))

    def extra_repr(self) -> str:
        """What it is made of."""
        opening = "patches" if self.patches else "terms" if self.taps is not None else "rows"
        steps = [str(len(self.out)), str(self.out.shape[1]), *([] if self.into is None else [str(self.into.shape[1])])]
        parts = [f"{opening} {' -> '.join(steps)}", *(name for name in ("relu", "pool") if getattr(self, name))]
        return ", ".join([*parts, *([] if self.taps is None and not self.patches else [f"kernel={self.kernel}"])])


class Opening(nn.Module):
    """Channels -> the terms that a layer's stage asks for: of the last dimension, or of maps (N, I, H, W).

    ``flat``: of all that is in the maps, for a linear layer behind them.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, maps: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous())  # (R, I)
        self.maps, self.flat = maps, flat

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        if self.maps:
            x = x.movedim(1, -1)
        return F.linear(x.flatten(1) if self.flat else x, self.weight)

    def extra_repr(self) -> str:
        """What it is made of."""
        rank, channels = self.weight.shape
        return ", ".join([f"{channels} -> {rank}", *(name for name in ("maps", "flat") if getattr(self, name))])


class Closing(nn.Module):
    """2x2 max pooling -> bias -> ReLU of maps (N, C, H, W), in one kernel: what is behind a layer that is no stage."""

    bias: Tensor | None

    def __init__(self, bias: Tensor | None, *, relu: bool, pool: bool) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.relu, self.pool = relu, pool

    def forward(self, x: Tensor) -> Tensor:
        """By the kernel where that is possible, else by torch's operations."""
        return self._by_kernel(x) if x.ndim == 4 and runs_kernel(x, self.bias) else self._by_torch(x)

    def _by_torch(self, x: Tensor) -> Tensor:
        if self.pool:
            x = F.max_pool2d(x, 2)
        if self.bias is not None:
            x = x + self.bias[:, None, None]
        return F.relu(x) if self.relu else x

    def _by_kernel(self, x: Tensor) -> Tensor:
        launch = torch.ops.cpnorm.closing if torch.compiler.is_compiling() else launch_closing
        return cast(Tensor, launch(x, self.bias, self.relu, self.pool))

    def extra_repr(self) -> str:
        """What it does."""
        return ", ".join(
            [name for name in ("relu", "pool") if getattr(self, name)] + ["bias"] * (self.bias is not None)
        )


# --- on a GPU -----------------------------------------------------------------------------------------------------


def runs_kernel(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether the kernels can do it: on a GPU (or in triton's interpreter), in their precisions, without gradients."""
    alike = weight is None or (x.dtype == weight.dtype and x.device == weight.device)
    fit = HAS_TRITON and within_reach(x.device) and x.dtype in PRECISIONS
    return fit and alike and not (torch.is_grad_enabled() and x.requires_grad)


def within_reach(device: torch.device) -> bool:
    """Of the kernels."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launch_stage(
    x: Tensor,
    taps: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    into: Tensor | None,
    moves: list[int],  # kernel, stride, padding, dilation: of rows and columns each
    relu: bool,
    pool: bool,
    patches: bool,
    blocks: list[int],  # none: those that are best
) -> Tensor:  # (N, H2, W2, O or R2)
    """What ``Stage`` computes, by the kernel."""
    from cpnorm.stage_kernels import stage

    y = _stage_output(x, taps, out, bias, into, moves, relu, pool, patches, blocks)
    images, height, width, _ = y.shape
    (width_in, channels), following = out.shape, 0 if into is None else into.shape[1]
    terms = x.shape[1] * math.prod(moves[:2]) if patches else x.shape[-1]
    if (_aligned(terms) if patches else terms) != width_in:  # the kernel would read what is not there
        raise ValueError(f"expected an input for weights of {width_in} terms, got one of shape {tuple(x.shape)}")
    count = images * height * width
    if y.numel() == 0:
        return y
    term_block, following_block = _power_of_2(width_in), _power_of_2(following) if following else 0
    known = Blocks(*blocks) if blocks else None
    chosen = known or _blocks(count, channels, term_block, following_block, pool, x.element_size())
    each = -(-channels // chosen.channels) * chosen.channels if following else chosen.each
    grid = (-(-count // chosen.pixels) * -(-channels // each),)
    tf32 = x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32
    with torch.cuda.device_of(x):
        stage[grid](
            x,
            taps,
            out,
            bias,
            into,
            y,
            count,
            *_image_size(x, patches),
            height,
            width,
            x.stride(),
            kernel=tuple(moves[:2]),
            stride=tuple(moves[2:4]),
            padding=tuple(moves[4:6]),
            dilation=tuple(moves[6:]),
            patches=patches,
            relu=relu,
            pool=pool,
            terms=terms,
            width=width_in,
            channels=channels,
            following=following,
            pixel_block=chosen.pixels,
            term_block=term_block,
            channel_block=chosen.channels,
            channels_each=each,
            following_block=following_block,
            precision="tf32" if tf32 else "ieee",
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return y


def _stage_output(
    x: Tensor,
    taps: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    into: Tensor | None,
    moves: list[int],
    relu: bool,
    pool: bool,
    patches: bool,
    blocks: list[int],
) -> Tensor:
    """Its output, without values."""
    sizes = _image_size(x, patches)
    moved = zip(sizes, *(moves[i : i + 2] for i in range(0, 8, 2)), strict=True)
    after = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in moved]
    after = [n // 2 for n in after] if pool else after
    if min(after) < 1:
        raise ValueError(f"expected an image as large as the kernel {tuple(moves[:2])}, got {tuple(sizes)}, {pool=}")
    return x.new_empty(x.shape[0], *after, (out if into is None else into).shape[1])


def _image_size(x: Tensor, patches: bool) -> torch.Size:
    return x.shape[2:] if patches else x.shape[1:3]


def launch_closing(x: Tensor, bias: Tensor | None, relu: bool, pool: bool) -> Tensor:
    """What ``Closing`` computes, by the kernel."""
    from cpnorm.stage_kernels import closing

    y = _closing_output(x, bias, relu, pool)
    if y.numel() == 0:
        return y
    _, channels, height, width = y.shape
    last = _lies_channels_last(x)
    inner = channels if last else width
    count, inner_block = y.numel() // inner, min(128, _power_of_2(inner))
    outer_block = CLOSING_BLOCK // inner_block
    with torch.cuda.device_of(x):
        closing[(-(-count // outer_block) * -(-inner // inner_block),)](
            x,
            bias,
            y,
            count,
            height,
            width,
            x.stride(),
            channels=channels,
            channels_last=last,
            relu=relu,
            pool=pool,
            outer_block=outer_block,
            inner_block=inner_block,
        )
    return y


def _closing_output(x: Tensor, bias: Tensor | None, relu: bool, pool: bool) -> Tensor:
    """Its output, without values."""
    images, channels, *size = x.shape
    after = [n // 2 for n in size] if pool else size
    if min(after) < 1:
        raise ValueError(f"expected maps of 2 x 2 and more before a pooling, got {tuple(size)}")
    layout = torch.channels_last if _lies_channels_last(x) else torch.contiguous_format
    return torch.empty(images, channels, *after, dtype=x.dtype, device=x.device, memory_format=layout)


def _lies_channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1


# For the compiler, which has no need to look inside.
_WEIGHTS = "Tensor x, Tensor? taps, Tensor out, Tensor? bias, Tensor? into"
torch.library.custom_op(
    "cpnorm::stage",
    launch_stage,
    mutates_args=(),
    schema=f"({_WEIGHTS}, int[] moves, bool relu, bool pool, bool patches, int[] blocks) -> Tensor",
).register_fake(_stage_output)
torch.library.custom_op(
    "cpnorm::closing",
    launch_closing,
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, bool relu, bool pool) -> Tensor",
).register_fake(_closing_output)


def _blocks(pixels: int, channels: int, terms: int, following: int, pool: bool, itemsize: int) -> Blocks:
    """What one program makes, by what was fastest on an H200 for layers of 16 to 128 terms.

    Few pixels: small tiles, so that all of the GPU has some, and large chunks, for there are few turns to overlap. Many
    pixels: as large a tile as registers hold, since every tile reads all of the weights.
    """
    held = terms * (4 if pool else 1)  # numbers for a pixel
    if pixels <= FEW_PIXELS:
        tile, chunk, warps = 16, 64 if pool else 128, 8 if terms >= 128 else 4
    elif pool:
        tile, chunk, warps = (64, 64, 4) if held <= 256 else (64, 128, 8) if held <= 512 else (16, 64, 8)
    else:
        tile, chunk, warps = (64, 64, 4) if terms <= 64 else (128, 32, 8) if terms <= 128 else (32, 64, 8)
    if itemsize > 2:
        tile, chunk = max(16, tile // 2), chunk // 2
    chunk = min(chunk, max(16, _power_of_2(channels)))
    while chunk > 16 and (terms + following) * chunk * itemsize > 2**16:  # bytes of shared memory
        chunk //= 2
    stages = min(3, max(2, 3 * 2**15 // ((terms + following) * chunk * itemsize)))
    # Who does not go on to terms may leave other channels to others, but each opens its tile anew.
    each = chunk if pixels <= FEW_PIXELS else -(-channels // chunk) * chunk
    return Blocks(tile, chunk, each, warps, stages)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# --- from canonical layers ----------------------------------------------------------------------------------------


def takes(layer: nn.Module, *, patches: bool = False) -> bool:
    """Whether a layer can be a stage: a linear one or a plain 2-d convolution, canonical and of few terms.

    Patches: one that reads an image; its kernel must see few numbers, and the number of terms does not matter.
    """
    if type(layer) is not CPConv2d:  # another's forward may do something else
        return type(layer) is CPLinear and _aligned(layer.rank) <= WIDEST and not patches
    taps = math.prod(layer.kernel_size)
    few = layer.in_channels * taps <= LARGEST_PATCH if patches else taps <= MOST_TAPS and _aligned(layer.rank) <= WIDEST
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and len(layer.modes) == 4
    return few and plain and _padding(layer) is not None


@torch.inference_mode(False)
@torch.no_grad()
def stage_of(
    layer: CPLayer, *, relu: bool = False, pool: bool = False, following: CPLayer | None = None, patches: bool = False
) -> Stage:
    """The layer and what is behind it as a stage; with a following layer it delivers the terms of that one.

    Without patches the stage asks for the layer's terms: those of the stage before, or of ``opening_of``.

    >>> first = CPLinear(20, 30, rank=5, init="kaiming_normal")
    >>> second = CPLinear(30, 10, rank=3, init="kaiming_normal")
    >>> stages = opening_of(first), stage_of(first, relu=True, following=second), stage_of(second)
    >>> nn.Sequential(*stages)(torch.randn(4, 20)).shape
    torch.Size([4, 10])
    """
    for one, whole in ((layer, patches), (following, False)):
        if one is not None and not takes(one, patches=whole):
            raise ValueError(f"expected a layer that can be a stage, got {one}")
    _, taps, out = _steps(layer)
    into = None if following is None else _steps(following)[0]
    if into is not None and len(into) != len(out):
        raise ValueError(f"expected a following layer of {len(out)} inputs, got {following}")
    if patches:
        taps, out = None, _dense(layer)
    dtype = layer.lambdas.dtype
    taps, into = (None if step is None else step.to(dtype) for step in (taps, into))
    bias = None if layer.bias is None else cast(Tensor, layer.bias).to(dtype).clone()
    moves: dict[str, Pair] = {}
    if isinstance(layer, CPConv2d):
        settings = {"kernel": layer.kernel_size, "stride": layer.stride, "padding": _padding(layer)}
        moves = cast(dict[str, Pair], settings | {"dilation": layer.dilation})
    stage = Stage(out.mT.to(dtype), taps=taps, bias=bias, into=into, relu=relu, pool=pool, patches=patches, **moves)
    return stage.train(layer.training)


@torch.inference_mode(False)
@torch.no_grad()
def opening_of(layer: CPLayer, channels: int | None = None) -> Opening:
    """What takes a layer's input to the terms that its stage asks for.

    With ``channels`` the input of a linear layer is so many maps that are yet to be flattened; they lie channels last,
    so that the weights are put in that order.
    """
    into = _steps(layer)[0].mT  # (R, I)
    if channels is not None:
        into = into.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1)
    maps = channels is not None or isinstance(layer, CPConv2d)
    return Opening(into.to(layer.lambdas.dtype), maps=maps, flat=channels is not None).train(layer.training)


def _steps(layer: CPLayer) -> tuple[Tensor, Tensor | None, Tensor]:  # (I, R), (kh, kw, R) or None, (O, R)
    """The three steps of a layer, its scales shared by the first and the last, with terms of zeros behind."""
    scales, factors = _wide_terms(layer)
    if isinstance(layer, CPLinear):
        count = len(_linear_modes(layer)[0])
        out, into, taps = khatri_rao(factors[:count]), khatri_rao(factors[count:]), None
    else:
        out, into, *kernels = factors
        taps = khatri_rao(kernels).unflatten(0, cast(CPConv2d, layer).kernel_size)
    first, last = _shared(scales)
    zeros = (0, _aligned(layer.rank) - layer.rank)
    return F.pad(into * first, zeros), None if taps is None else F.pad(taps, zeros), F.pad(out * last, zeros)


def _dense(layer: CPLayer) -> Tensor:  # (O, I * kh * kw rounded up)
    weight = dense_from_terms(*_wide_terms(layer)).flatten(1)
    return F.pad(weight, (0, _aligned(weight.shape[1]) - weight.shape[1]))


def _wide_terms(layer: CPLayer) -> tuple[Tensor, list[Tensor]]:  # (R,), [(d_i, R)]
    wide = torch.float64 if layer.lambdas.dtype == torch.float64 else torch.float32
    return (layer.sigma * layer.lambdas).to(wide), [unit_columns(factor.to(wide)) for factor in layer.factors]


def _padding(conv: CPConv2d) -> Pair | None:
    """In front and behind of rows and of columns; None if it is not the same there."""
    if not isinstance(conv.padding, str):
        return cast(Pair, tuple(conv.padding))
    reach = [d * (k - 1) if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return (reach[0] // 2, reach[1] // 2) if all(n % 2 == 0 for n in reach) else None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
