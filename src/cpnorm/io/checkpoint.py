"""Save and load: one file for a model; ranks come from the file, and nothing in it is ever run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import check_model, check_type
from cpnorm.cp.tensor import CPTensor
from cpnorm.io.fileformat import Content, Shape, StoredLayer, join, opened, read_content, write
from cpnorm.nn.convert import become_canonical, canonical_layers, check_not_sharded, fold, is_unmodified
from cpnorm.nn.layers import CANONICAL_TYPES, PATHS, CPLayer, tie_key
from cpnorm.nn.planner import weight_shape

Module = TypeVar("Module", bound=nn.Module)
PathLike = str | os.PathLike[str]


def save(model: nn.Module, path: PathLike, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write the model's parameters and buffers to one file, all of it or nothing; metadata is any JSON of the user's.

    >>> import tempfile
    >>> from cpnorm import canonical_norm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(canonical_norm(nn.Linear(8, 4), rank=2), f"{folder}/small.safetensors", metadata={"epoch": 3})
    ...     load(f"{folder}/small.safetensors", nn.Linear(8, 4)).rank, read_metadata(f"{folder}/small.safetensors")
    (2, {'epoch': 3})
    """
    check_not_sharded(model)
    check_type(metadata, (Mapping, type(None)), "a mapping or None as metadata")
    model = _unwrapped(model)
    for name, layer in canonical_layers(model).items():
        if layer.path not in PATHS:
            raise ValueError(
                f"expected path to be one of {', '.join(PATHS)}, got {layer.path!r} in {name or 'the layer'}"
            )
    layers = {
        name: StoredLayer(layer.modes, layer.rank, type(layer).__name__, layer.path)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, CPLayer)
    }
    write(Path(path), model.state_dict(), layers, metadata)


def load(path: PathLike, model: Module) -> Module:
    """Read a file into the model, in place, and return it: its layers become what the file says.

    A canonical layer in the file makes that layer of the model canonical, with the file's modes and rank; a plain one
    makes it plain. Dtypes and devices stay the model's. A file that does not fit raises a ValueError that names the
    first difference, and leaves the model as it was. A layer that changes its kind gets new parameters: build the
    optimizer afterwards.
    """
    check_model(model)
    target = _unwrapped(model)
    with opened(Path(path)) as reader:
        content = _with_ties_of(target, read_content(Path(path), reader))
        wanted = _wanted(content, target)
        _check_shapes(content, wanted)
        stored = {key: reader.get_tensor(key) for key in content.shapes if key not in content.tied}
    tensors = {key: stored[content.source(key)] for key in wanted}
    _check_values(content, wanted, tensors, target)
    _take_form(content, tensors, target)
    with torch.no_grad():
        for key, value in target.state_dict(keep_vars=True).items():
            value.copy_(tensors[key])
    return model


def read_metadata(path: PathLike) -> dict[str, Any]:
    """What was given to ``save`` as metadata; the tensors are not read."""
    with opened(Path(path)) as reader:
        return read_content(Path(path), reader).metadata


def _unwrapped(model: nn.Module) -> nn.Module:
    return cast(nn.Module, getattr(model, "_orig_mod", model))  # inside what torch.compile returns


# --- does it fit? -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """A tensor the model wants, once its layers are what the file says; those with equal homes are tied in it."""

    shape: Shape
    home: tuple[int, str]


def _with_ties_of(model: nn.Module, content: Content) -> Content:
    """safetensors' own ``save_model`` writes one of the keys of a tied tensor: the model knows the others."""
    state = model.state_dict(keep_vars=True)
    there = {id(value): key for key, value in state.items() if key in content.shapes}
    left_out = {k: there[id(v)] for k, v in state.items() if k not in content.shapes and id(v) in there}
    shapes = {key: content.shapes[twin] for key, twin in left_out.items()}
    tied = {key: content.source(twin) for key, twin in left_out.items()}
    return replace(content, shapes=content.shapes | shapes, tied=content.tied | tied)


