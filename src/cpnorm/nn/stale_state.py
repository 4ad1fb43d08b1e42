"""Stop an optimizer whose state no longer fits parameters that lost or gained terms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary


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
