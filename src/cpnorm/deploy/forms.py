"""Build the forms of a canonical layer, which are short chains of plain layers.

A term of W maps the input channels to one number, filters it along the axes of the kernel, and maps it to the output
channels. A chain splits that into steps: the first reads the input channels, the last writes the output channels, and
every axis of the kernel belongs to one of the steps. The split is what defines a form.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import add, floordiv, getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from cpnorm.cp.tensor import khatri_rao, split_scale, unit_columns
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.planner import linear_modes

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Steps = tuple[tuple[int, ...], ...]  # the axes of the kernel that each step takes
LINEAR = "linear-"  # forms whose first step is a linear layer
ALIGNED = "aligned-"  # forms made for tensor cores
ALIGNMENT = 8  # tensor cores take this many numbers at once; other widths run on kernels half as fast


# --- names --------------------------------------------------------------------------------------------------------


def forms_of(layer: CPLayer) -> list[str]:
    """Return the names of the chains that a layer can become, besides "dense".

    - "low-rank": two linear maps, or two 1x1 convolutions;
    - "depthwise": 1x1 -> kxk for each term -> 1x1;
    - "separable": 1x1 -> kx1 -> 1xk -> 1x1, and "split": kx1 -> 1xk; not for transposed convolutions;
    - "pointwise-first": 1x1 -> kxk, and "pointwise-last": kxk -> 1x1;
    - "unflatten": a linear layer with finer modes, as 1x1 -> depthwise -> linear;
    - "linear-depthwise" and others with this prefix begin with a linear layer over the channels, not a 1x1 convolution;
    - "aligned-depthwise" and others with this prefix have zero terms added up to a multiple of 8, and end with a linear
      layer over the channels, which adds the bias in the same kernel.
    """
    found = list(conv_steps(cast(_ConvNd, layer))) if not isinstance(layer, nn.Linear) else ["low-rank"]
    if isinstance(layer, nn.Linear) and 2 <= len(linear_modes(layer)[1]) <= 4:
        found.append("unflatten")
    return [*found, *(f"{ALIGNED}{form}" for form in found if not form.startswith(LINEAR))]


def conv_steps(conv: _ConvNd) -> dict[str, Steps]:
    """Return the axes of the kernel that each step of each chain of a convolution takes."""
    axes = tuple(axis for axis in range(len(conv.kernel_size)) if _moves(conv, axis))
    found: dict[str, Steps] = {"low-rank": (axes, ())}
    if math.prod(conv.kernel_size) > 1:
        found = {"depthwise": ((), axes, ())}
        # The steps of a transposed convolution share one output_size, so that one of them takes all the axes.
        if len(axes) > 1 and not conv.transposed:
            found["separable"] = ((), *((axis,) for axis in axes), ())
            found["split"] = (axes[:1], axes[1:])
        found |= {"pointwise-first": ((), axes), "pointwise-last": (axes, ())}
    linear = {f"{LINEAR}{form}": steps for form, steps in found.items() if not steps[0] and conv.groups == 1}
    return found | linear


def _moves(conv: _ConvNd, axis: int) -> bool:
    """Return True if the layer does anything along this axis of the kernel."""
    padding = 0 if isinstance(conv.padding, str) else int(conv.padding[axis])
    return max(conv.kernel_size[axis], conv.stride[axis]) > 1 or max(padding, int(conv.output_padding[axis])) > 0


# --- chains -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def chain(layer: CPLayer, form: str, *, empty: bool = False) -> nn.Module:
    """Return plain torch layers that together compute what the layer computes, and take the same calls.

    Args:
        layer: a canonical layer.
        form: one of ``forms_of(layer)``.
        empty: build it on the meta device, at no cost in time and memory, for its shapes only.
    """
    if form not in forms_of(layer):
        raise ValueError(f"expected form to be one of {', '.join(forms_of(layer))}, got {form!r}")
    wide = torch.float64 if layer.lambdas.dtype == torch.float64 else torch.float32
    device = torch.device("meta") if empty else layer.lambdas.device
    scales = (layer.sigma * layer.lambdas).to(device, wide)
    factors = [factor.to(device, wide) for factor in layer.factors]
    factors = factors if empty else [unit_columns(factor) for factor in factors]
    aligned, base = form.startswith(ALIGNED), form.removeprefix(ALIGNED)
    if aligned:
        scales, *factors = (F.pad(terms, (0, -len(scales) % ALIGNMENT)) for terms in (scales, *factors))
    if isinstance(layer, nn.Linear):
        plain = _linear_chain(layer, base, scales, factors)
    else:
        steps = conv_steps(cast(_ConvNd, layer))[base]
        layers = _conv_chain(cast(_ConvNd, layer), steps, scales, factors)
        if form.startswith(LINEAR):
            layers["into"] = _over_channels(cast(_ConvNd, layers["into"]))
        if aligned and not steps[-1] and layer.groups == 1:
            layers["out"] = _over_channels(cast(_ConvNd, layers["out"]))
        plain = _transposed_chain(layers) if layer.transposed else nn.Sequential(layers)
    plain.to(device, layer.lambdas.dtype).requires_grad_(layer.lambdas.requires_grad)
    return plain.train(layer.training)


def dense_form(layer: nn.Module) -> nn.Module:
    """Return a plain layer with the settings of this one, canonical or not, without values on the meta device."""
    dtype = next(layer.parameters()).dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=dtype)
    conv = cast(_ConvNd, layer)
    shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    weight = torch.empty(shape, device="meta", dtype=dtype)
    return _conv_step(conv, range(len(conv.kernel_size)), weight, conv.groups, conv.bias).to("meta")


def _linear_chain(layer: nn.Linear, form: str, scales: Tensor, factors: Sequence[Tensor]) -> nn.Module:
    outputs, inputs = linear_modes(layer)
    out, into = factors[: len(outputs)], factors[len(outputs) :]
    first, last = (scales, scales) if scales.is_meta else split_scale(scales)
    rank, space = len(scales), inputs[1:]
    last_step = _plain(nn.Linear(rank, layer.out_features, device="meta"), khatri_rao(out) * last, layer.bias)
    if form == "low-rank":
        first_step = _plain(nn.Linear(layer.in_features, rank, device="meta"), (khatri_rao(into) * first).mT)
        return nn.Sequential(OrderedDict(into=first_step, out=last_step))
    conv, ones = cast(type[nn.Conv2d], CONV[len(space) - 1]), (1,) * len(space)
    pointwise = conv(inputs[0], rank, 1, device="meta")
    depthwise = conv(rank, rank, cast(Any, space), groups=rank, device="meta")
    steps = {
        "into": _plain(pointwise, (into[0] * first).mT.reshape(rank, -1, *ones)),
        "depthwise": _plain(depthwise, khatri_rao(into[1:]).mT.reshape(rank, 1, *space)),
        "out": last_step,
    }
    # A convolution takes one leading dimension, a linear layer any number of them.
    graph = Graph()
    x = graph.placeholder("input")
    leading = graph.call_function(getitem, (graph.call_function(getattr, (x, "shape")), slice(None, -1)))
    rows = graph.call_function(floordiv, (graph.call_method("numel", (x,)), layer.in_features))
    y = graph.call_method("reshape", (x, (rows, *inputs)))
    y = graph.call_module("depthwise", (graph.call_module("into", (y,)),))
    y = graph.call_module("out", (graph.call_method("flatten", (y, 1)),))
    graph.output(graph.call_method("reshape", (y, graph.call_function(add, (leading, (layer.out_features,))))))
    return GraphModule(steps, graph, "UnflattenedChain")


def _transposed_chain(steps: dict[str, nn.Module]) -> GraphModule:
    """Return a chain that takes ``output_size``, as transposed convolutions do."""
    graph = Graph()
    x, size = graph.placeholder("input"), graph.placeholder("output_size", default_value=None)
    for name, step in steps.items():
        x = graph.call_module(name, (x, size) if isinstance(step, CONV_TRANSPOSE) else (x,))
    graph.output(x)
    return GraphModule(dict(steps), graph, "TransposedChain")


def _conv_chain(conv: _ConvNd, steps: Steps, scales: Tensor, factors: Sequence[Tensor]) -> OrderedDict[str, nn.Module]:
    into, out = factors[:2] if conv.transposed else (factors[1], factors[0])
    kernels, groups = factors[2:], conv.groups
    ones = (1,) * len(kernels)
    for axis, kernel in enumerate(kernels):
        if not any(axis in step for step in steps):
            scales = scales * kernel[0]
    first, last = (scales, scales) if scales.is_meta else split_scale(scales)
    # Groups share the input vectors of a convolution, and the output vectors of a transposed one.
    into = (into * first).reshape(-1, conv.in_channels // groups, len(scales)).expand(groups, -1, -1)  # (g, I / g, R)
    out = (out * last).repeat(groups if conv.transposed else 1, 1)  # (O, R)

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for axes in steps:
        kernel = _kernel(kernels, axes)  # (R, k, ...), 1 along the axes of other steps
        if not layers:
            weight = (into.mT.reshape(*into.mT.shape, *ones) * kernel[:, None]).flatten(0, 1)  # (g R, I / g, k, ...)
            layers["into"] = _conv_step(conv, axes, weight, groups)
        elif len(layers) < len(steps) - 1:
            name = "depthwise" if len(steps) == 3 else f"axis{axes[0]}"
            weight = kernel.repeat(groups, *(1 for _ in kernels))[:, None]  # (g R, 1, k, ...)
            layers[name] = _conv_step(conv, axes, weight, len(weight))
        else:
            weight = out.reshape(*out.shape, *ones) * kernel  # (O, R, k, ...)
            layers["out"] = _conv_step(conv, axes, weight, groups, conv.bias)
    return layers


def _kernel(kernels: Sequence[Tensor], axes: Iterable[int]) -> Tensor:  # [(k_i, R)] -> (R, k or 1, ...)
    rank = kernels[0].shape[1]
    product = kernels[0].new_ones(rank, *(1 for _ in kernels))
    for axis in axes:
        product = product * kernels[axis].mT.reshape(rank, *(-1 if axis == a else 1 for a in range(len(kernels))))
    return product


def _conv_step(
    conv: _ConvNd, axes: Sequence[int], weight: Tensor, groups: int, bias: Tensor | None = None
) -> nn.Module:
    """Return a convolution with this weight (out, in / groups, k, ...) that moves as the layer along these axes."""

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
    """Return a 1x1 convolution as a linear layer between two views, which copy nothing if channels are last.

    torch has no layer that permutes dimensions: a GraphModule carries its own code and needs no cpnorm.
    """
    linear = _plain(nn.Linear(conv.in_channels, conv.out_channels, device="meta"), conv.weight.flatten(1), conv.bias)
    channels = 1 - conv.weight.ndim  # counted from the end, since there may be no batch dimension
    graph = Graph()
    x = graph.call_method("movedim", (graph.placeholder("x"), channels, -1))
    x = graph.call_method("movedim", (graph.call_module("linear", (x,)), -1, channels))
    graph.output(x)
    return GraphModule({"linear": linear}, graph, "OverChannels")


def _plain(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """Give values to a layer built on the meta device, where it takes no memory and draws no random numbers."""
    layer.weight = nn.Parameter(weight.contiguous())
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer
