"""The document as Markdown, its drawings as SVG files beside it."""

from __future__ import annotations

import re
from pathlib import Path

from cpnorm.lab.report.build import build
from cpnorm.lab.report.document import Block, Column, Document, Drawing, Explorer, Gallery, Grid, Section, Text
from cpnorm.lab.training.runs import RunError, write_atomically

STYLE = (Path(__file__).parent / "plots.css").read_text(encoding="utf-8")
MADE_BY = "Made by `cpnorm report`"
OURS = re.compile(r"\(figures/([\w-]+)\.svg\)")
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def write_markdown(results: str | Path, out: str | Path | None = None, data_dir: str | Path | None = None) -> Path:
    """Write README.md (or ``out``) for a results folder, and its drawings into ``figures/`` beside it."""
    out = Path(results) / "README.md" if out is None else Path(out)
    before = out.read_text(encoding="utf-8") if out.exists() else MADE_BY
    if MADE_BY not in before:
        raise RunError(f"{out} was not made by cpnorm report and is left alone: move it away for tables in its place")
    document = build(results, data_dir)
    folder = out.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawings = _drawings(document.sections)
    for key in set(OURS.findall(before)) - {drawing.key for drawing in drawings}:
        (folder / f"{key}.svg").unlink(missing_ok=True)
    for drawing in drawings:
        write_atomically(folder / f"{drawing.key}.svg", standalone(drawing).encode())
    write_atomically(out, render(document).encode())
    return out


def render(document: Document) -> str:
    """The whole text."""
    parts = [
        f"# {text(document.title)}",
        text(document.summary),
        f"{MADE_BY}; the HTML page of the same name has an explorer.",
    ]
    for section in document.sections:
        parts += _section(section, 2)
    return "\n\n".join(part for part in parts if part) + "\n"


def text(value: str) -> str:
    """Plain text that Markdown and HTML leave as it is, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(value.split())).replace("\\<", "&lt;").replace("\\>", "&gt;")


def standalone(drawing: Drawing) -> str:
    """The drawing with its style and its ground inside, for a file of its own."""
    start = drawing.svg.index(">") + 1
    ground = (
        '<rect width="100%" height="100%" fill="var(--paper)"/>'  # the page around it may be dark while it is light
    )
    return f"{drawing.svg[:start]}<style>{STYLE}</style>{ground}{drawing.svg[start:]}\n"


def _drawings(sections: list[Section]) -> list[Drawing]:
    found = []
    for section in sections:
        found += [d for block in section.blocks if isinstance(block, Gallery) for d in block.drawings]
        found += _drawings(section.sections)
    return found


def _section(section: Section, level: int) -> list[str]:
    parts = [f"{'#' * level} {text(section.title)}"]
    for block in section.blocks:
        parts += _block(block)
    for below in section.sections:
        parts += _section(below, level + 1)
    return parts


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        if block.quote:
            return [f"> {text(block.text)}"]
        return [" ".join(part for part in (f"**{text(block.lead)}**" if block.lead else "", text(block.text)) if part)]
    if isinstance(block, Grid):
        return [_grid(block), f"*{text(block.caption)}*"]
    if isinstance(block, Gallery):
        return [f"![{text(d.caption)}](figures/{d.key}.svg)\n\n*{text(d.caption)}*" for d in block.drawings]
    return [_grid(grid_of_rates(block))]


def grid_of_rates(block: Explorer) -> Grid:
    """What the explorer shows, as a table: accuracy of each network at each rate."""
    from cpnorm.lab.report.document import number, words

    rates = sorted({rate for network in block.networks for rate in network["rates"]})
    rows = []
    for network in block.networks:
        measured = dict(zip(network["rates"], network["accuracy"], strict=True))
        rows.append([words(network["name"]), *(number(measured.get(rate)) for rate in rates)])
    columns = [Column("accuracy, % after removing", words=True), *(Column(f"{100 * rate:g} %") for rate in rates)]
    return Grid("", columns, rows)


def _grid(grid: Grid) -> str:
    names = [f"{column.group}: {column.name}" if column.group else column.name for column in grid.columns]
    lines = [
        names,
        [":--" if column.words else "--:" for column in grid.columns],
        *([text(cell.text) for cell in row] for row in grid.rows),
    ]
    lines[0] = [text(name) for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
