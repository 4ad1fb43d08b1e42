"""Truncate models: drop the least important terms under a budget, refit the others, and report the result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm._checks import check_int, check_type
from cpnorm.compress.calibration_data import as_batches, batch_size
from cpnorm.compress.distributed import truncate_wrapped
from cpnorm.compress.fitting.calibration import Calibrated
from cpnorm.compress.fitting.sequence import Refitted
from cpnorm.compress.optimizer_state import cut_states
from cpnorm.compress.probe import LossFunction
from cpnorm.compress.rank_choice import choose_ranks
from cpnorm.compress.report import Report, all_flops, compare
from cpnorm.compress.truncation_arguments import (
    FITTED_TO_DATA,
    Optimizers,
    absolute_budget,
    as_optimizers,
    check_arguments,
    expect_finite,
    layers_to_truncate,
    only_budget,
    strongest_refit,
)
from cpnorm.compress.truncation_job import Progress, TruncationJob
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import Skip, fold
from cpnorm.nn.stale_state import watch_resized
from cpnorm.nn.work import count_work

FEW_SAMPLES = 8  # a fit to fewer samples gets a warning


@torch.inference_mode(False)
@torch.no_grad()
def truncate(
    model: nn.Module,
    *,
    rate: float | None = None,
    ranks: int | Mapping[str, int] | None = None,
    params: float | None = None,
    flops: float | None = None,
    energy: float | None = None,
    loss: float | None = None,
    criterion: str | None = None,
    refit: str | None = None,
    data: Any = None,
    loss_function: LossFunction = F.cross_entropy,
    example_input: Any = None,
    optimizer: Optimizers | None = None,
    skip: Skip = (),
    round_ranks: int = 1,
    dense_layers: bool | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Report:
    """Drop terms of a canonical layer, or of all canonical layers of a model, in place, under exactly one budget.

    The parameters stay the same objects and have fewer columns, so that an optimizer still holds them. Every layer
    keeps at least one term. On an error no layer changes.

    Args:
        model: a canonical layer, or a model that has some. A DistributedDataParallel is truncated in the same way in
            all processes, on the data of all processes; each process must call this function.
        rate: the share of terms to drop in each layer, as in the paper.
        ranks: how many terms to keep, by layer name (other layers keep all), or one bound for every layer.
        params: how many parameters the whole model may have afterwards, including biases and plain layers: a number,
            or a float up to 1 as a share of the dense model's.
        flops: how many FLOPs all linear and convolutional layers may take on ``example_input``, each run dense or
            through its factors, whichever is less: a number, or a float up to 1 as a share of the dense model's.
        energy: the least mean over the layers of 1 - ||W - W_kept||^2 / ||W||^2, before any refit.
        loss: how much ``loss_function`` may grow on ``data``; with an error rate, the allowed drop in accuracy.
        criterion: the importance of a term. "lambda": its squared norm; "gram": what its absence adds to the squared
            error, including its overlap with other terms; "taylor": |lambda * dL/dlambda| on ``data``. With ``data``,
            the first two are measured at the outputs of the layer instead of its weight. To compare layers, each is
            scaled to a total of 1, since the next layer can undo the scale of a layer; and minus the logarithm of the
            share that is left is added up, so that no layer loses nearly everything for the sake of the others. The
            default is "gram" if vectors are refitted, else "lambda". With refit="calibrated" the budget is distributed
            by the change of the network's outputs, and the criterion is used only for layers that the data do not
            reach.
        refit: how the kept terms make up for the dropped ones. "none"; "lambdas": least squares on lambda towards the
            old weight; "als": alternating least squares towards it; "outputs": after "als", least squares on the output
            vectors and the bias towards the old outputs on ``data``; "calibrated": all vectors are fitted to the old
            outputs on ``data``. The last two go layer by layer, each on the outputs of the truncated layers before it.
            They are not for models that select or sort rows by value, where rows of the old and the new outputs would
            not correspond. The default is the strongest refit that the arguments allow: "calibrated" with ``data``
            ("outputs" if a criterion is given, "als" for a budget of energy), "als" without data, and "lambdas" with
            an optimizer, because it keeps the optimizer's state meaningful.
        data: a DataLoader, a tensor of inputs, or batches of inputs, of (inputs, targets) or of keyword arguments;
            inputs are one argument, a tuple of them, or a mapping by name. About a thousand samples are a good start.
            Targets are needed for ``loss`` and "taylor" only. The result of ``calibrate`` saves time if copies of one
            model are cut to several budgets. Statistics of batch norms are adapted to the truncated model.
        loss_function: a function of (outputs, targets), averaged over the batch.
        example_input: the input for which FLOPs are counted.
        optimizer: one or several optimizers, whose state is cut to the kept terms, so that training can continue.
            "als", "outputs" and "calibrated" make new terms, whose state starts from zero. Without this argument an
            optimizer that has state for the terms raises at its next step. Gradients of the terms are dropped, those
            of other parameters are not: call ``step`` or ``zero_grad`` first.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        round_ranks: keep multiples of this many terms only; 8 suits the matrix units of GPUs.
        dense_layers: under a budget of parameters or FLOPs, turn layers that keep all their terms back into plain ones
            if their dense weight is smaller; True by default unless an optimizer is given.
        progress: called with (layer name, layers done, layers in total).
        dry_run: report what would happen, and change nothing.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    >>> report = truncate(model, rate=0.75, refit="lambdas")
    >>> [layer.rank_after for layer in report.layers]
    [8, 3]
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        others = {key: value for key, value in locals().items() if key not in ("model", "optimizer")}
        return truncate_wrapped(truncate, model, as_optimizers(optimizer), others)
    budget, amount = only_budget(rate=rate, ranks=ranks, params=params, flops=flops, energy=energy, loss=loss)
    check_type(data, (Iterable, type(None)), "batches of inputs or of (inputs, targets) as data")
    batches = [] if data is None else as_batches(data)
    optimizers = as_optimizers(optimizer)
    by_default = refit is None
    refit = strongest_refit(budget, criterion, batches, optimizers) if refit is None else refit
    criterion = criterion if criterion is not None else "lambda" if refit in ("none", "lambdas") else "gram"
    check_arguments(budget, amount, criterion, refit, batches, example_input is not None)
    if dense_layers and optimizers:
        raise ValueError(
            "dense_layers=True replaces parameters that an optimizer holds: give dense_layers or optimizer"
        )
    layers = layers_to_truncate(model, skip)
    work = count_work(model, example_input) if example_input is not None else {}
    if budget == "flops" and not any(tie_key(layer) in work for layer in layers.values()):
        raise ValueError("example_input: expected one that reaches a canonical layer, got one that reaches none")

    known = data if isinstance(data, Calibrated) else None
    job = TruncationJob(model, layers, batches, criterion, refit, loss_function, progress, known)
    multiple = check_int("round_ranks", round_ranks)
    amount = absolute_budget(budget, amount, model, work)
    present = {"params": count_parameters(model), "flops": all_flops(model, work)}.get(budget)
    may_be_dense = present is not None and present > amount and not optimizers and dense_layers is not False
    chosen = choose_ranks(budget, amount, job, work, multiple, may_be_dense)
    cut = {name: rank for name, rank in chosen.items() if rank < layers[name].rank}
    dense = {
        name
        for name, layer in layers.items()
        if may_be_dense and name not in cut and math.prod(layer.modes) < layer.cp.numel()
    }
    refitted = job.refitted(cut, dense)
    forms = refitted.forms
    expect_finite({n: [form.cp.sigma, form.cp.lambdas, *form.cp.factors] for n, form in forms.items()}, "the refit")
    losses = (job.loss(Refitted({})), job.loss(refitted)) if budget == "loss" else (None, None)
    how = f"{budget}={amount}, criterion={criterion}, refit={refit}"
    report = compare(how, model, layers, {n: form.cp for n, form in forms.items()}, dense, work, *losses)
    _warn(budget, amount, present, report, job, by_default=by_default)
    states = cut_states(optimizers, layers, forms) if optimizers else []
    if dry_run:
        return report

    # Everything is computed and checked; what follows cannot fail after a part of it.
    for name, form in forms.items():
        layers[name].replace_terms(form.cp)
        if form.bias is not None:
            cast(Tensor, layers[name].bias).copy_(form.bias)
    refitted.apply_statistics()
    for state, kept in states:
        state.clear()
        state.update(kept)
    _make_dense(model, [layers[name] for name in dense])
    for name, (weight, bias) in refitted.dense.items():
        layers[name].weight.copy_(weight)
        if bias is not None:
            cast(Tensor, layers[name].bias).copy_(bias)
    return report


