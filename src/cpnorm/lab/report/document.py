"""The parts of a report. It is built once from the results; page.py and markdown.py only render it."""

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
    """A text of a table, and the number by which it is sorted."""

    text: str
    value: float | None = None
    tone: Tone = ""


@dataclass(frozen=True)
class Column:
    """A heading; neighbouring columns of one group share a second heading above."""

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
    """A paragraph; its lead is set in bold."""

    text: str
    lead: str = ""
    quote: bool = False  # the paper's own words


@dataclass(frozen=True)
class Code:
    """Lines to copy into a terminal."""

    text: str


@dataclass(frozen=True)
class Drawing:
    """One SVG with its caption."""

    key: str  # also the name of its file beside the Markdown
    svg: str
    caption: str
    narrow: str = ""  # another SVG for narrow screens
    kept: bytes = b""  # in place of svg: the file of an earlier report, whose data are not at hand


@dataclass(frozen=True)
class Gallery:
    """Drawings side by side where there is room."""

    drawings: Sequence[Drawing]


@dataclass(frozen=True)
class Explorer:
    """Trained networks whose truncation was measured."""

    networks: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fold:
    """Details that are read on request: a line, and what it opens."""

    summary: str
    blocks: Sequence[Block]


Block = Grid | Text | Code | Gallery | Explorer | Fold


@dataclass
class Section:
    """A heading and the content below it; on the page, sections within a section are folded."""

    key: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    note: str = ""  # a few words beside the heading: the answer or the outcome


@dataclass
class Document:
    """A whole page: a figure and a few sentences to remember, then the sections."""

    title: str
    lead: Drawing | None
    sentences: Sequence[str]
    sections: list[Section]

    def drawings(self) -> list[Drawing]:
        """Return every drawing of the report, the leading one first."""
        return ([self.lead] if self.lead else []) + [d for section in self.sections for d in _drawings(section)]


def _drawings(section: Section) -> list[Drawing]:
    blocks = list(section.blocks)
    found: list[Drawing] = []
    while blocks:
        block = blocks.pop(0)
        if isinstance(block, Fold):
            blocks[:0] = block.blocks
        elif isinstance(block, Gallery):
            found += block.drawings
    return found + [drawing for below in section.sections for drawing in _drawings(below)]


# --- numbers as cells -------------------------------------------------------------------------------------------------


def words(text: str, tone: Tone = "") -> Cell:
    """Return a cell of text, sorted as text."""
    return Cell(text, None, tone)


def number(value: float | None, digits: int = 2) -> Cell:
    """Return a cell of a number with this many digits, or a dash.

    >>> number(-1.5).text, number(None).text
    ('−1.50', '–')
    """
    return Cell(MISSING) if value is None else Cell(f"{value:.{digits}f}".replace("-", MINUS), value)


def signed(value: float | None, digits: int = 2) -> Cell:
    """Return a cell of a number with its sign; what rounds to zero has none."""
    if value is None:
        return Cell(MISSING)
    text = f"{value:+.{digits}f}"
    return Cell(text[1:] if float(text) == 0 else text.replace("-", MINUS), value)


def count(value: float | None) -> Cell:
    """Return a cell of a number of parameters or operations; from 0.1 M on as the paper prints them.

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
    """Return a cell of a mean and its standard deviation, sorted by the mean."""
    if summary is None:
        return Cell(MISSING)
    spread = "" if summary.sd is None else f" ± {summary.sd:.{digits}f}"
    return Cell(f"{summary.mean:.{digits}f}{spread}", summary.mean)


def p_cell(p: float | None) -> Cell:
    """Return a cell of a p value; small ones are given as a bound."""
    if p is None:
        return Cell(MISSING)
    return Cell("< 0.001" if p < 0.001 else f"{p:.3f}", p)
