"""FSDP2: shard canonical models over processes; ``renormalize_after`` works on them as on any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cpnorm import Report
from cpnorm import truncate as truncate_whole
from cpnorm.compress.distributed import take_terms, truncate_replicas
from cpnorm.nn.convert import canonical_layers, including_tied

Module = TypeVar("Module", bound=nn.Module)


def shard(model: Module, mesh: DeviceMesh, **options: Any) -> Module:
    """Apply ``fully_shard`` to every canonical layer, then to the rest, in place, and return the model.

    ``fully_shard`` cannot split a scalar, so every process keeps the sigmas, and hooks average their gradients. The
    vectors are split along their length; DTensor completes the sums that ``renormalize`` takes over it.

    Args:
        model: a model with canonical layers.
        mesh: the devices to shard over.
        options: passed on to ``fully_shard``.
    """
    layers = canonical_layers(model)
    sigmas = {layer.sigma for layer in layers.values()}
    for name, layer in layers.items():
        tied: list[nn.Module] = list(including_tied(model, {name: layer}).values())  # parameters have one owner
        fully_shard(tied, mesh=mesh, ignored_params=sigmas, **options)
    fully_shard(model, mesh=mesh, ignored_params=sigmas, **options)

    def average(sigma: Tensor) -> None:
        assert sigma.grad is not None
        for group in mesh.get_all_groups():
            distributed.all_reduce(sigma.grad, group=group)
        sigma.grad /= mesh.size()

    for sigma in (sigma for sigma in sigmas if sigma.requires_grad):
        sigma.register_post_accumulate_grad_hook(average)
    return model


@torch.no_grad()
def truncate(
    sharded: nn.Module, whole: Module, mesh: DeviceMesh, *, optimizer: torch.optim.Optimizer, **arguments: Any
) -> tuple[Module, torch.optim.Optimizer, Report]:
    """Truncate a sharded model, and return the truncated one, sharded again, with its optimizer and the report.

    FSDP cannot change the shapes of parameters that it has sharded. Parameters and optimizer state are therefore
    gathered into a whole model, which is truncated in the same way in all processes, on the data of all, and then
    sharded. Every process must call this function, and needs memory for a whole model while it runs. Options of
    ``fully_shard`` other than ``mesh``, and hooks and schedulers of the old optimizer, are not carried over.

    Args:
        sharded: a model made by ``shard``; do not use it afterwards.
        whole: a canonical model of the same architecture that is not sharded, of any rank and with any values.
        mesh: the devices to shard over.
        optimizer: the optimizer of the sharded model.
        arguments: arguments of ``cpnorm.truncate``.
    """
    values = {name: _gather(tensor) for name, tensor in sharded.state_dict().items()}
    take_terms(whole, values)
    whole.load_state_dict(values)
    names = {parameter: name for name, parameter in sharded.named_parameters()}
    gathered = _with_parameters(optimizer, names, dict(whole.named_parameters()), _gather_like)
    report = truncate_replicas(truncate_whole, whole, [gathered], arguments)
    names = {parameter: name for name, parameter in whole.named_parameters()}
    model = shard(whole, mesh)
    return model, _with_parameters(gathered, names, dict(model.named_parameters()), _shard_like), report


def _with_parameters(
    optimizer: torch.optim.Optimizer,
    names: dict[nn.Parameter, str],
    parameters: dict[str, nn.Parameter],
    converted: Callable[[Tensor, nn.Parameter], Tensor],
) -> torch.optim.Optimizer:
    """Return an optimizer of the same settings and state for parameters that have the same names in another model."""
    kind: Any = type(optimizer)
    other: torch.optim.Optimizer = kind(
        [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"params": [parameters[names[parameter]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    )
    for parameter, name in names.items():
        if state := optimizer.state.get(parameter):
            own = parameters[name]
            other.state[own] = {k: converted(v, own) if isinstance(v, Tensor) else v for k, v in state.items()}
    return other


def _gather(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gather_like(value: Tensor, _: nn.Parameter) -> Tensor:
    return _gather(value)


def _shard_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
