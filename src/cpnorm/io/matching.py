"""Compare a file with the model it is loaded into: the tensors that are wanted, and the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cpnorm.io.fileformat import Content, Shape, StoredLayer, join
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convertible import is_unmodified
from cpnorm.nn.layers import CANONICAL_TYPES
from cpnorm.nn.planner import weight_shape


@dataclass(frozen=True)
class Wanted:
    """A tensor that the model will have with the file's forms; tensors with the same ``home`` are tied."""

    shape: Shape
    home: tuple[int, str]


def with_ties_of(model: nn.Module, content: Content) -> Content:
    """Add the other keys of tied tensors, of which safetensors' ``save_model`` writes only one."""
    state = model.state_dict(keep_vars=True)
    there = {id(value): key for key, value in state.items() if key in content.shapes}
    left_out = {k: there[id(v)] for k, v in state.items() if k not in content.shapes and id(v) in there}
    shapes = {key: content.shapes[other] for key, other in left_out.items()}
    tied = {key: content.source(other) for key, other in left_out.items()}
    return replace(content, shapes=content.shapes | shapes, tied=content.tied | tied)


def wanted_tensors(content: Content, model: nn.Module) -> dict[str, Wanted]:
    """Return the tensors that the model will have with the file's forms; raise if a layer cannot take its form."""
    changed: dict[str, dict[str, Wanted]] = {}  # by a key of the model: its replacements
    leaders: dict[int, tuple[str, StoredLayer | None]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind, found = canonical_class(layer), content.layers.get(name)
        if kind is None or not (found or (isinstance(layer, CPLayer) and join(name, "weight") in content.shapes)):
            continue
        if found and found.kind not in (None, kind.__name__):
            raise misfit(content, name or "the layer", found.kind, kind.__name__)
        stored = found.modes if found else content.shapes[join(name, "weight")]
        if not same_weight(stored, layer):
            raise misfit(content, join(name, "weight"), stored, weight_shape(layer))
        leader, form = leaders.setdefault(tie_key(layer), (name, found))
        if form != found:
            raise _untied(content, leader, name)
        shapes: dict[str, Shape] = found.shapes() if found else {"weight": weight_shape(layer)}
        new = {join(name, last): Wanted(shape, (tie_key(layer), last)) for last, shape in shapes.items()}
        for last, parameter in layer.named_parameters():
            if parameter is not layer.bias:
                changed[join(name, last)] = new
    wanted: dict[str, Wanted] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        parts = key.split(".")
        if parts[-1] == "num_batches_tracked" and key not in content.shapes:  # as torch, which wrote none before 0.4.1
            continue
        rewritten = any(".".join(parts[:n]) in content.forms for n in range(len(parts)))
        if not isinstance(value, Tensor) or (value.is_meta and not rewritten):
            raise ValueError(f"model: expected tensors with values only in its state, got something else for {key}")
        if key not in changed and id(value) in leaders:
            raise _untied(content, leaders[id(value)][0], key)
        wanted |= changed.get(key, {key: Wanted(tuple(value.shape), (id(value), ""))})
    return wanted


def check_shapes(content: Content, wanted: Mapping[str, Wanted]) -> None:
    """Raise unless the file has the wanted tensors, in their shapes, and no others."""
    for key, want in wanted.items():
        if content.shapes.get(key) != want.shape:
            raise misfit(content, key, content.shapes.get(key, "missing"), want.shape)
    for key, shape in content.shapes.items():
        if key not in wanted:
            raise misfit(content, key, shape, "missing")


def check_values(
    content: Content, wanted: Mapping[str, Wanted], tensors: Mapping[str, Tensor], model: nn.Module
) -> None:
    """Raise if a tensor of the file has another kind of dtype, or tensors that are tied in the model differ."""
    state, first = model.state_dict(), dict[tuple[int, str], str]()
    for key, want in wanted.items():
        tensor, floating = tensors[key], key not in state or state[key].is_floating_point()
        if tuple(tensor.shape) != want.shape or tensor.is_floating_point() != floating:
            here = state[key].dtype if key in state else "a floating-point number"
            raise misfit(content, key, tensor.dtype, here)
        tied = first.setdefault(want.home, key)
        if content.source(tied) != content.source(key) and not torch.equal(tensors[tied], tensor):
            raise _untied(content, tied, key)


def misfit(content: Content, key: str, in_file: object, in_model: object) -> ValueError:
    """Return the error for a file that does not fit the model."""
    return ValueError(f"{content.path} does not fit: {key} is {in_file} in the file and {in_model} in the model")


def _untied(content: Content, one: str, other: str) -> ValueError:
    return ValueError(f"{content.path} does not fit: {one} and {other} are tied in the model, not in the file")


def canonical_class(layer: nn.Module) -> type[CPLayer] | None:
    """Return the canonical class of a layer, or the one it could have; None for a module without a canonical form."""
    for kind in CANONICAL_TYPES:
        if type(layer) is kind or is_unmodified(layer, kind.plain):
            return kind if isinstance(layer, CPLayer) or "weight" in layer._parameters else None
    return None


def same_weight(modes: Shape, layer: nn.Module) -> bool:
    """Return True if these are modes of the layer's weight: its shape, or a finer one of a linear layer."""
    shape = weight_shape(layer)
    if isinstance(layer, nn.Linear):
        return math.prod(modes) == math.prod(shape) and shape[0] in [math.prod(modes[:n]) for n in range(1, len(modes))]
    return modes == shape
