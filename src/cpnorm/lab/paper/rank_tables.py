"""The paper's rank tables: estimate the rank of each freshly drawn layer on the CPU, into results/*.jsonl."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import cpnorm
from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.paper.reproduce import Results
from cpnorm.lab.paper.tables import LayerRank
from cpnorm.lab.training import models
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.runs import environment

log = logging.getLogger("cpnorm.lab")


def missing_ranks(keys: Sequence[str], results: Results, seed: int = 0) -> dict[str, list[LayerRank]]:
    """Return, by table, the layers whose ranks are not estimated yet."""
    done, tables = results.done(), results.protocol.find_tables(keys)
    layers = {t.key: [y for y in t.ranks if (f"{t.key}/{y.layer}", seed) not in done] for t in tables}
    return {key: missing for key, missing in layers.items() if missing}


def estimate_ranks(
    keys: Sequence[str],
    results: Path,
    seed: int = 0,
    protocol: Protocol = WORDS,
    stop: Stop | None = None,
    announce: Callable[[str], None] = log.info,
) -> None:
    """Fit the freshly drawn layers by ALS with growing rank, and append each rank found to the results."""
    store, where = Results(results, protocol), environment()
    for table, layers in missing_ranks(keys, store, seed).items():
        _estimate(table, layers, store, where, seed, stop or Stop(), announce)


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
        found = cpnorm.estimate_rank(weight, generator=torch.Generator().manual_seed(seed))
        line = {"table": table, "row": key, "seed": seed, "rank": found.rank, "published": layer.rank}
        line |= {
            "curve": [[r, round(f, 5)] for r, f in found.curve],
            "seconds": round(time.perf_counter() - started, 2),
        }
        store.append(line | {"environment": where})
        announce(f"{key}: rank {found.rank} (published {layer.rank})")
