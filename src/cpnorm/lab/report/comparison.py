"""Compare our runs with the paper's numbers row by row; the verdict in words is computed from both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Published, Row, Table
from cpnorm.lab.report.nested import Measure, by_network, last_accuracy, nested_difference
from cpnorm.lab.report.records import Records, Run, that_learned
from cpnorm.lab.report.statistics import (
    PUBLISHED_RUNS,
    SIGNIFICANT,
    Difference,
    Summary,
    holm,
    mean_curve,
    summarize,
    welch,
)

LAST = 20  # epochs
NETWORKS = {"cifar10": "CIFAR-10", "svhn": "SVHN", "mnist": "MNIST"}  # the training tables
Status = Literal["within", "above", "below", "missing"]


@dataclass(frozen=True)
class Comparison:
    """One row: the published numbers, ours, and how they compare."""

    row: Row
    runs: int  # those that did not diverge
    diverged: int
    networks: int | None  # that the runs start from; None for a row without a truncation
    published: Summary | None  # as printed: the standard deviation is that of the population of eight runs
    last: Summary | None  # accuracies of the last epoch: what stands beside the published mean
    late: Summary | None  # of each run's mean over its last 20 epochs
    best: Summary | None  # of each run's best epoch: its maximum stands beside the published maximum
    best_of_mean: float | None  # the highest mean over the runs of any epoch
    parameters: int | None
    difference: Difference | None  # last epoch minus published mean
    difference_of_best: Difference | None
    status: Status
    words: str
    words_of_best: str


def compare(row: Row, table: Table, records: Records) -> Comparison:
    """Compare our runs with one published accuracy."""
    source = row.same_as or row.key
    runs = records.finished(source)
    diverged = len(records.runs.get(source, [])) - len(runs)
    last, late, best = last_epochs(runs), late_epochs(runs), best_epochs(runs)
    published = row.published
    theirs = _summary(published) if published else None
    difference = against_paper(row, runs, last_accuracy)
    of_best = against_paper(row, runs, lambda run: run.accuracy_best)
    status, words = _verdict(published, last, difference, diverged)
    _, words_of_best = _verdict(published, best, of_best, 0)
    words += _never_learned(runs)
    parameters = _parameters(row, table, records)
    return Comparison(
        row,
        len(runs),
        diverged,
        len(by_network(runs)) if row.truncation else None,
        theirs,
        last,
        late,
        best,
        max((epoch.mean for epoch in mean_curve([run.curve for run in runs if run.curve])), default=None),
        parameters,
        difference,
        of_best,
        status,
        words,
        words_of_best,
    )


def against_paper(row: Row, runs: Sequence[Run], measure: Measure) -> Difference | None:
    """Return our mean minus the published one, tested.

    The published standard deviation is that of the population of eight runs (numpy's default in the authors' code);
    Welch's test gets that of the sample. Cuts are tested with the network that runs start from as the unit.
    """
    published, values = row.published, [value for run in runs if (value := measure(run)) is not None]
    ours = summarize(values)
    if ours is None or published is None:
        return None
    if row.truncation is not None:
        return nested_difference(by_network(runs, measure), published.mean, published.sd)
    sample = None if published.sd is None else published.sd * math.sqrt(PUBLISHED_RUNS / (PUBLISHED_RUNS - 1))
    return welch(ours, Summary(PUBLISHED_RUNS, published.mean, sample, published.max))


@dataclass(frozen=True)
class Agreement:
    """How many rows agree with the paper; a row that shows the runs of another one does not count again."""

    rows: int
    measured: int
    complete: int  # with as many runs as the paper has
    within: int  # one published standard deviation
    above: int
    below: int
    tested: int
    apart: int  # significantly different after Holm's correction over all tested rows
    apart_alone: int  # significantly different if each were the only row
    agree: int  # within one published standard deviation, or tested and not significantly different
    undecided: int  # neither: outside it, and with too few runs for a test


def undecided(found: Agreement) -> str:
    """Return how many rows cannot be tested yet, as a clause; "" if there are none."""
    rows = "row" if found.undecided == 1 else "rows"
    return (
        f"{found.undecided} {rows} outside the published sd cannot be tested with so few runs"
        if found.undecided
        else ""
    )


def count_agreement(entries: Sequence[Comparison]) -> Agreement:
    """Count the distinct rows that agree with the paper."""
    distinct = [entry for entry in entries if not entry.row.same_as]
    measured = [entry for entry in distinct if entry.difference]
    ps = holm([entry.difference.p if entry.difference else None for entry in measured])
    status = Counter(entry.status for entry in measured)
    apart = [p is not None and p < SIGNIFICANT for p in ps]
    alike = [
        entry.status == "within" or (p is not None and p >= SIGNIFICANT) for entry, p in zip(measured, ps, strict=True)
    ]
    return Agreement(
        rows=len(distinct),
        measured=len(measured),
        complete=sum(entry.runs >= PUBLISHED_RUNS for entry in measured),
        within=status["within"],
        above=status["above"],
        below=status["below"],
        tested=sum(p is not None for p in ps),
        apart=sum(apart),
        apart_alone=sum(bool(entry.difference and entry.difference.significant) for entry in measured),
        agree=sum(alike),
        undecided=sum(p is None and entry.status != "within" for entry, p in zip(measured, ps, strict=True)),
    )


def last_epochs(runs: list[Run]) -> Summary | None:
    """Summarise the accuracies of the last epoch."""
    return summarize(run.accuracy_last for run in runs if run.accuracy_last is not None)


def best_epochs(runs: list[Run]) -> Summary | None:
    """Summarise each run's best accuracy on the test set."""
    return summarize(run.accuracy_best for run in runs if run.accuracy_best is not None)


