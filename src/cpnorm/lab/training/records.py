"""Read the records of finished runs, whatever version of cpnorm wrote them.

A record is one JSON object: ``record.json`` of a run folder, and a line of ``results/*.jsonl``. Records are never
rewritten, so keys that were renamed since are translated here, once, for every reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cpnorm.lab.training.jsonfiles import read_lines

RENAMED = {
    "compression": "truncation_settings",  # what was asked for
    "compress": "truncation_result",  # what it did
    "final": "test_accuracy_last",
    "best": "test_accuracy_best",
    "step": "step_mode",
    "at_once": "parallel_runs",
    "weights": "parameters",
}


def with_current_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record in which every key has its current name.

    >>> with_current_keys({"row": "mnist/cp-sgd", "final": 98.1, "at_once": 8})
    {'row': 'mnist/cp-sgd', 'test_accuracy_last': 98.1, 'parallel_runs': 8}
    """
    return {RENAMED.get(key, key): value for key, value in record.items()}


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the record of every line of a ``.jsonl`` file, with current keys.

    A last line without its end is skipped: the process that wrote it was killed, or the disk was full.

    Raises:
        ValueError: a line is not a JSON object; the message names the file and the line.
    """
    for number, record in read_lines(path):
        yield number, with_current_keys(record)
