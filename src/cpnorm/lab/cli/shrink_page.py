"""The page of ``cpnorm shrink``, with the parts and the look of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import cpnorm
from cpnorm.lab.cli.shrink import Outcome, Point
from cpnorm.lab.report.document import Block, Cell, Column, Document, Drawing, Gallery, Grid, Section, Text, words
from cpnorm.lab.report.drawing import INK, finish, image_grid, legend, style

THUMBNAIL = 96  # pixels


def document(network: str, outcome: Outcome) -> Document:
    """Return the page: what became of the network, other budgets, examples, layers and files."""
    report = outcome.small.report
    before, after, name = outcome.quality_before, outcome.quality_after, outcome.quality_name
    sentences = [
        f"{report.network}, shrunk to {report.budget}: {'; '.join(report.steps)}. It took {report.seconds:.0f} s.",
        f"On held-out data, {name} is {before:.4g} before and {after:.4g} after.",
        f"The outputs differ by {100 * report.output_error:.3g} % on {report.samples_compared:,} calibration samples.",
    ]
    lead = _curve(outcome.curve, name, before) if outcome.curve else None
    sections = [
        Section("sizes", "Before and after", [_sizes(outcome)]),
        *([Section("budgets", "Other budgets", [_budgets(outcome)])] if outcome.curve else []),
        Section("examples", "Examples", _examples(outcome.examples)),
        Section("layers", "Layers", [_layers(report)]),
    ]
    if report.dense:
        rows = [[words(x.name), Cell(f"{x.parameters:,}", x.parameters), words(x.reason)] for x in report.dense]
        columns = [Column("layer", words=True), Column("parameters"), Column("reason", words=True)]
        sections.append(Section("dense", "Layers left dense", [Grid("", columns, rows)]))
    files = [[words(file), words(said)] for file, said in outcome.files.items()]
    columns = [Column("file", words=True), Column("size, or why it was not written", words=True)]
    sections.append(Section("files", "Files", [Grid("", columns, files)]))
    return Document(f"{network}, shrunk", lead, sentences, sections)


def _sizes(outcome: Outcome) -> Grid:
    report = outcome.small.report
    lines = {
        f"{outcome.quality_name} on held-out data": (outcome.quality_before, outcome.quality_after, "{:.4g}"),
        "parameters": (report.parameters_before, report.parameters_after, "{:,.0f}"),
        "MFLOP of one sample": (report.flops_before / 1e6, report.flops_after / 1e6, "{:,.2f}"),
        f"ms of one sample on {report.device}": (report.milliseconds_before, report.milliseconds_after, "{:.3g}"),
    }
    rows = []
    for name, (before, after, form) in lines.items():
        share = Cell(f"{100 * after / before:.1f} %", after / before)
        rows.append([words(name), Cell(form.format(before), before), Cell(form.format(after), after), share])
    return Grid("", [Column("", words=True), Column("before"), Column("after"), Column("share")], rows)


def _budgets(outcome: Outcome) -> Grid:
    columns = [Column("budget", words=True), Column("parameters"), Column("share")]
    columns += [Column("error of the outputs"), Column(outcome.quality_name)]
    rows = [
        [
            words("asked for" if point.asked_for else "tried"),
            Cell(f"{point.parameters:,}", point.parameters),
            Cell(f"{100 * point.share:.1f} %", point.share),
            Cell(f"{100 * point.error:.3g} %", point.error),
            Cell(f"{point.quality:.4g}", point.quality),
        ]
        for point in outcome.curve
    ]
    return Grid("Error on the calibration data, quality on held-out data", columns, rows)


def _layers(report: cpnorm.ShrinkReport) -> Grid:
    columns = [*(Column(name, words=True) for name in ("layer", "kind", "shape", "form")), Column("terms")]
    columns += [Column("before", "parameters"), Column("after", "parameters")]
    rows = [
        [
            words(layer.name),
            words(layer.kind),
            words("×".join(map(str, layer.shape))),
            words(layer.form),
            Cell("", None) if layer.form == "dense" else Cell(f"{layer.rank:,}", layer.rank),
            Cell(f"{layer.parameters_before:,}", layer.parameters_before),
            Cell(f"{layer.parameters_after:,}", layer.parameters_after),
        ]
        for layer in report.layers
    ]
    return Grid("", columns, rows)


def _examples(examples: list[dict[str, Any]]) -> list[Block]:
    """Return held-out samples with the answers before and after: pictures with captions, or texts in a table."""
    if not examples:
        return [Text("There are none for a network that does not predict the next word of a text.")]
    if "prompt" in examples[0]:
        columns = [Column(name, words=True) for name in ("", "text", "goes on before", "goes on after")]
        rows = [
            [words(str(number)), *(words(" ".join(row[key].split())) for key in ("prompt", "before", "after"))]
            for number, row in enumerate(examples, start=1)
        ]
        return [Grid("", columns, rows)]
    return [Gallery([_picture(number, row) for number, row in enumerate(examples)])]


def _picture(number: int, row: dict[str, Any]) -> Drawing:
    label = f"{row['label']}: " if row["label"] else ""
    caption = f"{row['image']}, {label}{row['before']} before, {row['after']} after"
    return image_grid(f"samples-{number}", row["image"], _thumbnail(row["picture"])[None], caption, columns=1)


def _thumbnail(path: Path) -> Tensor:  # -> (3, H, W) uint8
    from PIL import Image

    with Image.open(path) as opened:
        image: Any = opened.convert("RGB")
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1)


@style()
def _curve(points: list[Point], name: str, before: float) -> Drawing:
    """Draw quality and the error of the outputs against the share of parameters left."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    quality, error = figure.subplots(1, 2)
    shares = [100 * point.share for point in points]
    for axes, values in ((quality, [p.quality for p in points]), (error, [100 * p.error for p in points])):
        axes.plot(shares, values, marker="o", label="budgets tried")
        for share, value, point in zip(shares, values, points, strict=True):
            if point.asked_for:
                axes.plot(share, value, "o", markersize=10, color=INK["s1"], label="asked for")
        axes.set_xlabel("share of the parameters, %")
    quality.axhline(before, linestyle="--", color=INK["s3"], label="given network")
    quality.set_title(f"{name} on held-out data")
    error.set_title("error of the outputs, %")
    legend(figure, quality, 3)
    return finish(
        figure, "budgets", "Quality and error against the budget", f"{name.capitalize()} and error against the budget."
    )
