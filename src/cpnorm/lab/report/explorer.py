"""What the report's explorer shows: trained networks, their lambdas, and the accuracy measured at every rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cpnorm.lab.report.records import Records, Run, numbers

SHOWN_LAMBDAS = 100  # of a layer; more make the page heavy and the drawing no finer


def networks(records: Records) -> list[Mapping[str, Any]]:
    """What the explorer shows, checked and thinned out; networks whose record does not hold together are left out."""
    found: list[Mapping[str, Any]] = []
    for run in records.all_runs():
        explorer = run.raw.get("explorer")
        network = _network(run, explorer) if isinstance(explorer, dict) and run.diverged is None else None
        if network:
            found.append(network)
    return found


def _network(run: Run, explorer: Mapping[str, Any]) -> dict[str, Any] | None:
    rates, accuracy = numbers(explorer.get("rates")), numbers(explorer.get("accuracy"))
    if not rates or len(rates) != len(accuracy) or not isinstance(explorer.get("layers"), dict):
        return None
    layers = []
    for name, entry in explorer["layers"].items():
        if not isinstance(entry, dict):
            return None
        lambdas = sorted((abs(value) for value in numbers(entry.get("lambdas"))), reverse=True)
        rank, term = entry.get("rank"), entry.get("term_weights")
        if not lambdas or not isinstance(rank, int) or not isinstance(term, int):
            return None
        step = max(1, math.ceil(len(lambdas) / SHOWN_LAMBDAS))
        flops = entry.get("flops_per_term")
        layers.append(
            {
                "name": str(name),
                "rank": rank,
                "term": term,
                "flops": flops if isinstance(flops, int) else None,
                "lambdas": [float(f"{value:.3g}") for value in lambdas[::step]],
            }
        )
    ordered = sorted(zip(rates, accuracy, strict=True))
    return {
        "name": f"{run.row}, seed {run.seed}",
        "weights": run.parameters,
        "rates": [rate for rate, _ in ordered],
        "accuracy": [value for _, value in ordered],
        "layers": layers,
    }
