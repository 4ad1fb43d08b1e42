"""An optimizer goes on after a truncation: its state loses the columns that the parameters lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cpnorm.layers import CPLayer
from cpnorm.refit import Fitted

State = dict[str, Any]


def cut_states(
    optimizer: torch.optim.Optimizer, layers: Mapping[str, CPLayer], forms: Mapping[str, Fitted]
) -> list[tuple[State, State]]:
    """Each state of a lambda or a factor that has one, with what it should become; nothing is changed yet."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    cuts = []
    for name, form in forms.items():
        layer = layers[name]
        parameters = layer.canonical_parameters()
        if any(p.requires_grad for p in parameters) and not any(id(p) in held for p in parameters):
            raise ValueError(f"the optimizer holds no parameter of {name or 'the layer'}: it would never be trained")
        for parameter in parameters[1:]:  # sigma has no terms
            state = optimizer.state.get(parameter, {})
            cut = {} if form.kept is None else {k: _cut(k, v, layer.rank, form.kept, name) for k, v in state.items()}
            cuts.append((state, cut))
    return cuts


def _cut(key: str, value: Any, rank: int, kept: Tensor, name: str) -> Any:
    """Terms are the last dimension of lambdas, factors and all that is kept per element or per column of them."""
    if not isinstance(value, Tensor) or value.numel() == 1 or value.shape[-1] == 1:
        return value
    if value.shape[-1] != rank:
        shape = tuple(value.shape)
        raise ValueError(f"cannot cut the optimizer's {key} of shape {shape} for {name} to fewer terms: make a new one")
    return value[..., kept.to(value.device)].clone()
