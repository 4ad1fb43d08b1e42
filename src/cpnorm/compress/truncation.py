"""Truncation: drop the terms that matter least under one budget, refit the others, and report what it cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm._checks import check_int, check_type, is_number
from cpnorm.compress import budgets
from cpnorm.compress.budgets import Elimination, Options
from cpnorm.compress.calibrate import Calibration, calibrate, fit_alone
from cpnorm.compress.calibration_data import as_batches, batch_size
from cpnorm.compress.distributed import truncate_wrapped
from cpnorm.compress.optimizer_state import cut_states
from cpnorm.compress.probe import Batch, LossFunction, mean_loss, output_gram, taylor_scores, term_moments
from cpnorm.compress.refit import REFITS, Fitted, fit
from cpnorm.compress.report import Report, all_flops, compare
from cpnorm.compress.sequence import Refitted, has_statistics, refit_in_sequence
from cpnorm.cp.tensor import inverse_norms
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import Skip, canonical_layers, check_not_sharded, fold, including_tied, skipped, spread_over_tied
from cpnorm.nn.stale_state import watch_resized
from cpnorm.nn.work import Work, count_work

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Progress = Callable[[str, int, int], None]
CRITERIA = ("lambda", "gram", "taylor")
FITTED_TO_DATA = ("outputs", "calibrated")
FEW_SAMPLES = 8


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

    The parameters stay the same objects with fewer columns, so that an optimizer cannot lose them. Every layer keeps at
    least one term. All layers are truncated, or, on an error, none.

    Args:
        model: a canonical layer, or a model that has some. A DistributedDataParallel is truncated in all processes
            alike, on the data of all; each must call this.
        rate: the share of terms to drop in each layer, as in the paper.
        ranks: how many terms to keep, by layer name (the others keep all), or one bound for every layer.
        params: parameters the whole model may have afterwards, biases and plain layers included: a number, or as a
            float up to 1 a share of the dense model's.
        flops: FLOPs of all linear and convolutional layers on ``example_input``, each run dense or through its factors,
            whichever is less: a number, or as a float up to 1 a share of the dense model's.
        energy: the least mean over the layers of 1 - ||W - W_kept||^2 / ||W||^2, before any refit.
        loss: how much ``loss_function`` may grow on ``data``; with an error rate, the allowed drop in accuracy.
        criterion: what a term is worth. "lambda": its squared norm; "gram": what its absence adds to the squared error,
            overlaps with other terms included; "taylor": |lambda * dL/dlambda| on ``data``. Given ``data``, the first
            two are measured at the outputs of the layer instead of its weight. Between layers they count as shares of
            the layer's own whole, since the scale of a layer means nothing where the next one can undo it; and what
            adds up is minus the logarithm of the share that is left, so that no layer is emptied for the others' sake.
            The default is "gram" where vectors are refitted, else "lambda". With refit="calibrated" the budget is
            shared by how much the outputs of the network would change, and the criterion is only for layers that the
            data do not reach.
        refit: how the kept terms make up for the others. "none"; "lambdas": least squares on lambda towards the old
            weight; "als": alternating least squares towards it; "outputs": after that, least squares on the output
            vectors and the bias towards the old outputs on ``data``; "calibrated": all vectors are fitted to the old
            outputs on ``data``. The last two go layer by layer, each on the inputs that the truncated layers before it
            hand on; they are not for models that pick or order rows by their values, where old and new outputs would
            not belong together. The default is the strongest that the arguments allow: "calibrated" with ``data``
            ("outputs" if a criterion is given, "als" for a budget of energy), "als" without, and "lambdas" with an
            optimizer, whose state it keeps.
        data: a DataLoader, a tensor of inputs, or batches of inputs, of (inputs, targets) or of keyword arguments;
            inputs are one argument, a tuple of them, or a mapping by name. A few hundred samples are plenty. Targets
            are needed for ``loss`` and "taylor" only. Statistics of batch norms are adapted to the truncated model.
        loss_function: of (outputs, targets), averaged over the batch.
        example_input: what FLOPs are counted on.
        optimizer: one or several: their state is cut to the kept terms, so that training goes on; "als", "outputs" and
            "calibrated" make new terms, whose state starts anew. Without it an optimizer that has state raises at its
            next step. Gradients that are there are dropped, those of other parameters are not: step or zero them first.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        round_ranks: cut to multiples of this many terms only; 8 suits the matrix units of GPUs.
        dense_layers: turn layers that keep all their terms under a budget of parameters or FLOPs back into plain ones
            where their dense weight is smaller; True by default unless an optimizer is given.
        progress: called with (layer name, layers done, layers in all).
        dry_run: only report what would happen.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    >>> report = truncate(model, rate=0.75, refit="lambdas")
    >>> [layer.rank_after for layer in report.layers]
    [8, 3]
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        others = {key: value for key, value in locals().items() if key not in ("model", "optimizer")}
        return truncate_wrapped(truncate, model, as_optimizers(optimizer), others)
    budget, amount = _only_budget(rate=rate, ranks=ranks, params=params, flops=flops, energy=energy, loss=loss)
    check_type(data, (Iterable, type(None)), "batches of inputs or of (inputs, targets) as data")
    batches = [] if data is None else as_batches(data)
    optimizers = as_optimizers(optimizer)
    by_default = refit is None
    refit = _strongest_refit(budget, criterion, batches, optimizers) if refit is None else refit
    criterion = criterion if criterion is not None else "lambda" if refit in ("none", "lambdas") else "gram"
    _check(budget, amount, criterion, refit, batches, example_input is not None)
    if dense_layers and optimizers:
        raise ValueError("dense_layers=True: an optimizer cannot follow layers that become plain; give one of the two")
    layers = _chosen(model, skip)
    work = count_work(model, example_input) if example_input is not None else {}
    if budget == "flops" and not any(tie_key(layer) in work for layer in layers.values()):
        raise ValueError("expected an example_input that reaches a canonical layer, got one that reaches none")

    job = _Job(model, layers, batches, criterion, refit, loss_function, progress)
    multiple = check_int("round_ranks", round_ranks)
    amount = _absolute(budget, amount, model, work)
    present = {"params": count_parameters(model), "flops": all_flops(model, work)}.get(budget)
    may_be_dense = present is not None and present > amount and not optimizers and dense_layers is not False
    chosen = _choose(budget, amount, job, work, multiple, may_be_dense)
    cut = {name: rank for name, rank in chosen.items() if rank < layers[name].rank}
    dense = {
        name
        for name, layer in layers.items()
        if may_be_dense and name not in cut and math.prod(layer.modes) < layer.cp.numel()
    }
    refitted = job.refitted(cut, dense)
    forms = refitted.forms
    _expect_finite({n: [form.cp.sigma, form.cp.lambdas, *form.cp.factors] for n, form in forms.items()}, "the refit")
    losses = (job.loss(Refitted({})), job.loss(refitted)) if budget == "loss" else (None, None)
    how = f"{budget}={amount}, criterion={criterion}, refit={refit}"
    report = compare(how, model, layers, {n: form.cp for n, form in forms.items()}, dense, work, *losses)
    _warn(budget, amount, present, report, job, by_default=by_default)
    states = cut_states(optimizers, layers, forms) if optimizers else []
    if dry_run:
        return report

    # Everything is known and checked: from here on nothing can fail half way.
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
    """Turn layers back into plain ones; an optimizer that still has state for their terms raises at its next step."""
    keys = {tie_key(layer) for layer in layers}
    tied = [module for module in model.modules() if isinstance(module, CPLayer) and tie_key(module) in keys]
    terms = [parameter for layer in layers for parameter in layer.canonical_parameters()[1:]]
    if tied:
        fold(nn.ModuleList(tied))
        watch_resized(terms)
        for parameter in terms:
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)


# --- what is asked for --------------------------------------------------------------------------------------------


def as_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return none, one or several optimizers as a list."""
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, torch.optim.Optimizer)
    optimizers = list(cast(Iterable[torch.optim.Optimizer], optimizer)) if several else [optimizer]
    for one in optimizers:
        check_type(one, (torch.optim.Optimizer, type(None)), "a torch.optim.Optimizer, several or None as optimizer")
    return [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]


