"""Whole models into canonical form and back: canonical_norm, renormalize, fold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from cpnorm._checks import check_generator, check_int, check_model, check_type, is_number
from cpnorm.cp.decompose import exact_rank
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.layers import CANONICAL_TYPES, CPLayer, check_options, initial_form, tie_key

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

    The layers change in place (their class becomes CPLinear, CPConv2d, ...), so hooks and references stay, and the
    model is returned. Subclasses that compute in a way of their own, or have methods or attributes of their own, are
    left alone. All layers are converted, or none.

    Args:
        model: a layer or a model.
        rank: number of terms; a fraction of the exact rank; "exact"; or a mapping from layer names to these, where
            layers not named get "exact". A number given for a whole model is capped at each layer's exact rank;
            for one layer, or in a mapping, it may be higher.
        init: "exact" (slice SVD: instant, loses nothing), "power" (the paper's greedy power method), "als", or
            "kaiming_normal" / "kaiming_uniform" (random vectors, at the old weight's norm).
        lambdas: "decomposition" (what the init found), "ones" or "normal" (drawn from N(0, 1)), both with sigma = 1.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        modes: finer shapes for linear weights: {"classifier.1": (1024, 256, 4, 4)} for one that follows a flatten.
        generator: source of all randomness.
        progress: called with (layer name, layers done, layers in all).

    >>> model = canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 4)))
    >>> model[0].rank, isinstance(model[0], nn.Conv2d)
    (27, True)
    """
    check_options(init, lambdas)
    check_generator(generator)
    check_type(modes, (Mapping, type(None)), "a mapping from layer names to shapes as modes")
    layers = convertible_layers(model, skip)
    rank = spread_over_tied("rank", rank, layers, "convert") if isinstance(rank, Mapping) else rank
    modes = spread_over_tied("modes", modes or {}, layers, "convert")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer to convert")

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
            raise ValueError(f"{error} ({_title(name, layer)})") from error
    if progress:
        progress("", len(layers), len(layers))

    first: dict[int, CPLayer] = {}
    for layer in layers.values():
        key = id(layer.weight)
        canonical = become_canonical(layer, forms[key])
        twin = first.setdefault(key, canonical)
        canonical.share_terms(twin)
    return model


def canonical_layers(model: nn.Module) -> dict[str, CPLayer]:
    """The canonical layers of a model by name, in order; tied ones once."""
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
                raise ValueError(f"expected terms as they are, got pruned or parametrized in {_title(name)}")
            if tie_key(module) not in seen:
                seen.add(tie_key(module))
                found[name] = module
    return found


def including_tied(model: nn.Module, layers: Mapping[str, CPLayer]) -> dict[str, CPLayer]:
    """These canonical layers of a model, and all that share their terms."""
    own = {tie_key(layer) for layer in layers.values()}
    return {name: m for name, m in model.named_modules() if isinstance(m, CPLayer) and tie_key(m) in own}


@torch.inference_mode(False)
def fold(model: Module) -> Module:
    """Turn canonical layers back into plain dense ones, in place, with the same outputs; the model is returned."""
    check_not_sharded(model)
    canonical_layers(model)  # which is an error where something stands in the way
    layers = [module for module in model.modules() if isinstance(module, CPLayer)]
    for name, module in model.named_modules():
        if isinstance(module, CPLayer):
            if "bias" not in module._parameters:
                raise ValueError(f"expected a plain bias, got a pruned or parametrized one in {_title(name)}")
            if "forward" in module.__dict__:
                raise ValueError(f"expected the layer's own forward, got another in {_title(name)}: take it off first")
    tied: dict[int, nn.Parameter] = {}
    for module in layers:  # all that takes memory first: if there is not enough of it, the model stays as it was
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
        del module.modes, module.path, module.columns_are_unit, module.ahead
        plain = cast(nn.Module, module)
        plain.__class__ = module.plain
        plain.__dict__.pop("plain", None)
        bias = plain._parameters.pop("bias", None)
        plain.weight = tied[key]
        plain.register_parameter("bias", bias)  # after the weight again, as in a layer never converted
    return model


# --- what canonical_norm checks before it touches anything --------------------------------------------------------


def convertible_layers(model: nn.Module, skip: Skip = ()) -> dict[str, nn.Module]:
    """What ``canonical_norm`` would convert, by name; it is an error if something stands in the way."""
    left_alone = skipped(model, skip)
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name in left_alone:
            continue
        if isinstance(module, CPLayer):
            raise ValueError(f"expected plain layers, but {_title(name, module)} is canonical already")
        if any(is_unmodified(module, kind.plain) for kind in CANONICAL_TYPES):
            _check_weight(name, module)
            layers[name] = module
    _check_ties(model, layers)
    return layers


def skipped(model: nn.Module, skip: Skip) -> set[str]:
    """Names of the modules that ``skip`` means, and of all inside them; a pattern that names none is an error."""
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
            raise ValueError(f"skip names no module of {type(model).__name__}: {pattern!r}")
        found |= named
    around = tuple(f"{name}." if name else "" for name in found)
    return {name for name in modules if name in found or name.startswith(around)}


WAYS = ("forward", "__call__", "_conv_forward", "_output_padding")
HARMLESS = ("extra_repr", "reset_parameters", "_is_protocol")  # in a subclass, beside special names


