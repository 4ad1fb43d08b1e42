"""Progress of a run: one line that a terminal redraws, and lines at intervals elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from cpnorm.lab.training.trainer import Trainer

LINE_GAP, SHORTEST_BAR = "  ", 4
QUIET = 10.0  # seconds between two lines where nothing can be redrawn


class Watch:
    """Show the progress of one run: ``with Watch(console) as watch: watch.follow(trainer)``; it is an observer, too."""

    def __init__(self, console: Console, silent: bool = False) -> None:
        self.console, self.silent, self.note = console, silent, "reading the data"
        self._trainer: Trainer | None = None
        self._started, self._spoken, self._epochs = 0.0, time.monotonic(), 0
        draws = console.is_terminal and not silent
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if draws else None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def preparing(self, layer: str, done: int, total: int) -> None:
        """Take the progress of ``canonical_norm``."""
        self.note = f"canonical form of {layer} ({done + 1} of {total})" if done < total else "starting"
        if not (self._live or self.silent) and self._quiet():
            self._print(self.note)

    def follow(self, trainer: Trainer) -> None:
        """Show the progress of this run from now on."""
        self._trainer, self._started = trainer, time.monotonic()

    def __call__(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Print an epoch where nothing can be redrawn: the first, the last, and others at intervals."""
        if not (self._live or self.silent) and (trainer.finished or self._epochs == 0 or self._quiet()):
            self._print(f"epoch {line['epoch']}/{trainer.config.epochs}", *results(line), *self._pace())
        self._epochs += 1

    def working(self) -> None:
        """Print a sign of life within an epoch that takes long, where nothing can be redrawn."""
        trainer = self._trainer
        if trainer is not None and not (self._live or self.silent) and self._quiet():
            epoch = f"epoch {trainer.epoch + 1}/{trainer.config.epochs}"
            self._print(epoch, f"step {trainer.batch:,} of {trainer.batches:,}", *self._pace())

    def _quiet(self) -> bool:
        return time.monotonic() - self._spoken > QUIET

    def _print(self, *parts: str) -> None:
        self._spoken = time.monotonic()
        self.console.print(LINE_GAP.join(filter(None, parts)), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        trainer = self._trainer
        if trainer is None:
            return Text(self.note)
        done, total = trainer.epoch * trainer.batches + trainer.batch, trainer.config.epochs * trainer.batches
        epoch = f"epoch {min(trainer.epoch + 1, trainer.config.epochs)}/{trainer.config.epochs}"
        images, left = self._pace()
        found = results(trainer.history[-1]) if trainer.history else []
        # Least important first: what does not fit is left out, since a second line would flicker.
        parts = {"epoch": epoch, **{part.partition(" ")[0]: part for part in found}, "images": images, "left": left}
        for part in ("images", "train", "loss", "validation", "left", "test"):
            if len(LINE_GAP.join(filter(None, parts.values()))) + SHORTEST_BAR + len(LINE_GAP) > self.console.width:
                parts.pop(part, None)
        text = LINE_GAP.join(part for key, part in parts.items() if part and key != "epoch")
        room = self.console.width - len(epoch) - len(text) - 2 * len(LINE_GAP)
        row = Table.grid(padding=(0, len(LINE_GAP)))
        for _ in range(3):
            row.add_column(no_wrap=True)
        bar = ProgressBar(total=max(total, 1), completed=done, width=max(SHORTEST_BAR, min(24, room)))
        row.add_row(epoch, bar, text)
        return row

    def _pace(self) -> tuple[str, str]:
        """Return images per second, evaluation included, and the time that the rest takes at that rate."""
        trainer = self._trainer
        if trainer is None:
            return "", ""
        if trainer.history:
            epoch = trainer.history[-1]["seconds"]
        else:
            epoch = (time.monotonic() - self._started) * trainer.batches / max(trainer.batch, 1)
        left = epoch * (trainer.config.epochs - trainer.epoch - trainer.batch / trainer.batches)
        return f"{len(trainer.data.train_labels) / max(epoch, 1e-9):,.0f} images/s", f"{duration(left)} left"


def results(line: dict[str, Any]) -> list[str]:
    """Return loss and accuracies of an epoch as short texts."""
    kinds = [kind for kind in ("train", "validation", "test") if f"{kind}_accuracy" in line]
    return [f"loss {line['loss']:.4f}", *(f"{kind} {line[f'{kind}_accuracy']:.2f} %" for kind in kinds)]


def duration(seconds: float) -> str:
    """Format a time as hours, minutes and seconds.

    >>> duration(75), duration(7325)
    ('1:15', '2:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
