"""Make the parts of a run from its config: network, optimizer, learning rate, device, processes."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn

import cpnorm
from cpnorm.lab.data.images import ImageSet, normalize
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.training import baselines, models
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.rmsprop import FusedRMSprop


def build_model(config: Config, data: ImageSet, device: torch.device, progress: Any = None) -> nn.Module:
    """Return the network a config describes, with its normalisation, drawn from its seed.

    torch's global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return _build(config, data, device, progress)


def _build(config: Config, data: ImageSet, device: torch.device, progress: Any) -> nn.Module:
    channels, size = data.train_images.shape[1], data.train_images.shape[2]
    model = models.build(config.model, channels, len(data.classes), size, config.width, config.design)
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
        return _canonical(config, model, torch.zeros(1, channels, size, size, device=device), progress)
    return model


def _canonical(config: Config, model: nn.Module, example: Tensor, progress: Any) -> nn.Module:
    """Convert the network; convolutions and linear layers separately where their settings differ."""
    if config.rank == "paper" and config.model not in ("alexnet", "lenet"):
        raise ValueError(f"the paper has no ranks for {config.model}: give --rank exact, a number or a share")
    rank: Any = paper.paper_ranks(config.model) if config.rank == "paper" else config.rank
    generator = torch.Generator().manual_seed(config.seed)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    modes = cpnorm.flatten_modes(model, example) if config.modes else {}
    if config.split_modes:
        shapes = {name: modes.get(name, tuple(layer.weight.shape)) for name, layer in linear.items()}
        modes = {name: finer_shape(shape, config.split_modes) for name, shape in shapes.items()}

    def convert(init: str, lambdas: str, skipped: Collection[str]) -> None:
        def chosen(names: Any) -> Any:
            named = isinstance(names, Mapping)
            return {name: value for name, value in names.items() if name not in skipped} if named else names

        cpnorm.canonical_norm(
            model,
            chosen(rank),
            init,
            lambdas=lambdas,
            skip=[*config.skip, *skipped],
            modes=chosen(modes),
            generator=generator,
            progress=progress,
        )

    linear_init = config.init if config.linear_init == "same" else config.linear_init
    linear_lambdas = config.lambdas if config.linear_lambdas == "same" else config.linear_lambdas
    if (linear_init, linear_lambdas) == (config.init, config.lambdas):
        convert(config.init, config.lambdas, ())
    else:
        convert(config.init, config.lambdas, linear)
        convert(linear_init, linear_lambdas, cpnorm.canonical_layers(model))
    if config.vector_lengths == "kaiming":
        drawn = [name for name in cpnorm.canonical_layers(model) if name not in linear or linear_init == config.init]
        _draw_vectors(config.init, drawn, model, generator)
    return model


def finer_shape(shape: Iterable[int], longest: int) -> tuple[int, ...]:
    """Return a shape in which sizes above ``longest`` are two factors, as equal as they can be.

    >>> finer_shape((512, 1024, 10), 64)
    (16, 32, 32, 32, 10)
    """
    split = ((max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0), size) for size in shape)
    return tuple(m for n, size in split for m in ((n, size // n) if size > longest and n > 1 else (size,)))


@torch.no_grad()
def _draw_vectors(init: str, names: Iterable[str], model: nn.Module, generator: torch.Generator) -> None:
    """Draw the vectors of these layers by torch's Kaiming initialisation, whose lengths are kept."""
    draw = nn.init.kaiming_normal_ if init == "kaiming_normal" else nn.init.kaiming_uniform_
    for name in names:
        for factor in cpnorm.canonical_layers(model)[name].factors:
            factor.copy_(draw(torch.empty(factor.shape), generator=generator))  # (d, R): the fan is R


def freeze(config: Config, model: nn.Module) -> None:
    """Freeze what the config does not train."""
    if config.trainable == "sigma-bias":
        for layer in cpnorm.canonical_layers(model).values():
            for parameter in (layer.lambdas, *layer.factors):
                parameter.requires_grad_(False)


def make_optimizer(config: Config, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of a config; on a GPU one that a CUDA graph can hold, with learning rates as tensors.

    Each group of parameters has a "scale", by which the config's learning rate is multiplied.
    """
    gpu, decay = device.type == "cuda", config.weight_decay
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad], "scale": 1.0}]
    if config.equal_angles:
        angles = cpnorm.equal_angles(model, 1.0)
        groups = [{"params": [p for p in g["params"] if p.requires_grad], "scale": g["lr"]} for g in angles]
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
    """Return the learning rate after ``progress`` epochs, which need not be whole."""
    if progress < config.warmup:
        return config.lr * max(progress, 1e-3) / config.warmup
    along = (progress - config.warmup) / max(config.epochs - config.warmup, 1e-9)
    shape = {"constant": 1.0, "linear": 1 - along, "cosine": (1 + math.cos(math.pi * along)) / 2}[config.schedule]
    return config.lr * max(shape, 0.0)


def process() -> tuple[int, int]:
    """Return rank and number of the processes of this run, as torchrun sets them; the first call joins the group.

    The group is taken down before the interpreter is: a thread of gloo that frees a tensor later aborts the process.
    Its threads end only when nothing refers to the group any more, neither a ``DistributedDataParallel`` (see
    ``Step.leave``) nor the functions of torch's that take the group there is at their import as a default argument.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if not distributed.is_initialized():
        import_module("torch.distributed.nn.functional")  # while there is no group
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)
    return distributed.get_rank(), distributed.get_world_size()


def pick_device(asked: str | None, rank: int) -> torch.device:
    """Return the device asked for, else the GPU of this process, else the CPU."""
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
