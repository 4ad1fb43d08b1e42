"""What ``cpnorm shrink`` says while it works: the step, how far it has come, and how long it will still take."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDE = 36  # characters of a step's name beside its bar, so that both fit into 80 columns
TOLD_SECONDS, SURE_SECONDS = 15.0, 3.0  # between lines about one step; after which its end is foretold


class Steps:
    """Tell the user what is being done, and how long it takes: as a bar on a terminal, else in lines."""

    def __init__(self, console: Console, silent: bool) -> None:
        columns = (TextColumn(f"{{task.description:{WIDE}.{WIDE}}}"), BarColumn(12), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
        self.bar = Progress(*columns, *times, console=console, disable=silent or not console.is_terminal)
        self.task = self.bar.add_task("", left="")
        self.console = None if silent else console
        self.prefix = ""  # in front of every step, such as the budget it belongs to
        self.started = time.monotonic()
        self.step, self.since, self.told = "", self.started, self.started

    def __enter__(self) -> Steps:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        if self.console is not None and line:
            self.console.print(line, soft_wrap=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        what, now = self.prefix + what, time.monotonic()
        step = what.partition(": ")[0] if not self.prefix else ": ".join(what.split(": ")[:2])
        is_new = step != self.step
        if is_new:
            self.step, self.since, self.told = step, now, now
        left = remaining(now - self.since, done, total)
        self.bar.update(self.task, description=_shortened(what), completed=done, total=total, left=left)
        if self.console is None or self.console.is_terminal or step.endswith("done"):
            return
        if is_new or now - self.told >= TOLD_SECONDS:
            self.told = now
            so_far = f", {done} of {total}{', ' if left else ''}{left}" if done else ""
            self.console.print(f"{now - self.started:6.0f} s  {step}{so_far}", soft_wrap=True)


def remaining(seconds: float, done: int, total: int) -> str:
    """Return about how long a step will still take; nothing before that can be said.

    >>> remaining(30.0, 60, 180), remaining(1.0, 1, 100)
    ('60 s left', '')
    """
    if seconds < SURE_SECONDS or not 0 < done < total:
        return ""
    left = seconds / done * (total - done)
    return f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left"


def _shortened(text: str) -> str:
    """Return a text that fits into the bar: of a long layer name, the end."""
    return text if len(text) <= WIDE else f"{text[: WIDE // 3]}…{text[-(WIDE - WIDE // 3 - 1) :]}"
