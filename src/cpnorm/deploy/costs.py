"""Model what the forms of a canonical layer cost: parameters, FLOPs, and both with memory traffic and calls.

The sizes follow from the layer's settings by arithmetic, so that nothing is built or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

from cpnorm.deploy.forms import ALIGNED, ALIGNMENT, conv_steps
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.planner import linear_modes, output_space

# Costs of moving a byte and of launching a kernel, in matrix-product FLOPs. Fitted on a CPU to 105 layers, ranks and
# batch sizes: the form modelled as cheapest takes 4 % longer than the fastest on average, 58 % at worst.
FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 120.0}
FLOPS_PER_CALL = {"cpu": 5e6, "cuda": 5e8}


@dataclass(frozen=True)
class FormCost:
    """Parameters, FLOPs, and their sum with memory traffic and calls, all in matrix-product FLOPs, of one pass."""

    parameters: int  # of the weights: biases are not counted, as in ``cpnorm.summary``
    flops: int
    total: float


class _Step(NamedTuple):
    """One plain layer of a chain."""

    weights: int
    inputs: int  # channels
    outputs: int
    axes: tuple[int, ...] = ()  # of the kernel, along which it moves


def form_cost(layer: CPLayer, form: str, shapes: Iterable[Sequence[int]], device: str = "cpu") -> FormCost:
    """Return the cost of a layer as "dense" or one of its chains, called once on each of these input shapes."""
    steps = _linear_steps(layer, form) if isinstance(layer, nn.Linear) else _conv_steps_of(cast(_ConvNd, layer), form)
    flops, total = 0, 0.0
    for shape in shapes:
        space = _space(layer, form, shape)
        rows = math.prod(shape) // max(1, steps[0].inputs * math.prod(space))
        for step in steps:
            before, space = rows * math.prod(space), _moved(layer, form, step, space)
            after = rows * math.prod(space)
            work = 2 * step.weights * (before if step.axes and getattr(layer, "transposed", False) else after)
            moved = layer.lambdas.element_size() * (step.weights + before * step.inputs + after * step.outputs)
            flops += work
            total += work + moved * FLOPS_PER_BYTE[device] + FLOPS_PER_CALL[device]
    return FormCost(sum(step.weights for step in steps), flops, total)


def _terms(layer: CPLayer, form: str) -> int:
    return layer.rank + (-layer.rank % ALIGNMENT if form.startswith(ALIGNED) else 0)


def _linear_steps(layer: CPLayer, form: str) -> list[_Step]:
    linear, terms = cast(nn.Linear, layer), _terms(layer, form)
    inputs, outputs = linear.in_features, linear.out_features
    if form == "dense":
        return [_Step(inputs * outputs, inputs, outputs)]
    last = _Step(terms * outputs, terms, outputs)
    if form.removeprefix(ALIGNED) == "low-rank":
        return [_Step(inputs * terms, inputs, terms), last]
    channels, *space = linear_modes(linear)[1]
    over_space = _Step(terms * math.prod(space), terms, terms, tuple(range(len(space))))
    return [_Step(channels * terms, channels, terms), over_space, last]


def _conv_steps_of(conv: _ConvNd, form: str) -> list[_Step]:
    terms, groups = conv.groups * _terms(cast(CPLayer, conv), form), conv.groups
    every = tuple(range(len(conv.kernel_size)))

    def taps(axes: Iterable[int]) -> int:
        return math.prod(conv.kernel_size[axis] for axis in axes)

    if form == "dense":
        weights = conv.out_channels * conv.in_channels // groups * taps(every)
        return [_Step(weights, conv.in_channels, conv.out_channels, every)]
    first, *middle, last = conv_steps(conv)[form.removeprefix(ALIGNED)]
    return [
        _Step(terms * conv.in_channels // groups * taps(first), conv.in_channels, terms, first),
        *(_Step(terms * taps(axes), terms, terms, axes) for axes in middle),
        _Step(conv.out_channels * terms // groups * taps(last), terms, conv.out_channels, last),
    ]


def _space(layer: CPLayer, form: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the maps that the first step gets; none for a linear layer that takes rows."""
    if not isinstance(layer, nn.Linear):
        return tuple(shape[len(shape) - len(cast(_ConvNd, layer).kernel_size) :])
    return linear_modes(layer)[1][1:] if form.endswith("unflatten") else ()


def _moved(layer: CPLayer, form: str, step: _Step, space: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):  # a kernel as large as the map
        return tuple(1 for _ in space) if step.axes else space
    moved = output_space(cast(_ConvNd, layer), space)
    return tuple(moved[axis] if axis in step.axes else n for axis, n in enumerate(space))
