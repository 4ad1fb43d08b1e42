"""Render the document as one HTML page that needs nothing else: style, script and drawings are inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from cpnorm.lab.report.document import Document, Grid
from cpnorm.lab.report.drawing import BOTH_THEMES, FONT, as_image
from cpnorm.lab.report.explorer import rate_grids
from cpnorm.lab.training.runs import write_atomically

TEMPLATES = Path(__file__).parent / "templates"
# Nothing is loaded from anywhere, whatever a record may hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(document: Document, out: str | Path) -> Path:
    """Write the page of a document; return where it is."""
    out = Path(out)
    content = render(document)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content.encode())
    return out


def render(document: Document) -> str:
    """Return the whole page."""
    return _template().render(document=document)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    style = f"{BOTH_THEMES}\n{FONT}\n{_file('page.css')}"
    values: dict[str, Any] = {"policy": POLICY, "style": style, "script": _file("page.js")}
    functions = {"as_image": as_image, "as_json": _as_json, "heading": _heading, "rate_grids": rate_grids}
    return environment.get_template("report.html", globals=values | functions)


def _file(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _as_json(networks: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(networks, allow_nan=False).replace("<", "\\u003c")  # no record can end the script element


class Heading(NamedTuple):
    """The head of a table."""

    groups: list[tuple[str, int]]  # names with their widths; none where no column has a group
    starts: set[int]  # columns that begin a group
    prose: bool  # all columns are text: on a phone its cells stand one below the other


def _heading(grid: Grid) -> Heading:
    groups = [(name, len(list(members))) for name, members in groupby(grid.columns, key=lambda column: column.group)]
    starts = {sum(width for _, width in groups[:index]) for index in range(1, len(groups))}
    named = any(column.group for column in grid.columns)
    return Heading(groups if named else [], starts, all(column.words for column in grid.columns))
