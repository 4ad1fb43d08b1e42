"""Run by torchrun: train, truncate on the data of all processes, train on; under DDP and under FSDP2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent))
from small import batches, network

import cpnorm
from cpnorm.integrations import fsdp

BUDGET: dict[str, Any] = {"params": 900, "criterion": "gram", "refit": "none"}
Data = list[tuple[Tensor, Tensor]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
    handle = cpnorm.renormalize_after(optimizer, model)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    handle.remove()


def share(rank: int = 0, world: int = 1) -> Data:
    return [(x[rank::world], y[rank::world]) for x, y in batches()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def cut_and_trained(wrap: Callable[[nn.Module], nn.Module], data: Data) -> nn.Module:
    """Return the model after training, truncation and more training, in one process or wrapped in DDP."""
    model = network()
    wrapped, optimizer = wrap(model), adam(model)
    train(wrapped, optimizer, data)
    report = cpnorm.truncate(wrapped, **BUDGET, data=data, optimizer=optimizer)
    assert [layer.rank_after for layer in report.layers] == [
        layer.rank for layer in cpnorm.canonical_layers(model).values()
    ]
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    train(wrapped, optimizer, data)
    return model


def cut_and_trained_in_shards(data: Data) -> dict[str, Tensor]:
    mesh = torch.distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    model = fsdp.shard(network(), mesh)
    optimizer = adam(model)
    train(model, optimizer, data)
    model, optimizer, _ = fsdp.truncate(model, network(), mesh, optimizer=optimizer, data=data, **BUDGET)
    assert isinstance(model[3].factors[0], DTensor)
    train(model, optimizer, data)
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def fails_everywhere(data: Data) -> None:
    """A wrong argument raises the same error in every process, and none waits for the others."""
    with pytest.raises(ValueError, match="expected 0 <= rate < 1"):
        cpnorm.truncate(DistributedDataParallel(network()), rate=3.0, data=data)


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    data = share(rank, distributed.get_world_size())
    ddp = cut_and_trained(DistributedDataParallel, data).state_dict()
    fails_everywhere(data)
    torch.save({"ddp": ddp, "fsdp": cut_and_trained_in_shards(data)}, folder / f"{rank}.pt")
    distributed.barrier()  # no process may take the connections down while another still uses them
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # DTensor's caches keep the process group, and so gloo's threads, which now and then abort the interpreter's end.
    os._exit(0)
