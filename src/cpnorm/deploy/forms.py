"""What a canonical layer can be run as: short chains of plain layers that compute the same, and what each one costs.

A term of W takes the input channels to one number, runs along the axes of the kernel, and goes out to the output
channels. A chain cuts that into steps: the first reads the input channels, the last writes the output channels, and
every axis of the kernel belongs to one of the steps. The cut is the whole form.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from cpnorm.cp.tensor import khatri_rao, split_scale, unit_columns
from cpnorm.nn.layers import CPLayer
from cpnorm.nn.planner import linear_modes

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# A forward pass in matrix-product FLOPs: what moving a byte and starting a kernel cost. Fitted on a CPU to 105 layers,
# ranks and batch sizes: the form modelled as cheapest takes 4 % longer than the fastest, 58 % at worst.
FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 120.0}
FLOPS_PER_CALL = {"cpu": 5e6, "cuda": 5e8}

Steps = tuple[tuple[int, ...], ...]  # the axes of the kernel that each step takes
LINEAR = "linear-"  # forms whose first step is a linear layer
ALIGNED = "aligned-"  # forms made for tensor cores
ALIGNMENT = 8  # numbers that tensor cores take at once: others' products fall to kernels half as fast


# --- which forms there are ----------------------------------------------------------------------------------------


def forms_of(layer: CPLayer) -> list[str]:
    """Names of the chains a layer can become, besides "dense".

    "low-rank": two linear maps, or two 1x1 convolutions; "depthwise": 1x1 -> kxk for each term -> 1x1;
    "separable": 1x1 -> kx1 -> 1xk -> 1x1; "split": kx1 -> 1xk; "pointwise-first": 1x1 -> kxk;
    "pointwise-last": kxk -> 1x1; "unflatten": a linear layer with finer modes, as 1x1 -> depthwise -> linear.
    "linear-depthwise" and its like begin with a linear layer over the channels instead of a 1x1 convolution;
    "aligned-depthwise" and its like have a few zero terms more, so that their number is a multiple of 8, and end with a
    linear layer over the channels, which adds its bias on the way.
    """
    found = list(_conv_steps(cast(_ConvNd, layer))) if not isinstance(layer, nn.Linear) else ["low-rank"]
    if isinstance(layer, nn.Linear) and 2 <= len(linear_modes(layer)[1]) <= 4:
        found.append("unflatten")
    return [*found, *(f"{ALIGNED}{form}" for form in found if not form.startswith(LINEAR))]


def _conv_steps(conv: _ConvNd) -> dict[str, Steps]:
    axes = tuple(axis for axis in range(len(conv.kernel_size)) if _moves(conv, axis))
    found: dict[str, Steps] = {"low-rank": (axes, ())}
    if math.prod(conv.kernel_size) > 1:
        found = {"depthwise": ((), axes, ())}
        if len(axes) > 1:
            found["separable"] = ((), *((axis,) for axis in axes), ())
            found["split"] = (axes[:1], axes[1:])
        found |= {"pointwise-first": ((), axes), "pointwise-last": (axes, ())}
    linear = {f"{LINEAR}{form}": steps for form, steps in found.items() if not steps[0] and conv.groups == 1}
    return found | linear


def _moves(conv: _ConvNd, axis: int) -> bool:
    """Whether the layer does anything along this axis of the kernel."""
    padding = 0 if isinstance(conv.padding, str) else int(conv.padding[axis])
    return max(conv.kernel_size[axis], conv.stride[axis]) > 1 or max(padding, int(conv.output_padding[axis])) > 0


# --- building one -------------------------------------------------------------------------------------------------


@torch.no_grad()
def chain(layer: CPLayer, form: str, *, empty: bool = False) -> nn.Sequential:
    """The layer in this form: plain torch layers that together compute what it computes.

    Empty: without values (on the meta device), at no cost in time and memory, to look at shapes only.
    """
    if form not in forms_of(layer):
        raise ValueError(f"expected form to be one of {', '.join(forms_of(layer))}, got {form!r}")
    wide = torch.float64 if layer.lambdas.dtype == torch.float64 else torch.float32
    device = torch.device("meta") if empty else layer.lambdas.device
    scales = (layer.sigma * layer.lambdas).to(device, wide)
    factors = [unit_columns(factor.to(device, wide)) for factor in layer.factors]
    aligned, base = form.startswith(ALIGNED), form.removeprefix(ALIGNED)
    if aligned:
        scales, *factors = (F.pad(terms, (0, -len(scales) % ALIGNMENT)) for terms in (scales, *factors))
    if isinstance(layer, nn.Linear):
        plain = _linear_chain(layer, base, scales, factors)
    else:
        steps = _conv_steps(cast(_ConvNd, layer))[base]
        plain = _conv_chain(cast(_ConvNd, layer), steps, scales, factors)
        if form.startswith(LINEAR):
            plain[0] = _over_channels(cast(_ConvNd, plain[0]))
        if aligned and not steps[-1] and layer.groups == 1:
            plain[-1] = _over_channels(cast(_ConvNd, plain[-1]))
    plain.to(device, layer.lambdas.dtype).requires_grad_(layer.lambdas.requires_grad)
    return plain.train(layer.training)


def _linear_chain(layer: nn.Linear, form: str, scales: Tensor, factors: Sequence[Tensor]) -> nn.Sequential:
    outputs, inputs = linear_modes(layer)
    out, into = factors[: len(outputs)], factors[len(outputs) :]
    first, last = split_scale(scales)
    rank, space = len(scales), inputs[1:]
    closing = _plain(nn.Linear(rank, layer.out_features, device="meta"), khatri_rao(out) * last, layer.bias)
    if form == "low-rank":
        opening = _plain(nn.Linear(layer.in_features, rank, device="meta"), (khatri_rao(into) * first).mT)
        return nn.Sequential(OrderedDict(into=opening, out=closing))
    conv, ones = cast(type[nn.Conv2d], CONV[len(space) - 1]), (1,) * len(space)
    pointwise = conv(inputs[0], rank, 1, device="meta")
    depthwise = conv(rank, rank, cast(Any, space), groups=rank, device="meta")
    steps: dict[str, nn.Module] = {
        "unflatten": nn.Unflatten(-1, inputs),
        "into": _plain(pointwise, (into[0] * first).mT.reshape(rank, -1, *ones)),
        "depthwise": _plain(depthwise, khatri_rao(into[1:]).mT.reshape(rank, 1, *space)),
        "flatten": nn.Flatten(-1 - len(space)),
        "out": closing,
    }
    return nn.Sequential(OrderedDict(steps))


def _conv_chain(conv: _ConvNd, steps: Steps, scales: Tensor, factors: Sequence[Tensor]) -> nn.Sequential:
    into, out = factors[:2] if conv.transposed else (factors[1], factors[0])
    kernels, groups = factors[2:], conv.groups
    for axis, kernel in enumerate(kernels):
        if not any(axis in step for step in steps):
            scales = scales * kernel[0]
    first, last = split_scale(scales)
    # Groups share the input vectors of a convolution, and the output vectors of a transposed one.
    into = (into * first).reshape(-1, conv.in_channels // groups, len(scales)).expand(groups, -1, -1)  # (g, I / g, R)
    out = (out * last).repeat(groups if conv.transposed else 1, 1)  # (O, R)

    layers: dict[str, nn.Module] = {}
    for axes in steps:
        kernel = _kernel(kernels, axes)  # (R, k, ...), 1 along the axes of other steps
        if not layers:
            weight = torch.einsum("gir,r...->gri...", into, kernel).flatten(0, 1)  # (g R, I / g, k, ...)
            layers["into"] = _conv_step(conv, axes, weight, groups)
        elif len(layers) < len(steps) - 1:
            name = "depthwise" if len(steps) == 3 else f"axis{axes[0]}"
            weight = kernel.repeat(groups, *(1 for _ in kernels))[:, None]  # (g R, 1, k, ...)
            layers[name] = _conv_step(conv, axes, weight, len(weight))
        else:
            weight = torch.einsum("or,r...->or...", out, kernel)  # (O, R, k, ...)
            layers["out"] = _conv_step(conv, axes, weight, groups, conv.bias)
    return nn.Sequential(OrderedDict(layers))


def _kernel(kernels: Sequence[Tensor], axes: Iterable[int]) -> Tensor:  # [(k_i, R)] -> (R, k or 1, ...)
    rank = kernels[0].shape[1]
    product = kernels[0].new_ones(rank, *(1 for _ in kernels))
    for axis in axes:
        product = product * kernels[axis].mT.reshape(rank, *(-1 if axis == a else 1 for a in range(len(kernels))))
    return product


def _conv_step(
    conv: _ConvNd, axes: Sequence[int], weight: Tensor, groups: int, bias: Tensor | None = None
) -> nn.Module:
    """One plain convolution with this weight (out, in / groups, k, ...), moving as the layer does along these axes."""

    def along(values: Sequence[int], elsewhere: int) -> Any:
        return tuple(int(values[a]) if a in axes else elsewhere for a in range(len(conv.kernel_size)))

    settings: dict[str, Any] = {"groups": groups, "bias": False, "device": "meta"}
    channels = weight.shape[1] * groups, weight.shape[0]
    kinds: Any = CONV
    if axes:
        settings |= {"stride": along(conv.stride, 1), "dilation": along(conv.dilation, 1)}
        settings["padding"] = conv.padding if isinstance(conv.padding, str) else along(conv.padding, 0)
        settings["padding_mode"] = conv.padding_mode
        if conv.transposed:
            kinds = CONV_TRANSPOSE
            settings["output_padding"] = along(conv.output_padding, 0)
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)  # (in, out / groups, k, ...)
    kernel = tuple(weight.shape[2:])
    return _plain(kinds[len(kernel) - 1](*channels, kernel, **settings), weight, bias)


def _over_channels(conv: _ConvNd) -> GraphModule:
    """A 1x1 convolution as a linear layer, between two views: channels last, nothing is moved for them.

    A module of torch's own that carries its code, since torch has no layer that turns dimensions.
    """
    linear = _plain(nn.Linear(conv.in_channels, conv.out_channels, device="meta"), conv.weight.flatten(1), conv.bias)
    channels = 1 - conv.weight.ndim  # counted from behind: there may be no batch
    graph = Graph()
    x = graph.call_method("movedim", (graph.placeholder("x"), channels, -1))
    x = graph.call_method("movedim", (graph.call_module("linear", (x,)), -1, channels))
    graph.output(x)
    return GraphModule({"linear": linear}, graph, "OverChannels")


def _plain(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A layer built on the meta device (no memory, no random numbers drawn) gets its values."""
    layer.weight = nn.Parameter(weight.contiguous())
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer


