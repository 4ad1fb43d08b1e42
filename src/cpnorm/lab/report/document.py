"""What a report is made of. It is built once from the results; page.py and markdown.py only render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpnorm.lab.report.statistics import Summary

Tone = str  # "within" | "above" | "below" | "missing" | "": how a cell is marked
MINUS = "−"
MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """What is read, and the number it is sorted by."""

    text: str
    value: float | None = None
    tone: Tone = ""


@dataclass(frozen=True)
class Column:
    """A heading; neighbours of one group share a second heading above."""

    name: str
    group: str = ""
    words: bool = False  # left-aligned text instead of numbers


@dataclass(frozen=True)
class Grid:
    """A table of cells; the first one of each row names it."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Text:
    """A paragraph; the lead says the main thing first."""

    text: str
    lead: str = ""
    quote: bool = False  # the paper's own words


@dataclass(frozen=True)
class Drawing:
    """One SVG with its caption."""

    key: str  # also the name of its file beside the Markdown
    svg: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Drawings side by side where there is room."""

    drawings: Sequence[Drawing]


@dataclass(frozen=True)
class Explorer:
    """Trained networks whose truncation was measured at several rates."""

    networks: Sequence[Mapping[str, Any]]


Block = Grid | Text | Gallery | Explorer


@dataclass
class Section:
    """A heading and what stands below it."""

    key: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


@dataclass
class Document:
    """The whole report."""

    title: str
    summary: str
    sections: list[Section]


# --- numbers as cells -------------------------------------------------------------------------------------------------


def words(text: str, tone: Tone = "") -> Cell:
    """Text, sorted as text."""
    return Cell(text, None, tone)


def number(value: float | None, digits: int = 2) -> Cell:
    """With so many digits, or a dash.

    >>> number(-1.5).text, number(None).text
    ('−1.50', '–')
    """
    return Cell(MISSING) if value is None else Cell(f"{value:.{digits}f}".replace("-", MINUS), value)


def signed(value: float | None, digits: int = 2) -> Cell:
    """With its sign, and none for what rounds to zero."""
    if value is None:
        return Cell(MISSING)
    text = f"{value:+.{digits}f}"
    return Cell(text[1:] if float(text) == 0 else text.replace("-", MINUS), value)


def count(value: float | None) -> Cell:
    """Of weights or operations; as the paper prints them from 0.1 M on.

    >>> count(9_253_171).text, count(910_000).text, count(12_345).text, count(8).text
    ('9.25 M', '0.91 M', '12.3 k', '8')
    """
    if value is None:
        return Cell(MISSING)
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if value >= size / 10:
            return Cell(f"{value / size:.2f}{unit}", value)
    return Cell(f"{value / 1e3:.1f} k" if value >= 1e3 else f"{value:.0f}", value)


def mean_sd(summary: Summary | None, digits: int = 2) -> Cell:
    """Sorted by the mean."""
    if summary is None:
        return Cell(MISSING)
    spread = "" if summary.sd is None else f" ± {summary.sd:.{digits}f}"
    return Cell(f"{summary.mean:.{digits}f}{spread}", summary.mean)


def p_cell(p: float | None) -> Cell:
    """Small ones as a bound."""
    if p is None:
        return Cell(MISSING)
    return Cell("< 0.001" if p < 0.001 else f"{p:.3f}", p)
