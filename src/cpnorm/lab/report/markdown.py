"""Render the document as Markdown, with its drawings as SVG files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from cpnorm.lab.report.document import Block, Code, Document, Drawing, Fold, Gallery, Grid, Section, Text
from cpnorm.lab.report.drawing import standalone
from cpnorm.lab.report.explorer import rate_grids
from cpnorm.lab.training.runs import RunError, write_atomically

MADE_BY = "Made by `cpnorm report`"
OURS = re.compile(r"\(figures/([\w-]+)\.svg\)")
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def write_markdown(document: Document, out: Path) -> Path:
    """Write a document to a file, and its drawings into ``figures/`` beside it.

    Figures that an earlier report linked and this one does not have are deleted; drawings kept from an earlier report
    stay as they are.
    """
    before = check_replaceable(out)
    folder = out.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawings = document.drawings()
    for key in set(OURS.findall(before)) - {drawing.key for drawing in drawings}:
        (folder / f"{key}.svg").unlink(missing_ok=True)
    for drawing in drawings:
        content = drawing.kept or standalone(drawing).encode()
        if not (folder / f"{drawing.key}.svg").is_file() or not drawing.kept:
            write_atomically(folder / f"{drawing.key}.svg", content)
    write_atomically(out, render(document).encode())
    return out


def check_replaceable(out: Path) -> str:
    """Return the report that a file holds, if any; raise where it holds something else."""
    before = out.read_text(encoding="utf-8") if out.exists() else MADE_BY
    if MADE_BY not in before:
        raise RunError(f"{out} was not made by cpnorm report and is left alone: move it away for tables in its place")
    return before


def render(document: Document) -> str:
    """Return the whole text."""
    parts = [f"# {text(document.title)}"]
    parts += [_drawing(document.lead)] if document.lead else []
    parts.append("\n".join(f"{number}. {text(sentence)}" for number, sentence in enumerate(document.sentences, 1)))
    parts.append(f"{MADE_BY}; the HTML page of the same results has an explorer.")
    for section in document.sections:
        parts += _section(section, 2)
    return "\n\n".join(part for part in parts if part) + "\n"


def text(value: str) -> str:
    """Return plain text on one line, escaped so that Markdown and HTML leave it as it is."""
    return SPECIAL.sub(r"\\\1", " ".join(value.split())).replace("\\<", "&lt;").replace("\\>", "&gt;")


def _section(section: Section, level: int) -> list[str]:
    note = [f"**{text(section.note)}**"] if section.note else []
    parts = [f"{'#' * level} {text(section.title)}", *note, *_blocks(section.blocks)]
    for below in section.sections:
        parts += _section(below, level + 1)
    return parts


def _blocks(blocks: Iterable[Block]) -> list[str]:
    return [part for block in blocks for part in _block(block)]


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        if block.quote:
            return [f"> {text(block.text)}"]
        return [" ".join(part for part in (f"**{text(block.lead)}**" if block.lead else "", text(block.text)) if part)]
    if isinstance(block, Grid):
        return [_grid(block), f"*{text(block.caption)}*" if block.caption else ""]
    if isinstance(block, Code):
        return [f"```\n{block.text}\n```"]
    if isinstance(block, Gallery):
        return [_drawing(drawing) for drawing in block.drawings]
    if isinstance(block, Fold):
        summary = escape(" ".join(block.summary.split()))
        return [f"<details>\n<summary>{summary}</summary>", *_blocks(block.blocks), "</details>"]
    return _blocks(rate_grids(block))


def _drawing(drawing: Drawing) -> str:
    return f"![{text(drawing.caption)}](figures/{drawing.key}.svg)\n\n*{text(drawing.caption)}*"


def _grid(grid: Grid) -> str:
    names = [f"{column.group}: {column.name}" if column.group else column.name for column in grid.columns]
    lines = [
        [text(name) for name in names],
        [":--" if column.words else "--:" for column in grid.columns],
        *([text(cell.text) for cell in row] for row in grid.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
