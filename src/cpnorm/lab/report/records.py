"""results/*.jsonl -> runs by row, estimated ranks by layer: every line checked, the optional parts left as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cpnorm.lab.training.jsonfiles import parse_object, read_bytes, whole_lines


class RecordError(ValueError):
    """A line that cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class Run:
    """One finished run; accuracies are in percent of the test set."""

    table: str
    row: str  # "cifar10/none-sgd"
    seed: int
    final: float | None  # of the last epoch; None, or not a number, only where the run diverged
    best: float | None
    weights: int | None
    diverged: str | None
    curve: tuple[float, ...]  # test accuracy of every epoch
    seconds: float
    raw: Mapping[str, Any]  # the whole line: settings, environment, lambdas, histograms, explorer

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings as they were stored; a newer or older version may know others than this one."""
        config = self.raw.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def device_seconds(self) -> float:
        """Its part of a device that several runs may have shared."""
        sharing = self.raw.get("at_once")
        return self.seconds / sharing if isinstance(sharing, int) and sharing > 0 else self.seconds

    @property
    def before_the_cut(self) -> float | None:
        """Accuracy of the network that was truncated."""
        return self._around_the_cut("accuracy_before")

    @property
    def right_after_the_cut(self) -> float | None:
        """Accuracy of a truncated network before its fine-tuning."""
        return self._around_the_cut("accuracy_cut")

    def _around_the_cut(self, key: str) -> float | None:
        cut = self.raw.get("compress")
        value = cut.get(key) if isinstance(cut, dict) else None
        return float(value) if isinstance(value, int | float) and 0 <= value <= 100 else None


@dataclass(frozen=True)
class RankEstimate:
    """One layer's rank, estimated by a growing fit."""

    table: str
    layer: str
    rank: int
    curve: tuple[tuple[float, float], ...]  # (rank, fit)


@dataclass
class Records:
    """Everything a results folder holds."""

    runs: dict[str, list[Run]] = field(default_factory=dict)  # by row, in the order of their seeds
    ranks: dict[tuple[str, str], RankEstimate] = field(default_factory=dict)  # by table and layer
    explanations: dict[str, str] = field(default_factory=dict)  # by row: why it differs from the paper, where tested
    environments: list[Mapping[str, Any]] = field(default_factory=list)  # of every line that has one

    def finished(self, row: str) -> list[Run]:
        """The runs of a row that did not diverge."""
        return [run for run in self.runs.get(row, []) if run.diverged is None]

    def all_runs(self) -> list[Run]:
        """Of all rows."""
        return [run for runs in self.runs.values() for run in runs]


def that_learned(runs: Sequence[Run]) -> list[Run]:
    """Those whose best epoch is not far below the others': a mean with one that is lies where no run does."""
    middle = median(run.best or 0.0 for run in runs) if runs else 0.0
    return [run for run in runs if (run.best or 0.0) > middle / 2]


def read_results(folder: str | Path) -> Records:
    """All ``*.jsonl`` of a folder; of two lines for one row and seed the later counts.

    ``explanations.json``, where there is one, maps a row to the tested reason why it differs from the paper.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"expected a folder of results, but {folder} is none")
    runs: dict[tuple[str, int], Run] = {}
    records = Records()
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(whole_lines(read_bytes(path)), 1):
            if not text.strip():
                continue
            try:
                line = parse_object(text)
                if "rank" in line and "final" not in line:
                    estimate = _estimate(line)
                    records.ranks[estimate.table, estimate.layer] = estimate
                else:
                    run = _run(line)
                    runs[run.row, run.seed] = run
            except (ValueError, TypeError) as error:
                raise RecordError(f"{path}, line {number}: {error}") from error
            if isinstance(line.get("environment"), dict):
                records.environments.append(line["environment"])
    for key in sorted(runs):
        records.runs.setdefault(key[0], []).append(runs[key])
    records.explanations = _explanations(folder / "explanations.json")
    return records


def _run(line: dict[str, Any]) -> Run:
    diverged = line.get("diverged")
    if diverged is not None and not isinstance(diverged, str):
        raise ValueError(f"expected diverged to be null or a string, got {diverged!r}")
    final, best = _accuracy(line, "final", diverged), _accuracy(line, "best", diverged)
    curve = line.get("curve")
    weights = line.get("weights")
    return Run(
        table=_text(line, "table"),
        row=_text(line, "row"),
        seed=_whole(line.get("seed"), "seed"),
        final=final,
        best=best,
        weights=None if weights is None else _whole(weights, "weights"),
        diverged=diverged,
        curve=tuple(numbers(curve.get("test_accuracy")) if isinstance(curve, dict) else ()),
        seconds=sum(numbers([line.get("seconds") or 0.0])),
        raw=line,
    )


def _estimate(line: dict[str, Any]) -> RankEstimate:
    curve = tuple((float(rank), float(fit)) for rank, fit in line.get("curve") or ())
    layer = _text(line, "row").rpartition("/")[2]  # "alexnet-ranks/features.3" or "features.3"
    return RankEstimate(_text(line, "table"), layer, _whole(line.get("rank"), "rank"), curve)


def _accuracy(line: dict[str, Any], key: str, diverged: str | None) -> float | None:
    value = line.get(key)
    if isinstance(value, int | float) and 0 <= value <= 100:
        return float(value)
    if diverged is None:
        raise ValueError(f"expected {key} to be an accuracy from 0 to 100, got {value!r}")
    return None


def _text(line: dict[str, Any], key: str) -> str:
    if not isinstance(line.get(key), str) or not line[key]:
        raise ValueError(f"expected {key} to be a string, got {line.get(key)!r}")
    return line[key]


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected {key} to be a whole number, got {value!r}")
    return value


def _explanations(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        values = parse_object(read_bytes(path))
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    if bad := [key for key, value in values.items() if not isinstance(value, str)]:
        raise RecordError(f"{path}: expected a text for {bad[0]}, got {values[bad[0]]!r}")
    return values


def numbers(values: Any) -> list[float]:
    """The optional parts of a line as floats; nothing where one is missing or infinite."""
    try:
        found = [float(value) for value in values or ()]
    except (TypeError, ValueError):
        return []
    return found if all(map(math.isfinite, found)) else []
