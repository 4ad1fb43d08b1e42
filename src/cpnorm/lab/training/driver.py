"""Run trainers to their end: one or several side by side, with checkpoints, signals, time limits and observers."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from cpnorm.lab.training.config import Config
from cpnorm.lab.training.forward import flags_restored
from cpnorm.lab.training.runs import START_FILES, RunError, RunFolder
from cpnorm.lab.training.setup import process
from cpnorm.lab.training.trainer import Trainer

log = logging.getLogger("cpnorm.lab")

AGREE_EVERY = 10  # steps between two agreements of several processes on whether to stop
LIFE_SIGN_EVERY = 10.0  # seconds between two calls of observers' ``working`` within an epoch
Observer = Callable[[Trainer, dict[str, Any]], None]


@dataclass
class Stop:
    """A request to stop, made by a signal or by a deadline; true once it was made."""

    deadline: float | None = None  # of time.monotonic()
    reason: str = ""
    _seen: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.reason = "the time limit was reached"
        return bool(self.reason)

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take SIGINT and SIGTERM as a request to stop; a second signal interrupts at once."""

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


def run_to_end(
    folder: RunFolder,
    config: Config,
    begin: Callable[[], Trainer],
    *,
    extra: dict[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Start or resume the run of a folder and train it to its end, or until ``stop``.

    Args:
        folder: the folder of the run; a finished run is not run again.
        config: its settings; a folder with other settings is an error.
        begin: makes the trainer. It is not called for a finished run.
        extra: settings beyond the config that must agree: those of a truncation.
        observers: called with the trainer and the metrics of each finished epoch.
        stop: a request to stop, which may come at any time.

    Returns:
        The record of the run; with "stopped" and the reason if it was stopped before its end.
    """
    stop = stop if stop is not None else Stop()
    chief, new = process()[0] == 0, not (folder / "config.json").exists()
    with stop.listening(), folder.claimed(config, extra) if chief else nullcontext():
        record = folder.record()
        if record is None:
            try:
                trainer = begin()
            except BaseException:
                if chief and new:  # a failed start must not stand in the way of other settings
                    folder.discard(START_FILES)
                raise
            drive([(trainer, folder)], observers=observers, stop=stop)
            record = trainer.record()
            if not trainer.finished or (chief and folder.record() is None):
                record["stopped"] = stop.reason
    return record


def drive(
    runs: Sequence[tuple[Trainer, RunFolder | None]],
    *,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
    finished: Callable[[Trainer], None] = lambda trainer: None,
    more: Callable[[Trainer], dict[str, Any]] = lambda trainer: {},
) -> None:
    """Take the steps of several runs in turn, so that they share a GPU; save regularly, at the end and on a stop.

    ``finished`` is called for each run as soon as it is stored, with ``more`` in its record. An observer that raises is
    dropped with a warning. An observer with a method ``working`` is also called within long epochs.
    """
    stop = Stop() if stop is None else stop  # a Stop without a request is false
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
    watching, turn = list(observers), 0
    saved = told = time.monotonic()
    with _together([trainer for trainer, _ in runs]):
        with stop.listening(), flags_restored():
            while active and not _all_stop(stop, active[0][0], turn):
                turn += 1
                for entry in list(active):
                    trainer, folder, steps = entry
                    with trainer.step.stream():
                        epoch_done = next(steps, None)
                    if epoch_done is None:
                        active.remove(entry)
                        if folder:
                            folder.finish(trainer.model, {**trainer.record(), **more(trainer)}, trainer.best_network())
                            finished(trainer)
                    elif epoch_done:
                        if folder:
                            folder.write_metrics(trainer.history)
                        watching = [observer for observer in watching if _told(observer, trainer)]
                now = time.monotonic()
                if now - told > LIFE_SIGN_EVERY:
                    told = now
                    for observer in watching:
                        if hasattr(observer, "working"):
                            observer.working()
                if now - saved > min(t.options.checkpoint_every for t, _ in runs):
                    _save_all(active)
                    saved = time.monotonic()
        _save_all(active)


@contextmanager
def _together(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Average gradients with other processes within the block, and leave it when they do."""
    for trainer in trainers:
        trainer.step.join()
    try:
        yield
        if any(trainer.world > 1 for trainer in trainers):
            distributed.barrier()  # no process closes the connections while another still uses them
    finally:
        for trainer in trainers:
            trainer.step.leave()


def _all_stop(stop: Stop, trainer: Trainer, turn: int) -> bool:
    """Return whether to stop; processes that train together agree on it, so that all leave after the same step."""
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
    """Call an observer; return False if it raised: a full disk or a server that is away must not end a training."""
    try:
        observer(trainer, trainer.history[-1])
    except Exception as error:
        name = getattr(observer, "__name__", type(observer).__name__)
        log.warning("%s is not called any more: %s: %s", name, type(error).__name__, error)
        return False
    return True


def _save_all(active: Sequence[tuple[Trainer, RunFolder | None, Any]]) -> None:
    for trainer, folder, _ in active:
        if folder and not trainer.diverged:  # the last good checkpoint stays
            folder.save_checkpoint(trainer.state())
            folder.write_metrics(trainer.history)
