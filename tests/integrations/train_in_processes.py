"""Run by torchrun: a plain user's loop under DDP, then under FSDP2, each process with its share of every batch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent))
from small import batches, network, sgd

import cpnorm
from cpnorm.integrations.fsdp import shard


def train(model: nn.Module, runner: nn.Module) -> None:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    optimizer = sgd(model)
    cpnorm.renormalize_after(optimizer, model)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(runner(x[rank::world]), y[rank::world]).backward()
        optimizer.step()


def refuses(sharded: nn.Module) -> None:
    """What cannot be done in parts says so."""
    around = nn.Sequential(DistributedDataParallel(network()))
    for change, model, why in (
        (lambda m: cpnorm.truncate(m, rate=0.5), around, "expected the DistributedDataParallel itself"),
        (lambda m: cpnorm.truncate(m, rate=0.5), sharded, "whole parameters"),
        (cpnorm.fold, sharded, "whole parameters"),
        (lambda m: cpnorm.save(m, "/nowhere/model.safetensors"), sharded, "whole parameters"),
    ):
        with pytest.raises(ValueError, match=why):
            change(model)


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    model = network()
    train(model, DistributedDataParallel(model))
    ddp = model.state_dict()

    model = shard(network(), torch.distributed.init_device_mesh("cpu", (distributed.get_world_size(),)))
    train(model, model)
    sharded = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    assert {name.rpartition(".")[2] for name, _ in model.named_parameters() if name not in sharded} == {"sigma"}
    fsdp = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    sigma = model[0].sigma.detach().clone()
    distributed.all_reduce(sigma)
    assert sigma == 2 * model[0].sigma, "the processes hold different sigmas"
    frozen = network()
    frozen[0].requires_grad_(False)
    frozen = shard(frozen, torch.distributed.init_device_mesh("cpu", (distributed.get_world_size(),)))
    train(frozen, frozen)
    assert frozen[0].sigma == network()[0].sigma != model[0].sigma
    refuses(model)
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    tied = shard(
        cpnorm.canonical_norm(tied), torch.distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    )
    tied(torch.randn(4, 6)).square().mean().backward()
    assert tied[0].lambdas.grad is not None
    if distributed.get_rank() == 0:
        torch.save({"ddp": ddp, "fsdp": fsdp}, folder / "states.pt")
    distributed.barrier()  # nobody takes the connections down while another still uses them
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # DTensor's caches keep the process group, and so gloo's threads, which now and then abort the interpreter's end.
    os._exit(0)
