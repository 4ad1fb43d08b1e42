"""An optimizer goes on after a truncation: its state loses the columns that the parameters lost, or it is stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from cpnorm.compress.refit import Fitted
    from cpnorm.nn.layers import CPLayer

State = dict[str, Any]


@torch.inference_mode(False)
def cut_states(
    optimizers: Sequence[torch.optim.Optimizer], layers: Mapping[str, CPLayer], forms: Mapping[str, Fitted]
) -> list[tuple[State, State]]:
    """Each state of a lambda or a factor that has one, with what it should become; nothing is changed yet."""
    if any(isinstance(optimizer, torch.optim.LBFGS) and optimizer.state for optimizer in optimizers) and forms:
        raise ValueError("cannot cut the state of LBFGS, which is of all parameters in one piece: make a new one")
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
    """Terms are the last dimension of lambdas, factors and all that is kept per element or per column of them."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    shape = tuple(value.shape)
    fits = len(shape) == parameter.ndim and all(n in (1, m) for n, m in zip(shape, parameter.shape, strict=True))
    if fits and shape[-1] == 1:
        return value
    if not fits:
        raise ValueError(f"cannot cut the optimizer's {key} of shape {shape} for {name} to fewer terms: make a new one")
    return value[..., kept.to(value.device)].clone()


# --- an optimizer that was not told -------------------------------------------------------------------------------


def watch_resized(parameters: Iterable[Tensor]) -> None:
    """From now on an optimizer with state of another shape for one of these raises instead of stepping.

    Most raise by themselves. Fused ones trust the shape, and would use the state of other terms or, where a parameter
    has grown, memory that is not theirs; a single term is broadcast.
    """
    _resized().update(dict.fromkeys(parameters))


@cache
def _resized() -> WeakTensorKeyDictionary:
    """The parameters that ever were, as long as they live; the first of them has all optimizers watched."""
    register_optimizer_step_pre_hook(_refuse_stale_state)
    return WeakTensorKeyDictionary()


def _refuse_stale_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, torch.optim.LBFGS):  # whose state is of no one parameter
        return
    torchs = type(optimizer).__module__.startswith("torch.optim")  # others' state may be of any shape
    by_row_and_column = isinstance(optimizer, torch.optim.Adafactor)
    groups = [group for group in optimizer.param_groups if torchs or group.get("fused")]
    for parameter in (parameter for group in groups for parameter in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape:
                continue  # first of all, what costs little: this is done before every step
            if parameter in _resized() and not (by_row_and_column and 1 in value.shape):
                found = f"{key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                raise RuntimeError(f"the optimizer has {found}: give optimizer= to truncate, or make a new one")
