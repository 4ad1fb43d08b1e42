"""Fine-tune a compressed network: distillation, cosine, weight averaging and fresh batch-norm statistics.

One small loop for any image classifier: canonical, factorised into plain layers, pruned or dense. On a GPU the data are
kept there and a step is replayed as a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import cpnorm
from cpnorm.lab.data.images import Augmentation, ImageSet
from cpnorm.lab.training.evaluation import accuracy
from cpnorm.lab.training.finetune_step import FinetuneStep


@dataclass(frozen=True)
class Recipe:
    """Settings of a fine-tuning.

    The defaults were chosen on held-out training images, for a ResNet-18 cut to 5 %: see docs/guides/pretrained.md.

    Args:
        epochs: passes over the training images.
        lr: peak learning rate; it rises over ``warmup`` epochs, then falls to zero along a cosine.
        optimizer: "adamw", for canonical layers with the learning rates of ``cpnorm.equal_angles``; or "sgd" with
            Nesterov momentum, which wants a learning rate that suits the scale of every term.
        weight_decay: of the weights of plain layers; canonical terms, whose vectors have length one, do not decay.
        distillation: share of the loss that asks for the teacher's outputs; the rest asks for the labels. Without a
            teacher it is 0.
        temperature: the teacher's and the network's logits are divided by it for the distillation.
        averaging: the averaged weights forget a step after this share of all steps; 0 turns averaging off.
        statistics: training images, augmented, that batch-norm statistics of the averaged network are estimated from.
        rebuild: on a GPU, run canonical layers as one dense layer with a rebuilt weight while they are trained.
    """

    epochs: float = 20
    lr: float = 2e-3
    batch_size: int = 256
    optimizer: Literal["sgd", "adamw"] = "adamw"
    momentum: float = 0.9
    weight_decay: float = 0.01
    warmup: float = 1.0
    distillation: float = 0.9
    temperature: float = 1.0
    label_smoothing: float = 0.0
    averaging: float = 0.05
    statistics: int = 4096
    augment: Augmentation = "crop-flip"
    precision: Literal["bf16", "fp32"] = "fp32"
    rebuild: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "batch_size", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("distillation", "label_smoothing", "averaging"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected 0 <= {name} <= 1, got {getattr(self, name)}")

    def learning_rate(self, epoch: float) -> float:
        """Return the learning rate after this many epochs, whole or not."""
        if epoch < self.warmup:
            return self.lr * (epoch + 1e-3) / (self.warmup + 1e-3)
        along = (epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9)
        return self.lr * (1 + math.cos(math.pi * min(along, 1.0))) / 2

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return dataclasses.asdict(self)


def finetune(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe | None = None,
    *,
    teacher: nn.Module | None = None,
    test_every: int = 0,
    on_epoch: Callable[[dict[str, Any]], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Fine-tune a network in place and return one line per epoch: loss, learning rate, seconds, test accuracy.

    The network ends with the averaged weights of the last steps and with batch-norm statistics of its own. The last
    line has its accuracy on the test images; nothing is chosen by it.

    Args:
        model: any classifier on the device it is to be trained on; canonical layers are renormalised after every step.
        data: the images; they are moved to the model's device.
        recipe: the settings.
        teacher: the network before it was compressed; its outputs on the same augmented images are to be met.
        test_every: epochs between two tests of the averaged network; 0 tests it after the last epoch alone.
        on_epoch: called with every line.

    >>> from cpnorm.lab.data.images import load
    >>> data = load("digits")
    >>> dense = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    >>> history = finetune(dense, data, Recipe(epochs=4, batch_size=64, augment="none"))
    >>> len(history), history[-1]["test_accuracy"] > 80
    (4, True)
    """
    recipe = recipe or Recipe()
    device = next(model.parameters()).device
    data = data.to(device)
    batches = len(data.train_labels) // recipe.batch_size
    if not batches:
        raise ValueError(f"expected a batch_size <= {len(data.train_labels)}, the training images; got {recipe}")
    training = FinetuneStep(model, data, recipe, teacher)
    total = max(1, round(recipe.epochs * batches))
    history: list[dict[str, Any]] = []
    step, shuffled = 0, torch.Generator().manual_seed(recipe.seed)
    with closing(training), _seeded(recipe.seed, device), _paths(model, recipe.rebuild and device.type == "cuda"):
        while step < total:
            started, steps = time.perf_counter(), min(batches, total - step)
            training.begin_epoch(torch.randperm(len(data.train_labels), generator=shuffled))
            for _ in range(steps):
                training.take(recipe.learning_rate(step / batches))
                step += 1
                training.average(step, total)
            loss = training.mean_loss(steps)
            line: dict[str, Any] = {"epoch": round(step / batches, 3), "loss": round(loss, 5)}
            line["lr"] = recipe.learning_rate(step / batches)
            line["seconds"] = round(time.perf_counter() - started, 3)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss was {loss} in epoch {line['epoch']:g}: use a smaller lr")
            if step == total:
                training.finish()
            if step == total or (test_every and len(history) % test_every == test_every - 1):
                tested = model if step == total else training.averaged
                line["test_accuracy"] = accuracy(tested, data)
            history.append(line)
            on_epoch(line)
    return history


# --- for a while ------------------------------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw augmentations from this seed and give the caller's random state back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def _paths(model: nn.Module, rebuild: bool) -> Iterator[None]:
    """Rebuild the weights of canonical convolutions: on a GPU one dense convolution beats three small ones."""
    layers = [layer for layer in cpnorm.canonical_layers(model).values() if isinstance(layer, nn.Conv2d) and rebuild]
    before = [layer.path for layer in layers]
    for layer in layers:
        layer.path = "rebuild"
    try:
        yield
    finally:
        for layer, path in zip(layers, before, strict=True):
            layer.path = path