def is_unmodified(module: nn.Module, plain: type[nn.Module]) -> bool:
    """Whether it computes what the plain layer computes, and has nothing that others may ask a subclass for."""
    if not isinstance(module, plain) or any(getattr(type(module), w, 0) is not getattr(plain, w, 0) for w in WAYS):
        return False
    above = type(module).__mro__[: type(module).__mro__.index(plain)]
    added = {name for kind in above if not kind.__module__.startswith("torch.") for name in vars(kind)}
    return all(name in HARMLESS or name.startswith(("__", "_abc_")) for name in added)


def check_not_sharded(model: nn.Module) -> None:
    """Of parameters that FSDP has sharded a process holds a part, from which no other form of the layer can be made."""
    check_model(model)
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("expected whole parameters, got sharded ones: gather them into a plain model first")


def _check_weight(name: str, layer: nn.Module) -> None:
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"expected a layer with known shapes, got lazy {_title(name)}: run the model once first")
    if parametrize.is_parametrized(layer) or not {"weight", "bias"} <= layer._parameters.keys():
        raise ValueError(f"expected a plain weight and bias, got one with a parametrization in {_title(name)}")
    weight = cast(Tensor, layer.weight)
    if not weight.is_floating_point():
        raise ValueError(f"expected a floating-point weight, got {weight.dtype} in {_title(name, layer)}")
    if weight.is_meta:
        raise ValueError(f"expected a weight with values, got one on the meta device in {_title(name, layer)}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"expected finite values, got NaN or infinity in {_title(name, layer)}")


def _check_ties(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """A weight shared with something that stays plain cannot be converted on one side only."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        weight = cast(Tensor, layer.weight)
        for other in holders[id(weight)]:
            twin = layers.get(other)
            if twin is None or twin.weight is not weight or type(twin) is not type(layer):
                raise ValueError(f"the weight of {_title(name, layer)} is also that of {other}: skip or untie them")


def spread_over_tied(
    option: str, named: Mapping[str, Value], layers: Mapping[str, nn.Module], purpose: str
) -> dict[str, Value]:
    """What is said of one of several tied layers, said of all; it is an error to say different things."""
    if unknown := [name for name in named if name not in layers]:
        raise ValueError(f"{option} names layers that are not there to {purpose}: {', '.join(map(str, unknown))}")
    said: dict[int, tuple[str, Value]] = {}
    for name, value in named.items():
        first, before = said.setdefault(tie_key(layers[name]), (name, value))
        if first != name and repr(_plain_value(before)) != repr(_plain_value(value)):  # 1 term is not 1.0 of them
            raise ValueError(f"{first} and {name} share a weight, but {option} says {before} and {value}")
    return {name: said[tie_key(layer)][1] for name, layer in layers.items() if tie_key(layer) in said}


def _plain_value(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def modes_of(name: str, layer: nn.Module, modes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape a layer's weight is decomposed in: its own, or the finer one asked for."""
    weight = cast(Tensor, layer.weight)
    asked = modes.get(name, weight.shape)
    check_type(asked, Sequence, f"a shape as modes of {_title(name, layer)}")
    shape = tuple(check_int("a mode", size, where=f" for {_title(name, layer)}") for size in asked)
    prefixes = [math.prod(shape[:n]) for n in range(1, len(shape))]
    if name in modes and not (isinstance(layer, nn.Linear) and weight.shape[0] in prefixes):
        raise ValueError(f"expected modes of a linear layer, outputs first, got {shape} for {_title(name, layer)}")
    if math.prod(shape) != weight.numel():
        raise ValueError(f"expected modes with product {weight.numel()}, got {shape} for {_title(name, layer)}")
    return shape


def _resolve_rank(
    rank: Rank | Mapping[str, Rank], name: str, layer: nn.Module, shape: tuple[int, ...], whole_model: bool
) -> int:
    exact = exact_rank(shape)
    asked = rank.get(name, "exact") if isinstance(rank, Mapping) else rank
    if isinstance(asked, str):
        if asked != "exact":
            raise ValueError(f"expected a number or 'exact' as rank, got {asked!r} for {_title(name, layer)}")
        return exact
    if isinstance(asked, float) or "float" in str(getattr(asked, "dtype", "")):  # Python's, numpy's or torch's
        if not (is_number(asked) and 0 < asked <= 1):
            raise ValueError(f"expected 0 < rank fraction <= 1, got {asked} for {_title(name, layer)}")
        return max(1, round(float(asked) * exact))
    terms = check_int("rank", asked, where=f" for {_title(name, layer)}")
    return min(terms, exact) if whole_model and not isinstance(rank, Mapping) else terms


def become_canonical(layer: nn.Module, cp: CPTensor) -> CPLayer:
    """Swap the class of the object, as torch's own parametrizations do, so that every reference to it stays good."""
    was = type(layer)
    layer.__class__ = next(kind for kind in CANONICAL_TYPES if isinstance(layer, kind.plain))
    canonical = cast(CPLayer, layer)
    if was is not canonical.plain:
        canonical.__dict__["plain"] = was  # for fold
    canonical.hold(cp)
    return canonical


def _title(name: str, layer: nn.Module | None = None) -> str:
    title = name or "the layer"
    if layer is None:
        return title
    return f"{title} with weight of shape {tuple(cast(Tensor, layer.weight).shape)}"
