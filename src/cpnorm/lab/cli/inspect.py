"""Show a run: its record, its layers, and their σ and λ over training, as tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.training.run_networks import blank, trained_network
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.setup import build_model

BARS = "▁▂▃▄▅▆▇█"
QUICK_INITS = ("exact", "kaiming_normal", "kaiming_uniform")


@dataclass(frozen=True)
class Inspection:
    """A run, read from its folder."""

    folder: Path
    settings: dict[str, Any]
    record: dict[str, Any] | None  # None: not finished yet
    metrics: list[dict[str, Any]]
    model: nn.Module | None
    summary: cpnorm.Summary | None  # None without canonical layers

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "run": str(self.folder),
            "settings": self.settings,
            "record": self.record,
            "last_epoch": self.metrics[-1] if self.metrics else None,
            "summary": self.summary.to_json() if self.summary else None,
        }


def inspect(path: str | Path) -> Inspection:
    """Read a run, finished or not; needs neither data nor a GPU."""
    folder = RunFolder(path)
    config, metrics = folder.config(), folder.metrics()
    model = trained_network(folder) if (folder / "model.safetensors").exists() else None
    if model is None and not metrics:
        raise RunError(f"{folder.path} has nothing to show yet: no epoch is finished")
    summary = None
    if model is not None and cpnorm.canonical_layers(model):
        images = blank(config.data, folder.data()).test_images
        summary = cast(cpnorm.Summary, cpnorm.summary(model.eval(), torch.zeros(images.shape)))
    return Inspection(folder.path, config.to_json(), folder.record(), metrics, model, summary)


# --- tables -----------------------------------------------------------------------------------------------------------


def result_table(run: Inspection) -> Table:
    """Return the run in a few lines."""
    settings, record = run.settings, run.record
    table = Table(show_header=False, box=None, pad_edge=False)
    norm = {"none": "plain", "weight": "weight-normalised", "cp": "canonical", "tai": "low rank (Tai et al.)"}
    table.add_row("network", f"{norm[settings['norm']]} {settings['model']} on {settings['data']}")
    optimizer = f"{settings['optimizer']}, learning rate {settings['lr']:g}, batch {settings['batch_size']}"
    table.add_row("training", f"{optimizer}, seed {settings['seed']}, {len(run.metrics)}/{settings['epochs']} epochs")
    if record and record["test_accuracy_last"] is not None:
        best = f" (best {record['test_accuracy_best']:.2f} % in epoch {record['best_epoch']})"
        table.add_row("test accuracy", f"{record['test_accuracy_last']:.2f} %{best}")
    elif run.metrics:
        table.add_row("test accuracy", f"{run.metrics[-1]['test_accuracy']:.2f} % so far")
    if record:
        table.add_row("parameters", f"{record['parameters']:,}")
        table.add_row("time", f"{record['seconds']:,.0f} s in training steps and evaluation ({record['step_mode']})")
        if cut := record.get("truncation_result"):
            before = "" if cut["accuracy_before"] is None else f"{cut['accuracy_before']:.2f} % before, "
            table.add_row("compressed", f"{before}{cut['accuracy_cut']:.2f} % before fine-tuning")
        if record["diverged"]:
            table.add_row("diverged", record["diverged"])
    return table


def layer_table(run: Inspection) -> Table:
    """Return shape, rank and parameters per canonical layer, and how it runs on one image."""
    assert run.summary is not None
    table = Table(box=SIMPLE)
    table.add_column("layer", overflow="fold")  # cut off, two names may look alike
    table.add_column("shape", overflow="fold")
    for heading in ("rank", "exact", "parameters", "of dense"):
        table.add_column(heading, justify="right")
    table.add_column("runs by")
    for row in run.summary.layers:
        table.add_row(
            row.name,
            "×".join(map(str, row.shape)),
            f"{row.rank:,}",
            f"{row.exact_rank:,}",
            f"{row.parameters:,}",
            f"{100 * row.parameters / row.parameters_dense:.3g} %",
            (row.path or "") + (f", terms cancel {row.cancellation:.0f}-fold" if row.degenerate else ""),
        )
    return table


def lambda_table(run: Inspection) -> Table:
    """Return per canonical layer the λ sorted by size and counted by value, and σ and |λ| over the epochs."""
    assert run.summary is not None
    assert run.model is not None
    table = Table(box=SIMPLE)
    for heading in ("layer", "|λ| sorted", "λ counted", "σ by epoch", "median |λ|"):
        table.add_column(heading, no_wrap=heading != "layer", overflow="fold")
    layers = cpnorm.canonical_layers(run.model)
    for row in run.summary.layers:
        history = [line["layers"][row.name] for line in run.metrics]
        table.add_row(
            row.name,
            bars(row.lambdas),
            counted(layers[row.name].lambdas.detach().float()),
            trend([entry["sigma"] for entry in history]),
            trend([entry["lambda_size_quartiles"][2] for entry in history]),
        )
    return table


def counted(values: torch.Tensor) -> str:
    """Return a histogram of the values that are numbers."""
    values = values[values.isfinite()]
    return bars(torch.histc(values, 10).tolist()) if len(values) else ""


def bars(values: Sequence[float], width: int = 10) -> str:
    """Return sizes as bars from zero to the largest, in ``width`` characters or fewer.

    >>> bars([1, 4, 8, 2])
    '▁▄█▂'
    """
    picked = _evenly([abs(value) for value in values if math.isfinite(value)], width)
    largest = max(picked, default=0) or 1.0
    return "".join(BARS[max(0, -int(-len(BARS) * value // largest) - 1)] for value in picked)


def trend(values: Sequence[float], width: int = 6) -> str:
    """Return the first and the last value, with a sparkline of all between them.

    >>> trend([1.0, 1.5, 2.0])
    '1 ▁▄█ 2'
    """
    if not values:
        return ""
    finite = [value for value in values if math.isfinite(value)]  # some are not where the training diverged
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    steps = [(value - low) / ((high - low) or 1.0) * len(BARS) for value in _evenly(finite, width)]
    course = "".join(BARS[min(len(BARS) - 1, max(0, round(step) - 1))] for step in steps)
    return f"{values[0]:.3g} {course} {values[-1]:.3g}"


def _evenly(values: Sequence[float], count: int) -> list[float]:
    count = min(count, len(values))
    return [values[n * (len(values) - 1) // max(count - 1, 1)] for n in range(count)]


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(run: Inspection, folder: str | Path, kind: str = "png") -> list[Path]:
    """Draw learning curves, σ and λ by epoch, spectrum and histograms of the λ into files; return their paths."""
    from cpnorm.lab.cli import pictures

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    figures = {}
    if run.metrics:
        figures["accuracy"] = pictures.curves({"test": run.metrics})
        figures["loss"] = pictures.curves({"training": run.metrics}, "loss", "training loss")
        if run.metrics[0]["layers"]:
            figures["progress"] = pictures.progress(run.metrics)
    if run.model is not None and run.summary is not None:
        states = lambda_states(run)
        figures |= {"spectrum": pictures.spectrum(states), "histograms": pictures.histograms(states)}
    return [pictures.write(figure, target / f"{name}.{kind}") for name, figure in figures.items()]


def lambda_states(run: Inspection) -> dict[str, dict[str, Tensor]]:
    """Return the λ of every layer after training, and before it where they can be drawn quickly from the seed."""
    assert run.model is not None
    folder = RunFolder(run.folder)
    config, before = folder.config(), {}
    if config.init in QUICK_INITS and config.norm == "cp" and not (run.record or {}).get("truncation_result"):
        before = cpnorm.canonical_layers(build_model(config, blank(config.data, folder.data()), torch.device("cpu")))
    return {
        name: {
            **({"before training": before[name].lambdas.detach()} if name in before else {}),
            "after training": layer.lambdas.detach(),
        }
        for name, layer in cpnorm.canonical_layers(run.model).items()
    }
