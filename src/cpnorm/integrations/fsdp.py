"""FSDP2: shard canonical models over processes; ``renormalize_after`` works on them as on any model."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

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
