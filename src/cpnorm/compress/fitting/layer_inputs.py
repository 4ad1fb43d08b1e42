"""Measure the inputs of a model's layers, and the gradients at their outputs, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm.compress.fitting.moments import (
    Added,
    Moments,
    Versioned,
    are_unchanged,
    choose_positions,
    first_argument,
    images_in,
    output_sensitivity,
    output_sizes,
    patch_size,
    patches_at,
    sampled_share,
    versioned,
)
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.planner import LAYERS
from cpnorm.nn.running import hooked, watch


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model's layers."""

    moments: dict[str, Moments]
    bytes: dict[str, int]  # of the largest input of each linear and convolutional layer, in the order of first calls


@dataclass(eq=False)
class _Reader:
    """Adds the inputs of layers to their moments while the model runs."""

    model: nn.Module
    layers: Mapping[str, CPLayer]
    batches: int
    moments: dict[str, Moments] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    latest: dict[nn.Module, list[Versioned]] = field(default_factory=dict)
    last: tuple[list[Versioned], Moments, Added] | None = None  # the last input of a linear layer

    def __post_init__(self) -> None:
        self.names = {tie_key(layer): name for name, layer in self.layers.items()}
        self.places = {module: name for name, module in self.model.named_modules()}

    @torch.no_grad()
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any = None) -> None:
        x = first_argument(args, kwargs)
        if are_unchanged(self.latest.get(layer, []), [x]):
            return  # the parts of stacked layers call the whole with the same input
        self.latest[layer] = versioned(x)
        where = self.places[layer]
        self.bytes[where] = max(self.bytes.get(where, 0), x.numel() * x.element_size())
        name = self.names.get(tie_key(layer))
        if name is not None and patch_size(layer) is not None and x.numel():
            self._add(layer, x, self.moments.setdefault(name, Moments()))

    def _add(self, layer: nn.Module, x: Tensor, moments: Moments) -> None:
        moments.calls += 1
        linear = isinstance(layer, nn.Linear)
        if linear and self.last is not None:
            before, other, added = self.last
            if moments.calls == other.calls and are_unchanged(before, [x]) and moments.add_again(other, added):
                return  # such as key and value after query
        share = sampled_share(layer, math.prod(output_sizes(layer, x)) * images_in(layer, x) * self.batches)
        added = moments.add(patches_at(layer, x, choose_positions(layer, x, share, moments.calls)))
        self.last = (versioned(x), moments, added) if linear else None

    def next_batch(self) -> None:
        """Forget the tensors of a batch."""
        self.latest.clear()
        self.last = None

    def found(self) -> Inputs:
        return Inputs(self.moments, self.bytes)


def input_moments(model: nn.Module, layers: Mapping[str, CPLayer], inputs: Sequence[Any]) -> Inputs:
    """Return the moments of the inputs of these layers over all data, in one pass."""
    reader = _Reader(model, layers, len(inputs))
    for each in inputs:
        watch(model, each, reader)
        reader.next_batch()
    return reader.found()


def inputs_and_sensitivity(
    model: nn.Module, layers: Mapping[str, CPLayer], inputs: Sequence[Any]
) -> tuple[Inputs, dict[str, Tensor] | None]:
    """Return what ``input_moments`` and ``output_sensitivity`` return, from one pass over the data."""
    reader = _Reader(model, layers, len(inputs))

    def batches() -> Iterator[Any]:
        for each in inputs:
            yield each
            reader.next_batch()

    rest = batches()
    with hooked([module for module in model.modules() if isinstance(module, LAYERS)], reader):
        metrics = output_sensitivity(model, layers, rest)
    if metrics is None:  # and perhaps not all inputs were read
        return input_moments(model, layers, inputs), None
    for each in rest:
        watch(model, each, reader)
    return reader.found(), metrics