def _strongest_refit(budget: str, criterion: str | None, batches: Sequence[Batch], optimizers: Sequence[Any]) -> str:
    if optimizers:
        return "lambdas"
    if not batches or budget == "energy":
        return "als"
    return "calibrated" if criterion is None else "outputs"


def _only_budget(**offered: Any) -> tuple[str, Any]:
    given = [(name, amount) for name, amount in offered.items() if amount is not None]
    if len(given) != 1:
        names = ", ".join(name for name, _ in given) or "none"
        raise ValueError(f"expected exactly one budget of {', '.join(offered)}, got {names}")
    return given[0]


def _check(
    budget: str, amount: Any, criterion: str, refit: str, batches: Sequence[Batch], has_example_input: bool
) -> None:
    for option, value, allowed in (("criterion", criterion, CRITERIA), ("refit", refit, REFITS)):
        if value not in allowed:
            raise ValueError(f"expected {option} to be one of {', '.join(allowed)}, got {value!r}")
    needs_targets = {"criterion='taylor'": criterion == "taylor", "a loss budget": budget == "loss"}
    needs_data = {f"refit={refit!r}": refit in FITTED_TO_DATA} | needs_targets
    for purpose, needed in needs_data.items():
        if needed and not batches:
            raise ValueError(f"expected data, a few batches of (inputs, targets), for {purpose}")
    for purpose, needed in needs_targets.items():
        if needed and any(targets is None for _, targets in batches):
            raise ValueError(f"data: expected batches of (inputs, targets) for {purpose}, got inputs without targets")
    if budget == "flops" and not has_example_input:
        raise ValueError("expected an example_input for a budget of FLOPs")
    if budget != "ranks" and not is_number(amount):
        raise ValueError(f"expected a number as {budget}, got {amount!r}")
    if budget == "rate" and not 0 <= amount < 1:
        raise ValueError(f"expected 0 <= rate < 1, got {amount}")
    if budget == "energy" and not 0 < amount <= 1:
        raise ValueError(f"expected 0 < energy <= 1, got {amount}")
    if budget == "loss" and not amount >= 0:
        raise ValueError(f"expected an allowed increase of the loss >= 0, got {amount}")


