"""The document as one HTML page that needs nothing else: style, script and drawings are inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from cpnorm.lab.report.build import build
from cpnorm.lab.report.document import Block, Cell, Column, Document, Drawing, Explorer, Gallery, Grid, Section, Text
from cpnorm.lab.training.runs import write_atomically

HERE = Path(__file__).parent
# Nothing is loaded from anywhere, whatever a record may hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(results: str | Path, out: str | Path, data_dir: str | Path | None = None) -> Path:
    """Write the page for a results folder; returns where it is."""
    out = Path(out)
    content = render(build(results, data_dir))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content.encode())
    return out


def render(document: Document) -> str:
    """The whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(document.title)}</title>
<style>
{_file("plots.css")}{_file("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<div class="sheet">
{_contents(document.sections)}
<main id="main">
<header>
<h1>{escape(document.title)}</h1>
<p>{escape(document.summary)}</p>
</header>
{"".join(_section(section, 2) for section in document.sections)}</main>
</div>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _contents(sections: Sequence[Section], label: str = ' aria-label="Contents"') -> str:
    def entries(sections: Sequence[Section]) -> str:
        items = "".join(
            f'<li><a href="#{escape(section.key)}">{escape(section.title)}</a>{entries(section.sections)}</li>'
            for section in sections
        )
        return f"<ul>{items}</ul>" if items else ""

    return f"<nav{label}>{entries(sections)}</nav>"


def _section(section: Section, level: int) -> str:
    key = escape(section.key)
    return (
        f'<section aria-labelledby="{key}">\n<h{level} id="{key}">{escape(section.title)}</h{level}>\n'
        + "".join(_block(block) for block in section.blocks)
        + "".join(_section(below, level + 1) for below in section.sections)
        + "</section>\n"
    )


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return _text(block)
    if isinstance(block, Grid):
        return _grid(block)
    if isinstance(block, Gallery):
        return f'<div class="gallery">{"".join(map(_drawing, block.drawings))}</div>\n'
    return _explorer(block)


def _text(block: Text) -> str:
    if block.quote:
        return f"<blockquote>{escape(block.text)}</blockquote>\n"
    lead = f"<b>{escape(block.lead)}</b> " if block.lead else ""
    return f"<p>{lead}{escape(block.text)}</p>\n"


def _drawing(drawing: Drawing) -> str:
    return f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>"


# --- tables -----------------------------------------------------------------------------------------------------------


def _grid(grid: Grid) -> str:
    groups, starts, at = [], set(), 0
    for name, members in groupby(grid.columns, key=lambda column: column.group):
        width = len(list(members))
        start = ' class="starts"' if name else ""
        groups.append(
            f'<th colspan="{width}" scope="colgroup"{start}>{escape(name)}</th>'
            if name
            else f'<td colspan="{width}"></td>'
        )
        starts |= {at} if at else set()
        at += width
    heading = "".join(_heading(index, column, index in starts) for index, column in enumerate(grid.columns))
    above = f'<tr class="groups">{"".join(groups)}</tr>' if any(c.group for c in grid.columns) else ""
    body = "".join(
        f"<tr>{''.join(_cell(i, cell, grid.columns[i], i in starts) for i, cell in enumerate(row))}</tr>\n"
        for row in grid.rows
    )
    prose = ' class="prose"' if all(column.words for column in grid.columns) else ""  # on a phone one below the other
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(grid.caption)}"><table{prose}>\n'
        f"<caption><span>{escape(grid.caption)}</span></caption>\n"
        f"<thead>{above}<tr>{heading}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _classes(column: Column, start: bool) -> str:
    names = " ".join(name for name, there in (("words", column.words), ("starts", start)) if there)
    return f' class="{names}"' if names else ""


def _heading(index: int, column: Column, start: bool) -> str:
    button = f'<button type="button" data-column="{index}">{escape(column.name)}</button>'
    return f'<th scope="col"{_classes(column, start)}>{button}</th>'


def _cell(index: int, cell: Cell, column: Column, start: bool) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    tone = f' data-tone="{escape(cell.tone)}"' if cell.tone else ""
    kind = 'th scope="row"' if index == 0 else "td"
    text = escape(cell.text).replace(" %", "&nbsp;%")
    label = f' data-label="{escape(column.name)}"' if index and column.words else ""
    return f"<{kind}{_classes(column, start)}{value}{tone}{label}>{text}</{kind[:2]}>"


# --- the explorer -----------------------------------------------------------------------------------------------------


def _explorer(block: Explorer) -> str:
    """Filled by the script; without one, a table of what was measured stands in its place."""
    data = json.dumps(block.networks, allow_nan=False).replace("<", "\\u003c")  # no record can end the script element
    figures = "".join(
        f'<div><dt>{label}</dt><dd data-part="{part}"></dd></div>'
        for part, label in (
            ("accuracy", "test accuracy"),
            ("weights", "weights"),
            ("terms", "terms"),
            ("flops", "FLOPs"),
        )
    )
    tables = "".join(
        _grid(
            Grid(
                str(network["name"]),
                [Column("terms removed, %"), Column("accuracy, %")],
                [
                    [Cell(f"{100 * rate:g}", rate), Cell(f"{accuracy:.2f}", accuracy)]
                    for rate, accuracy in zip(network["rates"], network["accuracy"], strict=True)
                ],
            )
        )
        for network in block.networks
    )
    return f"""<div class="explorer" hidden>
<div class="controls">
<div><label for="network">Trained network</label><select id="network" data-part="network"></select></div>
<div><label for="rate">Terms removed from each layer: <output for="rate" data-part="removed"></output></label>
<input id="rate" data-part="rate" type="range" min="0" max="1" step="1" value="0"></div>
</div>
<dl class="figures" aria-live="polite">{figures}</dl>
<div class="course" data-part="course"></div>
<div class="layers" data-part="layers"></div>
</div>
<noscript>{tables}</noscript>
<script type="application/json" id="networks">{data}</script>
"""
