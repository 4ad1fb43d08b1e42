"""Try several budgets on copies of a model: error or accuracy against size, and the sensitivity of each layer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm._checks import check_model, is_number
from cpnorm.compress.calibration_data import (
    Batch,
    Metric,
    accuracy,
    as_batches,
    batch_size,
    relative_error,
    tensors_of,
)
from cpnorm.compress.fitting.calibration import Calibrated, calibrate
from cpnorm.compress.truncation import truncate
from cpnorm.compress.truncation_job import Progress
from cpnorm.describe.tables import share, table
from cpnorm.nn.canonical import count_parameters
from cpnorm.nn.convert import canonical_layers, canonical_norm, fold
from cpnorm.nn.running import evaluating, run, to_device_of


@dataclass(frozen=True)
class SweepPoint:
    """The result of one budget: parameters that are left, error of the outputs, and the metric."""

    budget: float  # share of the dense parameters asked for
    parameters: int
    output_error: float  # distance of the outputs from the given model's, relative to their norm
    metric: float | None  # None without targets


@dataclass(frozen=True)
class LayerSensitivity:
    """The error that is expected if one layer alone is cut to half of its parameters."""

    name: str
    parameters: int
    output_error: float  # relative to the norm of the network's outputs
    rank: int  # at which its canonical form has half of the dense parameters


@dataclass(frozen=True)
class Sweep:
    """What ``sweep`` returns; prints as tables: points by descending size, layers by descending sensitivity."""

    parameters: int  # of the dense model
    metric_name: str | None
    metric: float | None  # of the given model
    points: tuple[SweepPoint, ...]
    layers: tuple[LayerSensitivity, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                share(point.parameters, self.parameters),
                f"{point.parameters:,}",
                f"{100 * point.output_error:.3g} %",
                "–" if point.metric is None else f"{point.metric:.4g}",
            ]
            for point in self.points
        ]
        whole = ["100 %", f"{self.parameters:,}", "0 %", "–" if self.metric is None else f"{self.metric:.4g}"]
        header = ["of dense", "parameters", "output error", self.metric_name or "metric"]
        layers = [
            [y.name or "(this layer)", f"{y.parameters:,}", f"{y.rank:,}", f"{100 * y.output_error:.3g} %"]
            for y in self.layers
        ]
        return (
            f"{table(header, [whole, *rows], left=())}\n\n"
            "output error expected when one layer alone is cut to half of its parameters:\n"
            f"{table(['layer', 'parameters', 'rank', 'output error'], layers, left=(0,))}"
        )

    def plot(self, path: str | Path) -> None:
        """Draw the metric, or the output error, against the parameters; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        sizes = [self.parameters, *(point.parameters for point in self.points)]
        if self.metric is not None and all(point.metric is not None for point in self.points):
            values = [self.metric, *(point.metric or 0.0 for point in self.points)]
            axes.set_ylabel(self.metric_name or "metric")
        else:
            values = [0.0, *(100 * point.output_error for point in self.points)]
            axes.set_ylabel("output error (%)")
        axes.plot(sizes, values, "o-")
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
        axes.grid(alpha=0.3)
        figure.savefig(path)


