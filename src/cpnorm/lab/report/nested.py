"""Compare cuts when several runs start from the same network: the network is the unit, not the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from cpnorm.lab.report.records import Run
from cpnorm.lab.report.statistics import PUBLISHED_RUNS, Difference, Summary, summarize

Measure = Callable[[Run], float | None]


def last_accuracy(run: Run) -> float | None:
    """Return the test accuracy of the last epoch."""
    return run.accuracy_last


def by_network(runs: Iterable[Run], measure: Measure = last_accuracy) -> list[list[float]]:
    """Return the accuracies of runs, grouped by the network that they start from."""
    groups: dict[object, list[float]] = {}
    for run in runs:
        truncated = run.raw.get("truncation_result")
        network = truncated.get("network") if isinstance(truncated, dict) else None
        value = measure(run)
        if value is not None:
            groups.setdefault(network, []).append(value)
    return list(groups.values())


def of_networks(runs: Iterable[Run], measure: Measure = last_accuracy) -> Summary | None:
    """Summarise one value per start network, the mean of its runs: n is the number of networks."""
    return summarize(math.fsum(group) / len(group) for group in by_network(runs, measure))


def nested_difference(groups: Sequence[Sequence[float]], mean: float, sd: float | None) -> Difference:
    """Return the difference of our mean from the published one, tested with networks as a random effect.

    An accuracy is mu + b_i + e_ij with the network i and the run j. Ours is the mean over k networks, with variance
    s_b^2 / k + s_w^2 / (k n); the published one is the mean of eight runs from one network, with variance
    s_b^2 + s^2 / 8. Both variances of ours are estimated by moments, and Satterthwaite's approximation gives the
    degrees of freedom. Where no variance between networks is found, all runs are pooled. With one network only there
    is nothing to estimate s_b from, and no test.

    Args:
        groups: accuracies of our runs, one group per start network.
        mean: published mean.
        sd: published standard deviation, which is that of the population of eight runs.
    """
    means = [math.fsum(group) / len(group) for group in groups]
    networks, runs = len(groups), sum(map(len, groups))
    value = math.fsum(means) / networks - mean
    if networks < 2:
        return Difference(value)
    between = math.fsum((m - math.fsum(means) / networks) ** 2 for m in means) / (networks - 1)  # of network means
    inverse = math.fsum(1 / len(group) for group in groups) / networks
    squares = math.fsum((x - m) ** 2 for group, m in zip(groups, means, strict=True) for x in group)
    within = squares / (runs - networks) if runs > networks else 0.0
    published = (sd or 0.0) ** 2 / (PUBLISHED_RUNS - 1)  # sample variance over eight
    network = max(0.0, between - within * inverse)
    parts = [(published**2, PUBLISHED_RUNS - 1)]
    own = between / networks
    if network:
        parts.append(((between * (1 / networks + 1)) ** 2, networks - 1))
        parts += [((within * inverse) ** 2, runs - networks)] if runs > networks else []
    else:  # networks differ no more than runs do, perhaps by luck: all runs together say how much that is
        middle = math.fsum(x for group in groups for x in group) / runs
        spread = math.fsum((x - middle) ** 2 for group in groups for x in group) / (runs - 1)
        own = spread * inverse / networks
        parts.append((own**2, runs - 1))
    error = math.sqrt(own + network + published)
    if error == 0:
        return Difference(value)
    freedom = error**4 / math.fsum(part / degrees for part, degrees in parts)
    from scipy.stats import t as student

    half = float(student.ppf(0.975, freedom)) * error
    return Difference(value, float(2 * student.sf(abs(value) / error, freedom)), value - half, value + half)
