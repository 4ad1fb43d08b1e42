"""Training: a Trainer takes steps, finishes epochs and saves its whole state; fit() drives one, drive() several."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import cpnorm
from cpnorm.lab.data.images import ImageSet, load, normalize
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.epoch_metrics import Readings, layer_readings, layer_statistics, means
from cpnorm.lab.training.forward import use_arithmetic
from cpnorm.lab.training.runs import RunError, RunFolder, environment
from cpnorm.lab.training.setup import build_model, learning_rate, make_optimizer, pick_device, process
from cpnorm.lab.training.steps import Step

log = logging.getLogger("cpnorm.lab")

DIVERGED_LOSS = 100.0  # a mean loss per image of a hundred is no longer training; chance level is ln(10)
Observer = Callable[["Trainer", dict[str, Any]], None]


@dataclass
class Options:
    """How a run is carried out, as opposed to what it computes."""

    device: str | None = None  # None: the GPU if there is one
    compile: bool = True  # torch.compile and graph capture, where they are to be had and pay
    checkpoint_every: float = 60.0  # seconds
    data_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint_every >= 0:
            raise ValueError(f"expected 0 or more seconds between checkpoints, got {self.checkpoint_every}")


class Trainer:
    """One run in progress: the model, its optimizer, where it stands, and the epochs so far."""

    def __init__(
        self,
        config: Config,
        data: ImageSet,
        options: Options | None = None,
        *,
        model: nn.Module | None = None,
        progress: Any = None,
        resumes: bool = False,  # what the network is made of comes from a checkpoint
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
        use_arithmetic(self.precision)
        torch.backends.cudnn.benchmark = self.options.compile  # the same few shapes come thousands of times
        if model is None:
            cheap = {"init": "kaiming_normal", "lambdas": "ones"} if resumes and config.norm == "cp" else {}
            model = build_model(config.replace(**cheap), data, self.device, progress)
        if self.device.type == "cuda":
            model.cpu()  # what building it has left of memory is given back, and its parameters lie close
            torch.cuda.empty_cache()
        self.model = model.to(self.device)
        if self.device.type == "cuda":  # as the images are: gradients come that way, and need no copy
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weights = sum(p.numel() for p in self.model.parameters())
        self.optimizer = make_optimizer(config, self.model, self.device)
        layers = cpnorm.canonical_layers(self.model).items()
        self.initial_lambdas = {name: layer.lambdas.detach().clone() for name, layer in layers}
        self.epoch, self.batch, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.diverged: str | None = None
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
        """Until the device has done all that was asked of it: steps run on a stream of their own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- a run as a sequence of steps ---

    @property
    def batches(self) -> int:
        """Steps in an epoch; the last may be smaller."""
        images, size = len(self.data.train_labels), self.config.batch_size
        return images // size if self.config.drop_last else -(-images // size)

    @property
    def finished(self) -> bool:
        """Whether no epoch is left, or the run was stopped early."""
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
            readings = self.measure()
            while not readings.ready():  # other runs go on meanwhile
                yield False
            self.finish_epoch(started, readings)
            yield True
        for layer in cpnorm.canonical_layers(self.model).values():
            layer.columns_are_unit = False  # from here on nobody promises to renormalise

    def set_learning_rate(self, progress: float) -> None:
        """A constant one is set once; others before every step."""
        if (self.config.schedule != "constant" or self.config.warmup) or progress == 0:
            value = learning_rate(self.config, progress)
            for group in self.optimizer.param_groups:
                scaled = value * group.get("scale", 1.0)  # none in a checkpoint of an older version
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(scaled)
                else:
                    group["lr"] = scaled

    def measure(self) -> Readings:
        """What an epoch's line tells, asked of the device without waiting for it."""
        sums = [self.step.totals(), self.step.tested_fast(self.data.test_images, self.data.test_labels)]
        if self.held_out:
            sums.append(self.step.tested_fast(*self.held_out))
        return Readings([*sums, *layer_readings(self.model)])

    def finish_epoch(self, started: float, readings: Readings) -> None:
        """Write the epoch's line, and look for trouble."""
        found = readings.values()
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

    def stopped_early(self) -> bool:
        """Whether the validation (without one: the training) loss has not improved for the epochs allowed."""
        patience = self.config.early_stopping
        if not patience or len(self.history) <= patience:
            return False
        losses = [line.get("validation_loss", line["loss"]) for line in self.history]
        return min(losses[-patience:]) >= min(losses[:-patience])

    def evaluate(self, images: Tensor, labels: Tensor, model: nn.Module | None = None) -> tuple[float, float]:
        """Mean loss and accuracy in percent, of the run's model or of another on its device."""
        return means(self.step.tested(self.model if model is None else model, images, labels).tolist())

    def prepare(self, images: Tensor) -> Tensor:  # (N, C, H, W) uint8 -> float
        """Normalised, in the layout the device likes."""
        x = normalize(images, self.data.mean, self.data.std, torch.float32)
        return x.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else x

    # --- the whole state ---

    def state(self) -> dict[str, Any]:
        """All of it, to go on with bit for bit on the CPU."""
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
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from ``state()``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.batch, self.seconds = state["epoch"], state["batch"], state["seconds"]
        self.history, self.diverged = state["history"], state["diverged"]
        self.initial_lambdas = state["initial_lambdas"]
        self.step.load_state(state["step"], self.epoch)
        self._wait()

    def record(self) -> dict[str, Any]:
        """What is worth keeping of a run, as plain JSON."""
        curve = {
            key: [line[key] for line in self.history]
            for key in ("loss", "train_accuracy", "test_loss", "test_accuracy", "validation_accuracy")
            if self.history and key in self.history[0]
        }
        tests = curve.get("test_accuracy", [])
        return {
            "config": self.config.to_json(),
            "weights": self.weights,
            "final": tests[-1] if tests else None,
            "best": max(tests) if tests else None,
            "best_epoch": 1 + tests.index(max(tests)) if tests else None,
            "diverged": self.diverged,
            "stopped_early": self.stopped_early(),
            "epochs": self.epoch,
            "seconds": round(self.seconds, 2),
            "precision": self.precision,  # what "auto" came to
            "data_sha256": self.whole_data.sha256 or None,
            "step": self.step.mode,
            "curve": curve,
            "environment": environment(),
        }