def _absolute(budget: str, amount: Any, model: nn.Module, work: Mapping[int, Work]) -> Any:
    """Return a budget of parameters or FLOPs as a number, also where it was given as a share of the dense model."""
    if budget not in ("params", "flops") or not isinstance(amount, float) or not 0 < amount <= 1:
        return amount
    if budget == "flops":
        return int(amount * sum(each.dense for each in work.values()))
    canonical = canonical_layers(model).values()
    whole = count_parameters(model) + sum(math.prod(layer.modes) - layer.cp.numel() for layer in canonical)
    return int(amount * whole)


def _chosen(model: nn.Module, skip: Skip) -> dict[str, CPLayer]:
    """Return the canonical layers but those to skip; layers that share their terms are skipped together."""
    check_not_sharded(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "expected the DistributedDataParallel itself, got a model that has one inside: its processes would train "
            "different weights from then on"
        )
    left_alone = {tie_key(model.get_submodule(name)) for name in skipped(model, skip)}
    layers = {name: layer for name, layer in canonical_layers(model).items() if tie_key(layer) not in left_alone}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to truncate")
    for name, layer in layers.items():
        if layer.lambdas.is_meta:
            raise ValueError(f"expected a model with values, got {name or 'the layer'} on the meta device")
    _expect_finite({name: layer.canonical_parameters() for name, layer in layers.items()})
    return layers


