"""Draws the figures of docs/mathematics.md: python docs/figures.py FOLDER. The site does so whenever it is built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import cpnorm

# Without a background, and in colours that can be read on white and on black.
STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "cpnorm",  # the same picture, the same file
    "font.size": 9,
    "axes.prop_cycle": mpl.cycler(color=["#3b7dd8", "#d9731a", "#2f9e5b", "#a06bd6"]),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#8a8f98"),
}


def layer_weight() -> Tensor:  # (O, I, K, K)
    """A convolution's weight with structure and noise, as training leaves it: smooth spectrum, no exact low rank."""
    torch.manual_seed(0)
    terms = cpnorm.CPTensor.from_terms(0.8 ** torch.arange(40.0), [torch.randn(d, 40) for d in (32, 24, 3, 3)])
    smooth = terms.normalize().to_dense()
    noise = torch.randn(32, 24, 3, 3)
    return smooth / smooth.norm() + 0.5 * noise / noise.norm()


def fit_against_rank(axes: Axes) -> None:
    """Fit of the three decompositions at growing rank."""
    weight = layer_weight()
    ranks = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 216]
    exact = cpnorm.cp_exact(weight)
    greedy = cpnorm.cp_power(weight, ranks[-1], generator=torch.Generator().manual_seed(0))
    for name, form in (("exact: slice SVD", exact), ("power method", greedy)):
        axes.plot(ranks, [form.select(torch.arange(r)).fit(weight) for r in ranks], label=name)
    fits = [cpnorm.cp_als(weight, r, sweeps=30, generator=torch.Generator().manual_seed(0)).fit(weight) for r in ranks]
    axes.plot(ranks, fits, label="ALS with norm control")
    axes.set(xlabel="rank", ylabel="fit, 1 − ‖W − W_R‖ / ‖W‖", ylim=(0, 1.03))
    axes.legend(loc="lower right")


def spectra(axes: Axes) -> None:
    """What λ look like: the greedy method puts the most into its first terms, least squares the least."""
    weight = layer_weight()
    generator = torch.Generator().manual_seed(0)
    for name, form in {
        "exact: slice SVD": cpnorm.cp_exact(weight),
        "power method": cpnorm.cp_power(weight, 216, generator=generator),
        "ALS with norm control": cpnorm.cp_als(weight, 120, sweeps=30, generator=generator),
    }.items():
        sizes = (form.sigma * form.lambdas).abs().sort(descending=True).values
        axes.plot(range(1, len(sizes) + 1), sizes / weight.norm(), label=name)
    axes.set(xlabel="term, by size", ylabel="λ / ‖W‖", xscale="log", yscale="log", ylim=(1e-3, 1.5))
    axes.legend(loc="lower left")


def cancellation(axes: Axes) -> None:
    """Plain least squares fits by terms that cancel each other; a price on their norms prevents it."""
    weight = torch.randn(32, 24, 3, 3, generator=torch.Generator().manual_seed(0))  # as drawn before training
    ranks = [40, 80, 100, 120, 130, 140, 160]
    for name, ridge in (("plain ALS", 0.0), ("ALS with norm control", 0.1)):
        forms = [
            cpnorm.cp_als(weight, r, sweeps=60, ridge=ridge, generator=torch.Generator().manual_seed(0)) for r in ranks
        ]
        axes.plot(ranks, [form.cancellation() for form in forms], marker="o", markersize=3, label=name)
    axes.axhline(1, linewidth=0.8, linestyle=":", color="#8a8f98")
    axes.set(xlabel="rank", ylabel="Σ ‖term‖² / ‖W‖²", ylim=(0, None))
    axes.legend()


def energy_kept(axes: Axes) -> None:
    """λ ~ N(0, 1), orthogonal terms: what is left when terms are dropped by size, and by signed value."""
    lambdas = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    dropped = torch.linspace(0, 100, len(lambdas))
    for name, order in (("by |λ|", lambdas.abs().argsort()), ("by signed λ", lambdas.argsort())):
        lost = lambdas[order].square().cumsum(0) / lambdas.square().sum()
        axes.plot(dropped, 100 * (1 - lost), label=name)
    axes.set(xlabel="% of the terms dropped", ylabel="% of the energy left", xlim=(0, 100), ylim=(0, 102))
    axes.legend()


def costs(axes: Axes) -> None:
    """Arithmetic of one 3×3 convolution by rank: through the factors, and through the rebuilt weight."""
    layer = nn.Conv2d(192, 384, 3, padding=1)
    ranks = [8, 16, 32, 64, 128, 256, 512, 1024, 1728]
    plans = [cpnorm.plan(layer, (64, 192, 8, 8), rank, training=False) for rank in ranks]
    axes.plot(ranks, [p.factors.flops / 1e9 for p in plans], label="through the factors")
    axes.plot(ranks, [p.rebuild.flops / 1e9 for p in plans], label="weight rebuilt")
    dense = 2 * 64 * 8 * 8 * 192 * 384 * 9 / 1e9
    axes.axhline(dense, linewidth=0.8, linestyle=":", color="#8a8f98")
    axes.annotate("dense layer", (8, dense), xytext=(0, 3), textcoords="offset points")
    axes.set(xlabel="rank", ylabel="GFLOP, 64 images", xscale="log", yscale="log")
    axes.legend()


FIGURES: tuple[Callable[[Axes], None], ...] = (fit_against_rank, spectra, cancellation, energy_kept, costs)


def draw_all(folder: Path) -> None:
    """Draw every figure into an SVG file named like its function."""
    with mpl.rc_context(STYLE):
        for draw in FIGURES:
            figure = Figure(figsize=(6, 3.2), layout="constrained")
            draw(figure.subplots())
            name = draw.__name__.replace("_", "-")
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
