"""Choose how many terms each layer keeps under a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cpnorm._checks import check_int
from cpnorm.compress import budgets
from cpnorm.compress.budgets import Options
from cpnorm.compress.fitting.sequence import Refitted
from cpnorm.compress.report import all_flops
from cpnorm.compress.truncation_job import TruncationJob
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import including_tied, spread_over_tied
from cpnorm.nn.work import Work


def choose_ranks(
    budget: str, amount: Any, job: TruncationJob, work: Mapping[int, Work], multiple: int, may_be_dense: bool
) -> dict[str, int]:
    """Return how many terms each layer keeps."""
    layers = job.layers
    if budget == "rate":
        kept = {name: budgets.terms_to_keep(layer.rank, amount) for name, layer in layers.items()}
        return {name: _rounded(rank, layers[name].rank, multiple) for name, rank in kept.items()}
    if budget == "ranks":
        asked = _ranks(amount, job.model, layers)
        return {name: _rounded(rank, layers[name].rank, multiple) for name, rank in asked.items()}

    options = {n: _options(budget, n, layer, job, work, multiple, may_be_dense) for n, layer in layers.items()}
    saved = {name: each.saved for name, each in options.items()}
    sequence = budgets.cheapest_first({name: each.losses for name, each in options.items()}, saved)

    def kept_at(steps: Mapping[str, int]) -> dict[str, int]:
        return {name: options[name].ranks[count] for name, count in steps.items()}

    if budget in ("params", "flops"):
        now: float = all_flops(job.model, work) if budget == "flops" else count_parameters(job.model)
        if budget == "params":
            now += sum(each.costs[0] - layers[name].cp.numel() for name, each in options.items())
        least = now - sum(each[-1] for each in saved.values())
        if amount < least:
            share = f"; a share of the dense model is a float up to 1, such as {budget}=0.1" if amount <= 100 else ""
            raise ValueError(
                f"expected {budget} >= {int(least):,}, which leave every layer one term, got {amount:,}{share}"
            )
        return kept_at(budgets.spend(sequence, saved, now - amount))
    if budget == "energy":
        grams = {name: layer.cp.to(torch.float64).gram() for name, layer in layers.items()}
        lost = {}
        for name, gram in grams.items():
            by_dropped = budgets.energy_lost(gram, job.order(name)).tolist()
            lost[name] = [by_dropped[layers[name].rank - rank] for rank in options[name].ranks]
        return kept_at(budgets.follow(sequence, layers, budgets.steps_within(sequence, lost, 1 - amount)))
    allowed = job.loss(Refitted({})) + amount

    def within(steps: int) -> bool:
        ranks = kept_at(budgets.follow(sequence, layers, steps))
        return job.loss(job.quickly({n: rank for n, rank in ranks.items() if rank < layers[n].rank})) <= allowed

    return kept_at(budgets.follow(sequence, layers, budgets.furthest(len(sequence), within)))


def _options(
    budget: str,
    name: str,
    layer: CPLayer,
    job: TruncationJob,
    work: Mapping[int, Work],
    multiple: int,
    may_be_dense: bool,
) -> Options:
    if budget == "flops":
        return Options.of(layer.rank, work.get(tie_key(layer), Work()).at, job.loss_of(name), multiple=multiple)
    dense = math.prod(layer.modes) if may_be_dense else None
    per_term = 1 + sum(layer.modes)
    return Options.of(layer.rank, lambda rank: 1 + rank * per_term, job.loss_of(name), dense=dense, multiple=multiple)


def _rounded(rank: int, most: int, multiple: int) -> int:
    """Return a rank rounded down to a multiple, but to no less than ``multiple`` if the layer has that many terms."""
    return rank if rank == most else min(most, max(multiple, rank - rank % multiple))


def _ranks(ranks: int | Mapping[str, int], model: nn.Module, layers: Mapping[str, CPLayer]) -> Mapping[str, int]:
    if isinstance(ranks, Mapping):
        given = spread_over_tied("ranks", ranks, including_tied(model, layers), "truncate")
    else:
        given = dict.fromkeys(layers, ranks)
    kept = {}
    for name in (name for name in given if name in layers):
        asked = given[name]
        most = layers[name].rank
        rank = check_int("rank", asked, where=f" for {name or 'the layer'}")
        if isinstance(ranks, Mapping) and rank > most:
            raise ValueError(f"expected 1 <= rank <= {most}, got {rank} for {name or 'the layer'}")
        kept[name] = min(rank, most)
    return kept
