"""A run on behalf of a command: begun or gone on with, watched, stopped by signals and time limits, and shown."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from cpnorm.lab.cli.options import parse_seconds
from cpnorm.lab.cli.watch import Watch
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import to_json

if TYPE_CHECKING:
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Observer, Trainer

DONE, FAILED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 3, 75, 130
Start = Callable[["RunFolder", Watch], "Trainer"]


def carry_out(
    out: Path,
    config: Config,
    start: Start,
    *,
    extra: dict[str, Any] | None = None,
    time_limit: str | None = None,
    log_to: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Begin a run or go on with it, to its end or a stop, and show the result; returns the exit code."""
    from cpnorm.lab.cli.observers import OBSERVERS
    from cpnorm.lab.training.compression import complete
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Stop

    stop = Stop(time.monotonic() + parse_seconds(time_limit) if time_limit else None)
    chief = os.environ.get("RANK", "0") == "0"  # of the processes torchrun may have started
    folder, console = RunFolder(out), messages()
    announce_warnings(console)
    with Watch(console, silent=as_json or not chief) as watch:

        def begin() -> Trainer:
            trainer = start(folder, watch)
            watch.follow(trainer)
            return trainer

        observers: list[Observer] = [watch]
        observers += [OBSERVERS[name](folder.path) for name in log_to if chief]
        record = complete(folder, config, begin, extra=extra, observers=observers, stop=stop)
    if as_json and chief:
        print_json({"run": str(out), **record})
    elif chief and "stopped" in record:
        where = f"epoch {record['epochs'] + 1} of {config.epochs}"
        text = f"stopped in {where}: {stop.reason}; {out} has all of it: the same command goes on from there"
        console.print(text, soft_wrap=True)
    elif chief:
        typer.echo(f"{out}: {in_words(record)}")
    return STOPPED if "stopped" in record else DIVERGED if record["diverged"] else DONE


def in_words(record: dict[str, Any]) -> str:
    """The record of a finished run."""
    if record["diverged"]:
        return f"diverged, {record['diverged']}"
    if record["final"] is None:
        return f"not trained, {record['weights']:,} weights"
    cut = record.get("compress")
    before = f", {cut['accuracy_cut']:.2f} % before fine-tuning" if cut else ""
    best = f"best {record['best']:.2f} % in epoch {record['best_epoch']}{before}"
    return f"{record['final']:.2f} % of the test set ({best}), {record['weights']:,} weights"


# --- saying things ----------------------------------------------------------------------------------------------------


def messages() -> Console:
    """Progress, messages and errors go to standard error, results to standard output."""
    return Console(stderr=True, highlight=False)


def announce_warnings(console: Console) -> None:
    """What the lab logs, such as a fallback, is shown without disturbing a line that is being redrawn."""
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.basicConfig(handlers=[handler], format="%(message)s", force=True)


def print_json(value: Any) -> None:
    """One JSON value."""
    typer.echo(to_json(value))
