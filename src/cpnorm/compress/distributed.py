"""Truncate a model in several processes: the first one truncates on the data of all, and the others copy its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from cpnorm.compress.calibration_data import as_batches
from cpnorm.compress.report import Report
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.convert import canonical_layers, fold


def truncate_wrapped(
    truncate: Callable[..., Report],
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    arguments: dict[str, Any],
) -> Report:
    """Truncate the module inside a DistributedDataParallel in the same way in all processes, and return the report.

    The wrapper is updated to the new shapes, so that training continues with the same objects.
    """
    if model.process_group is not distributed.group.WORLD:
        raise ValueError("expected a DistributedDataParallel of the default process group, got one of another group")
    report = truncate_replicas(truncate, model.module, optimizers, arguments)
    if not arguments.get("dry_run"):
        model.__setstate__(model.__getstate__())  # builds new buckets for gradients
    return report


def truncate_replicas(
    truncate: Callable[..., Report],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    arguments: dict[str, Any],
) -> Report:
    """Truncate a model of which every process has a replica in the same way in all processes, and return the report.

    Every process must call this. The first one truncates, on the batches of all processes together; the others take
    over its parameters, buffers and optimizer state. An error in the first process is raised in all of them.
    """
    batches = _gathered(arguments.get("data"))
    leader = distributed.get_rank() == 0
    message: list[Any] = [None]
    if leader:
        try:
            report = truncate(model, **{**arguments, "data": batches, "optimizer": list(optimizers)})
            message = [(report, _on_cpu(model.state_dict()), _on_cpu([o.state_dict() for o in optimizers]))]
        except Exception as error:  # the other processes wait for an answer
            message = [error]
    distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    report, state, states = message[0]
    if not leader and not arguments.get("dry_run"):
        take_terms(model, state)
        model.load_state_dict(state)
        for optimizer, values in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(values)
    return cast(Report, report)


def take_terms(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give every canonical layer the terms of a state dict, whatever their number; fold those that are dense there."""
    for name, layer in canonical_layers(model).items():
        start = f"{name}." if name else ""
        if f"{start}weight" in state:
            fold(layer)
            continue
        factors = tuple(state[f"{start}factors.{mode}"] for mode in range(len(layer.modes)))
        layer.replace_terms(CPTensor(state[f"{start}sigma"], state[f"{start}lambdas"], factors))


def _gathered(data: Any) -> list[Any] | None:
    """Return the batches of all processes, in the order of the processes, on the CPU; None if there are none."""
    own: Any = None
    try:
        own = None if data is None else _on_cpu(as_batches(data))
    except (TypeError, ValueError) as error:  # the other processes wait for an answer
        own = error
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    for process, batches in enumerate(gathered):
        if isinstance(batches, Exception):
            raise ValueError(f"process {process}: {batches}")
    found = [batches for batches in gathered if batches is not None]
    return [batch for batches in found for batch in batches] if found else None


def _on_cpu(values: Any) -> Any:
    return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, values)