def _wanted(content: Content, model: nn.Module) -> dict[str, _Wanted]:
    changed: dict[str, dict[str, _Wanted]] = {}  # by a key of the model: what stands in its place
    anchors: dict[int, tuple[str, StoredLayer | None]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind, found = _kind(layer), content.layers.get(name)
        if kind is None or not (found or (isinstance(layer, CPLayer) and join(name, "weight") in content.shapes)):
            continue
        if found and found.kind not in (None, kind.__name__):
            raise _misfit(content, name or "the layer", found.kind, kind.__name__)
        stored = found.modes if found else content.shapes[join(name, "weight")]
        if not _same_weight(stored, layer):
            raise _misfit(content, join(name, "weight"), stored, weight_shape(layer))
        leader, form = anchors.setdefault(tie_key(layer), (name, found))
        if form != found:
            raise _untied(content, leader, name)
        shapes: dict[str, Shape] = found.shapes() if found else {"weight": weight_shape(layer)}
        new = {join(name, last): _Wanted(shape, (tie_key(layer), last)) for last, shape in shapes.items()}
        for last, parameter in layer.named_parameters():
            if parameter is not layer.bias:
                changed[join(name, last)] = new
    wanted: dict[str, _Wanted] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.is_meta:
            raise ValueError(f"expected a model of tensors with values, got another thing for {key}")
        if key not in changed and id(value) in anchors:
            raise _untied(content, anchors[id(value)][0], key)
        wanted |= changed.get(key, {key: _Wanted(tuple(value.shape), (id(value), ""))})
    return wanted


def _check_shapes(content: Content, wanted: Mapping[str, _Wanted]) -> None:
    for key, want in wanted.items():
        if content.shapes.get(key) != want.shape:
            raise _misfit(content, key, content.shapes.get(key, "missing"), want.shape)
    for key, shape in content.shapes.items():
        if key not in wanted:
            raise _misfit(content, key, shape, "missing")


def _check_values(
    content: Content, wanted: Mapping[str, _Wanted], tensors: Mapping[str, Tensor], model: nn.Module
) -> None:
    state, first = model.state_dict(), dict[tuple[int, str], str]()
    for key, want in wanted.items():
        tensor, floating = tensors[key], key not in state or state[key].is_floating_point()
        if tuple(tensor.shape) != want.shape or tensor.is_floating_point() != floating:
            here = state[key].dtype if key in state else "a floating-point number"
            raise _misfit(content, key, tensor.dtype, here)
        twin = first.setdefault(want.home, key)
        if content.source(twin) != content.source(key) and not torch.equal(tensors[twin], tensor):
            raise _untied(content, twin, key)


def _misfit(content: Content, key: str, in_file: object, in_model: object) -> ValueError:
    return ValueError(f"{content.path} does not fit: {key} is {in_file} in the file and {in_model} in the model")


def _untied(content: Content, one: str, other: str) -> ValueError:
    return ValueError(f"{content.path} does not fit: {one} and {other} are tied in the model, not in the file")


def _kind(layer: nn.Module) -> type[CPLayer] | None:
    """The canonical class of a layer, or the one it could have; None for what has no canonical form."""
    for kind in CANONICAL_TYPES:
        if type(layer) is kind or is_unmodified(layer, kind.plain):
            return kind if isinstance(layer, CPLayer) or "weight" in layer._parameters else None
    return None


def _same_weight(modes: Shape, layer: nn.Module) -> bool:
    shape = weight_shape(layer)
    if isinstance(layer, nn.Linear):
        return math.prod(modes) == math.prod(shape) and shape[0] in [math.prod(modes[:n]) for n in range(1, len(modes))]
    return modes == shape


# --- becoming what the file says ----------------------------------------------------------------------------------


def _take_form(content: Content, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Make every layer canonical or plain as in the file, tied where the model ties; all that could fail is checked."""
    leaders: dict[int, nn.Module] = {}
    held = list(model.parameters())  # tie keys are ids: none may be given to another parameter meanwhile
    for name, layer in list(model.named_modules()):
        kind, found = _kind(layer), content.layers.get(name)
        if kind is None or not (found or isinstance(layer, CPLayer)):
            continue
        leader = leaders.setdefault(tie_key(layer), layer)
        if found is None:
            layer = fold(layer)
            layer.weight = leader.weight
            continue
        sigma, lambdas, *factors = (tensors[join(name, last)] for last in found.shapes())
        cp = CPTensor(sigma, lambdas, tuple(factors))
        canonical = cast(CPLayer, layer)
        if isinstance(layer, CPLayer) and layer.modes == found.modes:
            canonical.replace_terms(cp)
        else:
            become_canonical(fold(layer), cp)
        canonical.path = found.path
        twin = cast(CPLayer, leader)
        canonical.share_terms(twin)
    del held
