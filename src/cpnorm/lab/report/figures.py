"""The paper's own figures, redrawn from our runs; None where the records lack what a figure needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from cpnorm.lab.data.images import CLASSES, DataNotFoundError, load
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Figure, Histogram
from cpnorm.lab.report.charts import DATA_NAMES
from cpnorm.lab.report.comparison import exact_bound
from cpnorm.lab.report.document import Drawing
from cpnorm.lab.report.plots import Plot, image_grid
from cpnorm.lab.report.records import Records, Run, numbers
from cpnorm.lab.report.statistics import straightness


def samples(data_dir: str | Path | None) -> list[Drawing]:
    """25 random training images of each data set that is at hand."""
    drawings = []
    for name in ("cifar10", "svhn", "mnist"):
        try:
            data = load(name, data_dir)
        except DataNotFoundError:
            continue
        chosen = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))[:25]
        title = f"25 random training images of {DATA_NAMES[name]}"
        caption = f"{DATA_NAMES[name]}: {title[3:].partition(' of ')[0]}, {len(CLASSES[name])} classes."
        drawings.append(Drawing(f"samples-{name}", image_grid(title, data.train_images[chosen]), caption))
    return drawings


def lambda_progress(figure: Figure, records: Records) -> Drawing | None:
    """Sigma and every lambda of one small layer over the epochs."""
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
    values = [*sigma, *(value for term in terms for value in term)]
    margin = 0.05 * (max(values) - min(values))
    plot = Plot(
        figure.title,
        (first, len(lambdas)),
        (min(values) - margin, max(values) + margin),
        x_label="epoch",
        y_label="value",
    )
    for term in terms:
        plot.line(list(enumerate(term, first)), "s2 thin" if term[-1] >= term[0] else "s2 thin shrinking")
    if sigma:
        plot.line(list(enumerate(sigma, 1)), "s1", "σ")
    plot.name("line", "s2 thin", "λ that grows")
    plot.name("line", "s2 thin shrinking", "λ that shrinks")
    grown = sum(term[-1] >= term[0] for term in terms)
    since = "" if first == 0 else " from the end of the first epoch on"
    caption = (
        f"{figure.title}: {figure.row}, seed {run.seed}. {grown} of {len(terms)} λ grow{since};"
        f" at the end they lie between {min(lambdas[-1]):.2f} and {max(lambdas[-1]):.2f}."
    )
    steps = [sum(abs(b - a) for a, b in zip(*pair, strict=True)) for pair in pairwise(zip(*terms, strict=True))]
    if tenth := len(steps) // 10:
        shares = [100 * sum(part) / (sum(steps) or 1.0) for part in (steps[:tenth], steps[-tenth:])]
        caption += f" Of the way that all λ go{since}, {shares[0]:.0f} % fall into the first tenth of it"
        caption += f" and {shares[1]:.0f} % into the last."
    return Drawing(figure.key, plot.svg(), caption.replace("-0.", "−0.").replace(" -", " −"))


def lambda_histogram(figure: Figure, when: str, records: Records) -> Drawing | None:
    """Our bars with the outline of the published ones, both as densities since their bins differ."""
    run = _first_with(records, figure.row, "histograms", figure.layer)
    if run is None or figure.published is None:
        return None
    entry = run.raw["histograms"][figure.layer]
    edges, counts = numbers(entry.get("edges")), numbers(entry.get(when))
    if len(edges) != len(counts) + 1 or not sum(counts) or any(high <= low for low, high in pairwise(edges)):
        return None
    ours, theirs = _density(edges, counts), _density(_edges(figure.published), figure.published.counts)
    limit = max(abs(edges[0]), abs(edges[-1]), abs(figure.published.low), abs(figure.published.high))
    plot = Plot(
        figure.title, (-limit, limit), (0, 1.05 * max(*ours, *theirs)), x_label="λ", y_label="density of the terms"
    )
    plot.bars(edges, ours, "s2", f"ours, seed {run.seed}")
    steps = [(e, d) for k, d in enumerate(theirs) for e in _edges(figure.published)[k : k + 2]]
    plot.line(steps, "published", "published")
    near = 100 * _share_within(edges, counts, 0.2)
    published_near = 100 * _share_within(_edges(figure.published), figure.published.counts, 0.2)
    caption = (
        f"{figure.title}: {figure.row}, {sum(counts):.0f} terms. |λ| < 0.2 for {near:.1f} % of ours, "
        f"{published_near:.1f} % of the published."
    )
    return Drawing(figure.key, plot.svg(), caption)


def fit_against_rank(figure: Figure, records: Records) -> Drawing | None:
    """The fit of a growing decomposition, with the published rank and the bound that always suffices."""
    estimate = records.ranks.get(("alexnet-ranks", figure.layer or ""))
    if estimate is None or len(estimate.curve) < 2:
        return None
    layer = next(entry for entry in paper.ALEXNET_RANKS if entry.layer == figure.layer)
    points = sorted(estimate.curve)
    bound = exact_bound(layer)
    fits = [fit for _, fit in points]
    plot = Plot(
        figure.title,
        (min(0.0, points[0][0]), max(points[-1][0], bound, layer.rank)),
        (min(0.0, *fits), max(1.0, *fits)),
        x_label="rank",
        y_label="fit",
    )
    plot.vertical(layer.rank, "published", f"published rank {layer.rank}")
    plot.vertical(bound, "s1 thin", f"exact bound {bound}")
    plot.line(points, "s2", "alternating least squares, ours")
    for rank, fit in points:
        plot.dot((rank, fit), "s2", f"rank {rank:g}: fit {fit:.3f}")
    straight = straightness(points)
    line = "" if straight is None else f" A straight line explains {100 * straight:.1f} % of the variance of the fit."
    return Drawing(figure.key, plot.svg(), f"{figure.title}. Estimated rank {estimate.rank}.{line}")


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
    """Of the counted values between -limit and limit, bins at the border taken in proportion."""
    inside = sum(
        c * max(0.0, min(high, limit) - max(low, -limit)) / (high - low)
        for (low, high), c in zip(pairwise(edges), counts, strict=True)
    )
    return inside / sum(counts)
