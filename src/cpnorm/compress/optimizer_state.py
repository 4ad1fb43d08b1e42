"""Cut the state of an optimizer to the terms that a truncation keeps, so that training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpnorm.compress.refit import Fitted
    from cpnorm.nn.canonical import CPLayer

State = dict[str, Any]


@torch.inference_mode(False)
def cut_states(
    optimizers: Sequence[torch.optim.Optimizer], layers: Mapping[str, CPLayer], forms: Mapping[str, Fitted]
) -> list[tuple[State, State]]:
    """Return each state of a lambda or factor with what it should become; nothing is changed yet."""
    if any(isinstance(optimizer, torch.optim.LBFGS) and optimizer.state for optimizer in optimizers) and forms:
        raise ValueError("cannot cut the state of LBFGS, which belongs to all parameters at once: make a new one")
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    cuts = []
    for name, form in forms.items():
        layer = layers[name]
        parameters = layer.canonical_parameters()
        if any(p.requires_grad for p in parameters) and not any(id(p) in held for p in parameters):
            raise ValueError(f"the optimizer holds no parameter of {name or 'the layer'}: it would never be trained")
        for optimizer in optimizers:
            for parameter in parameters[1:]:  # sigma has no terms
                state = optimizer.state.get(parameter, {})
                kept = form.kept
                cut = {} if kept is None else {k: _cut(k, v, parameter, kept, name) for k, v in state.items()}
                cuts.append((state, cut))
    return cuts


def _cut(key: str, value: Any, parameter: Tensor, kept: Tensor, name: str) -> Any:
    """Return a state without the dropped terms, which are the last dimension of lambdas, factors and their states."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    shape = tuple(value.shape)
    fits = len(shape) == parameter.ndim and all(n in (1, m) for n, m in zip(shape, parameter.shape, strict=True))
    if fits and shape[-1] == 1:
        return value
    if not fits:
        raise ValueError(f"cannot cut the optimizer's {key} of shape {shape} for {name} to fewer terms: make a new one")
    return value[..., kept.to(value.device)].clone()
