"""Truncation: drop the terms that matter least, under one budget, and say what it cost and what it bought."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm._checks import check_int, check_type, is_number
from cpnorm.compress import budgets
from cpnorm.compress.budgets import Elimination
from cpnorm.compress.optimizer_state import cut_states
from cpnorm.compress.probe import Batch, LossFunction, mean_loss, output_gram, taylor_scores, term_moments
from cpnorm.compress.refit import REFITS, Fitted, fit, refit_outputs
from cpnorm.compress.report import Report, all_flops, compare
from cpnorm.cp.tensor import inverse_norms
from cpnorm.nn.convert import Skip, canonical_layers, check_not_sharded, including_tied, skipped, spread_over_tied
from cpnorm.nn.layers import CPLayer, count_parameters, tie_key
from cpnorm.nn.work import Work, count_work

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
CRITERIA = ("lambda", "gram", "taylor")


@torch.inference_mode(False)
@torch.no_grad()
def truncate(
    model: nn.Module,
    *,
    rate: float | None = None,
    ranks: int | Mapping[str, int] | None = None,
    params: int | None = None,
    flops: int | None = None,
    energy: float | None = None,
    loss: float | None = None,
    criterion: str = "lambda",
    refit: str = "none",
    data: Iterable[Batch] | None = None,
    loss_function: LossFunction = F.cross_entropy,
    example_input: Any = None,
    optimizer: Optimizers | None = None,
    skip: Skip = (),
    dry_run: bool = False,
) -> Report:
    """Drop terms of a canonical layer, or of all canonical layers of a model, in place, under exactly one budget.

    The parameters stay the same objects with fewer columns, so that an optimizer cannot lose them. Every layer keeps at
    least one term. All layers are truncated, or, on an error, none.

    Args:
        model: a canonical layer, or a model that has some.
        rate: the paper's way: the share of terms to drop in each layer.
        ranks: how many terms to keep, by layer name (the others keep all), or one bound for every layer.
        params: parameters the whole model may have afterwards; biases and plain layers count.
        flops: FLOPs of all linear and convolutional layers on ``example_input``, each run dense or through its factors,
            whichever is less.
        energy: the least mean over the layers of 1 - ||W - W_kept||^2 / ||W||^2, before any refit.
        loss: how much ``loss_function`` may grow on ``data``; with an error rate, the allowed drop in accuracy.
        criterion: what a term is worth. "lambda": its squared norm; "gram": what its absence adds to the squared error,
            overlaps with other terms included; "taylor": |lambda * dL/dlambda| on ``data``. Given ``data``, the first
            two are measured at the outputs of the layer instead of its weight. Between layers they count as shares of
            the layer's own whole, since the scale of a layer means nothing where the next one can undo it; and what
            adds up is minus the logarithm of the share that is left, so that no layer is emptied for the others' sake.
        refit: what the kept terms take over from the others. "lambdas": least squares on lambda towards the old weight;
            "als": alternating least squares towards it; "outputs": after that, layer by layer, least squares on the
            output vectors and the bias towards the old outputs on ``data``; not for models that pick or order rows by
            their values, where old and new outputs would not belong together.
        data: a few batches of (inputs, targets); inputs are one argument, a tuple of them, or a mapping by name.
        loss_function: of (outputs, targets), averaged over the batch.
        example_input: what FLOPs are counted on.
        optimizer: one or several: their state is cut to the kept terms, so that training goes on; "als" and "outputs"
            make new terms, whose state starts anew. Without it an optimizer that has state raises at its next step.
            Gradients that are there are dropped, those of other parameters are not: step or zero them first.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        dry_run: only report what would happen.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    >>> report = truncate(model, rate=0.75, refit="lambdas")
    >>> [layer.rank_after for layer in report.layers]
    [8, 3]
    """
    budget, amount = _only_budget(rate=rate, ranks=ranks, params=params, flops=flops, energy=energy, loss=loss)
    batches = _batches(data)
    optimizers = as_optimizers(optimizer)
    _check(budget, amount, criterion, refit, bool(batches), example_input is not None)
    layers = _chosen(model, skip)
    work = count_work(model, example_input) if example_input is not None else {}
    if budget == "flops" and not any(tie_key(layer) in work for layer in layers.values()):
        raise ValueError("expected an example_input that reaches a canonical layer, got one that reaches none")
    if criterion == "taylor":
        scores = taylor_scores(model, layers, batches, loss_function)
        _expect_finite({name: [score] for name, score in scores.items()}, "its gradient on the data")
        eliminations = {name: budgets.by_score(score) for name, score in scores.items()}
    else:
        moments = term_moments(model, [inputs for inputs, _ in batches])
        if batches and not moments:
            raise ValueError("expected data that reach a canonical layer, got some that reach none")
        _expect_finite({name: [moments.get(tie_key(y), y.lambdas)] for name, y in layers.items()}, "what it is fed")
        eliminations = {n: _eliminate(layer, criterion, moments.get(tie_key(layer))) for n, layer in layers.items()}

    def fitted(dropped: Mapping[str, int]) -> dict[str, Fitted]:
        kept = {name: eliminations[name].kept(count) for name, count in dropped.items() if count}
        forms = {name: fit(layers[name], terms, refit) for name, terms in kept.items()}
        return refit_outputs(model, layers, forms, [x for x, _ in batches]) if refit == "outputs" else forms

    def measured(dropped: Mapping[str, int]) -> float:
        instead = {p: value for n, form in fitted(dropped).items() for p, value in form.instead(layers[n]).items()}
        return mean_loss(model, batches, loss_function, instead)

    dropped = _choose(budget, amount, model, layers, eliminations, work, measured)
    losses = (measured({}), measured(dropped)) if budget == "loss" else (None, None)
    forms = fitted(dropped)
    _expect_finite({n: [form.cp.sigma, form.cp.lambdas, *form.cp.factors] for n, form in forms.items()}, "the refit")
    how = f"{budget}={amount}, criterion={criterion}, refit={refit}"
    report = compare(how, model, layers, {n: form.cp for n, form in forms.items()}, work, *losses)
    states = cut_states(optimizers, layers, forms) if optimizers else []
    if dry_run:
        return report

    # Everything is known and checked: from here on nothing can fail half way.
    for name, form in forms.items():
        layers[name].replace_terms(form.cp)
        if form.bias is not None:
            cast(Tensor, layers[name].bias).copy_(form.bias)
    for state, cut in states:
        state.clear()
        state.update(cut)
    return report


# --- what is asked for --------------------------------------------------------------------------------------------


def as_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """None, one or several, as a list."""
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, torch.optim.Optimizer)
    optimizers = list(cast(Iterable[torch.optim.Optimizer], optimizer)) if several else [optimizer]
    for one in optimizers:
        check_type(one, (torch.optim.Optimizer, type(None)), "a torch.optim.Optimizer, several or None as optimizer")
    return [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]


def _only_budget(**offered: Any) -> tuple[str, Any]:
    given = [(name, amount) for name, amount in offered.items() if amount is not None]
    if len(given) != 1:
        names = ", ".join(name for name, _ in given) or "none"
        raise ValueError(f"expected exactly one budget of {', '.join(offered)}, got {names}")
    return given[0]


def _check(budget: str, amount: Any, criterion: str, refit: str, data: bool, example_input: bool) -> None:
    for option, value, allowed in (("criterion", criterion, CRITERIA), ("refit", refit, REFITS)):
        if value not in allowed:
            raise ValueError(f"expected {option} to be one of {', '.join(allowed)}, got {value!r}")
    needs_data = {"criterion='taylor'": criterion == "taylor", "refit='outputs'": refit == "outputs"}
    needs_data["a loss budget"] = budget == "loss"
    for purpose, needed in needs_data.items():
        if needed and not data:
            raise ValueError(f"expected data, a few batches of (inputs, targets), for {purpose}")
    if budget == "flops" and not example_input:
        raise ValueError("expected an example_input for a budget of FLOPs")
    if budget != "ranks" and not is_number(amount):
        raise ValueError(f"expected a number as {budget}, got {amount!r}")
    if budget == "rate" and not 0 <= amount < 1:
        raise ValueError(f"expected 0 <= rate < 1, got {amount}")
    if budget == "energy" and not 0 < amount <= 1:
        raise ValueError(f"expected 0 < energy <= 1, got {amount}")
    if budget == "loss" and not amount >= 0:
        raise ValueError(f"expected an allowed increase of the loss >= 0, got {amount}")


def _batches(data: Iterable[Batch] | None) -> list[Batch]:
    check_type(data, (Iterable, type(None)), "a few batches of (inputs, targets) as data")
    batches = [] if data is None else list(data)
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(f"expected batches of (inputs, targets) as data, got a {type(batch).__name__}")
    return batches


def _chosen(model: nn.Module, skip: Skip) -> dict[str, CPLayer]:
    """The canonical layers but those to skip; layers that share their terms are skipped together."""
    check_not_sharded(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "expected a model that is not wrapped in DistributedDataParallel, whose processes would train different "
            "weights from then on: truncate the model inside and wrap it anew"
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


# --- choosing -----------------------------------------------------------------------------------------------------


def _eliminate(layer: CPLayer, criterion: str, moments: Tensor | None) -> Elimination:
    """By what each term does to the weight or, with moments, to the outputs, as a share of what all do."""
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


def _choose(
    budget: str,
    amount: Any,
    model: nn.Module,
    layers: Mapping[str, CPLayer],
    eliminations: Mapping[str, Elimination],
    work: Mapping[int, Work],
    measured: Callable[[Mapping[str, int]], float],
) -> dict[str, int]:
    """How many terms each layer gives up."""
    if budget == "rate":
        return {name: layer.rank - budgets.terms_to_keep(layer.rank, amount) for name, layer in layers.items()}
    if budget == "ranks":
        return {name: layers[name].rank - rank for name, rank in _ranks(amount, model, layers).items()}

    if budget == "flops":
        total = all_flops(model, work)
        saved = {name: _flops_saved(layer.rank, work.get(tie_key(layer), Work())) for name, layer in layers.items()}
    else:
        total = count_parameters(model)
        saved = {name: [n * (1 + sum(layer.modes)) for n in range(layer.rank)] for name, layer in layers.items()}
    sequence = budgets.cheapest_first(eliminations, saved)
    if budget in ("params", "flops"):
        least = total - sum(s[-1] for s in saved.values())
        if amount < least:
            raise ValueError(f"expected {budget} >= {least:,}, which leave every layer one term, got {amount:,}")
        return budgets.spend(sequence, saved, total - amount)
    if budget == "energy":
        grams = {name: layer.cp.to(torch.float64).gram() for name, layer in layers.items()}
        lost = {name: budgets.energy_lost(gram, eliminations[name].order).tolist() for name, gram in grams.items()}
        return budgets.follow(sequence, layers, budgets.steps_within(sequence, lost, 1 - amount))
    allowed = measured({}) + amount
    steps = budgets.furthest(len(sequence), lambda n: measured(budgets.follow(sequence, layers, n)) <= allowed)
    return budgets.follow(sequence, layers, steps)


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


def _flops_saved(rank: int, work: Work) -> list[int]:
    return [work.at(rank) - work.at(rank - gone) for gone in range(rank)]
