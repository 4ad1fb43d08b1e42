"""Execute a run for a command: start or resume it, show its progress, stop it on request, print the result."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from cpnorm.lab.cli.options import RunOptions, parse_seconds
from cpnorm.lab.cli.watch import Watch
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import to_json

if TYPE_CHECKING:
    from cpnorm.lab.training.driver import Observer
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Trainer

DONE, FAILED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 3, 75, 130
Start = Callable[["RunFolder", Watch], "Trainer"]


def execute_run(
    out: Path, config: Config, start: Start, options: RunOptions, *, extra: dict[str, Any] | None = None
) -> int:
    """Start or resume a run, train it to its end or a stop, and print the result; return the exit code."""
    from cpnorm.lab.cli.observers import OBSERVERS
    from cpnorm.lab.training.driver import Stop, run_to_end
    from cpnorm.lab.training.runs import RunFolder

    limit, as_json = options.time_limit, options.as_json
    stop = Stop(time.monotonic() + parse_seconds(limit) if limit else None)
    chief = os.environ.get("RANK", "0") == "0"  # of the processes torchrun may have started
    folder, console = RunFolder(out), messages()
    announce_warnings(console)
    with Watch(console, silent=as_json or not chief) as watch:

        def begin() -> Trainer:
            trainer = start(folder, watch)
            watch.follow(trainer)
            return trainer

        observers: list[Observer] = [watch]
        observers += [OBSERVERS[name](folder.path) for name in options.log_to() if chief]
        record = run_to_end(folder, config, begin, extra=extra, observers=observers, stop=stop)
    if as_json and chief:
        print_json({"run": str(out), **record})
    elif chief and "stopped" in record:
        where = f"epoch {record['epochs'] + 1} of {config.epochs}"
        text = f"stopped in {where}: {stop.reason}; saved in {out}: the same command resumes it"
        console.print(text, soft_wrap=True)
    elif chief:
        typer.echo(f"{out}: {in_words(record)}")
    return STOPPED if "stopped" in record else DIVERGED if record["diverged"] else DONE


def in_words(record: dict[str, Any]) -> str:
    """Return the record of a finished run in one line."""
    if record["diverged"]:
        return f"diverged, {record['diverged']}"
    if record["test_accuracy_last"] is None:
        return f"not trained, {record['parameters']:,} parameters"
    cut = record.get("truncation_result")
    before = f", {cut['accuracy_cut']:.2f} % before fine-tuning" if cut else ""
    best = f"best {record['test_accuracy_best']:.2f} % in epoch {record['best_epoch']}{before}"
    return f"{record['test_accuracy_last']:.2f} % of the test set ({best}), {record['parameters']:,} parameters"


# --- messages ----------------------------------------------------------------------------------------------------


def messages() -> Console:
    """Return the console for progress, messages and errors: standard error. Results go to standard output."""
    return Console(stderr=True, highlight=False)


def announce_warnings(console: Console) -> None:
    """Show what the lab logs, such as a fallback, without disturbing a line that is being redrawn."""
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.basicConfig(handlers=[handler], format="%(message)s", force=True)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    typer.echo(to_json(value))
