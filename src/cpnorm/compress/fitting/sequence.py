"""Fit layers one after the other, each to its old outputs, on the outputs of the fitted layers before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cpnorm.compress.fitting.batch_norm import moved_statistics, normalized
from cpnorm.compress.fitting.calibration import (
    Calibration,
    fit_alone,
    has_statistics,
    layer_problem,
    layers_with_free_mean,
    modes_by_patch,
    terms_by_patch,
)
from cpnorm.compress.fitting.layer_target import Pair, Samples, Target
from cpnorm.compress.fitting.lockstep import Call, run_in_lockstep
from cpnorm.compress.fitting.memory import batches_at
from cpnorm.compress.fitting.moments import Versioned, are_unchanged, first_argument, outputs_first, versioned
from cpnorm.compress.fitting.refit import Fitted, regress_outputs
from cpnorm.compress.fitting.successors import EventLog, Successors, successors
from cpnorm.cp.calibrated import fit
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import fold
from cpnorm.nn.planner import linear_modes, weight_shape

Progress = Callable[[str, int, int], None]
RECTIFIED_ROUNDS = 2  # of fits to what is left after a rectifier, each from the one before
RECTIFIED_STEPS = 40  # quasi-Newton steps in each


@dataclass
class Refitted:
    """New forms of layers, weights and biases of layers that become dense, and statistics of batch norms."""

    forms: dict[str, Fitted]
    dense: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = field(default_factory=dict)  # mean, variance

    def instead(self, layers: Mapping[str, CPLayer]) -> dict[Tensor, Tensor]:
        """Return the new tensor for each tensor of the model, for a run with replaced tensors."""
        new = {p: value for name, form in self.forms.items() for p, value in form.instead(layers[name]).items()}
        for norm, (mean, variance) in self.statistics.items():
            new[cast(Tensor, norm.running_mean)] = mean
            new[cast(Tensor, norm.running_var)] = variance
        return new

    def apply_statistics(self) -> None:
        """Write the statistics into the batch norms."""
        for norm, (mean, variance) in self.statistics.items():
            cast(Tensor, norm.running_mean).copy_(mean)
            cast(Tensor, norm.running_var).copy_(variance)


def refit_in_sequence(
    model: nn.Module,
    layers: Mapping[str, CPLayer],
    forms: Mapping[str, Fitted],
    ranks: Mapping[str, int],
    calibrations: Mapping[str, Calibration],
    inputs: Sequence[Any],
    *,
    dense: Iterable[str] = (),
    regress: bool = True,
    input_bytes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Refitted:
    """Return layers fitted one after the other, each on the outputs of the fitted layers before it.

    The old and the new network run side by side on the data, once. When all runs have reached a layer, it is fitted to
    give the outputs of the old network on the inputs of the new one, which corrects earlier errors as far as possible;
    then the runs continue with the outputs of the fitted layer. Statistics of batch norms are changed by the difference
    of mean and variance between both networks.

    Args:
        model: the old network.
        layers: its canonical layers, by name.
        forms: new forms of some layers, whose output vectors and biases are fitted if ``regress``.
        ranks: the ranks of other layers, all vectors of which are fitted.
        calibrations: the calibrations of these.
        inputs: the inputs of all batches.
        dense: layers that become dense, which are also fitted to their old outputs if ``regress``.
        regress: see ``forms``.
        input_bytes: bytes of the input of each layer for one batch, in the order of the first calls. Where the inputs
            of a layer or of a later one would need too much memory for all batches, fewer batches take part; the others
            join where feature maps have become smaller.
        progress: called with (layer name, layers done, layers in total).
    """
    batches = batches_at(model, input_bytes or {}, next(iter(layers.values())).lambdas.device)
    sequence = _Sequence(
        model, layers, dict(forms), dict(ranks), calibrations, list(inputs), list(dense), regress, progress, batches
    )
    sequence.run()
    found = {name: sequence.new[name] for name in sequence.dense if name in sequence.new}
    return Refitted(sequence.forms, found, sequence.statistics)


class _FinishedError(Exception):
    """Raised when nothing is left to fit: what follows the last layer need not run."""


@dataclass
class _Sequence:
    model: nn.Module
    layers: Mapping[str, CPLayer]
    forms: dict[str, Fitted]
    ranks: dict[str, int]
    calibrations: Mapping[str, Calibration]
    inputs: list[Any]
    dense: list[str]
    regress: bool
    progress: Progress | None
    batches: Mapping[nn.Module, int]  # how many may run when a layer is reached
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    plain: dict[nn.Module, nn.Module] = field(default_factory=dict)  # dense layers to compute with
    old: dict[str, Tensor] = field(default_factory=dict)  # weights
    new: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # weights and biases
    free: dict[nn.Module, bool] = field(default_factory=dict)  # whether the mean of a layer's outputs can be corrected
    follows: dict[nn.Module, Successors] = field(default_factory=dict)
    logs: list[EventLog] = field(default_factory=list)
    latest: dict[int, tuple[nn.Module, list[Versioned]]] = field(default_factory=dict)  # input and output, by job
    norms: int = 0

    def run(self) -> None:
        """Fit all layers in one pass over the network; fit layers that no input reaches independently."""
        changed = {tie_key(self.layers[name]): name for name in (*self.forms, *self.ranks, *self.dense)}
        self.old = {name: self.layers[name].weight.detach() for name in changed.values()}
        free = layers_with_free_mean(self.model)  # before batch norms become stops
        for module in self.model.modules():
            if isinstance(module, CPLayer) and tie_key(module) in changed and "forward" not in module.__dict__:
                self.names[module] = changed[tie_key(module)]
                self.plain[module] = fold(copy.deepcopy(module))
                self.free[module] = module in free
        norms = [module for module in self.model.modules() if has_statistics(module)]
        self.norms, stops = len(norms), [*self.names, *norms]
        if self.regress:
            self._look_ahead(stops)
        jobs = [each for each in self.inputs for _ in range(2)]  # old and new: jobs 2b and 2b + 1 belong together
        wanted = {each.stream for each in self.follows.values() if each.stream is not None}
        self.logs = [EventLog(wanted) for _ in jobs]
        with suppress(_FinishedError):
            run_in_lockstep(self.model, jobs, stops, self.visit, self.logs, self._jobs_at)
        for name in self.ranks:
            if name not in self.new:
                self.forms[name] = fit_alone(self.layers[name], self.calibrations[name], self.ranks[name])
        if self.progress:
            self.progress("", len(self.old), len(self.old))

    def _jobs_at(self, module: nn.Module) -> int:
        """Return how many jobs may run when they reach a module; batch norms add none."""
        return 2 * self.batches.get(module, min(self.batches.values(), default=len(self.inputs)))

    def _look_ahead(self, stops: list[nn.Module]) -> None:
        """Find out what follows each layer, by one run of the old network."""
        log = EventLog(record=True)

        def visit(module: nn.Module, calls: list[Call]) -> None:
            for call in calls:
                if isinstance(module, _BatchNorm):
                    call.result = normalized(module, call.args[0])
                else:
                    layer = cast(CPLayer, module)
                    call.result = self._forward(layer, call, self.old[self.names[layer]], cast(Any, layer.bias))

        run_in_lockstep(self.model, self.inputs[:1], stops, visit, [log])
        self.follows = successors(log.events, self.names)

    def visit(self, module: nn.Module, calls: list[Call]) -> None:
        """Compute the outputs of a layer or batch norm; fit it at the first visit. End the runs when all are fitted."""
        if isinstance(module, _BatchNorm):
            self._visit_norm(module, calls)
        else:
            self._visit_layer(module, calls)
        if len(self.new) == len(self.old) and len(self.statistics) == self.norms:
            raise _FinishedError

    def _visit_layer(self, module: nn.Module, calls: list[Call]) -> None:
        name, layer = self.names[module], cast(CPLayer, module)
        follows = self.follows.get(layer, Successors())
        for call in calls:
            if call.job % 2 == 0:
                call.result = self._result(layer, call, self.old[name], cast(Tensor | None, layer.bias))
        if name not in self.new:
            if self.progress:
                self.progress(name, len(self.new), len(self.old))
            self.new[name] = self._fitted(name, layer, calls)
        for call in calls:
            if follows.stream is not None:  # of a job that came late, nothing was fitted to it
                self.logs[call.job].kept.pop(follows.stream, None)
            if call.job % 2:
                call.result = self._result(layer, call, *self.new[name])

    def _result(self, layer: CPLayer, call: Call, weight: Tensor, bias: Tensor | None) -> Any:
        """Return the outputs; those of a call with the same input just before it, such as a part of stacked layers."""
        x = first_argument(call.args, call.kwargs)
        before, seen = self.latest.get(call.job, (None, []))
        if before is layer and seen and are_unchanged(seen, [x, seen[1][0]]):
            return seen[1][0]
        y = self._forward(layer, call, weight, bias)
        self.latest[call.job] = (layer, versioned(x, y))
        return y

    def _forward(self, layer: CPLayer, call: Call, weight: Tensor, bias: Tensor | None) -> Any:
        plain = self.plain[layer]
        plain._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        plain._parameters["bias"] = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return plain.forward(*call.args, **call.kwargs)

    def _fitted(self, name: str, layer: CPLayer, calls: list[Call]) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the layer in its new form."""
        old_bias = cast(Tensor | None, layer.bias)
        if name in self.dense:
            return self._refitted_dense(name, layer, calls) or (self.old[name], old_bias)
        form = self._calibrated(name, layer, calls) if name in self.ranks else self._regressed(name, layer, calls)
        self.forms[name] = form
        return form.cp.to_dense().reshape(weight_shape(layer)), old_bias if form.bias is None else form.bias

    def _refitted_dense(self, name: str, layer: CPLayer, calls: list[Call]) -> tuple[Tensor, Tensor | None] | None:
        samples = self._samples(name, layer, calls) if self.regress else None
        if samples is None:
            return None
        target = samples.target(self._old_weight(name))
        weight = outputs_first(layer, target.weight.reshape(modes_by_patch(layer))).reshape(weight_shape(layer))
        bias = self._corrected_mean(layer, target, target.weight)
        return weight.to(layer.lambdas.dtype), cast(Tensor | None, layer.bias) if bias is None else bias

    def _calibrated(self, name: str, layer: CPLayer, calls: list[Call]) -> Fitted:
        """Fit all vectors."""
        calibration, rank = self.calibrations[name], self.ranks[name]
        samples = self._samples(name, layer, calls) if calibration.problem.output_modes == 1 else None
        if samples is None:
            return fit_alone(layer, calibration, rank)
        fitted, target, made = None, samples.target(self._old_weight(name)), calibration.problem.weight
        for each in range(1 + RECTIFIED_ROUNDS * samples.follows.rectified):
            if fitted is not None:
                target = samples.target(self._old_weight(name), (made, target.missing(made)))
            shaped = outputs_first(layer, target.weight.reshape(modes_by_patch(layer)))
            problem = layer_problem(layer, shaped, target.squares, calibration.sensitivity)
            if each == 0:
                fitted = fit(problem, rank, None if problem.is_matrix else problem.candidates())
            else:
                fitted = fit(problem, rank, None, fitted, steps=RECTIFIED_STEPS)
            made = fitted.to(torch.float64).to_dense().reshape(target.weight.shape)
        assert fitted is not None
        bias = self._corrected_mean(layer, target, made)
        return Fitted(terms_by_patch(layer, fitted).to(layer.lambdas.dtype), None, bias)

    def _old_weight(self, name: str) -> Tensor:  # (g, o, D)
        problem = self.calibrations[name].problem
        return problem.weight.double() * problem.scale

    def _samples(self, name: str, layer: CPLayer, calls: list[Call]) -> Samples | None:
        """Return inputs and wanted outputs of the layer; None if old and new inputs do not correspond."""
        calibration = self.calibrations.get(name)
        pairs = None if calibration is None or calibration.repeated else self._pairs(calls)
        if not pairs:
            return None
        follows = self.follows.get(layer, Successors())
        with_streams = [self._with_streams(follows, new, y) for new, y in pairs]
        if any(pair.streams is None for pair in with_streams) and follows.stream is not None:
            with_streams = [Pair(pair.x, pair.y) for pair in with_streams]
            follows = Successors(follows.norm)
        return Samples(layer, with_streams, follows, self.free[layer])

    def _with_streams(self, follows: Successors, new: Call, y: Tensor) -> Pair:
        x, streams = first_argument(new.args, new.kwargs), []
        if follows.stream is not None:
            streams = [self.logs[job].kept.pop(follows.stream, None) for job in (new.job - 1, new.job)]
        found = [stream for stream in streams if stream is not None and stream.shape == y.shape]
        return Pair(x, y, (found[0], found[1]) if len(found) == 2 else None)

    def _corrected_mean(self, layer: CPLayer, target: Target, weight: Tensor) -> Tensor | None:
        """Return a new bias with which the outputs have the right mean, or let the batch norm that follows do it."""
        missing, old = target.missing(weight), cast(Tensor | None, layer.bias)
        norm = self.follows.get(layer, Successors()).norm
        if missing is None:
            return None
        if norm is not None:
            mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
            moved = mean.clone() if old is not None else (mean.double() - missing).to(mean.dtype)
            self.statistics[norm] = moved, (variance * target.spread(weight)).to(variance.dtype)
        return None if old is None else (old.double() + missing).to(old.dtype)

    def _regressed(self, name: str, layer: CPLayer, calls: list[Call]) -> Fitted:
        """Fit output vectors and bias."""
        form = self.forms[name]
        free = not (isinstance(layer, nn.Linear) and len(linear_modes(layer)[0]) > 1)
        pairs = self._pairs(calls) if self.regress and free else None
        if not pairs:
            return form
        shift = layer.bias is not None and self.free[layer]
        return regress_outputs(layer, form, [(call.args, call.kwargs, y) for call, y in pairs], shift=shift)

    def _pairs(self, calls: list[Call]) -> list[tuple[Call, Tensor]] | None:
        """Return calls of the new network with the outputs of the old one; None if they do not correspond."""
        by_job = {call.job: call for call in calls}
        pairs = []
        for job in range(0, 2 * len(self.inputs), 2):
            old, new = by_job.get(job), by_job.get(job + 1)
            if old is None and new is None:
                continue
            if old is None or new is None:
                return None
            before, after = (first_argument(call.args, call.kwargs) for call in (old, new))
            if before.shape != after.shape:
                return None
            pairs.append((new, cast(Tensor, old.result)))
        return pairs

    def _visit_norm(self, norm: _BatchNorm, calls: list[Call]) -> None:
        if norm not in self.statistics:
            old, new = ([call.args[0] for call in calls if call.job % 2 == side] for side in (0, 1))
            self.statistics[norm] = moved_statistics(norm, old, new)
        for call in calls:
            call.result = normalized(norm, call.args[0], self.statistics[norm] if call.job % 2 else None)
