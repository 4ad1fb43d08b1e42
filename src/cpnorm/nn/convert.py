"""Convert models to canonical form and back: canonical_norm and fold."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from cpnorm._checks import check_generator, check_int, check_model, check_type, is_number
from cpnorm.cp.decompose import exact_rank
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convertible import (
    check_values,
    is_conv1d,
    is_unmodified,
    layer_title,
    own_reason,
    reasons_in_short,
    tie_reasons,
)
from cpnorm.nn.initial import check_options, initial_form
from cpnorm.nn.layers import CANONICAL_TYPES

Module = TypeVar("Module", bound=nn.Module)
Rank = int | float | str
Value = TypeVar("Value")
Skip = str | type | Iterable[str | type]


def canonical_norm(
    model: Module,
    rank: Rank | Mapping[str, Rank] = "exact",
    init: str = "exact",
    *,
    lambdas: str = "decomposition",
    skip: Skip = (),
    modes: Mapping[str, Sequence[int]] | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Module:
    """Put the weights of a layer, or of every linear and convolutional layer of a model, into canonical form.

    W = sigma * sum_r lambda_r * a_r/|a_r| o b_r/|b_r| o ...   (the paper's equation 5)

    The layers change in place: their class becomes CPLinear, CPConv2d, ..., so that hooks and references stay valid.
    The model is returned. Subclasses with another forward, or with methods or attributes of their own, are left alone.
    A layer whose weight is shared with an embedding, or that has a parametrization, stays dense with a warning. On an
    error no layer is converted.

    Args:
        model: a layer or a model.
        rank: the number of terms; a fraction of the exact rank; "exact"; or a mapping from layer names to these, in
            which layers that are not named get "exact". A number for a whole model is limited to each layer's exact
            rank; for a single layer, or in a mapping, it may be higher.
        init: "exact" (slice SVD: fast and lossless), "power" (the paper's greedy power method), "als", or
            "kaiming_normal" / "kaiming_uniform" (random vectors, with the norm of the old weight).
        lambdas: "decomposition" (those of the init), or "ones" or "normal" (drawn from N(0, 1)) with sigma = 1.
        skip: layers to leave dense: names, patterns such as "features.*", or types.
        modes: finer shapes for weights of linear layers, such as {"classifier.1": (1024, 256, 4, 4)} after a flatten.
        generator: the source of all random numbers.
        progress: called with (layer name, layers done, layers in total).

    >>> model = canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 4)))
    >>> model[0].rank, isinstance(model[0], nn.Conv2d)
    (27, True)
    """
    check_options(init, lambdas)
    check_generator(generator)
    check_type(modes, (Mapping, type(None)), "a mapping from layer names to shapes as modes")
    layers, reasons = examine_layers(model, skip)
    for option, named in (("rank", rank), ("modes", modes)):
        for name in named if isinstance(named, Mapping) else ():
            if name in reasons:
                raise ValueError(f"{option}: layer {name!r} stays dense: {reasons[name]}")
    rank = spread_over_tied("rank", rank, layers, "convert") if isinstance(rank, Mapping) else rank
    modes = spread_over_tied("modes", modes or {}, layers, "convert")
    if not layers:
        why = f": {reasons_in_short(reasons)}" if reasons else ""
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer to convert{why}")
    if reasons:
        which = reasons_in_short(reasons)
        warnings.warn(f"canonical_norm leaves layers dense; list them in skip= to hide this: {which}", stacklevel=2)

    forms: dict[int, CPTensor] = {}  # by the id of the weight: tied layers share one
    for done, (name, layer) in enumerate(layers.items()):
        if progress:
            progress(name, done, len(layers))
        weight = cast(Tensor, layer.weight)
        if id(weight) in forms:
            continue
        shape = modes_of(name, layer, modes)
        terms = _resolve_rank(rank, name, layer, shape, whole_model=layer is not model)
        try:
            forms[id(weight)] = initial_form(weight.detach().reshape(shape), terms, init, lambdas, generator)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{error} ({layer_title(name, layer)})") from error
    if progress:
        progress("", len(layers), len(layers))

    first: dict[int, CPLayer] = {}
    for layer in layers.values():
        key = id(layer.weight)
        canonical = become_canonical(layer, forms[key])
        canonical.share_terms(first.setdefault(key, canonical))
    return model


def canonical_layers(model: nn.Module) -> dict[str, CPLayer]:
    """Return the canonical layers of a model by name, in order; of tied layers only the first."""
    check_model(model)
    found: dict[str, CPLayer] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, CPLayer):
            factors = {str(mode) for mode in range(len(module.modes))}
            if (
                not {"sigma", "lambdas"} <= module._parameters.keys()
                or not factors <= module.factors._parameters.keys()
            ):
                what = f"layer {name!r}" if name else "the layer"
                raise ValueError(f"{what} has pruned or parametrized factors; remove the pruning first")
            if tie_key(module) not in seen:
                seen.add(tie_key(module))
                found[name] = module
    return found


def including_tied(model: nn.Module, layers: Mapping[str, CPLayer]) -> dict[str, CPLayer]:
    """Return these canonical layers of a model, and all others that share their terms."""
    own = {tie_key(layer) for layer in layers.values()}
    return {name: m for name, m in model.named_modules() if isinstance(m, CPLayer) and tie_key(m) in own}


@torch.inference_mode(False)
def fold(model: Module) -> Module:
    """Turn canonical layers back into plain dense ones that compute the same, in place, and return the model."""
    check_not_sharded(model, "fold")
    canonical_layers(model)  # raises for pruned or parametrized layers
    layers = [module for module in model.modules() if isinstance(module, CPLayer)]
    for name, module in model.named_modules():
        if isinstance(module, CPLayer):
            if "bias" not in module._parameters:
                raise ValueError(f"{layer_title(name)} has a pruned or parametrized bias; remove the pruning first")
            if "forward" in module.__dict__:
                raise ValueError(f"{layer_title(name)} has a patched forward, which fold would lose; remove it first")
    tied: dict[int, nn.Parameter] = {}
    for module in layers:  # allocates all memory first, so that the model does not change if there is too little
        if (key := tie_key(module)) not in tied:
            kind = module.lambdas.device.type
            with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
                dense = module.weight.detach().contiguous().clone()
            tied[key] = nn.Parameter(dense, requires_grad=module.lambdas.requires_grad)
    for module in layers:
        key = tie_key(module)
        for name in ("sigma", "lambdas"):
            del module._parameters[name]
        del module._modules["factors"]
        folds_to = module._form.folds_to
        del module._form
        plain = cast(nn.Module, module)
        plain.__class__ = folds_to
        bias = plain._parameters.pop("bias", None)
        plain.weight = tied[key]
        plain.register_parameter("bias", bias)  # after the weight, as in a layer that was never converted
    return model


# --- checks of canonical_norm, before it changes anything ---------------------------------------------------------


def convertible_layers(model: nn.Module, skip: Skip = ()) -> dict[str, nn.Module]:
    """Return the layers that ``canonical_norm`` would convert, by name."""
    return examine_layers(model, skip)[0]


def examine_layers(model: nn.Module, skip: Skip = ()) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers that ``canonical_norm`` would convert, and why it would leave others dense, both by name.

    Raise a ValueError for canonical or lazy layers, and for weights without finite values.
    """
    left_alone = skipped(model, skip)
    layers: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in left_alone:
            continue
        if isinstance(module, CPLayer):
            raise ValueError(f"expected plain layers, got {layer_title(name, module)}, which is canonical already")
        if any(is_unmodified(module, kind.plain) for kind in CANONICAL_TYPES):
            if isinstance(module, LazyModuleMixin):
                raise ValueError(
                    f"expected a layer with known shapes, got lazy {layer_title(name)}: run the model once"
                )
            if reason := own_reason(module):
                reasons[name] = reason
            else:
                layers[name] = module
        elif is_conv1d(module):
            reasons[name] = "a Conv1D of transformers: call cpnorm.integrations.huggingface.linears_for_conv1d first"
    reasons |= tie_reasons(model, layers)
    layers = {name: layer for name, layer in layers.items() if name not in reasons}
    for name, layer in layers.items():
        check_values(name, layer)
    return layers, reasons


