"""Measure what each term of a model is worth, and fit the terms that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm.compress import budgets
from cpnorm.compress.budgets import Elimination
from cpnorm.compress.calibration_data import Batch
from cpnorm.compress.fitting.calibration import Calibrated, Calibration, calibrate_layers, fit_alone
from cpnorm.compress.fitting.refit import Fitted, fit
from cpnorm.compress.fitting.sequence import Refitted, has_statistics, refit_in_sequence
from cpnorm.compress.probe import LossFunction, mean_loss, output_gram, taylor_scores, term_moments
from cpnorm.compress.truncation_arguments import FITTED_TO_DATA, expect_finite
from cpnorm.cp.tensor import scaled_columns
from cpnorm.nn.canonical import CPLayer, tie_key

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TruncationJob:
    """A model to be truncated, its data, and the options of the truncation."""

    model: nn.Module
    layers: Mapping[str, CPLayer]
    batches: Sequence[Batch]
    criterion: str
    refit: str
    loss_function: LossFunction
    progress: Progress | None
    calibrated: Calibrated | None = None  # if it was measured before

    @property
    def inputs(self) -> list[Any]:
        return [inputs for inputs, _ in self.batches]

    @cached_property
    def calibrations(self) -> tuple[dict[str, Calibration], dict[str, int]]:
        """The calibration of each layer that the data reach, and the bytes that inputs of layers take."""
        if self.refit != "calibrated":
            return {}, {}
        if self.calibrated is not None:
            return self.calibrated.of(self.layers)
        found = calibrate_layers(self.model, self.layers, self.inputs)
        expect_finite({name: [each.problem.inputs] for name, each in found[0].items()}, "the inputs")
        return found

    @cached_property
    def eliminations(self) -> dict[str, Elimination]:
        """The order in which to drop the terms of each layer that is not calibrated."""
        layers = {name: layer for name, layer in self.layers.items() if name not in self.calibrations[0]}
        if self.criterion == "taylor" and layers:
            scores = taylor_scores(self.model, layers, self.batches, self.loss_function)
            expect_finite({name: [score] for name, score in scores.items()}, "the gradient on the data")
            return {name: budgets.by_score(score) for name, score in scores.items()}
        moments = term_moments(self.model, self.inputs) if layers else {}
        if self.batches and not moments and not self.calibrations[0]:
            raise ValueError("data: expected inputs that reach a canonical layer, got some that reach none")
        expect_finite({name: [moments.get(tie_key(y), y.lambdas)] for name, y in layers.items()}, "the inputs")
        return {name: _eliminate(y, self.criterion, moments.get(tie_key(y))) for name, y in layers.items()}

    def loss_of(self, name: str) -> Callable[[int], float]:
        """Return the expected loss of a layer as a function of the number of terms it keeps."""
        calibration = self.calibrations[0].get(name)
        if calibration is not None:
            return calibration.expected_loss
        known = [each.importance for each in self.calibrations[0].values()]
        whole = sum(known) / len(known) if known else 1.0  # in the units of the calibrated layers
        loss, rank = (self.eliminations[name].loss * whole).tolist(), self.layers[name].rank
        return lambda kept: cast(float, loss[rank - kept])

    def order(self, name: str) -> Tensor:
        """Return the order in which to drop the terms of a layer."""
        if name in self.eliminations:
            return self.eliminations[name].order
        return budgets.by_gram(self.layers[name].cp.to(torch.float64).gram()).order

    def alone(self, ranks: Mapping[str, int], *, steps: int = 0) -> dict[str, Fitted]:
        """Return each layer at its new rank, fitted independently of the others."""
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
        """Return all layers at their new ranks, fitted one after the other if there are data."""
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
                input_bytes=self.calibrations[1],
                progress=self.progress,
            )
        if self.progress:
            self.progress("", len(ranks), len(ranks))
        return Refitted(forms)

    def quickly(self, ranks: Mapping[str, int]) -> Refitted:
        """Return a quick approximation of ``refitted``, for comparisons of many ranks."""
        return Refitted(self.alone(ranks)) if self.refit == "calibrated" else self.refitted(ranks)

    def loss(self, refitted: Refitted) -> float:
        """Return the loss of the model with these layers."""
        return mean_loss(self.model, self.batches, self.loss_function, refitted.instead(self.layers))


def _eliminate(layer: CPLayer, criterion: str, moments: Tensor | None) -> Elimination:
    """Order terms by their share of the weight or, with moments, of the outputs."""
    tiny = torch.finfo(torch.float64).tiny
    if criterion == "lambda" and moments is None:
        alive = torch.stack([scaled_columns(factor)[2] != 0 for factor in layer.factors]).all(0)
        squares = layer.lambdas.double().square() * alive
    else:
        gram = layer.cp.to(torch.float64).gram() if moments is None else output_gram(layer, moments)
        if criterion == "gram":
            return budgets.by_gram(gram / budgets.energy(gram))
        squares = gram.diagonal()
    return budgets.by_score(squares / squares.sum().clamp_min(tiny))
