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
    """Make every optimizer that has state of another shape for one of these parameters raise instead of stepping.

    Most optimizers raise anyway. Fused ones do not check the shape: they would use the state of other terms or, if a
    parameter has grown, read and write beyond the state. The state of a single term would be broadcast.

    The first call registers one hook for all optimizers of the process, since an optimizer cannot be found from its
    parameters. The hook stays registered, because torch does not allow a hook to be removed while another thread
    steps; as soon as none of the resized parameters is alive it returns at once.
    """
    _resized().update(dict.fromkeys(parameters))


@cache
def _resized() -> WeakTensorKeyDictionary:
    """Return the resized parameters that are alive; the first call registers the hook."""
    register_optimizer_step_pre_hook(_refuse_stale_state)
    return WeakTensorKeyDictionary()


def _refuse_stale_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not len(_resized()):
        return
    if isinstance(optimizer, torch.optim.LBFGS):  # its state is one vector for all parameters
        return
    torchs = type(optimizer).__module__.startswith("torch.optim")  # others may have state of any shape
    by_row_and_column = isinstance(optimizer, torch.optim.Adafactor)
    groups = [group for group in optimizer.param_groups if torchs or group.get("fused")]
    for parameter in (parameter for group in groups for parameter in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape:
                continue  # the cheap test comes first, since this runs before every step
            if parameter in _resized() and not (by_row_and_column and 1 in value.shape):
                found = f"{key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                raise RuntimeError(f"the optimizer has {found}: give optimizer= to truncate, or make a new one")
