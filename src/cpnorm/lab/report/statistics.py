"""The statistics of the report: means and spreads, tests, and the epochs that an accuracy takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIGNIFICANT = 0.05
PUBLISHED_RUNS = 8


@dataclass(frozen=True)
class Summary:
    """A summary of n values; sd is the sample's (n - 1), None for one value."""

    n: int
    mean: float
    sd: float | None
    max: float | None


@dataclass(frozen=True)
class Difference:
    """The mean of one sample minus that of another; p and interval are None where nothing can be tested."""

    value: float
    p: float | None = None
    low: float | None = None  # 95 % confidence interval
    high: float | None = None

    @property
    def significant(self) -> bool:
        """Return True if the difference is significant at 5 %."""
        return self.p is not None and self.p < SIGNIFICANT


def summarize(values: Iterable[float]) -> Summary | None:
    """Return the summary of the values, or None for no values.

    >>> summarize([1.0, 2.0, 3.0])
    Summary(n=3, mean=2.0, sd=1.0, max=3.0)
    """
    values = list(values)
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    return Summary(n, mean, sd, max(values))


def welch(ours: Summary, theirs: Summary) -> Difference:
    """Return ours minus theirs, tested without assuming equal spreads; where neither varies there is no test."""
    value = ours.mean - theirs.mean
    if ours.sd is None or theirs.sd is None or ours.sd == theirs.sd == 0:
        return Difference(value)
    from scipy.stats import ttest_ind_from_stats

    samples = (ours.mean, ours.sd, ours.n, theirs.mean, theirs.sd, theirs.n)
    p = float(ttest_ind_from_stats(*samples, equal_var=False).pvalue)
    half = _interval(ours, theirs)
    return Difference(value, p, value - half, value + half)


def _interval(ours: Summary, theirs: Summary) -> float:
    """Return half the width of the 95 % confidence interval of the difference; SciPy gives none from summaries."""
    from scipy.stats import t as student

    assert ours.sd is not None
    assert theirs.sd is not None
    a, b = ours.sd**2 / ours.n, theirs.sd**2 / theirs.n
    freedom = (a + b) ** 2 / (a**2 / (ours.n - 1) + b**2 / (theirs.n - 1))
    return float(student.ppf(0.975, freedom)) * math.sqrt(a + b)


def mann_whitney(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Return ours minus theirs with a test of ranks: for counts with ties, or values known only to be large."""
    mine, others = summarize(ours), summarize(theirs)
    if mine is None or others is None:
        return None
    value = mine.mean - others.mean
    if mine.n < 2 or others.n < 2:
        return Difference(value)
    if len({*ours, *theirs}) == 1:
        return Difference(value, 1.0)
    from scipy.stats import mannwhitneyu

    return Difference(value, float(mannwhitneyu(ours, theirs).pvalue))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return each p corrected for being one of several (Holm); None stays None and does not count.

    >>> holm([0.01, 0.04, None])
    [0.02, 0.04, None]
    """
    order = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for done, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - done)))
        corrected[index] = largest
    return corrected


def epochs_to_reach(curve: Sequence[float], level: float) -> int:
    """Return the first epoch, counted from 1, that reaches ``level``; one more than there are where none does.

    >>> epochs_to_reach([50.0, 70.0, 90.0], 70.0), epochs_to_reach([50.0], 70.0)
    (2, 2)
    """
    return next((epoch for epoch, value in enumerate(curve, 1) if value >= level), len(curve) + 1)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[Summary]:
    """Return mean and spread at every epoch that all curves have."""
    epochs = min((len(curve) for curve in curves), default=0)
    return [s for epoch in range(epochs) if (s := summarize(curve[epoch] for curve in curves))]


def straightness(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the variance that a straight line explains (R squared); None where there is no such line."""
    xs, ys = {x for x, _ in points}, {y for _, y in points}
    if len(points) < 3 or len(xs) == 1 or len(ys) == 1:
        return None
    from scipy.stats import linregress

    return float(linregress(*zip(*points, strict=True)).rvalue ** 2)
