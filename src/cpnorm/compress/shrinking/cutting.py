"""Cut a canonical model so that its plain form is within a budget of ``shrink``."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any

from torch import nn

from cpnorm.compress.shrinking.job import ShrinkJob, flops_of
from cpnorm.compress.truncation import truncate
from cpnorm.deploy.factorization import Factorization, choose_forms
from cpnorm.nn.canonical import count_parameters
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.siblings import split_siblings
from cpnorm.nn.work import count_work

PROBES = 7  # steps of the bisection for a budget of latency or accuracy
ATTEMPTS = 3  # truncations until the factorised model is within the budget
FOR_SPEED = 0.98  # share of a parameter budget for terms; the rest is for faster forms of convolutions
NEARLY = 1.05  # a faster form of a layer may have this many times the fewest parameters


def cut_within(job: ShrinkJob, budget: str, amount: float) -> tuple[nn.Module, Factorization | None]:
    """Return the canonical model, truncated so that its plain form is within the budget, and its forms if known."""
    if budget == "accuracy_drop":
        return _by_accuracy(job, amount), None
    if budget == "latency_ms":
        return _by_latency(job, amount)
    before = count_parameters(job.model) if budget == "parameters" else job.flops
    limit = int(amount * before) if amount <= 1 else int(amount)
    if limit >= before:
        raise ValueError(f"{budget}: expected less than the model's {before:,}, got {amount:g}")
    least = _least_parameters(job.exact)
    if budget == "parameters" and limit < least:
        raise ValueError(
            f"parameters: expected at least {least:,} ({100 * least / before:.3g} % of {before:,}), which leave "
            f"one term in each layer that can be cut and all other parameters, got {amount:g}"
            f"{_largest_dense(job)}"
        )
    target, job.limit = limit, limit if budget == "parameters" else None
    if budget == "parameters" and any(len(layer.modes) > 3 for layer in canonical_layers(job.exact).values()):
        target = max(least, int(FOR_SPEED * limit))
    for attempt in range(ATTEMPTS):
        last = attempt == ATTEMPTS - 1
        candidate = copy.deepcopy(job.exact)
        cut_to(job, candidate, budget, target)
        choice = budget_forms(job, candidate, budget)
        small = plain_model(choice, candidate)
        got = count_parameters(small) if budget == "parameters" else flops_of(small, job.example)
        if got <= limit or last:
            break
        # Plain forms have more parameters than terms: a little more, or many times as many after a flatten.
        less = target - math.ceil(1.02 * (got - limit))
        target = max(least, less if 2 * less > target else int(0.98 * target * limit / got))
    if got > limit:
        warnings.warn(f"the result has {got:,} {budget}, more than the {limit:,} of the budget", stacklevel=3)
    return candidate, choice


def _largest_dense(job: ShrinkJob) -> str:
    """Return the layer that stays dense with the most parameters, and why, as the end of a message."""
    layers = sorted(job.dense_layers(job.exact), key=lambda layer: layer.parameters)
    return f"; the largest layer that stays dense is {layers[-1]}" if layers else ""


def cut_to(job: ShrinkJob, candidate: nn.Module, budget: str, target: int, **changed: Any) -> None:
    """Truncate in place to a number of parameters or FLOPs; ranks are rounded where the budget allows it."""
    options: dict[str, Any] = {"progress": partial(job.report_progress, "cutting"), **changed}
    options = options if "data" in options else options | {"data": job.calibrated}
    if budget == "parameters":
        options["params"] = target
    else:
        counted = sum(work.dense for work in count_work(job.model, job.example).values())
        others = job.flops - counted  # such as attention's products, which truncation leaves
        options |= {"flops": target - others, "example_input": job.example}
    try:
        truncate(candidate, round_ranks=job.round_ranks, **options)
    except ValueError:  # less than the fewest rounded terms in each layer
        if job.round_ranks == 1:
            raise
        truncate(candidate, **options)


def _by_accuracy(job: ShrinkJob, drop: float) -> nn.Module:
    allowed = job.score(job.model) - drop
    whole, best, high = count_parameters(job.model), None, 1.0
    low = min(1.0, _least_parameters(job.exact) / whole)
    for probe in range(PROBES):
        job.progress("bisecting", probe, PROBES)
        share = math.sqrt(low * high)
        candidate = copy.deepcopy(job.exact)
        cut_to(job, candidate, "parameters", math.ceil(share * whole))
        score = job.score(candidate)
        if score >= allowed:
            best, high = candidate, share
        else:
            low = share
    if best is None:
        raise ValueError(
            f"accuracy_drop: no cut keeps the metric at {allowed:.4g}; the mildest tried gives {score:.4g}"
        )
    return best


def _by_latency(job: ShrinkJob, limit: float) -> tuple[nn.Module, Factorization]:
    now = job.milliseconds(job.model)
    if now <= limit:
        raise ValueError(f"latency_ms: expected less than the {now:.3g} ms that the model takes now, got {limit:g}")
    whole, low, high, share = job.flops, 0.0, 1.0, 0.0
    quickly = {"refit": "none", "data": job.batches[:1]}  # the time depends on the ranks only
    least = math.inf

    def tried(share: float, **options: Any) -> tuple[nn.Module, Factorization, float]:
        candidate = copy.deepcopy(job.exact)
        cut_to(job, candidate, "flops", math.ceil(share * whole), **options)
        choice = budget_forms(job, candidate, "latency_ms")
        return candidate, choice, job.milliseconds(plain_model(choice, candidate))

    for probe in range(PROBES):
        job.progress("bisecting", probe, PROBES)
        middle = (low + high) / 2
        try:
            *_, taken = tried(middle, **quickly)
        except ValueError:  # fewer than one term in each layer
            low = middle
            continue
        least = min(least, taken)
        if taken <= limit:
            low = share = middle
        else:
            high = middle
    for slack in (1.0, 0.9, 0.8) if share else ():  # timings are noisy
        candidate, choice, taken = tried(slack * share)
        least = min(least, taken)
        if taken <= limit:
            return candidate, choice
    raise ValueError(f"latency_ms: expected at least about {least:.3g} ms, the least time found, got {limit:g}")


def _least_parameters(exact: nn.Module) -> int:
    layers = canonical_layers(exact).values()
    return count_parameters(exact) - sum((y.rank - 1) * (1 + sum(y.modes)) for y in layers)


def budget_forms(job: ShrinkJob, cut: nn.Module, budget: str) -> Factorization:
    """Return the forms of least parameters, FLOPs or time, depending on the budget."""
    if budget == "latency_ms":
        return choose_forms(cut, job.example)
    choice = choose_forms(cut, job.example, measure=False, goal="parameters")
    picked = {name: layer.form for name, layer in choice.layers.items()}
    if budget == "flops":
        least = {n: min(y.costs, key=lambda form: y.costs[form].flops) for n, y in choice.layers.items()}
        return choose_forms(cut, job.example, measure=False, forms=least)
    spare = math.inf if job.limit is None else job.limit - count_parameters(choice.apply(cut))
    faster = []
    for name, layer in choice.layers.items():
        now = layer.costs[layer.form]
        nearly = {form: cost for form, cost in layer.costs.items() if cost.parameters <= NEARLY * now.parameters}
        best = min(nearly, key=lambda form: nearly[form].total)
        more, gain = nearly[best].parameters - now.parameters, now.total - nearly[best].total
        faster += [(gain / max(more, 1), more, name, best)] if gain > 0 else []
    for _, more, name, best in sorted(faster, reverse=True):
        if more <= spare:
            spare, picked[name] = spare - more, best
    return choose_forms(cut, job.example, measure=False, forms=picked) if faster else choice


def plain_model(choice: Factorization, cut: nn.Module) -> nn.Module:
    """Return the model in these forms, as plain layers."""
    small = choice.apply(cut).eval()
    split_siblings(small)
    return small
