"""Adapt the statistics of batch norms to weights that have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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


def normalized(norm: _BatchNorm, x: Tensor, statistics: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return the output of a batch norm in eval mode with these statistics, by default its own."""
    mean, variance = statistics or (cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var))
    return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)


def moved_statistics(norm: _BatchNorm, old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a batch norm, changed by the difference between its old and its new inputs.

    Only the difference, measured on the same data: few of them tell it better than the statistics themselves.
    """
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    before, after = _statistics(old), _statistics(new)
    if before is None or after is None:
        return mean.clone(), variance.clone()
    ratio = torch.where(before[1] > 0, after[1] / before[1].clamp_min(1e-30), 1.0)
    moved = mean.double() + after[0] - before[0]
    return moved.to(mean.dtype), (variance.double() * ratio).to(variance.dtype)


def _statistics(inputs: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance of each channel over several feature maps."""
    total: list[Tensor] = []
    count = 0
    shift = None
    for x in inputs:
        rows = x.transpose(0, 1).flatten(1)
        shift = rows.mean(1, keepdim=True) if shift is None else shift
        centered = rows - shift
        sums = [centered.sum(1).double(), centered.square().sum(1).double()]
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
        count += rows.shape[1]
    if shift is None or not count:
        return None
    mean = total[0] / count
    return mean + shift[:, 0], total[1] / count - mean.square()
