"""From a config to the things a run is made of: network, optimizer, learning rate, device, processes."""

from __future__ import annotations

import atexit
import math
import os
from typing import Any

import torch
from torch import distributed, nn

import cpnorm
from cpnorm.lab.data.images import ImageSet, normalize
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.training import baselines, models
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.rmsprop import FusedRMSprop


def build_model(config: Config, data: ImageSet, device: torch.device, progress: Any = None) -> nn.Module:
    """The network a config describes, with its normalisation, drawn from its seed."""
    torch.manual_seed(config.seed)
    channels, size = data.train_images.shape[1], data.train_images.shape[2]
    model = models.build(config.model, channels, len(data.classes), size, config.width)
    if not config.dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    model = model.to(device)
    if config.norm == "weight":
        return baselines.weight_norm(model, skip=config.skip)
    if config.norm == "tai":
        if config.rank == "paper" and config.model != "alexnet":
            raise ValueError(f"the paper has no ranks of Tai et al.'s form for {config.model}: give some with --rank")
        ranks = paper.TAI_RANKS if config.rank == "paper" else config.rank if isinstance(config.rank, dict) else None
        batch = normalize(data.train_images[:256], data.mean, data.std).to(device)
        return baselines.tai(model, ranks, skip=config.skip, images=batch)
    if config.norm == "cp":
        example = torch.zeros(1, channels, size, size, device=device)
        return cpnorm.canonical_norm(
            model,
            paper.paper_ranks(config.model) if config.rank == "paper" else config.rank,
            config.init,
            lambdas=config.lambdas,
            skip=config.skip,
            modes=cpnorm.flatten_modes(model, example) if config.modes else None,
            generator=torch.Generator().manual_seed(config.seed),
            progress=progress,
        )
    return model


def make_optimizer(config: Config, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """torch's own, or as torch's; on a GPU in the forms that can be captured, with the learning rates in tensors.

    Each group of parameters has its "scale": what its learning rate is times the config's.
    """
    gpu, decay = device.type == "cuda", config.weight_decay
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "scale": 1.0}]
    if config.equal_angles:
        groups = [{"params": g["params"], "scale": g["lr"]} for g in cpnorm.equal_angles(model, 1.0)]
    for group in groups:
        lr = config.lr * group["scale"]
        group["lr"] = torch.tensor(lr, device=device) if gpu else lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups, momentum=config.momentum, weight_decay=decay, nesterov=config.nesterov, fused=gpu or None
        )
    if config.optimizer == "rmsprop":
        if gpu and not config.momentum:
            return FusedRMSprop(groups, weight_decay=decay)
        return torch.optim.RMSprop(groups, momentum=config.momentum, weight_decay=decay, capturable=gpu, foreach=True)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, weight_decay=decay, fused=gpu or None, capturable=gpu)


def learning_rate(config: Config, progress: float) -> float:
    """After ``progress`` epochs (a fraction of an epoch counts)."""
    if progress < config.warmup:
        return config.lr * max(progress, 1e-3) / config.warmup
    along = (progress - config.warmup) / max(config.epochs - config.warmup, 1e-9)
    shape = {"constant": 1.0, "linear": 1 - along, "cosine": (1 + math.cos(math.pi * along)) / 2}[config.schedule]
    return config.lr * max(shape, 0.0)


def process() -> tuple[int, int]:
    """Rank and number of the processes of this run; torchrun sets the variables, the first call joins them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)  # or its threads may abort the process at its end
    return distributed.get_rank(), distributed.get_world_size()


def pick_device(asked: str | None, rank: int) -> torch.device:
    """The GPU of this process if there is one."""
    if asked is None:
        asked = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"expected a device such as cpu or cuda:1, got {asked!r}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("expected a GPU for device 'cuda', but torch sees none")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
