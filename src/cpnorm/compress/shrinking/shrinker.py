"""Shrink a trained network to a small one of plain layers, with a report, in one call."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from cpnorm._checks import check_int, check_model, check_type, is_number
from cpnorm.compress import distillation
from cpnorm.compress.calibration_data import as_batches, first_sample
from cpnorm.compress.shrinking.cutting import budget_forms, cut_within, plain_model
from cpnorm.compress.shrinking.job import Metric, ShrinkJob, run_without_gradients
from cpnorm.compress.shrinking.report import ShrinkReport
from cpnorm.compress.truncation_arguments import only_budget
from cpnorm.compress.truncation_job import Progress
from cpnorm.deploy.factorization import choose_forms
from cpnorm.nn.convert import Skip, canonical_layers, canonical_norm, fold, skipped
from cpnorm.nn.coverage import dense_reasons, unpack_layers
from cpnorm.nn.modes import flatten_modes
from cpnorm.nn.planner import LAYERS
from cpnorm.nn.siblings import stack_siblings
from cpnorm.nn.training import renormalize


@dataclass(frozen=True)
class Shrunk:
    """What ``shrink`` returns: the small model in plain torch layers, its canonical form, and a printable report."""

    model: nn.Module
    canonical: nn.Module
    report: ShrinkReport

    def __str__(self) -> str:
        return str(self.report)


def shrink(
    model: nn.Module,
    data: Any,
    *,
    parameters: float | None = None,
    flops: float | None = None,
    latency_ms: float | None = None,
    accuracy_drop: float | None = None,
    metric: Metric | None = None,
    distill: int = 0,
    finetune: Callable[[nn.Module], Any] | None = None,
    example_input: Any = None,
    samples: int = 512,
    skip: Skip = (),
    together: bool = True,
    round_ranks: int | None = None,
    progress: Progress | None = None,
) -> Shrunk:
    """Make a small model of plain torch layers from a trained one, under exactly one budget.

    The given model does not change. A copy takes canonical form, is truncated to the budget where that changes its
    outputs on the data least, fitted to the old outputs, optionally trained, and factorised. The outputs before and
    after factorisation are compared.

    Args:
        model: any trained network; the report lists the layers that stay dense, with reasons.
        data: several hundred typical inputs or more: a DataLoader of inputs or (inputs, targets), a tensor, or batches
            as tensors, tuples or mappings of keyword arguments. Targets are used by ``metric`` only.
        parameters: how many parameters the result may have: a share of the given model's (0.1), or a number.
        flops: how many FLOPs one pass over the example input may take: a share, or a number.
        latency_ms: milliseconds that one pass over the example input may take, measured on the model's device.
        accuracy_drop: how far the metric may fall on the data, such as 0.01; the smallest such model is found by
            bisection.
        metric: a function of (outputs, targets) of a batch, larger values being better; by default the accuracy if the
            targets are class indices.
        distill: steps of training towards the given model's outputs on all of the data, without labels; see
            ``cpnorm.distill``. Cuts that cost much gain most.
        finetune: a function that trains the canonical model in place.
        example_input: the input for which FLOPs and milliseconds are counted; by default the first sample of the data.
        samples: the largest number of samples of the data to calibrate with; raise it for strong cuts.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        together: under a budget of parameters or accuracy, let linear layers with the same input, such as query, key
            and value, share their input vectors. This takes fewer parameters for the same outputs, and more FLOPs. With
            much data it may be worse; see the guide for what was measured on a language model.
        round_ranks: keep multiples of this many terms, where the budget allows it; 8 by default on a GPU, whose matrix
            units are slow at other sizes, and 1 elsewhere.
        progress: called with (name of the step, steps done, steps in total).

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> small = shrink(network, torch.randn(256, 64), parameters=0.5)
    >>> small.report.parameters_before, small.report.parameters_after <= 4810 // 2
    (4810, True)
    """
    budget = {"parameters": parameters, "flops": flops, "latency_ms": latency_ms, "accuracy_drop": accuracy_drop}
    _only_budget(**budget)  # before the data are read
    shrinker = Shrinker(
        model,
        data,
        metric=metric,
        example_input=example_input,
        samples=samples,
        skip=skip,
        together=together,
        round_ranks=round_ranks,
        progress=progress,
    )
    return shrinker.shrink(distill=distill, finetune=finetune, **budget)


class Shrinker:
    """A trained network, measured on data once, of which small models can be made under several budgets.

    The arguments are those of ``shrink``, and so are those of its method of that name. Canonical form and measurements
    are kept between its calls.

    >>> import torch
    >>> shrinker = Shrinker(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(256, 64))
    >>> half, third = shrinker.shrink(parameters=1 / 2), shrinker.shrink(parameters=1 / 3)
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        metric: Metric | None = None,
        example_input: Any = None,
        samples: int = 512,
        skip: Skip = (),
        together: bool = True,
        round_ranks: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_model(model)
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        self.round_ranks = (8 if on_gpu else 1) if round_ranks is None else check_int("round_ranks", round_ranks)
        check_type(skip, (str, type, Iterable), "names, patterns or types as skip")
        self.skip = (skip,) if isinstance(skip, str | type) else tuple(skip)
        self.batches = as_batches(data, samples)
        self.data = self.batches if isinstance(data, Iterator) else data  # what can be read again
        self.example = first_sample(model, self.batches[0][0]) if example_input is None else example_input
        self.model, self.metric, self.together = model, metric, together
        self.progress = progress or (lambda what, done, total: None)
        self._prepared: dict[bool, ShrinkJob] = {}

    @torch.inference_mode(False)
    def shrink(
        self,
        *,
        parameters: float | None = None,
        flops: float | None = None,
        latency_ms: float | None = None,
        accuracy_drop: float | None = None,
        distill: int = 0,
        finetune: Callable[[nn.Module], Any] | None = None,
    ) -> Shrunk:
        """Make a small model under exactly one budget; see ``cpnorm.shrink``."""
        started = time.perf_counter()
        budget, amount = _only_budget(
            parameters=parameters, flops=flops, latency_ms=latency_ms, accuracy_drop=accuracy_drop
        )
        job = self._job(self.together and budget in ("parameters", "accuracy_drop"))
        steps = ["exact canonical form"]
        cut, choice = cut_within(job, budget, amount)
        steps.append(f"cut and fitted to the outputs on {job.samples:,} samples")
        if distill:
            distillation.distill(cut, self.model, self.data, steps=distill, progress=self.progress)
            choice = None
            steps.append(f"trained for {distill:,} steps towards the given network's outputs")
        if finetune is not None:
            self.progress("fine-tuning", 0, 1)
            returned = finetune(cut.train())
            cut, choice = returned if isinstance(returned, nn.Module) else cut, None
            renormalize(cut)
            steps.append("fine-tuned")
        cut.eval()
        self.progress("factorising", 0, 1)
        choice = choice or budget_forms(job, cut, budget)
        small = plain_model(choice, cut)
        verified = job.verify(small, cut)
        steps.append("factorised into plain layers, outputs verified")
        self.progress("comparing with the given network", 0, 1)
        report = job.report(f"{budget}={amount:g}", small, choice, verified, steps, started)
        self.progress("done", 1, 1)
        return Shrunk(small, cut, report)

    def _job(self, together: bool) -> ShrinkJob:
        if together not in self._prepared:
            job = ShrinkJob(self.model, self.batches, self.example, self.metric, self.progress, self.round_ranks)
            job.check_repeatable()  # after this pass torch can copy weights that pruning computes
            _prepare(job, self.skip, together)
            self._prepared[together] = job
        return self._prepared[together]


