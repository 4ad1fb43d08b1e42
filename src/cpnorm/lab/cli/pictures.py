"""Pictures of runs, as the paper draws them: spectrum, progress and histograms of the lambdas, learning curves.

They have the look of the report, whose ``finish`` turns them into drawings of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cpnorm.lab.report.drawing import INK, count_axis, style

BINS = 30  # of the paper's histograms
Lines = Sequence[Mapping[str, Any]]  # metrics.jsonl


@style()
def curves(
    runs: Mapping[str, Lines],
    key: str = "test_accuracy",
    label: str = "test accuracy, %",
    *,
    after: Mapping[str, int] | None = None,
) -> Figure:
    """Draw a metric over the epochs, one line per run; runs that start ``after`` some epochs of another are dashed."""
    figure, axes = _figure(1)
    for name, lines in runs.items():
        before = (after or {}).get(name, 0)
        epochs = [before + line["epoch"] for line in lines]
        axes[0].plot(epochs, [line[key] for line in lines], ".--" if before else ".-", label=name)
    axes[0].set(xlabel="epoch", ylabel=label)
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize="small")
    return figure


@style()
def spectrum(layers: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """Draw |λ| in descending order, one panel per layer, one line per state ("before training", "after training")."""
    figure, axes = _figure(len(layers))
    for panel, (name, states) in zip(axes, layers.items(), strict=True):
        for state, lambdas in states.items():
            sizes = lambdas.abs().sort(descending=True).values
            panel.plot(range(1, len(sizes) + 1), sizes.tolist(), ".-" if len(sizes) < 20 else "-", label=state)
        panel.set(title=name, xlabel="term", ylabel="|λ|", ylim=(0, None))
    axes[0].legend(fontsize="small")
    return figure


@style()
def histograms(layers: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """Draw histograms of λ before and after training: the paper's two figures in one."""
    figure, axes = _figure(len(layers))
    for panel, (name, states) in zip(axes, layers.items(), strict=True):
        limit = max(lambdas.abs().max().item() for lambdas in states.values()) or 1.0
        edges = torch.linspace(-limit, limit, BINS + 1)
        for number, (state, lambdas) in enumerate(states.items(), 1):
            counts = torch.histogram(lambdas.float().cpu(), edges).hist
            last = number == len(states)  # filled, the ones before it as outlines
            panel.stairs(counts.tolist(), edges.tolist(), fill=last, alpha=0.5 if last else 1.0, label=state)
        panel.set(title=name, xlabel="λ", ylabel="terms")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize="small")
    return figure


@style()
def progress(lines: Lines) -> Figure:
    """Draw σ and every λ, or quartiles of |λ|, over the epochs; dashed where a λ shrinks, as in the paper."""
    names = list(lines[0]["layers"])
    figure, axes = _figure(len(names))
    epochs = [line["epoch"] for line in lines]
    for panel, name in zip(axes, names, strict=True):
        entries = [line["layers"][name] for line in lines]
        panel.plot(epochs, [entry["sigma"] for entry in entries], color=INK["ink"], linewidth=2.5, label="σ")
        if "lambdas" in entries[0]:
            for values in zip(*(entry["lambdas"] for entry in entries), strict=True):
                shrinks = abs(values[-1]) < abs(values[0])
                panel.plot(epochs, values, "--" if shrinks else "-", linewidth=1)
            panel.set(title=f"{name}: σ and every λ", xlabel="epoch")
        else:
            low, lower, median, upper, high = zip(*(entry["lambda_size_quartiles"] for entry in entries), strict=True)
            panel.fill_between(epochs, low, high, alpha=0.15, color=INK["s2"], linewidth=0, label="|λ|: all")
            panel.fill_between(epochs, lower, upper, alpha=0.35, color=INK["s2"], linewidth=0, label="middle half")
            panel.plot(epochs, median, color=INK["s2"], label="median")
            panel.set(title=f"{name}: σ and |λ|", xlabel="epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.legend(fontsize="small")
    return figure


@style()
def against_parameters(points: Mapping[str, tuple[int, float]]) -> Figure:
    """Draw accuracy against the number of parameters."""
    figure, axes = _figure(1)
    for name, (parameters, accuracy) in points.items():
        axes[0].plot([parameters], [accuracy], "o", markersize=9, alpha=0.8, label=name)
    sizes, lowest = [size for size, _ in points.values()], min(accuracy for _, accuracy in points.values())
    # Down to 90 at least: a closer look would make much of a few test images.
    axes[0].set(xlabel="parameters, logarithmic", ylabel="test accuracy, %", ylim=(min(90, lowest - 1), 100))
    count_axis(axes[0], min(sizes) / 1.5, max(sizes) * 1.5)
    axes[0].legend(fontsize="small")
    return figure


def write(figure: Figure, path: Path) -> Path:
    """Write a figure on white, in the format of the file name."""
    with style():
        figure.savefig(path, dpi=150, transparent=False, facecolor="white")
    return path


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    columns = min(panels, 2)
    rows = -(-panels // columns)
    size = (4.4 * columns, 3.2 * rows) if panels > 1 else (6.0, 4.0)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]