def over_the_last(epochs: int) -> Callable[[list[Run]], Summary | None]:
    """Return a function that summarises each run's mean over its last epochs."""
    return lambda runs: summarize(fmean(run.curve[-epochs:]) for run in runs if run.curve)


def late_epochs(runs: list[Run]) -> Summary | None:
    """Summarise each run's mean over its last 20 epochs, which varies less than one epoch; short runs are left out."""
    return over_the_last(LAST)([run for run in runs if len(run.curve) >= 2 * LAST])


def published_mean(row: Row) -> float:
    """Return the published mean of a row of the paper."""
    assert row.published is not None
    return row.published.mean


def _summary(published: Published) -> Summary:
    return Summary(PUBLISHED_RUNS, published.mean, published.sd, published.max)


def _verdict(
    published: Published | None, last: Summary | None, difference: Difference | None, diverged: int
) -> tuple[Status, str]:
    if last is None or difference is None or published is None:
        return "missing", f"all {diverged} runs diverged" if diverged else "not measured yet"
    status, words = _position(published, difference.value)
    if difference.p is not None:
        words += f", {'different' if difference.significant else 'no difference shown'} ({p_words(difference.p)})"
    if last.n < PUBLISHED_RUNS:
        words += f"; {last.n} of {PUBLISHED_RUNS} runs"
    if diverged:
        words += f"; {diverged} more diverged"
    return status, words


def _never_learned(runs: list[Run]) -> str:
    """Say how many runs never learned: they count in the mean, but are not hidden in it."""
    others = last_epochs(learned := that_learned(runs))
    if others is None or others.sd is None or len(learned) == len(runs):
        return ""
    return f"; {len(runs) - len(learned)} of them never learned, the others have {others.mean:.2f} ± {others.sd:.2f}"


def _position(published: Published, value: float) -> tuple[Status, str]:
    if published.sd is not None and abs(value) <= published.sd:
        return "within", "within one published sd"
    side: Status = "above" if value > 0 else "below"
    return side, f"{side} by {abs(value):.2f} points"


def p_words(p: float | None) -> str:
    """Return a p value for a sentence, with spaces that do not break.

    >>> p_words(0.41234), p_words(0.00001)
    ('p\xa0=\xa00.41', 'p\xa0<\xa00.001')
    """
    if p is None:
        return ""
    text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.0995 else f"p = {p:.2f}"
    return text.replace(" ", "\xa0")


# --- parameters ---------------------------------------------------------------------------------------------------


def _parameters(row: Row, table: Table, records: Records) -> int | None:
    """Count the parameters of the whole network, or of the layers that a table counts, after the truncation."""
    own = _measured_parameters(row.same_as or row.key, records)
    if table.counted is None or own is None:
        return own
    start = _measured_parameters(row.starts_from or row.same_as or row.key, records)
    counted = [layer for layer in paper.ALEXNET_RANKS if layer.layer in table.counted]
    if row.config.norm == "cp":
        before = sum(1 + layer.rank * (1 + sum(layer.size)) for layer in counted)
    else:
        before = sum(math.prod(layer.size) for layer in counted)
    return None if start is None else before - (start - own)  # the other layers are left as they were


def _measured_parameters(key: str, records: Records) -> int | None:
    counts = [run.parameters for run in records.finished(key) if run.parameters is not None]
    return round(sum(counts) / len(counts)) if counts else None
