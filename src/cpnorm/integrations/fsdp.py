"""FSDP2: canonical models sharded over processes, trained with ``renormalize_after`` as anywhere else."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from cpnorm.nn.convert import canonical_layers, including_tied

Module = TypeVar("Module", bound=nn.Module)


def shard(model: Module, mesh: DeviceMesh, **options: Any) -> Module:
    """``fully_shard`` every canonical layer, then the rest, in place; ``options`` are those of ``fully_shard``.

    It cannot split a scalar. Every process keeps the sigmas, and their gradients are averaged here. The vectors are
    split along their length, and the sums that ``renormalize`` takes over it are DTensor's to complete.
    """
    layers = canonical_layers(model)
    sigmas = {layer.sigma for layer in layers.values()}
    for name, layer in layers.items():
        twins: list[nn.Module] = list(including_tied(model, {name: layer}).values())  # parameters have one owner
        fully_shard(twins, mesh=mesh, ignored_params=sigmas, **options)
    fully_shard(model, mesh=mesh, ignored_params=sigmas, **options)

    def average(sigma: Tensor) -> None:
        assert sigma.grad is not None
        for group in mesh.get_all_groups():
            distributed.all_reduce(sigma.grad, group=group)
        sigma.grad /= mesh.size()

    for sigma in (sigma for sigma in sigmas if sigma.requires_grad):
        sigma.register_post_accumulate_grad_hook(average)
    return model
