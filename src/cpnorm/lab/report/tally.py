"""Test differences between our own runs, correct for their number, and count them to an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cpnorm.lab.report.document import Cell, Column, Grid, p_cell, signed
from cpnorm.lab.report.statistics import Difference, Summary, holm, welch

NOT_MEASURED = "Not measured yet."


@dataclass(frozen=True)
class Claim:
    """One question, the paper's words on it (none if the question is ours), and the answer of our numbers."""

    key: str
    question: str
    paper: str
    answer: str  # "Yes.", "No.", "Partly.", ...
    explanation: str
    grid: Grid | None = None
    headline: str = ""  # one sentence to remember, without the context
    counts: str = ""  # in a few words, what the answer rests on


def corrected(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """Return the tests of one claim, each p corrected for their number (Holm)."""
    ps = holm([difference.p if difference else None for difference in differences])
    return [replace(d, p=p) if d else None for d, p in zip(differences, ps, strict=True)]


def minus(ours: Summary | None, theirs: Summary | None) -> Difference | None:
    """Return Welch's test of the difference, where both were measured."""
    return welch(ours, theirs) if ours and theirs else None


@dataclass(frozen=True)
class Tally:
    """The numbers of tested differences that are above zero, below it, and neither."""

    above: int
    below: int
    neither: int

    @property
    def total(self) -> int:
        """Return the number of tests."""
        return self.above + self.below + self.neither

    def counts(self, good: int, bad: int) -> str:
        """Return in a few words how many tests came out as claimed."""
        return f"{good} of {self.total} tests for it, {bad} against" if self.total else ""

    def answer(self, good: int, bad: int) -> str:
        """Return in a word what share of the tests came out as claimed."""
        if not self.total:
            return NOT_MEASURED
        if good == self.total:
            return "Yes."
        if good and bad:
            return "Sometimes, and sometimes the opposite."
        if good:
            return "Partly."
        return "No, the opposite." if bad else "Not shown."


def tally(differences: Iterable[Difference | None]) -> Tally:
    """Count the differences that have a p."""
    tested = [d for d in differences if d and d.p is not None]
    above = sum(d.significant and d.value > 0 for d in tested)
    below = sum(d.significant and d.value < 0 for d in tested)
    return Tally(above, below, len(tested) - above - below)


def difference_columns(group: str, name: str = "points") -> list[Column]:
    """Return the columns of a difference and its p; ``difference_cells`` fills them."""
    return [Column(name, group), Column("p", group)]


def difference_cells(difference: Difference | None, digits: int = 2) -> list[Cell]:
    """Return cells of the difference and its p."""
    return [signed(difference.value if difference else None, digits), p_cell(difference.p if difference else None)]