def _expect_finite(tensors: Mapping[str, Iterable[Tensor]], what: str = "") -> None:
    for name, values in tensors.items():
        if not all(value.isfinite().all() for value in values):
            of = f"{what} of {name or 'the layer'}" if what else name or "the layer"
            raise ValueError(f"expected finite values, got NaN or infinity in {of}")


def _warn(budget: str, amount: Any, present: int | None, report: Report, job: _Job, *, by_default: bool) -> None:
    """Warn of results that are hardly what was wanted; a refit that is named is taken for a choice."""
    if present is not None and present <= amount:
        _tell(f"{budget}={amount:,} is no less than the {present:,} that the model has: nothing is cut")
    elif by_default and report.parameters_after > report.parameters_dense and any(y.changed for y in report.layers):
        _tell(
            f"the truncated model has {report.parameters_after:,} parameters, more than the "
            f"{report.parameters_dense:,} of the dense one: give a budget, such as params=0.5"
        )
    samples = sum(batch_size(inputs) for inputs, _ in job.batches)
    if job.refit in FITTED_TO_DATA and samples < FEW_SAMPLES:
        _tell(f"data: {samples} samples are few to fit to; a few hundred make a difference")


def _tell(message: str) -> None:
    warnings.warn(message, stacklevel=6)  # past truncate and its decorators


# --- measuring and refitting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A model with its data, and what is asked of them."""

    model: nn.Module
    layers: Mapping[str, CPLayer]
    batches: Sequence[Batch]
    criterion: str
    refit: str
    loss_function: LossFunction
    progress: Progress | None

    @property
    def inputs(self) -> list[Any]:
        return [inputs for inputs, _ in self.batches]

    @cached_property
    def calibrations(self) -> tuple[dict[str, Calibration], int]:
        """Return what the data say about each layer, and the bytes that feature maps take."""
        if self.refit != "calibrated":
            return {}, 0
        found = calibrate(self.model, self.layers, self.inputs)
        _expect_finite({name: [each.problem.inputs] for name, each in found[0].items()}, "what it is fed")
        return found

    @cached_property
    def eliminations(self) -> dict[str, Elimination]:
        """Return the order in which the terms of each layer should go; of calibrated layers it is not asked."""
        layers = {name: layer for name, layer in self.layers.items() if name not in self.calibrations[0]}
        if self.criterion == "taylor" and layers:
            scores = taylor_scores(self.model, layers, self.batches, self.loss_function)
            _expect_finite({name: [score] for name, score in scores.items()}, "its gradient on the data")
            return {name: budgets.by_score(score) for name, score in scores.items()}
        moments = term_moments(self.model, self.inputs) if layers else {}
        if self.batches and not moments and not self.calibrations[0]:
            raise ValueError("expected data that reach a canonical layer, got some that reach none")
        _expect_finite({name: [moments.get(tie_key(y), y.lambdas)] for name, y in layers.items()}, "what it is fed")
        return {name: _eliminate(y, self.criterion, moments.get(tie_key(y))) for name, y in layers.items()}

    def loss_of(self, name: str) -> Callable[[int], float]:
        """Return what cutting a layer to so many terms is expected to lose."""
        calibration = self.calibrations[0].get(name)
        if calibration is not None:
            return calibration.expected_loss
        known = [each.importance for each in self.calibrations[0].values()]
        whole = sum(known) / len(known) if known else 1.0  # in the units of the calibrated layers
        loss, rank = (self.eliminations[name].loss * whole).tolist(), self.layers[name].rank
        return lambda kept: cast(float, loss[rank - kept])

    def order(self, name: str) -> Tensor:
        """Return the order in which the terms that a layer has should go."""
        if name in self.eliminations:
            return self.eliminations[name].order
        return budgets.by_gram(self.layers[name].cp.to(torch.float64).gram()).order

    def alone(self, ranks: Mapping[str, int], *, steps: int = 0) -> dict[str, Fitted]:
        """Return each layer by itself at its new rank."""
        found = {}
        for done, (name, rank) in enumerate(ranks.items()):
            layer, calibration = self.layers[name], self.calibrations[0].get(name)
            if calibration is not None:
                found[name] = fit_alone(layer, calibration, rank, steps=steps)
            else:
                if self.progress and self.refit not in FITTED_TO_DATA:
                    self.progress(name, done, len(ranks))
                found[name] = fit(layer, self.eliminations[name].kept(layer.rank - rank), self.refit)
        return found

    def refitted(self, ranks: Mapping[str, int], dense: Iterable[str] = ()) -> Refitted:
        """Return all layers at their new ranks, fitted one after the other where the data allow it."""
        by_themselves = {name: rank for name, rank in ranks.items() if name not in self.calibrations[0]}
        forms = self.alone(by_themselves)
        sequential = self.refit in FITTED_TO_DATA or any(map(has_statistics, self.model.modules()))
        if ranks and self.batches and sequential:
            return refit_in_sequence(
                self.model,
                self.layers,
                forms,
                {name: rank for name, rank in ranks.items() if name in self.calibrations[0]},
                self.calibrations[0],
                self.inputs,
                dense=[name for name in dense if name in self.calibrations[0]],
                regress=self.refit in FITTED_TO_DATA,
                bytes_alive=self.calibrations[1],
                progress=self.progress,
            )
        if self.progress:
            self.progress("", len(ranks), len(ranks))
        return Refitted(forms)

    def quickly(self, ranks: Mapping[str, int]) -> Refitted:
        """Return about what ``refitted`` does, for comparisons of many ranks: calibrated layers one by one, roughly."""
        return Refitted(self.alone(ranks)) if self.refit == "calibrated" else self.refitted(ranks)

    def loss(self, refitted: Refitted) -> float:
        """Return the loss of the model in this form."""
        return mean_loss(self.model, self.batches, self.loss_function, refitted.instead(self.layers))


