"""Our MNIST runs beside the authors' own: do the curves agree, and how do they look on top of each other?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from cpnorm.lab.paper.authors_runs import Curves, authors_runs
from cpnorm.lab.report.drawing import INK, style
from cpnorm.lab.report.statistics import Difference, summarize, welch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = {"loss": "training loss", "test_accuracy": "test accuracy, %"}
MOST_PERMUTATIONS = 20_000


@dataclass(frozen=True)
class RowBesideAuthors:
    """How the runs of a row compare with the authors' own."""

    row: str
    ours: int  # runs
    theirs: int
    last: Difference | None  # test accuracy of the last epoch, ours minus theirs
    curves: Mapping[str, float | None]  # p of ``same_curves`` by metric; None where nothing can be tested


def compare_rows(runs: Mapping[str, Sequence[Curves]]) -> list[RowBesideAuthors]:
    """Compare runs with the authors' runs of the same rows; rows with fewer than two runs on a side are left out.

    All of the authors' cuts start from one network, so that their runs are a sample of one: cuts are not tested.
    """
    found = []
    for row, theirs in authors_runs().items():
        ours = runs.get(row, ())
        if len(ours) < 2 or len(theirs) < 2:
            continue
        samples = [summarize(run["test_accuracy"][-1] for run in side) for side in (ours, theirs)]
        last = welch(samples[0], samples[1]) if samples[0] and samples[1] else None
        curves: dict[str, float | None] = dict.fromkeys(METRICS)
        if is_cut(row):
            last = Difference(last.value) if last else None
        else:
            curves = {metric: same_curves(_matrix(ours, metric), _matrix(theirs, metric)) for metric in METRICS}
        found.append(RowBesideAuthors(row, len(ours), len(theirs), last, curves))
    return found


def is_cut(row: str) -> bool:
    """Return True for a row whose runs start from a truncated network."""
    return row.startswith("compress-")


def same_curves(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> float:
    """Return the p-value of a permutation test that two sets of curves (runs x epochs) have the same mean curve.

    The statistic is the largest difference of the two means at any epoch in units of the standard deviation over all
    runs there. Whole runs are exchanged between the sides: all ways if there are few, else a sample of them.
    """
    everything = np.concatenate([ours, theirs])
    n = len(ours)
    spread = everything.std(axis=0, ddof=1)
    spread[spread == 0] = np.inf
    ways = list(_ways(len(everything), n, seed))
    chosen = np.zeros((len(ways), len(everything)))
    for number, way in enumerate(ways):
        chosen[number, list(way)] = 1
    mean_of_chosen = chosen @ everything / n
    mean_of_others = (everything.sum(axis=0) - chosen @ everything) / len(theirs)
    statistics = (np.abs(mean_of_chosen - mean_of_others) / spread).max(axis=1)
    return float((statistics >= statistics[0] * (1 - 1e-9)).mean())  # the first way is the one observed


def _ways(total: int, n: int, seed: int) -> list[tuple[int, ...]]:
    first = tuple(range(n))
    draw = np.random.default_rng(seed)
    everything = combinations(range(total), n)
    ways = [way for way, _ in zip(everything, range(MOST_PERMUTATIONS + 1), strict=False)]
    if len(ways) > MOST_PERMUTATIONS:
        ways = [first, *(tuple(draw.permutation(total)[:n]) for _ in range(MOST_PERMUTATIONS - 1))]
    return ways


def _matrix(runs: Sequence[Curves], metric: str) -> np.ndarray:
    epochs = min(len(run[metric]) for run in runs)
    return np.array([list(run[metric])[:epochs] for run in runs], dtype=float)


@style()
def draw_curves(runs: Mapping[str, Sequence[Curves]], rows: Sequence[str]) -> Figure:
    """Draw our curves over the authors': mean and range of the runs of each side, a line of panels per metric."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(rows), 5.6), layout="constrained")
    panels = figure.subplots(len(METRICS), len(rows), squeeze=False)
    sides = (("the authors", INK["s1"], authors_runs()), ("ours", INK["s2"], runs))
    for column, row in enumerate(rows):
        for line, (metric, label) in enumerate(METRICS.items()):
            panel = panels[line][column]
            for name, colour, side in sides:
                if not side.get(row):
                    continue
                values = _matrix(side[row], metric)
                epochs = range(1, values.shape[1] + 1)
                panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.25, linewidth=0)
                panel.plot(epochs, values.mean(0), color=colour, label=f"{name}, {len(values)} runs")
            panel.set(title=row if line == 0 else None, xlabel="epoch", ylabel=label)
            if metric == "loss":
                panel.set_yscale("log")
        panels[0][column].legend(fontsize="small", frameon=False)
    return figure
