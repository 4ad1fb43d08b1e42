"""Fine-tune a compressed network: distillation, cosine, weight averaging and fresh batch-norm statistics.

One small loop for any image classifier: canonical, factorised into plain layers, pruned or dense. On a GPU the data are
kept there and a step is replayed as a CUDA graph.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
from cpnorm.lab.data.images import Augmentation, ImageSet, augment
from cpnorm.lab.training.evaluation import accuracy, calibration_batches, prepared, reestimate_batch_norm

EAGER_STEPS = 3  # before a step is captured: libraries have chosen their kernels, and optimizers have their state


@dataclass(frozen=True)
class Recipe:
    """Settings of a fine-tuning.

    Args:
        epochs: passes over the training images.
        lr: peak learning rate; it rises over ``warmup`` epochs, then falls to zero along a cosine.
        optimizer: "adamw", for canonical layers with the learning rates of ``cpnorm.equal_angles``; or "sgd" with
            Nesterov momentum, which wants a learning rate that suits the scale of every term.
        distillation: share of the loss that asks for the teacher's outputs; the rest asks for the labels. Without a
            teacher it is 0.
        temperature: the teacher's and the network's logits are divided by it for the distillation.
        averaging: the averaged weights forget a step after this share of all steps; 0 turns averaging off.
        statistics: training images, augmented, that batch-norm statistics of the averaged network are estimated from.
        rebuild: on a GPU, run canonical layers as one dense layer with a rebuilt weight while they are trained.
    """

    epochs: float = 20
    lr: float = 1e-3
    batch_size: int = 256
    optimizer: Literal["sgd", "adamw"] = "adamw"
    momentum: float = 0.9
    weight_decay: float = 0.01
    warmup: float = 1.0
    distillation: float = 0.9
    temperature: float = 4.0
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
    training = _Training(model, data, recipe, teacher)
    batches = len(data.train_labels) // recipe.batch_size
    if not batches:
        raise ValueError(f"expected a batch_size <= {len(data.train_labels)}, the training images; got {recipe}")
    total = max(1, round(recipe.epochs * batches))
    history: list[dict[str, Any]] = []
    step, shuffled = 0, torch.Generator().manual_seed(recipe.seed)
    with _seeded(recipe.seed, device), _paths(model, rebuild=recipe.rebuild and device.type == "cuda"):
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


# --- a step -----------------------------------------------------------------------------------------------------------


class _Training:
    """The state of one fine-tuning: batches, step, averaged weights."""

    def __init__(self, model: nn.Module, data: ImageSet, recipe: Recipe, teacher: nn.Module | None) -> None:
        self.model, self.data, self.recipe = model, data, recipe
        device = data.train_labels.device
        self.on_gpu = device.type == "cuda"
        self.teacher = copy.deepcopy(teacher).to(device).eval() if teacher is not None else None
        if self.on_gpu:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.canonical = bool(cpnorm.canonical_layers(model))
        self.averaged = copy.deepcopy(model)
        self.optimizer = _optimizer(model, recipe, self.on_gpu)
        self.order = torch.zeros(len(data.train_labels), dtype=torch.long, device=device)
        self.offsets = torch.arange(recipe.batch_size, device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.taken = 0
        model.train()

    def begin_epoch(self, order: Tensor) -> None:
        self.order.copy_(order)
        self.cursor.zero_()
        self.loss.zero_()

    def take(self, lr: float) -> None:
        """Take one step: eagerly on the CPU, and as a graph on a GPU once a few eager steps have been taken."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["scale"])
            else:
                group["lr"] = lr * group["scale"]
        self.taken += 1
        if self.stream is None:
            self._step()
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
            if self.taken == EAGER_STEPS:
                self.optimizer.zero_grad(set_to_none=True)  # so that the graph writes gradients instead of adding them
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self._step()

    def _step(self) -> None:
        recipe, data = self.recipe, self.data
        index = self.order[self.cursor + self.offsets]
        x = prepared(augment(data.train_images[index], recipe.augment), data)
        labels = data.train_labels[index]
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            logits = self.model(x).float()
            if self.teacher is not None:
                with torch.no_grad():
                    wanted = self.teacher(x).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        if self.teacher is not None and recipe.distillation:
            t, share = recipe.temperature, recipe.distillation
            soft = F.kl_div(
                F.log_softmax(logits / t, 1), F.log_softmax(wanted / t, 1), reduction="batchmean", log_target=True
            )
            loss = (1 - share) * loss + share * t**2 * soft
        loss.backward()
        self.optimizer.step()
        if self.canonical:
            cpnorm.renormalize(self.model)
        self.cursor += recipe.batch_size
        self.loss += loss.detach()

    @torch.no_grad()
    def average(self, step: int, total: int) -> None:
        """Move the averaged weights towards the network's; the window grows until it is as long as asked for."""
        window = min(1 + step / 4, max(1.0, self.recipe.averaging * total))
        averaged, current = ([*m.parameters(), *self._statistics(m)] for m in (self.averaged, self.model))
        torch._foreach_lerp_(averaged, current, 1 / window)

    @staticmethod
    def _statistics(model: nn.Module) -> Iterator[Tensor]:
        return (buffer for buffer in model.buffers() if buffer.is_floating_point())

    def mean_loss(self, steps: int) -> float:
        return float(self.loss) / steps

    @torch.no_grad()
    def finish(self) -> None:
        """Put the averaged weights into the network, with batch-norm statistics that are their own."""
        for parameter, average in zip(self.model.parameters(), self.averaged.parameters(), strict=True):
            parameter.copy_(average)
        if self.canonical:
            cpnorm.renormalize(self.model)
        images = calibration_batches(self.data, self.recipe.statistics, batch=512, mode=self.recipe.augment)
        reestimate_batch_norm(self.model, [x for x, _ in images])
        self.model.eval()


def _optimizer(model: nn.Module, recipe: Recipe, on_gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe; vectors (biases, batch norm) do not decay."""
    groups: list[dict[str, Any]] = []
    scaled: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 1.0}]
    if recipe.optimizer == "adamw" and cpnorm.canonical_layers(model):
        scaled = cpnorm.equal_angles(model, 1.0)
    for group in scaled:
        for decays in (True, False):
            chosen = [p for p in group["params"] if (p.ndim > 1) == decays]
            lr = recipe.lr * group["lr"]
            rate = torch.tensor(lr, device=next(model.parameters()).device) if on_gpu else lr
            if chosen:
                groups.append(
                    {"params": chosen, "scale": group["lr"], "lr": rate, "weight_decay": recipe.weight_decay * decays}
                )
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=recipe.momentum, nesterov=recipe.momentum > 0, fused=on_gpu or None)
    return torch.optim.AdamW(groups, fused=on_gpu or None, capturable=on_gpu)


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
