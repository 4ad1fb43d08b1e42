"""The paper's rank tables: estimate the rank of each freshly drawn layer on the CPU, into results/*.jsonl."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cpnorm
from cpnorm.lab.paper.jobs import Results
from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.paper.tables import LayerRank
from cpnorm.lab.training import models
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.runs import environment

log = logging.getLogger("cpnorm.lab")


STEP, TARGET, FAILURES, SWEEPS = 5, 0.99, 4, 100  # of the authors' estimator


def authors_rank(weight: Tensor, fit_at: Callable[[int], float] | None = None, seed: int = 0) -> cpnorm.RankEstimate:
    """Return the rank by the authors' stopping rule: 1, 6, 11, … until the fit exceeds 99 %, or has failed four times.

    Each rank is fitted anew by plain alternating least squares. A failed fit is one that is not a number: their
    published 571 is such an end. Ranks may go beyond the exact one. The first rank that succeeds or fails is found by
    bisection, on the assumption that the fit grows with the rank.

    Args:
        weight: a convolution kernel.
        fit_at: the fit of a rank; by default that of ``cpnorm.cp_als`` without a ridge.
        seed: of the random starts.
    """
    if fit_at is None:

        def fit_at(rank: int) -> float:
            start = torch.Generator().manual_seed(seed)
            return cpnorm.cp_als(weight, rank, sweeps=SWEEPS, tolerance=1e-8, ridge=0.0, generator=start).fit(weight)

    fits: dict[int, float] = {}

    def at(index: int) -> float:
        rank = 1 + STEP * index
        if rank not in fits:
            fits[rank] = fit_at(rank)
        return fits[rank]

    low, high = -1, 1
    while at(high) <= TARGET:  # false for a fit that is not a number
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) <= TARGET else (low, middle)
    if math.isnan(at(high)):  # the first failure: the fourth ends it, unless a fit succeeds before
        failures = 0
        while True:
            failures += math.isnan(at(high))
            if failures == FAILURES or at(high) > TARGET:
                break
            high += 1
    curve = [(rank, fit) for rank, fit in sorted(fits.items()) if rank <= 1 + STEP * high]
    return cpnorm.RankEstimate(1 + STEP * high, curve)


def missing_ranks(keys: Sequence[str], results: Results) -> dict[tuple[str, int], list[LayerRank]]:
    """Return, by table and seed, the layers whose ranks are not estimated yet."""
    done, tables, seeds = results.done(), results.protocol.find_tables(keys), range(results.protocol.rank_seeds)
    layers = {
        (t.key, seed): [y for y in t.ranks if (f"{t.key}/{y.layer}", seed) not in done]
        for seed in seeds
        for t in tables
    }
    return {key: missing for key, missing in layers.items() if missing}


def estimate_ranks(
    keys: Sequence[str],
    results: Path,
    protocol: Protocol = WORDS,
    stop: Stop | None = None,
    announce: Callable[[str], None] = log.info,
) -> None:
    """Fit the freshly drawn layers by ALS with growing rank, and append each rank found to the results."""
    store, where = Results(results, protocol), environment()
    stop = Stop() if stop is None else stop  # a Stop without a request is false
    for (table, seed), layers in missing_ranks(keys, store).items():
        _estimate(table, layers, store, where, seed, stop, announce)


def _estimate(
    table: str,
    layers: Sequence[LayerRank],
    store: Results,
    where: dict[str, Any],
    seed: int,
    stop: Stop,
    announce: Callable[[str], None],
) -> None:
    name = table.partition("-")[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = models.build(name, *((3, 10, 32) if name == "alexnet" else (1, 10, 28)))
    for layer in layers:
        key = f"{table}/{layer.layer}"
        if stop:
            return
        started = time.perf_counter()
        weight = model.get_parameter(f"{layer.layer}.weight").detach()
        if store.protocol.authors_rank_rule and weight.ndim > 2:
            found = authors_rank(weight, seed=seed)
        else:
            found = cpnorm.estimate_rank(weight, generator=torch.Generator().manual_seed(seed))
        line = {"table": table, "row": key, "seed": seed, "rank": found.rank, "published": layer.rank}
        line |= {
            "curve": [[r, None if math.isnan(f) else round(f, 5)] for r, f in found.curve],
            "rule": "authors" if store.protocol.authors_rank_rule else "growth",
            "seconds": round(time.perf_counter() - started, 2),
        }
        store.append(line | {"environment": where})
        announce(f"{key}: rank {found.rank} (published {layer.rank})")
