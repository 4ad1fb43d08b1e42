"""Fit layers one after the other, each to its old outputs, on the inputs that the fitted layers before it hand on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cpnorm.compress.calibrate import (
    Calibration,
    bias_is_free,
    fit_alone,
    has_statistics,
    layer_problem,
    modes_by_patch,
    terms_by_patch,
)
from cpnorm.compress.lockstep import Call, run_in_lockstep
from cpnorm.compress.moments import (
    Moments,
    choose_positions,
    first_argument,
    outputs_at,
    outputs_first,
    patches_at,
    sampled_share,
)
from cpnorm.compress.refit import Fitted, regress_outputs
from cpnorm.cp.calibrated import fit, regression_target
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import fold
from cpnorm.nn.planner import linear_modes, weight_shape

Progress = Callable[[str, int, int], None]
ALIVE_BYTES = 4 * 2**30  # of feature maps that all inputs together may keep alive; with more, fewer inputs are used
MAPS_ALIVE = 6  # about so many times the largest map is alive at once, old and new


@dataclass
class Refitted:
    """New forms of layers, new weights and biases of those that become dense, and new statistics of batch norms."""

    forms: dict[str, Fitted]
    dense: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = field(default_factory=dict)  # mean, variance

    def instead(self, layers: Mapping[str, CPLayer]) -> dict[Tensor, Tensor]:
        """Return what to put in place of the model's tensors to try it."""
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
    bytes_alive: int = 0,
    progress: Progress | None = None,
) -> Refitted:
    """Return layers fitted one after the other on the inputs that the fitted ones before them hand on.

    The old and the new network run side by side on the data, once. When all inputs have come to a layer it is fitted so
    that on the new network's inputs it gives the outputs of the old one, which makes up for errors before it as far as
    it can; then they go on with what the fitted layer gives. Batch norms take over how mean and variance of their
    inputs differ between the networks.

    Args:
        model: the old network.
        layers: its canonical layers, by name.
        forms: new forms of some layers, whose output vectors and biases are fitted if ``regress``.
        ranks: of other layers, all vectors of which are fitted.
        calibrations: of these.
        inputs: of all batches.
        dense: layers that become dense: they too are fitted to their old outputs if ``regress``.
        regress: see ``forms``.
        bytes_alive: what the feature maps of one layer take over all inputs; if memory is short, fewer are used.
        progress: called with (layer name, layers done, layers in all).
    """
    share = ALIVE_BYTES / max(1, MAPS_ALIVE * bytes_alive)
    used = list(inputs)[: max(1, int(len(inputs) * min(share, 1.0)))]
    sequence = _Sequence(model, layers, dict(forms), dict(ranks), calibrations, used, list(dense), regress, progress)
    sequence.run()
    found = {name: sequence.new[name] for name in sequence.dense if name in sequence.new}
    return Refitted(sequence.forms, found, sequence.statistics)


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
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    plain: dict[nn.Module, nn.Module] = field(default_factory=dict)  # dense layers to compute with
    old: dict[str, Tensor] = field(default_factory=dict)  # weights
    new: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # weights and biases

    def run(self) -> None:
        """Fit all layers in one pass, and those that no input reaches by themselves."""
        changed = {tie_key(self.layers[name]): name for name in (*self.forms, *self.ranks, *self.dense)}
        self.old = {name: self.layers[name].weight.detach() for name in changed.values()}
        for module in self.model.modules():
            if isinstance(module, CPLayer) and tie_key(module) in changed and "forward" not in module.__dict__:
                self.names[module] = changed[tie_key(module)]
                self.plain[module] = fold(copy.deepcopy(module))
        norms = [module for module in self.model.modules() if has_statistics(module)]
        jobs = [each for each in self.inputs for _ in range(2)]  # old and new: jobs 2b and 2b + 1 belong together
        run_in_lockstep(self.model, jobs, [*self.names, *norms], self.visit)
        for name in self.ranks:
            if name not in self.new:
                self.forms[name] = fit_alone(self.layers[name], self.calibrations[name], self.ranks[name])
        if self.progress:
            self.progress("", len(self.old), len(self.old))

    def visit(self, module: nn.Module, calls: list[Call]) -> None:
        """Compute what a stop returns, after fitting it on the first visit."""
        if isinstance(module, _BatchNorm):
            self._visit_norm(module, calls)
            return
        name, layer = self.names[module], cast(CPLayer, module)
        for call in calls:
            if call.job % 2 == 0:
                call.result = self._forward(layer, call, self.old[name], cast(Tensor | None, layer.bias))
        if name not in self.new:
            if self.progress:
                self.progress(name, len(self.new), len(self.old))
            self.new[name] = self._fitted(name, layer, calls)
        for call in calls:
            if call.job % 2:
                call.result = self._forward(layer, call, *self.new[name])

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
        calibration = self.calibrations.get(name)
        target = None if calibration is None or not self.regress else self._target(layer, calibration, calls)
        if target is None:
            return None
        weight = outputs_first(layer, target.weight.reshape(modes_by_patch(layer))).reshape(weight_shape(layer))
        bias = target.bias(layer, target.weight)
        return weight.to(layer.lambdas.dtype), cast(Tensor | None, layer.bias) if bias is None else bias

    def _calibrated(self, name: str, layer: CPLayer, calls: list[Call]) -> Fitted:
        """Fit all vectors."""
        calibration, rank = self.calibrations[name], self.ranks[name]
        target = self._target(layer, calibration, calls) if calibration.problem.output_modes == 1 else None
        if target is None:
            return fit_alone(layer, calibration, rank)
        shaped = outputs_first(layer, target.weight.reshape(modes_by_patch(layer)))
        problem = layer_problem(layer, shaped, target.squares, calibration.sensitivity)
        fitted = fit(problem, rank, problem.candidates())
        bias = target.bias(layer, fitted.to(torch.float64).to_dense().reshape(target.weight.shape))
        return Fitted(terms_by_patch(layer, fitted).to(layer.lambdas.dtype), None, bias)

    def _target(self, layer: CPLayer, calibration: Calibration, calls: list[Call]) -> _Target | None:
        """Return the dense weight that gives the old outputs on the new inputs; None if they do not belong together."""
        pairs = None if calibration.repeated else self._pairs(calls)
        if not pairs:
            return None
        moments = Moments()
        positions = sum(y.numel() for _, y in pairs) // calibration.problem.weight.shape[1]
        for number, (call, y) in enumerate(pairs, start=1):
            x = first_argument(call.args, call.kwargs)
            chosen = choose_positions(layer, x, sampled_share(layer, positions), number)
            moments.add(patches_at(layer, x, chosen), outputs_at(layer, x, y, chosen))
        free = bias_is_free(self.model, layer)
        squares, products = moments.second(centered=free)
        old = calibration.problem.weight.double() * calibration.problem.scale
        return _Target(regression_target(old, squares, products), squares, moments if free else None)

    def _regressed(self, name: str, layer: CPLayer, calls: list[Call]) -> Fitted:
        """Fit output vectors and bias."""
        form = self.forms[name]
        free = not (isinstance(layer, nn.Linear) and len(linear_modes(layer)[0]) > 1)
        pairs = self._pairs(calls) if self.regress and free else None
        if not pairs:
            return form
        shift = layer.bias is not None and bias_is_free(self.model, layer)
        return regress_outputs(layer, form, [(call.args, call.kwargs, y) for call, y in pairs], shift=shift)

    def _pairs(self, calls: list[Call]) -> list[tuple[Call, Tensor]] | None:
        """Return calls of the new network with the old one's outputs; None if they do not belong together."""
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
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        if norm not in self.statistics:
            old, new = (_statistics(call.args[0] for call in calls if call.job % 2 == side) for side in (0, 1))
            self.statistics[norm] = mean.clone(), variance.clone()
            if old is not None and new is not None:
                # Only the difference, measured on the same inputs: few of them tell it better than the statistics.
                ratio = torch.where(old[1] > 0, new[1] / old[1].clamp_min(1e-30), 1.0)
                moved = mean.double() + new[0] - old[0]
                self.statistics[norm] = moved.to(mean.dtype), (variance.double() * ratio).to(variance.dtype)
        for call in calls:
            used = self.statistics[norm] if call.job % 2 else (mean, variance)
            call.result = F.batch_norm(call.args[0], *used, norm.weight, norm.bias, False, 0.0, norm.eps)


