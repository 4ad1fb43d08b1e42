"""The forward pass of a step, from an index into the data to a loss, in one piece or in two, as it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.lab.data.images import augment, normalize

Loss = Callable[..., tuple[Tensor, Tensor]]
Parts = tuple[Loss, Loss]  # batch_outputs of the front of a model, loss_of of its back


def use_arithmetic(precision: str) -> None:
    """Set what float32 means from now on in this process; runs that take turns may differ in it.

    The flags are process-wide: callers work within ``flags_restored``.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def flags_restored() -> Iterator[None]:
    """Restore torch's process-wide flags of arithmetic and cuDNN at the end of the block."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    tf32, benchmark = cudnn.allow_tf32, cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32, cudnn.benchmark = tf32, benchmark


def batch_outputs(
    model: nn.Module,
    images: Tensor,  # (all, C, H, W) uint8
    labels: Tensor,  # (all,)
    order: Tensor,  # (all,)
    cursor: Tensor,  # (): where in the order the batch begins
    offsets: Tensor,  # (N,): 0, 1, ...
    mean: tuple[float, ...],  # (C,)
    std: tuple[float, ...],
    mode: Any,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Gather, augment and normalise a batch and run the model; return its outputs and the labels.

    One function, so that the compiler can fuse it into few kernels.
    """
    index = order[cursor + offsets]
    x = normalize(augment(images[index], mode), mean, std, torch.float32)
    if x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return model(x), labels[index]


def loss_of(
    model: nn.Module | None, x: Tensor, answers: Tensor, smoothing: float, precision: str
) -> tuple[Tensor, Tensor]:
    """Run the rest of the model and return the summed loss, and the sums of loss, correct answers and images."""
    if model is not None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            x = model(x)
    logits = x.float()
    loss = F.cross_entropy(logits, answers, reduction="sum", label_smoothing=smoothing)
    seen = torch.full_like(loss, len(answers))
    return loss, torch.stack([loss.detach(), (logits.argmax(1) == answers).sum(), seen]).double()


def batch_loss(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    order: Tensor,
    cursor: Tensor,
    offsets: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    mode: Any,
    smoothing: float,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a whole model on a batch, and the sums for the record: see ``loss_of``."""
    batch = batch_outputs(model, images, labels, order, cursor, offsets, mean, std, mode, precision)
    return loss_of(None, *batch, smoothing, precision)


@cache
def compiled_loss() -> Loss:
    """Return one compiled function for all models of a process: seeds of a row share its code."""
    return _compiled(batch_loss)


@cache
def compiled_parts() -> Parts:
    """Return the compiled functions for a model that is split in two."""
    return _compiled(batch_outputs), _compiled(loss_of)


def _compiled(function: Loss) -> Loss:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=False)
