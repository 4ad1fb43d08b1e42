"""Cut the state of an optimizer to the terms that a truncation keeps, so that training can continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpnorm.compress.fitting.refit import Fitted
    from cpnorm.nn.canonical import CPLayer

State = dict[str, Any]


@torch.inference_mode(False)
def cut_states(
    optimizers: Sequence[torch.optim.Optimizer], layers: Mapping[str, CPLayer], forms: Mapping[str, Fitted]
) -> list[tuple[State, State]]:
    """Return pairs of the present state and the cut state of each lambda and factor; nothing is changed yet."""
    if any(isinstance(optimizer, torch.optim.LBFGS) and optimizer.state for optimizer in optimizers) and forms:
        raise ValueError("optimizer: the state of LBFGS cannot be cut, since it mixes all parameters: make a new one")
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    cuts = []
    for name, form in forms.items():
        layer = layers[name]
        parameters = layer.canonical_parameters()
        if any(p.requires_grad for p in parameters) and not any(id(p) in held for p in parameters):
            raise ValueError(
                f"optimizer: expected one with the parameters of {name or 'the layer'}, got one without them"
            )
        for optimizer in optimizers:
            for parameter in parameters[1:]:  # sigma has no terms
                state = optimizer.state.get(parameter, {})
                kept = form.kept
                cut = {} if kept is None else {k: _cut(k, v, parameter, kept, name) for k, v in state.items()}
                cuts.append((state, cut))
    return cuts


def _cut(key: str, value: Any, parameter: Tensor, kept: Tensor, name: str) -> Any:
    """Return a state tensor without the dropped terms, which are indexed by its last dimension."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    shape = tuple(value.shape)
    fits = len(shape) == parameter.ndim and all(n in (1, m) for n, m in zip(shape, parameter.shape, strict=True))
    if fits and shape[-1] == 1:
        return value
    if not fits:
        raise ValueError(f"optimizer: cannot cut its {key} of shape {shape} for {name} to fewer terms: make a new one")
    return value[..., kept.to(value.device)].clone()
