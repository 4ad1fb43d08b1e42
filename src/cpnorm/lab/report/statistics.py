"""The numbers of the report: means, spreads, Welch's test from summaries, and how many epochs an accuracy takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Summary:
    """Of n values; sd is the sample's (n - 1), None for one value."""

    n: int
    mean: float
    sd: float | None
    max: float | None


@dataclass(frozen=True)
class Difference:
    """Mean of one sample minus that of another, with a test; p and interval are None where nothing can be tested."""

    value: float
    p: float | None = None
    low: float | None = None  # 95 % confidence interval
    high: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the test tells the two apart at 5 %."""
        return self.p is not None and self.p < SIGNIFICANT


def summarize(values: Iterable[float]) -> Summary | None:
    """None for no values.

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
    """Ours minus theirs, tested without assuming equal spreads; where neither varies there is no test."""
    value = ours.mean - theirs.mean
    if ours.sd is None or theirs.sd is None or ours.sd == theirs.sd == 0:
        return Difference(value)
    a, b = ours.sd**2 / ours.n, theirs.sd**2 / theirs.n
    from scipy.stats import t as student

    error = math.sqrt(a + b)
    freedom = (a + b) ** 2 / (a**2 / (ours.n - 1) + b**2 / (theirs.n - 1))
    half = float(student.ppf(0.975, freedom)) * error
    return Difference(value, float(2 * student.sf(abs(value) / error, freedom)), value - half, value + half)


def mann_whitney(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Ours minus theirs by a test of ranks: for counts with ties, or values known only to be large."""
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
    """Each p corrected for being one of several (Holm); None stays None and does not count.

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
    """The first epoch, counted from 1, that is at least at ``level``; one more than there are where none is.

    >>> epochs_to_reach([50.0, 70.0, 90.0], 70.0), epochs_to_reach([50.0], 70.0)
    (2, 2)
    """
    return next((epoch for epoch, value in enumerate(curve, 1) if value >= level), len(curve) + 1)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[Summary]:
    """Mean and spread at every epoch that all curves have."""
    epochs = min((len(curve) for curve in curves), default=0)
    return [s for epoch in range(epochs) if (s := summarize(curve[epoch] for curve in curves))]


def straightness(points: Sequence[tuple[float, float]]) -> float | None:
    """The part of the variance that a straight line explains (R squared); None for fewer than three points."""
    if len(points) < 3:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mx, my = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    xx = math.fsum((x - mx) ** 2 for x in xs)
    yy = math.fsum((y - my) ** 2 for y in ys)
    xy = math.fsum((x - mx) * (y - my) for x, y in points)
    return xy**2 / (xx * yy) if xx and yy else None
