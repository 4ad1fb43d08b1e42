"""Choose how a layer computes its output: rebuild W and run the plain layer, or contract with the factors without W.

Choosing (`plan`) is separate from doing (`through_*`), and the choice can be printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm._checks import check_int, check_type
from cpnorm.cp.tensor import khatri_rao, split_modes

Path = Literal["rebuild", "factors"]

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
CONV = (F.conv1d, F.conv2d, F.conv3d)
CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

# All four constants were fitted to sweeps of benchmarks/plan.py (CPU: seven, on two cores; GPU: one on an H200, without
# the last constant); the results of its --fit vary somewhat between runs. The first is the number of FLOPs in the time
# in which one byte is moved between layers.
FLOPS_PER_BYTE = {"cpu": 16.0, "cuda": 4.0}
# A convolution through the factors is one more call into the library, which takes the time of this many FLOPs.
FLOPS_PER_CALL = {"cpu": 5e7, "cuda": 3e9}
# Depthwise convolutions use no matrix unit: one of their FLOPs costs as much as this many of a matrix product.
DEPTHWISE_PENALTY = {"cpu": 1.0, "cuda": 32.0}
# A product that sums over fewer terms than this takes no less time, since its results have to be written.
LEAST_TERMS = {"cpu": 32, "cuda": 1}
# A convolution with a weight that is kept takes less time than its FLOPs and bytes would in products and copies: by the
# first factor, or by the second where a position has no neighbours. (A GPU uses a kept weight without asking.)
KEPT_SPEED = (1.45, 2.5)
MANY_POSITIONS = 512  # from which convolutions of 1x1 are no slower than products, and on some CPUs twice as fast


# --- doing --------------------------------------------------------------------------------------------------------


def through_linear(x: Tensor, scales: Tensor, factors: Sequence[Tensor], outputs: int, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias, (..., I) -> (..., O), as two thin products; both I and O may consist of several modes."""
    size, first_input = 1, 0
    while size < outputs:
        size *= factors[first_input].shape[0]
        first_input += 1
    first_input = max(first_input, 1)
    into = khatri_rao(factors[first_input:])  # (I, R)
    out = khatri_rao(factors[:first_input])  # (O, R)
    return F.linear((x @ into) * scales.to(x.dtype), out, bias)