def skipped(model: nn.Module, skip: Skip) -> set[str]:
    """Return the names of the modules that ``skip`` selects and of all inside them; raise if a pattern selects none."""
    check_model(model)
    check_type(skip, (str, type, Iterable), "names, patterns or types as skip")
    skips = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in skips:
        check_type(entry, (str, type), "names, patterns or types as skip")
    types = tuple(s for s in skips if isinstance(s, type))
    modules = dict(model.named_modules())
    found = {name for name, module in modules.items() if isinstance(module, types)}
    for pattern in (s for s in skips if isinstance(s, str)):
        named = {name for name in modules if fnmatchcase(name, pattern)}
        if not named:
            raise ValueError(f"skip: no module of {type(model).__name__} matches {pattern!r}")
        found |= named
    around = tuple(f"{name}." if name else "" for name in found)
    return {name for name in modules if name in found or name.startswith(around)}


def check_not_sharded(model: nn.Module, action: str = "this") -> None:
    """Raise if parameters are FSDP-sharded, because each process holds only a part of them."""
    check_model(model)
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ValueError(
                f"{action} needs whole parameters, but {name!r} is sharded by FSDP: gather the state dict into a model "
                "that is not sharded first"
            )


_ADJECTIVES = {"convert": "convertible", "truncate": "canonical", "factorize": "canonical"}


