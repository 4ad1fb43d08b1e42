"""Save a model to one file and load it: ranks and forms come from the file, and no code is executed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import check_model, check_type
from cpnorm.cp.tensor import CPTensor
from cpnorm.deploy.forms import chain, dense_form, forms_of
from cpnorm.deploy.pointwise import dilate, is_dilated, is_pointwise
from cpnorm.deploy.rewrite import is_channels_last, output_layer, tagged, with_layout
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue, FusedInput
from cpnorm.io.fileformat import Content, StoredForm, StoredLayer, checksum, join, opened, read_content, write
from cpnorm.io.matching import (
    canonical_class,
    check_shapes,
    check_values,
    misfit,
    same_weight,
    wanted_tensors,
    with_ties_of,
)
from cpnorm.nn.canonical import PATHS, CPLayer, tie_key
from cpnorm.nn.convert import become_canonical, canonical_layers, check_not_sharded, fold
from cpnorm.nn.planner import weight_shape

Module = TypeVar("Module", bound=nn.Module)
PathLike = str | os.PathLike[str]


def save(model: nn.Module, path: PathLike, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write the model's parameters and buffers to one safetensors file, completely or not at all.

    Canonical and factorised models load into the plain architecture again. Compiled and data-parallel modules are
    stored as the modules inside them. A model with fused blocks cannot be saved: save the model it was made from.

    Args:
        model: any model.
        path: the path of the file.
        metadata: a mapping that can be written as JSON, for ``read_metadata``.

    >>> import tempfile
    >>> from cpnorm import canonical_norm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(canonical_norm(nn.Linear(8, 4), rank=2), f"{folder}/small.safetensors", metadata={"epoch": 3})
    ...     load(f"{folder}/small.safetensors", nn.Linear(8, 4)).rank, read_metadata(f"{folder}/small.safetensors")
    (2, {'epoch': 3})
    """
    check_not_sharded(model)
    check_type(metadata, (Mapping, type(None)), "a mapping or None as metadata")
    with _unwrapped(model) as inner:
        for name, layer in canonical_layers(inner).items():
            if layer.path not in PATHS:
                raise ValueError(
                    f"expected path to be one of {', '.join(PATHS)}, got {layer.path!r} in {name or 'the layer'}"
                )
        modules = dict(inner.named_modules(remove_duplicate=False))
        for name, module in modules.items():
            if isinstance(module, FusedBlock | FusedInput | FusedEpilogue):
                raise ValueError(f"expected a model without fused blocks, got one in {name}: save the canonical model")
        layers = {
            name: StoredLayer(layer.modes, layer.rank, type(layer).__name__, layer.path)
            for name, layer in modules.items()
            if isinstance(layer, CPLayer)
        }
        forms = {name: _stored_form(module) for name, module in modules.items() if "cpnorm_form" in module.__dict__}
        last = any(is_channels_last(module) for module in modules.values())
        dilated = [name for name, module in modules.items() if is_dilated(module)]
        write(Path(path), inner.state_dict(), layers, forms, last, dilated, metadata)


def load(path: PathLike, model: Module) -> Module:
    """Read a file into the model, in place, and return the model, whose layers take the forms in the file.

    A canonical layer in the file makes that layer of the model canonical, with the file's modes and rank; a chain of
    ``factorize`` makes it that chain; a plain one makes it plain. Dtypes and devices stay the model's. A file that does
    not fit or is damaged raises a ValueError that names the first difference, and leaves the model as it was. A layer
    that changes its kind gets new parameters: build the optimizer afterwards.
    """
    check_model(model)
    with _unwrapped(model) as target:
        with opened(Path(path)) as reader:
            content = read_content(Path(path), reader)
            undo = _rewrite(content, target)
            try:
                content = with_ties_of(target, content)
                wanted = wanted_tensors(content, target)
                check_shapes(content, wanted)
                stored = {key: reader.get_tensor(key) for key in content.shapes if key not in content.tied}
                if content.checksum not in (None, checksum(stored)):
                    raise ValueError(f"{path} is damaged: the checksum of its tensors differs")
                tensors = {key: stored[content.source(key)] for key in wanted}
                check_values(content, wanted, tensors, target)
            except BaseException:
                for module, kind, attributes in undo:
                    module.__class__, module.__dict__ = kind, attributes
                raise
        _take_form(content, tensors, target)
        _take_values(content, tensors, target, [module for module, *_ in undo])
        for name, module in target.named_modules():
            if name in content.dilated and is_pointwise(module):
                dilate(module)
    return model


