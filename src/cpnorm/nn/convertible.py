"""Decide whether a layer can take canonical form, and say why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cpnorm.nn.layers import RESERVED

WAYS = ("forward", "__call__", "_conv_forward", "_output_padding", "__setattr__", "__getattr__", "__getattribute__")
HARMLESS = ("extra_repr", "reset_parameters", "_is_protocol")  # names that a subclass may add or override


def is_unmodified(module: nn.Module, plain: type[nn.Module]) -> bool:
    """Return True if the module computes what the plain layer computes and its class adds no public name."""
    if not isinstance(module, plain) or any(getattr(type(module), w, 0) is not getattr(plain, w, 0) for w in WAYS):
        return False
    above = type(module).__mro__[: type(module).__mro__.index(plain)]
    added = {name for kind in above if not kind.__module__.startswith("torch.") for name in vars(kind)}
    return all(name in HARMLESS or name.startswith(("__", "_abc_")) for name in added)


def is_conv1d(layer: nn.Module) -> bool:
    """Return True for the linear layer of transformers' GPT-2, whose weight is transposed."""
    kind = type(layer)
    plain = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return plain and {"weight", "bias"} <= layer._parameters.keys()


def own_reason(layer: nn.Module) -> str:
    """Return why a layer by itself cannot be converted; an empty string if it can."""
    if parametrize.is_parametrized(layer) or not {"weight", "bias"} <= layer._parameters.keys():
        return "its weight or bias has a parametrization or pruning: remove that first"
    weight = layer._parameters["weight"]
    if weight is None:
        return "it has no weight"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not a real floating-point type: convert a model before quantising it"
    taken = RESERVED & (vars(layer).keys() | layer._parameters.keys() | layer._buffers.keys() | layer._modules.keys())
    if taken:
        names = ", ".join(repr(name) for name in sorted(taken))
        return f"its attribute {names} has a name that canonical layers use"
    return ""


def tie_reasons(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return reasons for the layers whose weight is shared with a module that stays dense, by name."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    reasons = {}
    for name, layer in layers.items():
        weight = cast(Tensor, layer.weight)
        for other in holders[id(weight)]:
            tied = layers.get(other)
            if tied is None or tied.weight is not weight or type(tied) is not type(layer):
                reasons[name] = f"its weight is also that of {other}, which stays dense"
                break
    return reasons


def check_values(name: str, layer: nn.Module) -> None:
    """Raise if the weight has no values, or values that are not finite."""
    weight = cast(Tensor, layer.weight).detach()
    if weight.is_meta:
        raise ValueError(f"expected a weight with values, got one on the meta device in {layer_title(name, layer)}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"expected finite values, got NaN or infinity in {layer_title(name, layer)}")


def reasons_in_short(reasons: Mapping[str, str], most: int = 4) -> str:
    """Return the names of layers by reason, in a text of bounded length."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the layer")
    parts = [
        f"{', '.join(named[:most])}{f' and {len(named) - most} more' if len(named) > most else ''} ({reason})"
        for reason, named in list(names.items())[:most]
    ]
    left = sum(len(named) for named in list(names.values())[most:])
    return "; ".join(parts) + (f"; and {left} more layers" if left else "")


def layer_title(name: str, layer: nn.Module | None = None) -> str:
    """Return how an error message names a layer: by its name, and by the shape of its weight if it is given."""
    title = name or "the layer"
    return title if layer is None else f"{title} with weight of shape {tuple(cast(Tensor, layer.weight).shape)}"