@torch.inference_mode(False)
@torch.no_grad()
def sweep(
    model: nn.Module,
    data: Any,
    *,
    parameters: Sequence[float] = (0.75, 0.5, 0.33, 0.2, 0.1),
    evaluation: Any = None,
    metric: Metric | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Sweep:
    """Return what several budgets would do to a model, and the sensitivity of its layers; the model does not change.

    Args:
        model: a plain model, or one with canonical layers.
        data: data to fit to, as for ``truncate``.
        parameters: shares of the dense model's parameters to try.
        evaluation: data to measure on, of the same form; by default ``data``, which makes a fit to few samples look
            better than it is.
        metric: a function of (outputs, targets) of a batch, averaged over all batches; by default the accuracy if the
            targets are class indices.
        progress: called with (name of the step, steps done, steps in total).
        options: further arguments of ``truncate``, such as ``skip=`` or ``round_ranks=``.

    >>> network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> found = sweep(network, torch.randn(200, 32), parameters=(0.7, 0.4))
    >>> found.points[0].output_error < found.points[1].output_error, len(found.layers)
    (True, 2)
    """
    check_model(model)
    budgets = sorted(set(parameters), reverse=True)
    if not budgets or not all(is_number(each) and 0 < each <= 1 for each in budgets):
        raise ValueError(f"parameters: expected shares between 0 and 1, got {parameters!r}")
    batches = as_batches(data)
    measured = batches if evaluation is None else as_batches(evaluation)
    canonical = copy.deepcopy(model).eval()
    if not canonical_layers(canonical):
        canonical_norm(canonical, skip=options.get("skip", ()))
    dense = fold(copy.deepcopy(canonical))
    expected = _outputs(model, measured)
    name, score = _metric(metric, expected, measured)
    points = []
    calibrated = calibrate(canonical, batches)
    for done, budget in enumerate(budgets):
        if progress:
            progress(f"{100 * budget:g} % of the parameters", done, len(budgets))
        truncated = copy.deepcopy(canonical)
        report = truncate(truncated, params=float(budget), data=calibrated, **options)
        outputs = _outputs(truncated, measured)
        error = relative_error(zip(outputs, expected, strict=True))
        points.append(SweepPoint(budget, report.parameters_after, error, score(outputs) if score else None))
    if progress:
        progress("", len(budgets), len(budgets))
    whole, layers = score(expected) if score else None, _sensitivity(canonical, calibrated)
    return Sweep(count_parameters(dense), name, whole, tuple(points), layers)


def _outputs(model: nn.Module, batches: Sequence[Batch]) -> list[Any]:
    with evaluating(model):
        return [[y.cpu() for y in tensors_of(run(model, inputs))] for inputs, _ in batches]


def _metric(
    metric: Metric | None, outputs: Sequence[Any], batches: Sequence[Batch]
) -> tuple[str | None, Callable[[Sequence[Any]], float] | None]:
    """Return the metric's name and the metric as a function of all outputs, or None twice without suitable targets."""
    targets = [to_device_of(nn.Identity(), wanted) for _, wanted in batches]
    if metric is None:
        classes = all(
            isinstance(wanted, Tensor) and not wanted.is_floating_point() and wanted.shape == y[0].shape[:-1]
            for y, wanted in zip(outputs, targets, strict=True)
        )
        if not classes:
            return None, None
    chosen = metric or accuracy
    sizes = [batch_size(inputs) for inputs, _ in batches]

    def mean(results: Sequence[Any]) -> float:
        values = [
            float(chosen(y if len(y) > 1 else y[0], wanted)) * size
            for y, wanted, size in zip(results, targets, sizes, strict=True)
        ]
        return sum(values) / sum(sizes)

    return getattr(chosen, "__name__", "metric"), mean


def _sensitivity(model: nn.Module, calibrated: Calibrated) -> tuple[LayerSensitivity, ...]:
    """Return the expected error of the outputs if each layer alone is cut to half of its parameters."""
    layers = canonical_layers(model)
    samples = sum(batch_size(inputs) for inputs, _ in calibrated)
    norm = sum(y.double().square().sum().item() for outputs in _outputs(model, calibrated.batches) for y in outputs)
    rows = []
    for name, calibration in calibrated.layers.items():
        size = calibration.problem.weight.numel()
        rank = max(1, min(layers[name].rank, (size // 2 - 1) // (1 + sum(layers[name].modes))))
        squared = calibration.importance * calibration.expected_error(rank) * samples / max(norm, 1e-300)
        rows.append(LayerSensitivity(name, size, squared**0.5, rank))
    return tuple(sorted(rows, key=lambda row: -row.output_error))
