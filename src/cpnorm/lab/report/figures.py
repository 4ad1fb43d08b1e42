"""The paper's own figures, redrawn from our runs; None where the records lack what a figure needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

import cpnorm
from cpnorm.lab.data.images import CLASSES, DataNotFoundError, load
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Figure, Histogram
from cpnorm.lab.report.document import Drawing, Fold, Gallery, Section, Text
from cpnorm.lab.report.drawing import INK, NOTE, finish, image_grid, legend, panel, style
from cpnorm.lab.report.networks import DATA_NAMES
from cpnorm.lab.report.records import Records, Run, numbers
from cpnorm.lab.report.statistics import straightness

FORWARD_ONLY = "beyond-batch/adam-free"  # vectors divided in the forward pass only, as in the authors' code


def section(records: Records, data_dir: str | Path | None, earlier: Path) -> Section:
    """Return the paper's figures that show results; those that cannot be drawn are named."""
    by_key = {figure.key: figure for figure in paper.FIGURES}
    after = by_key["lambda-after"]
    if records.finished(FORWARD_ONLY):
        after = replace(after, row=FORWARD_ONLY)
    drawn: dict[str, list[Drawing | None]] = {
        "samples": [*samples(data_dir, earlier)],
        "lambda-progress": [lambda_progress(by_key["lambda-progress"], records)],
        "lambda-before": [lambda_histogram(by_key["lambda-before"], "before", records)],
        "lambda-after": [lambda_histogram(after, "after", records)],
        "fit-rank": [fit_against_rank(by_key["fit-rank"], records)],
    }
    part = Section("figures", "The paper's figures")
    absent = [by_key[key].title for key, drawings in drawn.items() if not any(drawings)]
    images = [drawing for drawing in drawn.pop("samples") if drawing]
    rest = [drawing for drawings in drawn.values() for drawing in drawings if drawing]
    for title, drawings in (("Samples of the data sets", images), ("λ during training, and fit against rank", rest)):
        part.blocks += [Fold(title, [Gallery(drawings)])] if drawings else []
    if absent:
        part.blocks.append(Text("; ".join(absent) + ".", lead="Not in these results:"))
    return part


def samples(data_dir: str | Path | None, earlier: Path) -> list[Drawing]:
    """Show 25 random training images of each data set; where its files are missing, those of an earlier report.

    Args:
        data_dir: the folder of the data sets.
        earlier: the folder with the figures of an earlier report.
    """
    drawings = []
    for name in ("cifar10", "svhn", "mnist"):
        key, title = f"samples-{name}", f"25 random training images of {DATA_NAMES[name]}"
        caption = f"{DATA_NAMES[name]}: 25 random training images, {len(CLASSES[name])} classes."
        try:
            data = load(name, data_dir)
        except DataNotFoundError:
            file = earlier / f"{key}.svg"
            drawings += [Drawing(key, "", caption, kept=file.read_bytes())] if file.is_file() else []
            continue
        chosen = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))[:25]
        drawings.append(image_grid(key, title, data.train_images[chosen], caption))
    return drawings


@style()
def lambda_progress(figure: Figure, records: Records) -> Drawing | None:
    """Draw sigma and every lambda of one small layer over the epochs."""
    run = _first_with(records, figure.row, "layers", figure.layer)
    if run is None:
        return None
    trace = run.raw["layers"][figure.layer]
    kept = trace.get("lambdas")
    sigma, lambdas = numbers(trace.get("sigma")), [numbers(line) for line in kept] if isinstance(kept, list) else []
    if not lambdas or not lambdas[0] or any(len(line) != len(lambdas[0]) for line in lambdas):
        return None
    initial = numbers(trace.get("initial"))  # older records begin with the end of the first epoch
    first = 0 if len(initial) == len(lambdas[0]) else 1
    terms = list(zip(*([initial] if first == 0 else []), *lambdas, strict=True))
    drawn, axes = panel("epoch", "value")
    for grows, dashes, name in ((True, "-", "λ that grows"), (False, (0, (4, 3)), "λ that shrinks")):
        for term in terms:
            if (term[-1] >= term[0]) == grows:
                axes.plot(range(first, first + len(term)), term, linestyle=dashes, color=INK["s2"], linewidth=1.2)
        axes.plot([], [], linestyle=dashes, color=INK["s2"], linewidth=1.2, label=name)
    if sigma:
        axes.plot(range(1, len(sigma) + 1), sigma, color=INK["s1"], linewidth=2, label="σ")
    legend(drawn, axes, 3)
    grown = sum(term[-1] >= term[0] for term in terms)
    since = "" if first == 0 else " from the end of the first epoch on"
    caption = (
        f"{figure.title}: {figure.row}, seed {run.seed}. {grown} of {len(terms)} λ grow{since};"
        f" at the end they lie between {min(lambdas[-1]):.2f} and {max(lambdas[-1]):.2f}."
    )
    steps = [sum(abs(b - a) for a, b in zip(*pair, strict=True)) for pair in pairwise(zip(*terms, strict=True))]
    if tenth := len(steps) // 10:
        shares = [100 * sum(part) / (sum(steps) or 1.0) for part in (steps[:tenth], steps[-tenth:])]
        caption += f" Of the total change of all λ{since}, {shares[0]:.0f} % falls into the first tenth of the epochs"
        caption += f" and {shares[1]:.0f} % into the last."
    return finish(drawn, figure.key, figure.title, caption.replace("-0.", "−0.").replace(" -", " −"))


