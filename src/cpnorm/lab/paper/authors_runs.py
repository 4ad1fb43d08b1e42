"""The authors' own MNIST runs, epoch by epoch, from the logs in an early commit of their repository."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("authors_mnist.json")
Curves = Mapping[str, Sequence[float]]  # "loss" (training), "test_loss" and "test_accuracy" of every epoch


@cache
def authors_runs() -> dict[str, tuple[Curves, ...]]:
    """Return the curves of the authors' runs by row, under the names that our records have for them.

    >>> {row: len(runs) for row, runs in authors_runs().items()}["mnist/cp-rmsprop"]
    8
    """
    content = json.loads(FILE.read_text())
    return {
        row: tuple(
            {"loss": run["train_loss"], "test_loss": run["test_loss"], "test_accuracy": run["test_accuracy"]}
            for run in runs
        )
        for row, runs in content["runs"].items()
    }
