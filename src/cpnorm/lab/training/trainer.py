"""One training run in progress: a Trainer takes steps, finishes epochs, and saves and loads its whole state."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.epoch_metrics import PendingMetrics, layer_metrics, layer_statistics, means
from cpnorm.lab.training.forward import flags_restored, use_arithmetic
from cpnorm.lab.training.runs import environment
from cpnorm.lab.training.setup import build_model, freeze, learning_rate, make_optimizer, pick_device, process
from cpnorm.lab.training.steps import Step

log = logging.getLogger("cpnorm.lab")

DIVERGED_LOSS = 100.0  # mean loss per image; chance level is ln(10)


@dataclass
class Options:
    """How a run is executed, as opposed to what it computes."""

    device: str | None = None  # None: the GPU if there is one
    compile: bool = True  # torch.compile and CUDA graphs, where available and worth it
    checkpoint_every: float = 60.0  # seconds
    data_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint_every >= 0:
            raise ValueError(f"expected 0 or more seconds between checkpoints, got {self.checkpoint_every}")


class Trainer:
    """One run: the model, its optimizer, its position, and the metrics of the epochs so far."""

    def __init__(
        self,
        config: Config,
        data: ImageSet,
        options: Options | None = None,
        *,
        model: nn.Module | None = None,
        progress: Any = None,
        resumes: bool = False,  # the parameters will come from a checkpoint
    ) -> None:
        self.config, self.options = config, options or Options()
        self.rank, self.world = process()
        self.device = pick_device(self.options.device, self.rank)
        self.data = self.whole_data = data.to(self.device)
        self.held_out: tuple[Tensor, Tensor] | None = None
        if config.validation:
            self.data, *held_out = self.data.split_validation(config.validation, config.seed)
            self.held_out = (held_out[0], held_out[1])
        if not self.batches:
            images = len(self.data.train_labels)
            raise ValueError(f"expected a whole batch of images, got {images}, fewer than {config.batch_size}")
        self.precision = config.precision
        if self.precision == "auto":
            self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.epoch, self.batch, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.best_state: dict[str, Tensor] | None = None
        self.diverged: str | None = None
        with flags_restored():
            self._use_flags()
            self._prepare(model, data, progress, resumes)

    def _use_flags(self) -> None:
        use_arithmetic(self.precision)
        torch.backends.cudnn.benchmark = self.options.compile  # the same few shapes come thousands of times

    def _prepare(self, model: nn.Module | None, data: ImageSet, progress: Any, resumes: bool) -> None:
        """Build the network, its optimizer and the training step."""
        config = self.config
        if model is None:
            cheap = {"init": "kaiming_normal", "lambdas": "ones"} if resumes and config.norm == "cp" else {}
            cheap |= {"linear_init": "same", "linear_lambdas": "same"} if cheap else {}
            model = build_model(config.replace(**cheap), data, self.device, progress)
        if self.device.type == "cuda":
            model.cpu()  # frees what building it left on the GPU, and puts its parameters close together
            torch.cuda.empty_cache()
        self.model = model.to(self.device)
        if self.device.type == "cuda":  # the layout of the images: gradients need no copy then
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        freeze(config, self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = make_optimizer(config, self.model, self.device)
        layers = cpnorm.canonical_layers(self.model).items()
        self.initial_lambdas = {name: layer.lambdas.detach().clone() for name, layer in layers}
        self.step = Step(
            config,
            self.model,
            self.optimizer,
            self.data,
            precision=self.precision,
            compile=self.options.compile,
            rank=self.rank,
            world=self.world,
        )
        self._wait()

    def _wait(self) -> None:
        """Wait for the device: steps run on a stream of their own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- a run as a sequence of steps ---

    @property
    def batches(self) -> int:
        """Return the number of steps in an epoch; the last may have fewer images."""
        images, size = len(self.data.train_labels), self.config.batch_size
        return images // size if self.config.drop_last else -(-images // size)

    @property
    def finished(self) -> bool:
        """Return True if no epoch is left, the run diverged or was stopped early."""
        return self.epoch >= self.config.epochs or self.diverged is not None or self.stopped_early()

    def run(self) -> Iterator[bool]:
        """Train to the end, yielding after every step (False) and every finished epoch (True)."""
        while not self.finished:
            started = time.perf_counter()
            if self.batch == 0:
                self.step.begin_epoch(self.epoch)
            while self.batch < self.batches:
                self.set_learning_rate(self.epoch + self.batch / self.batches)
                self.step(self.batch)
                self.batch += 1
                if self.batch < self.batches:
                    yield False
            pending = self.measure()
            while not pending.ready():  # other runs continue meanwhile
                yield False
            self.finish_epoch(started, pending)
            yield True
        if self.step.network:
            self.step.network.remove()  # from here on, nothing renormalises

    def set_learning_rate(self, progress: float) -> None:
        """Set the learning rate; a constant one once, others before every step."""
        if (self.config.schedule != "constant" or self.config.warmup) or progress == 0:
            value = learning_rate(self.config, progress)
            for group in self.optimizer.param_groups:
                scaled = value * group.get("scale", 1.0)  # older checkpoints have no scale
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(scaled)
                else:
                    group["lr"] = scaled

    def measure(self) -> PendingMetrics:
        """Start to measure the epoch on the device, without waiting for it."""
        sums = [self.step.totals(), self.step.tested_fast(self.data.test_images, self.data.test_labels)]
        if self.held_out:
            sums.append(self.step.tested_fast(*self.held_out))
        return PendingMetrics([*sums, *layer_metrics(self.model)])

    def finish_epoch(self, started: float, pending: PendingMetrics) -> None:
        """Append the metrics of the epoch, and check whether the run diverged."""
        found = pending.values()
        (loss, accuracy), (test_loss, test_accuracy), *rest = (
            means(sums) for sums in found[: 3 if self.held_out else 2]
        )
        line: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "loss": round(loss, 5),
            "train_accuracy": round(accuracy, 3),
            "test_loss": round(test_loss, 5),
            "test_accuracy": round(test_accuracy, 3),
        }
        for held_out in rest:
            line["validation_loss"], line["validation_accuracy"] = (round(v, 5) for v in held_out)
        line["seconds"] = round(time.perf_counter() - started, 3)
        line["layers"] = layer_statistics(self.model, found[2 + len(rest) :])
        self.seconds += line["seconds"]
        self.epoch, self.batch = self.epoch + 1, 0
        if not math.isfinite(loss) or loss > DIVERGED_LOSS:
            self.diverged = f"the loss was {loss:.3g} in epoch {self.epoch}"
            log.warning("diverged: %s", self.diverged)
        self.history.append(line)
        earlier = max((before["test_accuracy"] for before in self.history[:-1]), default=-1.0)
        if self.config.keep_best and line["test_accuracy"] > earlier:
            self.best_state = {key: value.detach().clone() for key, value in self.model.state_dict().items()}

    def stopped_early(self) -> bool:
        """Return True if the validation loss (else the training loss) has not improved for the epochs allowed."""
        patience = self.config.early_stopping
        if not patience or len(self.history) <= patience:
            return False
        losses = [line.get("validation_loss", line["loss"]) for line in self.history]
        return min(losses[-patience:]) >= min(losses[:-patience])

    def evaluate(self, images: Tensor, labels: Tensor, model: nn.Module | None = None) -> tuple[float, float]:
        """Return mean loss and accuracy in percent, of the run's model or of another on its device."""
        with flags_restored():
            self._use_flags()
            return means(self.step.tested(self.model if model is None else model, images, labels).tolist())

    # --- the whole state ---

    def state(self) -> dict[str, Any]:
        """Return all that is needed to resume, bit for bit on the CPU."""
        self._wait()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step.state(),
            "epoch": self.epoch,
            "batch": self.batch,
            "seconds": self.seconds,
            "history": self.history,
            "diverged": self.diverged,
            "initial_lambdas": self.initial_lambdas,
            "best_state": self.best_state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from ``state()``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.batch, self.seconds = state["epoch"], state["batch"], state["seconds"]
        self.history, self.diverged = state["history"], state["diverged"]
        self.initial_lambdas, self.best_state = state["initial_lambdas"], state.get("best_state")
        self.step.load_state(state["step"], self.epoch)
        self._wait()

    def best_network(self) -> nn.Module | None:
        """Return the network of the best test epoch, if the config asks to keep it."""
        if self.best_state is None:
            return None
        self._wait()  # the copy was made on the run's own stream
        network = copy.deepcopy(self.model)
        network.load_state_dict(self.best_state)
        return network

    def record(self) -> dict[str, Any]:
        """Return what is kept of a run, as plain JSON."""
        curve = {
            key: [line[key] for line in self.history]
            for key in ("loss", "train_accuracy", "test_loss", "test_accuracy", "validation_accuracy")
            if self.history and key in self.history[0]
        }
        tests = curve.get("test_accuracy", [])
        return {
            "config": self.config.to_json(),
            "parameters": self.parameters,
            "test_accuracy_last": tests[-1] if tests else None,
            "test_accuracy_best": max(tests) if tests else None,
            "best_epoch": 1 + tests.index(max(tests)) if tests else None,
            "diverged": self.diverged,
            "stopped_early": self.stopped_early(),
            "epochs": self.epoch,
            "seconds": round(self.seconds, 2),
            "precision": self.precision,  # what "auto" came to
            "data_sha256": self.whole_data.sha256 or None,
            "step_mode": self.step.mode,
            "curve": curve,
            "environment": environment(),
        }