# --- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormCost:
    """Parameters, FLOPs, and their sum with memory traffic and calls, all in matrix-product FLOPs, of one pass."""

    parameters: int
    flops: int
    total: float


def form_cost(layer: nn.Module, shapes: Iterable[Sequence[int]], device: str = "cpu") -> FormCost:
    """Modelled cost of a plain layer, or of a chain of them, called once on each of these input shapes."""
    flops, total = 0, 0.0
    steps = list(layer) if isinstance(layer, nn.Sequential) else [layer]
    for shape in shapes:
        for step in steps:
            after = _output_shape(step, shape)
            weight = next((p for name, p in step.named_parameters() if name.endswith("weight")), None)
            if weight is not None:
                work = 2 * weight.numel() * math.prod(shape if _transposed(step) else after) // weight.shape[0]
                moved = weight.element_size() * (weight.numel() + math.prod(shape) + math.prod(after))
                flops += work
                total += work + moved * FLOPS_PER_BYTE[device] + FLOPS_PER_CALL[device]
            shape = after
    return FormCost(sum(p.numel() for p in layer.parameters()), flops, total)


def _transposed(step: nn.Module) -> bool:
    return isinstance(step, _ConvNd) and step.transposed


def _output_shape(step: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
    parameters = {name: p.detach().to("meta") for name, p in step.named_parameters()}
    dtype = next((p.dtype for p in parameters.values()), torch.float32)
    x = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return tuple(torch.func.functional_call(step, parameters, (x,)).shape)
