"""The page of ``cpnorm shrink``: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cpnorm.lab.cli.pictures import COLOURS, style
from cpnorm.lab.cli.shrink import Outcome, Point
from cpnorm.lab.cli.user_models import UserData

THUMBNAIL = 96  # pixels


def render(network: str, outcome: Outcome, data: UserData) -> str:
    """Return the whole page."""
    from jinja2 import Environment, StrictUndefined

    template = resources.files("cpnorm.lab.cli").joinpath("shrink_page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    examples = [{**row, "picture": _thumbnail(row["picture"])} if "picture" in row else row for row in outcome.examples]
    return environment.from_string(template).render(
        network=network,
        report=outcome.small.report,
        outcome=outcome,
        kind=data.kind,
        examples=examples,
        curve=_curve(outcome.curve, outcome.quality_name, outcome.quality_before) if outcome.curve else "",
    )


def _curve(points: list[Point], name: str, before: float) -> str:
    """Return an SVG of quality and of the error of the outputs against the share of parameters left."""
    with style():
        figure = Figure(figsize=(7.5, 3.2))
        quality, error = figure.subplots(1, 2)
        shares = [100 * point.share for point in points]
        for axes, values in ((quality, [p.quality for p in points]), (error, [100 * p.error for p in points])):
            axes.plot(shares, values, marker="o")
            for share, value, point in zip(shares, values, points, strict=True):
                if point.asked_for:
                    axes.plot(share, value, marker="o", markersize=10, color=COLOURS[1], label="asked for")
            axes.set_xlabel("% of the parameters")
            axes.legend()
        quality.axhline(before, linestyle="--", color=COLOURS[2], label="given network")
        quality.set_title(f"{name}, held out")
        quality.legend()
        error.set_title("error of the outputs, %")
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _thumbnail(path: Path) -> str:
    """Return a small picture as a data address."""
    from PIL import Image

    with Image.open(path) as opened:
        image: Any = opened.convert("RGB")
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        content = io.BytesIO()
        image.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
