"""Estimate the statistics of batch norms again after weights have changed."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cpnorm._checks import check_model
from cpnorm.compress.calibration_data import as_batches
from cpnorm.nn.running import evaluating, run

Module = TypeVar("Module", bound=nn.Module)


@torch.inference_mode(False)
@torch.no_grad()
def reestimate_batch_norm(model: Module, data: Any) -> Module:
    """Estimate the running mean and variance of every batch norm on data, in place, and return the model.

    Batch norms of a network whose weights have changed (truncated, averaged, quantised) get other inputs than those
    that their statistics describe. The new statistics are means over all batches; dropout and all other modules stay
    in eval mode. ``truncate`` with data adapts the statistics by itself. With few samples the old statistics, if they
    still fit, may be better.

    Args:
        model: a model that has batch norms.
        data: as for ``truncate``; large batches of shuffled training inputs are best.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    >>> inputs = torch.randn(100, 4)
    >>> outputs = reestimate_batch_norm(model, inputs).eval()(inputs)
    >>> bool(outputs.mean().abs() < 1e-5), bool((outputs.var(0) - 1).abs().max() < 0.02)
    (True, True)
    """
    check_model(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise ValueError(f"{type(model).__name__} has no batch norm with running statistics")
    batches = as_batches(data)
    before = [
        (norm.momentum, {key: value.clone() for key, value in norm._buffers.items() if value is not None})
        for norm in norms
    ]
    try:
        with evaluating(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = cast(float, None)  # the mean over all batches
                norm.training = True
            for inputs, _ in batches:
                run(model, inputs)
    except BaseException:
        for norm, (_, buffers) in zip(norms, before, strict=True):
            for key, value in buffers.items():
                cast(torch.Tensor, norm._buffers[key]).copy_(value)
        raise
    finally:
        for norm, (momentum, _) in zip(norms, before, strict=True):
            norm.momentum = momentum
    return model
