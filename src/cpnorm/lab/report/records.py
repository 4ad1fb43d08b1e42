"""Read a results folder: runs by row and ranks by layer. Required parts are checked, optional ones may be odd."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from cpnorm.lab.training.jsonfiles import parse_object, read_bytes
from cpnorm.lab.training.records import read_records

LARGEST = 2**53  # of a count; larger ones are not exact as floats


class RecordError(ValueError):
    """Raised for a record that cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class Run:
    """One finished run; accuracies are in percent of the test set."""

    table: str
    row: str  # "cifar10/none-sgd"
    seed: int
    accuracy_last: float | None  # of the last epoch; None only where the run diverged
    accuracy_best: float | None
    parameters: int | None
    diverged: str | None
    curve: tuple[float, ...]  # test accuracy of every epoch
    seconds: float
    raw: Mapping[str, Any]  # the whole record: settings, environment, lambdas, histograms, explorer

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the settings as stored; another version of cpnorm may have had other ones."""
        return self._part("config")

    @property
    def truncation_settings(self) -> Mapping[str, Any]:
        """Return how the network was truncated; empty for a run that trains."""
        return self._part("truncation_settings")

    @property
    def device_seconds(self) -> float:
        """Return the run's share of the time of a device that several runs may have used."""
        sharing = self.raw.get("parallel_runs")
        return self.seconds / sharing if isinstance(sharing, int) and 0 < sharing < LARGEST else self.seconds

    @property
    def accuracy_before_truncation(self) -> float | None:
        """Return the accuracy of the network that was truncated."""
        return self._around_truncation("accuracy_before")

    @property
    def accuracy_after_truncation(self) -> float | None:
        """Return the accuracy of the truncated network before its fine-tuning."""
        return self._around_truncation("accuracy_cut")

    def _around_truncation(self, key: str) -> float | None:
        value = self._part("truncation_result").get(key)
        return float(value) if isinstance(value, int | float) and 0 <= value <= 100 else None

    def _part(self, key: str) -> Mapping[str, Any]:
        part = self.raw.get(key)
        return part if isinstance(part, dict) else {}


@dataclass(frozen=True)
class RankEstimate:
    """The rank of one layer, estimated by decompositions of growing rank."""

    table: str
    layer: str
    rank: int
    curve: tuple[tuple[float, float], ...]  # (rank, fit)


@dataclass
class Records:
    """The content of a results folder."""

    runs: dict[str, list[Run]] = field(default_factory=dict)  # by row, ordered by seed
    estimates: dict[tuple[str, str], dict[int, RankEstimate]] = field(default_factory=dict)  # by table, layer and seed
    explanations: dict[str, str] = field(default_factory=dict)  # by row: why it differs from the paper
    environments: list[Mapping[str, Any]] = field(default_factory=list)  # of every record that has one

    @property
    def ranks(self) -> dict[tuple[str, str], RankEstimate]:
        """Return one estimated rank by table and layer: that of the first seed."""
        return {key: by_seed[min(by_seed)] for key, by_seed in self.estimates.items()}

    def finished(self, row: str) -> list[Run]:
        """Return the runs of a row that did not diverge."""
        return [run for run in self.runs.get(row, []) if run.diverged is None]

    def all_runs(self) -> list[Run]:
        """Return the runs of all rows."""
        return [run for runs in self.runs.values() for run in runs]


def that_learned(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose best epoch reaches at least half the median of all best epochs.

    A mean that includes a run stuck at chance level describes none of the runs.
    """
    middle = median(run.accuracy_best or 0.0 for run in runs) if runs else 0.0
    return [run for run in runs if (run.accuracy_best or 0.0) > middle / 2]


def without_trials(records: Records) -> Records:
    """Return the records without runs that were tested on held-out training images to choose settings."""
    runs = {key: [run for run in found if not run.config.get("validation")] for key, found in records.runs.items()}
    return replace(records, runs={key: found for key, found in runs.items() if found})


def read_results(folder: str | Path) -> Records:
    """Read every ``*.jsonl`` of a folder; of two records for one row and seed the later one counts.

    ``explanations.json``, if present, maps a row to the tested reason why it differs from the paper.

    Raises:
        RecordError: the folder does not exist, or a record lacks a required part.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"expected a folder of results, but {folder} is not a folder")
    runs: dict[tuple[str, int], Run] = {}
    records = Records()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            for number, line in read_records(path):
                try:
                    if "rank" in line and "test_accuracy_last" not in line:
                        estimate = _estimate(line)
                        by_seed = records.estimates.setdefault((estimate.table, estimate.layer), {})
                        by_seed[_count(line.get("seed", 0), "seed")] = estimate
                    else:
                        run = _run(line)
                        runs[run.row, run.seed] = run
                except (ValueError, TypeError, OverflowError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                if isinstance(line.get("environment"), dict):
                    records.environments.append(line["environment"])
        except ValueError as error:
            raise RecordError(str(error)) from error
    for key in sorted(runs):
        records.runs.setdefault(key[0], []).append(runs[key])
    records.explanations = _explanations(folder / "explanations.json")
    return records


def _run(line: dict[str, Any]) -> Run:
    diverged = line.get("diverged")
    if diverged is not None and not isinstance(diverged, str):
        raise ValueError(f"expected diverged to be null or a string, got {reprlib.repr(diverged)}")
    curve = line.get("curve")
    parameters = line.get("parameters")
    return Run(
        table=_text(line, "table"),
        row=_text(line, "row"),
        seed=_count(line.get("seed"), "seed"),
        accuracy_last=_accuracy(line, "test_accuracy_last", diverged),
        accuracy_best=_accuracy(line, "test_accuracy_best", diverged),
        parameters=None if parameters is None else _count(parameters, "parameters"),
        diverged=diverged,
        curve=tuple(numbers(curve.get("test_accuracy")) if isinstance(curve, dict) else ()),
        seconds=sum(numbers([line.get("seconds") or 0.0])),
        raw=line,
    )


def _estimate(line: dict[str, Any]) -> RankEstimate:
    points = [(float(rank), float(fit)) for rank, fit in line.get("curve") or ()]
    curve = tuple(point for point in points if all(map(math.isfinite, point)))
    layer = _text(line, "row").rpartition("/")[2]  # "alexnet-ranks/features.3" or "features.3"
    return RankEstimate(_text(line, "table"), layer, _count(line.get("rank"), "rank"), curve)


def _accuracy(line: dict[str, Any], key: str, diverged: str | None) -> float | None:
    value = line.get(key)
    if isinstance(value, int | float) and 0 <= value <= 100:
        return float(value)
    if diverged is None:
        raise ValueError(f"expected {key} to be an accuracy from 0 to 100, got {reprlib.repr(value)}")
    return None


def _text(line: dict[str, Any], key: str) -> str:
    if not isinstance(line.get(key), str) or not line[key]:
        raise ValueError(f"expected {key} to be a string, got {reprlib.repr(line.get(key))}")
    return line[key]


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"expected {key} to be a whole number from 0 to 2^53, got {reprlib.repr(value)}")
    return value


def _explanations(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        values = parse_object(read_bytes(path))
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    if bad := [key for key, value in values.items() if not isinstance(value, str)]:
        raise RecordError(f"{path}: expected a text for {reprlib.repr(bad[0])}, got {reprlib.repr(values[bad[0]])}")
    return values


def numbers(values: Any) -> list[float]:
    """Return an optional part of a record as finite floats, or nothing where one of them is not a finite number."""
    try:
        found = [float(value) for value in values or ()]
    except (TypeError, ValueError, OverflowError):
        return []
    return found if all(map(math.isfinite, found)) else []
