"""Test a classifier, and prepare images for calibration, before or after compression."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cpnorm.lab.data.images import Augmentation, ImageSet, augment, normalize

TEST_BATCH = 1000  # images


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet, images: int | None = None) -> float:
    """Return the percentage of the test images, or the first of them, that a network classifies correctly."""
    device = next(model.parameters()).device
    x, y = data.test_images[:images].to(device), data.test_labels[:images].to(device)
    right = torch.zeros((), dtype=torch.long, device=device)
    with _evaluating(model):
        for part in range(0, len(y), TEST_BATCH):
            logits = model(prepared(x[part : part + TEST_BATCH], data))
            right += (logits.argmax(1) == y[part : part + TEST_BATCH]).sum()
    return 100 * right.item() / len(y)


def prepared(images: Tensor, data: ImageSet) -> Tensor:  # (N, C, H, W) uint8 -> float
    """Return images normalised as this data set's are, in the layout that convolutions prefer."""
    return normalize(images, data.mean, data.std).contiguous(memory_format=torch.channels_last)


def calibration_batches(
    data: ImageSet,
    count: int,
    *,
    batch: int = 256,
    mode: Augmentation = "crop-flip",
    copies: int = 1,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Return the first ``count`` training images, augmented and normalised, with their labels.

    They are what ``cpnorm.truncate`` looks at, and what batch-norm statistics are estimated from. Augment them as in
    training: the statistics of clean images are others, and cost a ResNet-20 that was trained on crops 2.8 points.
    With ``copies`` the same images come several times, augmented anew each time.
    """
    generator = torch.Generator(data.train_images.device).manual_seed(seed)
    batches = []
    for _ in range(copies):
        images = augment(data.train_images[:count], mode, generator)
        batches += list(zip(images.split(batch), data.train_labels[:count].split(batch), strict=True))
    return [(prepared(x, data), y) for x, y in batches]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in eval mode; afterwards every module has its own mode again."""
    modules = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in modules.items():
            module.training = was