def _only_budget(**offered: Any) -> tuple[str, float]:
    name, amount = only_budget(**offered)
    least = 0 if name == "accuracy_drop" else math.ulp(0.0)
    if not is_number(amount) or amount < least:
        raise ValueError(f"{name}: expected a number > 0, got {amount!r}")
    return name, float(amount)


def _prepare(job: ShrinkJob, skip: tuple[str | type, ...], together: bool) -> None:
    """Store a copy of the model at exact ranks, and the reasons why layers stay dense, in the job."""
    canonical = copy.deepcopy(job.model).eval()
    reasons: dict[str, str] = {}
    if not canonical_layers(canonical):
        alone = _named(canonical, skip)
        packed = unpack_layers(canonical, job.example, alone)
        skip = (*alone, *skip)
        canonical = _with_siblings(job, canonical, skip) if together else canonical
        reasons = dense_reasons(canonical, skip)
        reasons |= {name: reason for name, reason in packed.items() if name in reasons}
        try:
            modes = {n: m for n, m in flatten_modes(canonical, job.example).items() if n not in reasons}
            inside = [name for name in reasons if isinstance(canonical.get_submodule(name), LAYERS)]
            canonical_norm(canonical, skip=inside, modes=modes, progress=partial(job.report_progress, "canonical form"))
        except ValueError as error:
            raise ValueError(f"{error}; layers that stay dense: {reasons}" if reasons else str(error)) from error
    # A layer whose weight is read by other code must stay in one piece, so that truncating it would save nothing.
    for name, form in choose_forms(canonical, job.example, measure=False, goal="parameters").layers.items():
        if form.form == "dense" and form.reason != "fewest parameters":
            fold(canonical.get_submodule(name))
            reasons[name] = form.reason
    if not canonical_layers(canonical):
        raise ValueError(f"no layer of {type(job.model).__name__} can be cut: {reasons}")
    job.exact, job.dense = canonical, reasons


def _named(model: nn.Module, skip: Iterable[str | type]) -> list[str]:
    """Return the names of the layers that ``skip`` selects in the given model: other names are of unpacked layers."""
    found: set[str] = set()
    for entry in skip:
        with suppress(ValueError):  # it selects no layer
            found |= skipped(model, entry)
    return sorted(found)


def _with_siblings(job: ShrinkJob, canonical: nn.Module, skip: Skip) -> nn.Module:
    stacked = copy.deepcopy(canonical)
    found = stack_siblings(stacked, job.example, sorted(skipped(canonical, skip) if skip else ()))
    try:
        run_without_gradients(stacked, job.example)
    except AttributeError:  # other code reads the weights of these layers
        return canonical
    job.stacked.update(found)
    return stacked