def _make_dense(model: nn.Module, layers: Sequence[CPLayer]) -> None:
    """Turn layers back into plain ones; an optimizer that has state for their terms will raise at its next step."""
    keys = {tie_key(layer) for layer in layers}
    tied = [module for module in model.modules() if isinstance(module, CPLayer) and tie_key(module) in keys]
    terms = [parameter for layer in layers for parameter in layer.canonical_parameters()[1:]]
    if tied:
        fold(nn.ModuleList(tied))
        watch_resized(terms)
        for parameter in terms:
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)


def _warn(
    budget: str, amount: Any, present: int | None, report: Report, job: TruncationJob, *, by_default: bool
) -> None:
    """Warn about likely mistakes: a budget that cuts nothing, a result larger than the dense model, few samples."""
    if present is not None and present <= amount:
        _tell(f"{budget}={amount:,} is not below the {present:,} that the model has: nothing is cut")
    elif by_default and report.parameters_after > report.parameters_dense and any(y.changed for y in report.layers):
        _tell(
            f"the truncated model has {report.parameters_after:,} parameters, more than the "
            f"{report.parameters_dense:,} of the dense one: give a budget, such as params=0.5"
        )
    samples = sum(batch_size(inputs) for inputs, _ in job.batches)
    if job.refit in FITTED_TO_DATA and samples < FEW_SAMPLES:
        _tell(f"data: {samples} samples are too few for a good fit; give a few hundred")


def _tell(message: str) -> None:
    warnings.warn(message, stacklevel=6)  # the caller of truncate, outside of its decorators