def _eliminate(layer: CPLayer, criterion: str, moments: Tensor | None) -> Elimination:
    """Order terms by what each does to the weight or, with moments, to the outputs, as a share of what all do."""
    tiny = torch.finfo(torch.float64).tiny
    if criterion == "lambda" and moments is None:
        alive = torch.stack([inverse_norms(factor) != 0 for factor in layer.factors]).all(0)
        squares = layer.lambdas.double().square() * alive
    else:
        gram = layer.cp.to(torch.float64).gram() if moments is None else output_gram(layer, moments)
        if criterion == "gram":
            return budgets.by_gram(gram / budgets.energy(gram))
        squares = gram.diagonal()
    return budgets.by_score(squares / squares.sum().clamp_min(tiny))


# --- choosing -----------------------------------------------------------------------------------------------------


def _choose(
    budget: str, amount: Any, job: _Job, work: Mapping[int, Work], multiple: int, may_be_dense: bool
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
            raise ValueError(f"expected {budget} >= {int(least):,}, which leave every layer one term, got {amount:,}")
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
    job: _Job,
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
    """Return a rank rounded down to a multiple, at least to one of it, if the layer has so many terms."""
    return rank if rank == most else min(most, max(multiple, rank - rank % multiple))


def _ranks(ranks: int | Mapping[str, int], model: nn.Module, layers: Mapping[str, CPLayer]) -> Mapping[str, int]:
    if isinstance(ranks, Mapping):
        told = spread_over_tied("ranks", ranks, including_tied(model, layers), "truncate")
    else:
        told = dict.fromkeys(layers, ranks)
    kept = {}
    for name in (name for name in told if name in layers):
        asked = told[name]
        most = layers[name].rank
        rank = check_int("rank", asked, where=f" for {name or 'the layer'}")
        if isinstance(ranks, Mapping) and rank > most:
            raise ValueError(f"expected 1 <= rank <= {most}, got {rank} for {name or 'the layer'}")
        kept[name] = min(rank, most)
    return kept