# --- running one or several -----------------------------------------------------------------------------------------


@dataclass
class Stop:
    """Whether to leave: after a signal, or at a deadline."""

    deadline: float | None = None  # of time.monotonic()
    reason: str = ""
    _seen: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.reason = "the time limit was reached"
        return bool(self.reason)

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """SIGINT and SIGTERM ask for a stop; a second one is taken at its word."""

        def handle(number: int, frame: Any) -> None:
            if self._seen:
                raise KeyboardInterrupt
            self._seen.append(number)
            self.reason = f"{signal.Signals(number).name} was received"

        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def fit(
    config: Config,
    *,
    out: str | Path | None = None,
    data: ImageSet | None = None,
    options: Options | None = None,
    model: nn.Module | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
    progress: Any = None,
) -> Trainer:
    """Train one run to its end, or until told to stop; with a folder it goes on where it was stopped or killed."""
    options = options or Options()
    data = data if data is not None else load(config.data, options.data_dir)
    with ExitStack() as stack:
        folder = RunFolder(out) if out is not None else None
        if folder and process()[0] == 0:
            stack.enter_context(folder.claimed(config))
            if folder.record() is not None:
                raise RunError(f"{folder.path} holds a finished run")
        resumes = folder is not None and folder.has_checkpoint()
        trainer = Trainer(config, data, options, model=model, progress=progress, resumes=resumes)
        drive([(trainer, folder)], observers=observers, stop=stop)
    return trainer


def drive(
    runs: Sequence[tuple[Trainer, RunFolder | None]],
    *,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
    finished: Callable[[Trainer], None] = lambda trainer: None,
    more: Callable[[Trainer], dict[str, Any]] = lambda trainer: {},
) -> None:
    """Take the steps of several runs in turn, so that they share a GPU; save now and then, at the end and on a stop.

    ``finished`` hears of each run that comes to its end, as soon as it is stored, with ``more`` in its record. An
    observer that fails is left out from then on.
    """
    stop = Stop() if stop is None else stop  # one that nobody has stopped yet is false
    active: list[tuple[Trainer, RunFolder | None, Iterator[bool]]] = []
    for trainer, folder in runs:
        if folder and trainer.rank == 0:
            folder.keep_data(trainer.whole_data)
        if folder and (state := folder.load_checkpoint(trainer.device)) is not None:
            try:
                trainer.load_state(state)
            except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                text = f"{folder / 'checkpoint.pt'} does not fit this run: {type(error).__name__}: {error}"
                raise RunError(" ".join(text.split())[:400]) from error
        active.append((trainer, folder if trainer.rank == 0 else None, trainer.run()))
    saved, watching, turn = time.monotonic(), list(observers), 0
    with stop.listening():
        while active and not _all_stop(stop, active[0][0], turn):
            turn += 1
            for entry in list(active):
                trainer, folder, steps = entry
                with trainer.step.stream():
                    epoch_done = next(steps, None)
                if epoch_done is None:
                    active.remove(entry)
                    if folder:
                        folder.finish(trainer.model, {**trainer.record(), **more(trainer)})
                        finished(trainer)
                elif epoch_done:
                    if folder:
                        folder.write_metrics(trainer.history)
                    watching = [observer for observer in watching if _told(observer, trainer)]
            if time.monotonic() - saved > min(t.options.checkpoint_every for t, _ in runs):
                _save_all(active)
                saved = time.monotonic()
    _save_all(active)
    if any(trainer.world > 1 for trainer, _ in runs):
        distributed.barrier()  # nobody takes the connections down while another still uses them


AGREE_EVERY = 10  # steps


def _all_stop(stop: Stop, trainer: Trainer, turn: int) -> bool:
    """Processes that train together leave after the same step, whichever of them was asked to."""
    if trainer.world == 1:
        return bool(stop)
    if turn % AGREE_EVERY:
        return False
    asked = torch.tensor(float(bool(stop)), device=trainer.device)
    distributed.all_reduce(asked, distributed.ReduceOp.MAX)
    if asked.item() and not stop.reason:
        stop.reason = "another process was asked to stop"
    return bool(asked.item())


def _told(observer: Observer, trainer: Trainer) -> bool:
    """Whether an observer could take the last epoch; a full disk or a server that is away must not end a training."""
    try:
        observer(trainer, trainer.history[-1])
    except Exception as error:
        name = getattr(observer, "__name__", type(observer).__name__)
        log.warning("%s is told no more: %s: %s", name, type(error).__name__, error)
        return False
    return True


def _save_all(active: Sequence[tuple[Trainer, RunFolder | None, Any]]) -> None:
    for trainer, folder, _ in active:
        if folder and not trainer.diverged:  # the last good checkpoint stays
            folder.save_checkpoint(trainer.state())
            folder.write_metrics(trainer.history)