def through_conv(
    x: Tensor,  # (N, I, ...)
    scales: Tensor,  # (R,)
    factors: Sequence[Tensor],  # (O, R), (I / groups, R), (k, R), ...
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve in three steps: 1x1 into the terms, one depthwise filter per term, 1x1 out.

    A filter of one number scales its term. Groups share the input vectors. On a CPU, what is between the first and the
    last step lies channels-last, and for few positions the two of 1x1 are matrix products: convolutions copy their
    weights into another layout at each call.
    """
    out, into, *kernels = factors
    conv, ones, rank = CONV[len(kernels) - 1], (1,) * len(kernels), scales.shape[0]
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    on_cpu = x.device.type == "cpu" and len(kernels) == 2 and groups == 1 and not traced and x.is_contiguous()
    batch, channels = x.shape[:2]
    if on_cpu and not isinstance(padding, str):  # rows of the kernel that meet nothing but padding: small images
        pairs = [overlap(*given) for given in zip(kernels, x.shape[2:], padding, dilation, strict=True)]
        kernels, padding = [kernel for kernel, _ in pairs], [rows for _, rows in pairs]
    scaled = all(len(kernel) == 1 for kernel in kernels) and (isinstance(padding, str) or not any(padding))
    if scaled and any(step > 1 for step in stride):
        x = x[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
    products = on_cpu and x.numel() < channels * MANY_POSITIONS
    x = x.reshape(batch * groups, channels // groups, *x.shape[2:])
    if on_cpu and not products:
        x = x.contiguous(memory_format=torch.channels_last)
    x = (x.movedim(1, -1) @ into).movedim(-1, 1) if products else conv(x, into.mT.reshape(rank, -1, *ones))
    depthwise = khatri_rao(kernels).mT.reshape(rank, 1, *(k.shape[0] for k in kernels))
    if scaled:
        scales = scales * depthwise.flatten()
    else:
        x = conv(x, depthwise, None, stride, padding, dilation, rank)
    x = x.reshape(batch, groups * rank, *x.shape[2:])
    if products:
        return F.linear(x.movedim(1, -1), out * scales, bias).movedim(-1, 1).contiguous()
    x = conv(x, (out * scales).reshape(-1, rank, *ones), bias, groups=groups)
    return x.contiguous() if on_cpu else x


def through_two_convolutions(
    x: Tensor,  # (N, I, H, W)
    left: Tensor,  # (O * k1, R or more), rows in the order (O, k1)
    right: Tensor,  # (k2 * I or more, R or more), rows in the order (k2, I)
    conv: nn.Conv2d,
    rank: int,
) -> Tensor:
    """Convolve in two steps: 1 x k2 into the terms, k1 x 1 out of them, for a weight given as two matrices.

    Terms are computed in multiples of 8, as tensor cores want them; those beyond the rank have entries of zero.
    """
    rank = min(-(-rank // 8) * 8, left.shape[1])
    (k1, k2), inputs = conv.kernel_size, conv.in_channels
    into = right[: k2 * inputs, :rank].mT.reshape(rank, 1, k2, inputs).permute(0, 3, 1, 2)  # (R, I, 1, k2)
    out = left[:, :rank].reshape(-1, k1, 1, rank).permute(0, 3, 1, 2)  # (O, R, k1, 1)
    (s1, s2), (d1, d2), padding = conv.stride, conv.dilation, conv.padding
    rows, columns = (padding, padding) if isinstance(padding, str) else ((padding[0], 0), (0, padding[1]))
    x = F.conv2d(x, into, None, (1, s2), columns, (1, d2))
    return F.conv2d(x, out, conv.bias, (s1, 1), rows, (d1, 1))


def weight_of_sides(layer: nn.Module, left: Tensor, right: Tensor) -> Tensor:
    """Return the weight that ``through_two_convolutions`` or two products of a linear layer amount to."""
    if not isinstance(layer, nn.Conv2d):
        return left @ right.mT
    (k1, k2), inputs = layer.kernel_size, layer.in_channels
    return (left @ right[: k2 * inputs].mT).reshape(-1, k1, k2, inputs).permute(0, 3, 1, 2)


def overlap(kernel: Tensor, length: int, padding: int, dilation: int) -> tuple[Tensor, int]:  # (k, R)
    """Return the kernel and its padding; of one centred on a single pixel, the row that meets it."""
    alone = length == dilation == 1 and len(kernel) == 2 * padding + 1
    return (kernel[padding : padding + 1], 0) if alone else (kernel, padding)


def through_conv_transpose(
    x: Tensor,  # (N, I, ...)
    scales: Tensor,  # (R,)
    factors: Sequence[Tensor],  # (I, R), (O / groups, R), (k, R), ...
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """Run the same three steps for a transposed convolution, whose input mode comes first; groups share the outputs."""
    into, out, *kernels = factors
    dims, ones, rank = len(kernels) - 1, (1,) * len(kernels), scales.shape[0]
    batch, channels = x.shape[:2]
    per_group = into.reshape(groups, channels // groups, rank).mT.reshape(groups * rank, -1, *ones)
    x = CONV[dims](x, per_group, groups=groups)
    x = x.reshape(batch * groups, rank, *x.shape[2:])
    depthwise = khatri_rao(kernels).mT.reshape(rank, 1, *(k.shape[0] for k in kernels))
    x = CONV_TRANSPOSE[dims](x, depthwise, None, stride, padding, output_padding, rank, dilation)
    x = CONV[dims](x, (out * scales).reshape(-1, rank, *ones))
    x = x.reshape(batch, groups * x.shape[1], *x.shape[2:])
    return x if bias is None else x + bias.to(x.dtype).reshape(-1, *ones)


# --- choosing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """FLOPs and memory traffic of one pass over a batch, and their weighted sum in matrix-product FLOPs."""

    flops: int
    bytes: int
    total: float


@dataclass(frozen=True)
class Plan:
    """The path chosen for a layer at an input size, and the cost of both paths."""

    path: Path
    rebuild: Cost
    factors: Cost

    def __str__(self) -> str:
        def line(name: str, cost: Cost) -> str:
            chosen = "->" if name == self.path else "  "
            return f"{chosen} {name:<8} {cost.flops / 1e6:10.2f} MFLOP {cost.bytes / 1e6:8.2f} MB"

        return line("rebuild", self.rebuild) + "\n" + line("factors", self.factors)


def plan(
    layer: nn.Module,
    input_shape: Sequence[int],
    rank: int,
    *,
    modes: Sequence[int] | None = None,
    training: bool = False,
    device: str | torch.device = "cpu",
    itemsize: int = 4,
    built: bool = False,
) -> Plan:
    """Return the cheaper path for this layer, rank and input size: rebuild W, or contract through the factors.

    Args:
        layer: a linear or convolutional layer; only its settings are read.
        input_shape: the shape of the layer's input, with its batch dimension.
        rank: the number of terms.
        modes: the shape in which the weight is decomposed; by default the weight's own.
        training: count the backward pass as well.
        device: the device to plan for.
        itemsize: bytes of a number.
        built: W has been built already, so that rebuilding it costs nothing.

    >>> print(plan(nn.Linear(4096, 1024), (64, 4096), rank=1024))
       rebuild     9126.81 MFLOP    76.81 MB
    -> factors      671.09 MFLOP    22.81 MB
    """
    check_type(layer, LAYERS, "a linear or convolutional layer")
    if not isinstance(rank, int) or rank < 0:
        rank = check_int("rank", rank, least=0)
    weight = modes if modes is not None else weight_shape(layer)
    size = math.prod(weight)
    if isinstance(layer, nn.Linear):
        positions = positions_out = math.prod(input_shape) // layer.in_features
        inputs, outputs, groups, kernel, transposed, scaled = layer.in_features, layer.out_features, 1, 0, False, False
        dense_positions = positions
    else:
        assert isinstance(layer, nn.modules.conv._ConvNd)
        if len(input_shape) == len(layer.kernel_size) + 1:
            input_shape = (1, *input_shape)
        if len(input_shape) != len(layer.kernel_size) + 2:
            raise ValueError(f"input_shape: expected that of an image or a batch of images, got {tuple(input_shape)}")
        batch, space = input_shape[0], input_shape[2:]
        positions, positions_out = batch * math.prod(space), batch * math.prod(output_space(layer, space))
        inputs, outputs, groups, transposed = layer.in_channels, layer.out_channels, layer.groups, layer.transposed
        kernel = math.prod(layer.kernel_size)
        dense_positions = positions if transposed else positions_out
        scaled = kernel == 1 and not transposed and (isinstance(layer.padding, str) or not any(layer.padding))
        if scaled:  # no filter; of the input no more is read than what an output needs
            positions = positions_out

    passes = 3 if training else 1  # forward, and backward to the input and to the weight
    left, right = split_modes(weight)
    products = math.prod([weight[m] for m in left]) + math.prod([weight[m] for m in right])
    activations = positions * inputs + positions_out * outputs
    kind = device if isinstance(device, str) and device in FLOPS_PER_BYTE else torch.device(device).type
    kind = kind if kind == "cpu" else "cuda"  # any other accelerator is treated as a GPU
    per_byte, per_call, penalty = FLOPS_PER_BYTE[kind], FLOPS_PER_CALL[kind], DEPTHWISE_PENALTY[kind]

    def cost(matrices: list[tuple[int, int]], depthwise: int, numbers: int, calls: int = 0) -> Cost:
        """Return the cost of matrix products, given as (results, terms summed for each), and the rest."""
        moved = passes * itemsize * numbers
        flops = sum(2 * results * terms for results, terms in matrices)
        spent = sum(2 * results * max(terms, LEAST_TERMS[kind]) for results, terms in matrices)
        total = passes * (spent + penalty * depthwise + per_call * calls) + per_byte * moved
        return Cost(passes * (flops + depthwise), moved, total)

    into = inputs // groups
    dense = into if transposed or not kernel else into * kernel  # terms summed for each result of the plain layer
    rebuild = cost(
        [*([] if built else [(size, rank)]), (dense_positions * size // dense, dense)],
        0,
        (size if built else 2 * rank * products + 2 * size) + activations,
    )
    thin = [(positions * groups * rank, into), (positions_out * outputs, rank)]
    if built and kernel and groups == 1 and kind == "cpu":
        alone = kernel == 1 or math.prod(space) == 1
        rebuild = replace(rebuild, total=rebuild.total / KEPT_SPEED[alone])
    if kernel and not scaled:  # the first 1x1 runs at the size of the input, the last at that of the output
        depthwise = 2 * dense_positions * groups * rank * kernel
        numbers = 2 * groups * rank * (positions + positions_out) + activations + rank * sum(weight)
        factors = cost(thin, depthwise, numbers, calls=1)
    else:
        factors = cost(thin, 0, rank * (inputs + outputs + 2 * positions) + activations)
    return Plan("factors" if factors.total < rebuild.total else "rebuild", rebuild, factors)


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of the layer's weight, read from its settings."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, nn.modules.conv._ConvNd)
    first, second = layer.out_channels, layer.in_channels
    if layer.transposed:
        first, second = second, first
    return first, second // layer.groups, *layer.kernel_size


def output_space(layer: nn.modules.conv._ConvNd, space: Sequence[int]) -> list[int]:
    """Return height, width, ... of the layer's output."""
    if isinstance(layer.padding, str):
        same = layer.padding == "same"
        total = [d * (k - 1) if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    else:
        total = [2 * int(p) for p in layer.padding]
    sizes = []
    for i, length in enumerate(space):
        reach = layer.dilation[i] * (layer.kernel_size[i] - 1)
        if layer.transposed:
            sizes.append((length - 1) * layer.stride[i] - total[i] + reach + layer.output_padding[i] + 1)
        else:
            sizes.append((length + total[i] - reach - 1) // layer.stride[i] + 1)
    return sizes


def linear_modes(layer: nn.Linear) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the modes that make up the outputs, and those that make up the inputs."""
    modes: tuple[int, ...] = layer.modes  # type: ignore[assignment]
    count = next(n for n in range(1, len(modes)) if math.prod(modes[:n]) == layer.out_features)
    return modes[:count], modes[count:]