@dataclass(frozen=True, eq=False)
class _Target:
    """What a layer should compute: a dense weight, and the moments in whose norm to approximate it."""

    weight: Tensor  # (g, o, D)
    squares: Tensor  # (g, D, D)
    moments: Moments | None  # if the bias is free

    def bias(self, layer: CPLayer, weight: Tensor) -> Tensor | None:  # (g, o, D)
        """Return the bias with which the outputs of this weight have the right mean; None for the old one."""
        if self.moments is None or layer.bias is None:
            return None
        mean, output_mean = self.moments.means()
        missing = (output_mean - (weight @ mean[..., None]).squeeze(-1)).flatten()
        old = cast(Tensor, layer.bias)
        return (old.double() + missing).to(old.dtype)


def _statistics(inputs: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance of each channel over several feature maps."""
    total: list[Tensor] = []
    count = 0
    shift = None
    for x in inputs:
        rows = x.transpose(0, 1).flatten(1)
        shift = rows.mean(1, keepdim=True) if shift is None else shift
        centered = rows - shift
        sums = [centered.sum(1).double(), centered.square().sum(1).double()]
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
        count += rows.shape[1]
    if shift is None or not count:
        return None
    mean = total[0] / count
    return mean + shift[:, 0], total[1] / count - mean.square()
