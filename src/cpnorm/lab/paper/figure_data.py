"""Collect what the figures and the explorer of the report show of a trained network, besides its accuracy."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch

import cpnorm
from cpnorm.lab.training.evaluation import prepared
from cpnorm.lab.training.trainer import Trainer

EXPLORED_RATES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 0.99)
HISTOGRAM_BINS = 30


def collect_figure_data(trainer: Trainer) -> dict[str, Any]:
    """Return sigma and lambdas over the epochs where they are few, their histograms, and the accuracy at every rate."""
    layers: dict[str, Any] = {}
    for line in trainer.history:
        for name, entry in line["layers"].items():
            if "lambdas" in entry and name.endswith("features.0"):
                start = [round(value, 5) for value in trainer.initial_lambdas[name].tolist()]
                trace = layers.setdefault(name, {"initial": start, "sigma": [], "lambdas": []})
                trace["sigma"].append(entry["sigma"])
                trace["lambdas"].append(entry["lambdas"])
    histograms = {}
    for name, layer in cpnorm.canonical_layers(trainer.model).items():
        if name in trainer.initial_lambdas:
            before, after = trainer.initial_lambdas[name].float().cpu(), layer.lambdas.detach().float().cpu()
            limit = max(before.abs().max().item(), after.abs().max().item())
            histograms[name] = {
                "edges": [round(e, 4) for e in torch.linspace(-limit, limit, HISTOGRAM_BINS + 1).tolist()],
                "before": torch.histc(before, HISTOGRAM_BINS, -limit, limit).int().tolist(),
                "after": torch.histc(after, HISTOGRAM_BINS, -limit, limit).int().tolist(),
            }
    return {"layers": layers, "histograms": histograms, "explorer": explore(trainer)}


def explore(trainer: Trainer) -> dict[str, Any]:
    """Return the accuracy after truncation without fine-tuning, and the cost of each layer's terms."""
    whole = trainer.model
    accuracies = []
    for rate in EXPLORED_RATES:
        small = copy.deepcopy(whole)
        cpnorm.truncate(small, rate=rate, criterion="lambda", refit="none")
        _, accuracy = trainer.evaluate(trainer.data.test_images, trainer.data.test_labels, small)
        accuracies.append(round(accuracy, 2))
    through_factors = copy.deepcopy(whole)
    for layer in cpnorm.canonical_layers(through_factors).values():
        layer.path = "factors"
    image = prepared(trainer.data.test_images[:1], trainer.data)
    summary = cast(cpnorm.Summary, cpnorm.summary(through_factors.eval(), image))
    flops = {row.name: row.flops or 0 for row in summary.layers}
    layers = {}
    for name, layer in cpnorm.canonical_layers(whole).items():
        sizes = layer.lambdas.detach().abs().sort(descending=True).values.cpu()
        shown = sizes[:: max(1, len(sizes) // 100)]
        layers[name] = {
            "rank": layer.rank,
            "lambdas": [float(f"{value:.3g}") for value in shown.tolist()],
            "term_weights": 1 + sum(layer.modes),
            "flops_per_term": flops[name] // layer.rank,
        }
    return {"rates": list(EXPLORED_RATES), "accuracy": accuracies, "layers": layers}
