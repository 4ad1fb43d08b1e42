"""Claim: canonical_norm, truncate and factorize take time in proportion to the number of layers.

For chains of 10, 100 and 1,000 linear layers of 16 × 16 in single precision, each call takes per layer at 1,000 layers
at most 1.5 times as long as at 100: canonical_norm at exact rank, truncate to half of the dense size (without a refit,
by default, and fitted to 64 samples), and factorize by the model of the costs. Times are those of the CPU; a ratio is
the median of --rounds rounds in which the sizes take turns.

    python benchmarks/scaling_layers.py --threads 1 [--rounds 3]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cpnorm
import timing

SIZES = (10, 100, 1000)
WIDTH = 16


def chain(layers: int) -> nn.Sequential:
    """Return a chain of plain linear layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def steps(layers: int) -> dict[str, Callable[[], Any]]:
    """Return the calls on chains of this length; what they need is made beforehand."""
    plain, x = chain(layers), torch.randn(64, WIDTH)
    canonical = cpnorm.canonical_norm(copy.deepcopy(plain))
    budget = sum(p.numel() for p in canonical.parameters()) // 4
    cut = copy.deepcopy(canonical)
    cpnorm.truncate(cut, params=budget, refit="none")
    models = {"canonical_norm": plain, "factorize": cut}  # the others: canonical
    calls: dict[str, Callable[[nn.Module], Any]] = {
        "canonical_norm": cpnorm.canonical_norm,
        "truncate without refit": lambda model: cpnorm.truncate(model, params=budget, refit="none"),
        "truncate": lambda model: cpnorm.truncate(model, params=budget),
        "truncate with data": lambda model: cpnorm.truncate(model, params=budget, data=[x]),
        "factorize": lambda model: cpnorm.factorize(model, x, measure=False, goal="parameters"),
    }

    def timed(name: str) -> float:
        model = copy.deepcopy(models.get(name, canonical))
        start = time.process_time()
        calls[name](model)
        return time.process_time() - start

    return {name: lambda name=name: timed(name) for name in calls}


def main() -> None:
    args: argparse.Namespace = timing.start(timing.parser(__doc__, rounds=3))
    runs = {layers: steps(layers) for layers in SIZES}
    for run in runs[SIZES[0]].values():  # the first call loads libraries
        run()
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for n, calls in runs.items() for name in calls}
    for _ in range(args.rounds):
        for name, layers in seconds:
            seconds[name, layers].append(runs[layers][name]() / layers)
    claims = [
        timing.at_most(
            f"{name}, per layer, 1,000 layers against 100",
            timing.spread(a / b for a, b in zip(seconds[name, 1000], seconds[name, 100], strict=True)),
            1.5,
        )
        for name in runs[SIZES[0]]
    ]
    rows = [
        {
            "call": name,
            **{f"{layers:,} layers: ms per layer": timing.milliseconds(seconds[name, layers]) for layers in SIZES},
        }
        for name in runs[SIZES[0]]
    ]
    timing.write(
        "scaling_layers",
        args.device,
        title="Growth with the number of layers",
        claims=claims,
        tables={f"chains of linear layers of {WIDTH} × {WIDTH}": rows},
    )


if __name__ == "__main__":
    main()