def spread_over_tied(
    option: str, named: Mapping[str, Value], layers: Mapping[str, nn.Module], purpose: str
) -> dict[str, Value]:
    """Apply a per-layer option to all tied layers; raise on conflicts and on names that are not in ``layers``."""
    for name in named:
        if name not in layers:
            close = get_close_matches(str(name), list(layers), n=1)
            near = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{option}: no {_ADJECTIVES.get(purpose, purpose)} layer named {name!r}{near}")
    given: dict[int, tuple[str, Value]] = {}
    for name, value in named.items():
        first, before = given.setdefault(tie_key(layers[name]), (name, value))
        if first != name and repr(_plain_value(before)) != repr(_plain_value(value)):  # 1 is one term, 1.0 all terms
            raise ValueError(f"{option}: {first} and {name} share a weight, but got {before} and {value} for them")
    return {name: given[tie_key(layer)][1] for name, layer in layers.items() if tie_key(layer) in given}


def _plain_value(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def modes_of(name: str, layer: nn.Module, modes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the shape in which a layer's weight is decomposed: its own, or the finer one of ``modes``."""
    weight = cast(Tensor, layer.weight)
    asked = modes.get(name, weight.shape)
    check_type(asked, Sequence, f"a shape as modes of {layer_title(name, layer)}")
    shape = tuple(check_int("a mode", size, where=f" for {layer_title(name, layer)}") for size in asked)
    prefixes = [math.prod(shape[:n]) for n in range(1, len(shape))]
    if name in modes and not (isinstance(layer, nn.Linear) and weight.shape[0] in prefixes):
        raise ValueError(f"expected modes of a linear layer, outputs first, got {shape} for {layer_title(name, layer)}")
    if math.prod(shape) != weight.numel():
        raise ValueError(f"expected modes with product {weight.numel()}, got {shape} for {layer_title(name, layer)}")
    return shape


def _resolve_rank(
    rank: Rank | Mapping[str, Rank], name: str, layer: nn.Module, shape: tuple[int, ...], whole_model: bool
) -> int:
    exact = exact_rank(shape)
    asked = rank.get(name, "exact") if isinstance(rank, Mapping) else rank
    if isinstance(asked, str):
        if asked != "exact":
            raise ValueError(f"expected a number or 'exact' as rank, got {asked!r} for {layer_title(name, layer)}")
        return exact
    if isinstance(asked, float) or "float" in str(getattr(asked, "dtype", "")):  # a float of Python, numpy or torch
        if not (is_number(asked) and 0 < asked <= 1):
            raise ValueError(f"expected 0 < rank fraction <= 1, got {asked} for {layer_title(name, layer)}")
        return max(1, round(float(asked) * exact))
    terms = check_int("rank", asked, where=f" for {layer_title(name, layer)}")
    return min(terms, exact) if whole_model and not isinstance(rank, Mapping) else terms


def become_canonical(layer: nn.Module, cp: CPTensor) -> CPLayer:
    """Change the class of the layer in place, as torch's parametrizations do, so that references to it stay valid."""
    was = type(layer)
    layer.__class__ = next(kind for kind in CANONICAL_TYPES if isinstance(layer, kind.plain))
    canonical = cast(CPLayer, layer)
    canonical.hold(cp, was)
    return canonical