@style()
def lambda_histogram(figure: Figure, when: str, records: Records) -> Drawing | None:
    """Draw our bars with the outline of the published ones, both as densities since their bins differ."""
    run = _first_with(records, figure.row, "histograms", figure.layer)
    if run is None or figure.published is None:
        return None
    entry = run.raw["histograms"][figure.layer]
    edges, counts = numbers(entry.get("edges")), numbers(entry.get(when))
    if len(edges) != len(counts) + 1 or not sum(counts) or any(high <= low for low, high in pairwise(edges)):
        return None
    ours, theirs = _density(edges, counts), _density(_edges(figure.published), figure.published.counts)
    drawn, axes = panel("λ", "density of the terms")
    axes.stairs(ours, edges, fill=True, color=INK["s2"], alpha=0.75, label=f"ours, seed {run.seed}")
    axes.stairs(theirs, _edges(figure.published), color=INK["ink"], linewidth=1.3, label="published")
    legend(drawn, axes)
    near = 100 * _share_within(edges, counts, 0.2)
    published_near = 100 * _share_within(_edges(figure.published), figure.published.counts, 0.2)
    caption = (
        f"{figure.title}: {figure.row}, {sum(counts):.0f} terms. |λ| < 0.2 for {near:.1f} % of ours, "
        f"{published_near:.1f} % of the published."
    )
    return finish(drawn, figure.key, figure.title, caption)


@style()
def fit_against_rank(figure: Figure, records: Records) -> Drawing | None:
    """Draw the fit of decompositions of growing rank, with the published and the exact rank, which always suffices."""
    estimate = records.ranks.get(("alexnet-ranks", figure.layer or ""))
    if estimate is None or len(estimate.curve) < 2:
        return None
    layer = next(entry for entry in paper.ALEXNET_RANKS if entry.layer == figure.layer)
    points = sorted(estimate.curve)
    exact = cpnorm.exact_rank(layer.size)
    drawn, axes = panel("rank", "fit")
    axes.axvline(layer.rank, color=INK["ink"], linewidth=1.3, label=f"published rank {layer.rank}")
    axes.axvline(exact, color=INK["s1"], linewidth=1.3, label=f"exact rank {exact}")
    axes.plot(*zip(*points, strict=True), color=INK["s2"], label="alternating least squares, ours")
    for rank, fit in points:
        axes.plot([rank], [fit], "o", color=INK["s2"], markersize=6, gid=f"{NOTE}rank {rank:g}: fit {fit:.3f}")
    legend(drawn, axes)
    straight = straightness(points)
    line = "" if straight is None else f" A straight line explains {100 * straight:.1f} % of the variance of the fit."
    return finish(drawn, figure.key, figure.title, f"{figure.title}. Estimated rank {estimate.rank}.{line}")


def _first_with(records: Records, row: str | None, part: str, layer: str | None) -> Run | None:
    for run in records.finished(row or ""):
        entries = run.raw.get(part)
        if isinstance(entries, dict) and isinstance(entries.get(layer), dict):
            return run
    return None


def _edges(histogram: Histogram) -> list[float]:
    width = (histogram.high - histogram.low) / len(histogram.counts)
    return [histogram.low + k * width for k in range(len(histogram.counts) + 1)]


def _density(edges: Sequence[float], counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [c / total / (high - low) for (low, high), c in zip(pairwise(edges), counts, strict=True)]


def _share_within(edges: Sequence[float], counts: Sequence[float], limit: float) -> float:
    """Return the share of values between -limit and limit; bins at the border count in proportion."""
    inside = sum(
        c * max(0.0, min(high, limit) - max(low, -limit)) / (high - low)
        for (low, high), c in zip(pairwise(edges), counts, strict=True)
    )
    return inside / sum(counts)