def read_metadata(path: PathLike) -> dict[str, Any]:
    """Return the metadata that was given to ``save``, without reading the tensors."""
    with opened(Path(path)) as reader:
        return read_content(Path(path), reader).metadata


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Replace compiled and data-parallel modules by the modules inside them, inside the block."""

    def inside(module: nn.Module) -> nn.Module:
        while True:
            if "_orig_mod" in module._modules:  # what torch.compile returns
                module = cast(nn.Module, module._orig_mod)
            elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
                module = module.module
            else:
                return module

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and inside(child) is not child
    ]
    root = inside(model)
    for parent, name, child in wrapped:
        parent._modules[name] = inside(child)
    try:
        yield root
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


# --- rewritten layers ---------------------------------------------------------------------------------------------


def _stored_form(module: nn.Module) -> StoredForm:
    noted = cast(dict[str, Any], module.cpnorm_form)
    last = output_layer(module)
    bias = last is not None and last.bias is not None
    return StoredForm(noted["form"], bias, noted.get("rank", 1), tuple(noted.get("modes", ())))


def _rewrite(content: Content, model: nn.Module) -> list[tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
    """Give layers the forms in the file, without values, and return what they were before."""
    made: dict[nn.Module, nn.Module] = {}
    for name, stored in content.forms.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise misfit(content, name, f"a layer of form {stored.form}", "missing") from None
        if module not in made and not ("cpnorm_form" in module.__dict__ and _stored_form(module) == stored):
            made[module] = _empty(content, name, module, stored)
    before = [(module, type(module), module.__dict__) for module in made]
    for module, empty in made.items():  # the object stays, so that references to it stay valid
        module.__class__, module.__dict__ = type(empty), empty.train(module.training).__dict__
    return before


def _empty(content: Content, name: str, module: nn.Module, stored: StoredForm) -> nn.Module:
    """Return a module of the stored form for this place, on the meta device."""
    if stored.form == "folded":
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise misfit(content, name, "a folded batch norm", f"a {type(module).__name__}")
        return tagged(nn.Identity(), form="folded")
    if canonical_class(module) is None:
        raise misfit(content, name, f"a layer of form {stored.form}", f"a {type(module).__name__}")
    plain = dense_form(module)
    dtype = cast(Tensor, next(plain.parameters())).dtype
    outputs = int(plain.out_features if isinstance(plain, nn.Linear) else cast(nn.Conv2d, plain).out_channels)
    bias = nn.Parameter(torch.empty(outputs, device="meta", dtype=dtype)) if stored.bias else None
    plain.register_parameter("bias", bias)
    if stored.form == "dense":
        return tagged(plain, form="dense")
    if len(stored.modes) < 2 or not same_weight(stored.modes, plain):
        raise misfit(content, name, stored.modes, weight_shape(plain))
    sizes = ((), (stored.rank,), *((size, stored.rank) for size in stored.modes))
    sigma, lambdas, *factors = (torch.empty(size, device="meta", dtype=dtype) for size in sizes)
    layer = become_canonical(plain, CPTensor(sigma, lambdas, tuple(factors)))
    if stored.form not in forms_of(layer):
        raise misfit(content, name, f"a layer of form {stored.form!r}", f"a {type(module).__name__}")
    return tagged(chain(layer, stored.form, empty=True), form=stored.form, rank=stored.rank, modes=list(stored.modes))


@torch.no_grad()
def _take_values(content: Content, tensors: Mapping[str, Tensor], model: nn.Module, empty: list[nn.Module]) -> None:
    """Copy the values into the model; allocate rewritten layers first, and tie what is tied in the file."""
    device = next((p.device for p in (*model.parameters(), *model.buffers()) if not p.is_meta), torch.device("cpu"))
    for module in empty:
        module.to_empty(device=device)
    with_layout(model, content.channels_last)
    for key, value in model.state_dict(keep_vars=True).items():
        if key in tensors:
            value.copy_(tensors[key])
    owners: dict[str, nn.Parameter] = {}
    rewritten = {step for module in empty for step in module.modules()}
    for name, module in model.named_modules():
        for last, parameter in list(module._parameters.items()) if module in rewritten else ():
            if parameter is not None:
                module._parameters[last] = owners.setdefault(content.source(join(name, last)), parameter)


# --- taking the form of the file ----------------------------------------------------------------------------------


def _take_form(content: Content, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Make every layer canonical or plain as in the file, tied as in the model; this cannot fail."""
    leaders: dict[int, nn.Module] = {}
    held = list(model.parameters())  # tie keys are ids: no other parameter may get the id of one that is replaced
    for name, layer in list(model.named_modules()):
        kind, found = canonical_class(layer), content.layers.get(name)
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
        canonical.share_terms(cast(CPLayer, leader))
    del held
