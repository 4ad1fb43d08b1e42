"""Measure on data, for each layer by itself, what to fit, where to start, and what errors cost the network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cpnorm.compress.calibration_data import Batch, as_batches
from cpnorm.compress.fitting.layer_inputs import inputs_and_sensitivity
from cpnorm.compress.fitting.moments import Versioned, are_unchanged, first_argument, outputs_first, versioned
from cpnorm.compress.fitting.refit import Fitted
from cpnorm.cp.calibrated import fit
from cpnorm.cp.closed_form import errors_by_rank
from cpnorm.cp.output_metric import TRUST_IN_OUTPUTS, Candidates, Problem
from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.planner import linear_modes

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Calibration:
    """A layer measured on data: the problem to solve, terms to start from, and the importance of its errors."""

    problem: Problem
    candidates: Candidates | None  # None for a matrix, whose best approximation is known
    errors: Tensor | None  # of a matrix, relative to that of a weight of zeros, after 0, 1, ... terms are dropped
    importance: float  # squared change of the network's outputs if the layer returned its mean output only
    repeated: bool  # called more than once per input, or tied

    @property
    def sensitivity(self) -> Tensor:  # (g, o, o), mean diagonal 1
        """The metric of the outputs as it was measured; stored, it would take gigabytes for a language model."""
        metric = self.problem.outputs.clone()
        metric.diagonal(dim1=-2, dim2=-1).sub_(TRUST_IN_OUTPUTS)
        return metric

    def expected_loss(self, rank: int) -> float:
        """Return an estimate of what cutting the layer to this rank costs; it grows without bound for large errors.

        The signal at the end of a chain of layers is a product of the shares that each layer keeps, so that their
        logarithms add up.
        """
        return -self.importance * math.log1p(-min(self.expected_error(rank), 1 - 1e-9))

    def expected_error(self, rank: int) -> float:
        """Return an estimate of the relative error that a fit of this rank reaches."""
        if self.errors is not None:
            return self.errors[max(0, len(self.errors) - rank)].item()
        assert self.candidates is not None
        return self.candidates.expected_error(rank)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What ``calibrate`` returns: data, and what they say about every layer of one model. Iterates over the batches."""

    batches: list[Batch]
    layers: dict[str, Calibration]
    bytes: dict[str, int]  # of the input of each layer for one batch, in the order of the first calls
    forms: dict[str, CPTensor]  # that were measured

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def of(self, layers: Mapping[str, CPLayer]) -> tuple[dict[str, Calibration], dict[str, int]]:
        """Return the calibrations of these layers and ``bytes``; raise if their terms are not the measured ones."""
        for name, layer in layers.items():
            if name not in self.forms or not _same(self.forms[name], layer.cp):
                which = name or "the layer"
                raise ValueError(f"data: calibrated on another model, of which {which} differs; calibrate this one")
        return {name: each for name, each in self.layers.items() if name in layers}, self.bytes


def _same(one: CPTensor, other: CPTensor) -> bool:
    pairs = zip((one.sigma, one.lambdas, *one.factors), (other.sigma, other.lambdas, *other.factors), strict=True)
    return len(one.factors) == len(other.factors) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@torch.inference_mode(False)
@torch.no_grad()
def calibrate(model: nn.Module, data: Any, *, progress: Progress | None = None) -> Calibrated:
    """Measure on data what ``truncate`` needs to know of every layer; copies of the model can then be cut repeatedly.

    The result takes the place of the data in ``truncate``, for several budgets from one measurement.

    Args:
        model: a model in canonical form; it does not change.
        data: as for ``truncate``.
        progress: called with (name of the step, steps done, steps in total).

    >>> import copy, cpnorm
    >>> model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)))
    >>> measured = cpnorm.calibrate(model, torch.randn(64, 32))
    >>> for share in (0.5, 0.3):
    ...     report = cpnorm.truncate(copy.deepcopy(model), params=share, data=measured)
    """
    layers, batches = canonical_layers(model), as_batches(data)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to calibrate: call canonical_norm first")
    found, sizes = calibrate_layers(model, layers, [inputs for inputs, _ in batches], progress)
    forms = {name: CPTensor(y.cp.sigma.clone(), y.cp.lambdas.clone(), tuple(f.clone() for f in y.cp.factors))
             for name, y in layers.items()}  # fmt: skip
    return Calibrated(batches, found, sizes, forms)


def calibrate_layers(
    model: nn.Module, layers: Mapping[str, CPLayer], inputs: Sequence[Any], progress: Progress | None = None
) -> tuple[dict[str, Calibration], dict[str, int]]:
    """Return the calibration of each layer that the data reach, and the bytes that inputs of layers take."""
    with _built_weights(model), _shared_outputs(model):
        counted = _Counted(inputs, "measuring inputs and gradients of layers", progress)
        seen, metrics = inputs_and_sensitivity(model, layers, counted)
    found, free = {}, layers_with_free_mean(model)
    for name in _Counted(list(seen.moments), "decomposing layers", progress):
        layer = layers[name]
        moments, metric = seen.moments.pop(name), (metrics or {}).pop(name, None)  # they take much memory
        squares, _ = moments.second(centered=layer in free)
        if not squares.isfinite().all():
            raise ValueError(
                f"data: expected finite values, got NaN or infinity in the inputs of {name or 'the layer'}"
            )
        problem = layer_problem(layer, layer.weight.detach(), squares, metric)
        importance = 1.0 if metrics is None else problem.total
        candidates = _candidates(problem, layer)
        errors = errors_by_rank(problem) if candidates is None else None
        found[name] = Calibration(problem, candidates, errors, importance, moments.calls > len(inputs))
    return found, seen.bytes


def _candidates(problem: Problem, layer: CPLayer) -> Candidates | None:
    """Return the terms to start from; None where the best approximation is known."""
    if problem.output_modes > 1:
        return Candidates.of(problem, _scaled_factors(problem, layer.cp))
    return None if problem.is_matrix else problem.candidates()


class _Counted(list[Any]):
    """A list that reports how far a loop over it has come."""

    def __init__(self, items: Iterable[Any], what: str, progress: Progress | None) -> None:
        super().__init__(items)
        self.what, self.progress = what, progress

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(super().__iter__()):
            if self.progress:
                self.progress(self.what, done, len(self))
            yield item


@contextmanager
def _built_weights(model: nn.Module) -> Iterator[None]:
    """Build every weight once inside the block: at exact rank that can take as long as a batch."""
    layers = [module for module in model.modules() if isinstance(module, CPLayer)]
    try:
        for layer in layers:
            layer.use_prebuilt(layer._dense().detach())
        yield
    finally:
        for layer in layers:
            layer.prebuilt = None


@contextmanager
def _shared_outputs(model: nn.Module) -> Iterator[None]:
    """Compute each whole once per input inside the block: all parts of stacked layers call it."""
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False) if isinstance(module, CPLayer))
    shared = [layer for layer, count in places.items() if count > 1 and "forward" not in layer.__dict__]
    for layer in shared:
        layer.__dict__["forward"] = _remembering(layer.forward)
    try:
        yield
    finally:
        for layer in shared:
            layer.__dict__.pop("forward")


def _remembering(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that gives its last output again if the input is the same tensor."""
    latest: list[Versioned] = []  # input and output

    def remembered(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal latest
        x = first_argument(args, kwargs)
        if not (latest and are_unchanged(latest, [x, latest[1][0]])):
            latest = versioned(x, y := forward(*args, **kwargs))
            return y
        return latest[1][0]

    return remembered


def layer_problem(layer: CPLayer, weight: Tensor, squares: Tensor, metric: Tensor | None) -> Problem:
    """Return the problem for another weight of this layer."""
    weight = weight.to(torch.promote_types(layer.lambdas.dtype, torch.float32))
    modes = len(linear_modes(layer)[0]) if isinstance(layer, nn.Linear) else 1
    shape = modes_by_patch(layer)
    dense = outputs_first(layer, weight).reshape(shape)
    return Problem.of(dense, squares, metric, groups=getattr(layer, "groups", 1), output_modes=modes)


def modes_by_patch(layer: CPLayer) -> tuple[int, ...]:
    """Return the shape in which a layer's weight is decomposed, with the outputs first."""
    first, second, *rest = layer.modes
    return (second, first, *rest) if getattr(layer, "transposed", False) else (first, second, *rest)


def terms_by_patch(layer: CPLayer, cp: CPTensor) -> CPTensor:
    """Swap input and output vectors of a transposed convolution, whose inputs come first, or swap them back."""
    if not getattr(layer, "transposed", False):
        return cp
    first, second, *rest = cp.factors
    return CPTensor(cp.sigma, cp.lambdas, (second, first, *rest))


def _scaled_factors(problem: Problem, cp: CPTensor) -> list[Tensor]:
    first = cp.factors[0] * (cp.sigma * cp.lambdas / problem.scale)
    return [factor.detach().to(problem.weight) for factor in (first, *cp.factors[1:])]


def layers_with_free_mean(model: nn.Module) -> set[nn.Module]:
    """Return the canonical layers whose mean output can be corrected, by their bias or by a batch norm."""
    modules = list(model.modules())
    has_norms = any(map(has_statistics, modules))
    holders = Counter(id(module._parameters.get("bias")) for module in modules)
    tied = Counter(map(tie_key, modules))
    return {
        module
        for module in modules
        if isinstance(module, CPLayer)
        and (has_norms if module.bias is None else holders[id(module.bias)] == tied[tie_key(module)] == 1)
    }


def fit_alone(layer: CPLayer, calibration: Calibration, rank: int, *, steps: int = 150) -> Fitted:
    """Return the layer at this rank, fitted on its inputs in the network before truncation."""
    chosen = calibration.candidates if calibration.problem.output_modes == 1 else None
    start = None
    if calibration.problem.output_modes > 1 and calibration.candidates is not None:
        kept = calibration.candidates.order[layer.rank - rank :].sort().values.to(layer.lambdas.device)
        start = layer.cp.select(kept)
    fitted = fit(calibration.problem, rank, chosen, start, steps=steps)
    return Fitted(terms_by_patch(layer, fitted).to(layer.lambdas.dtype), None)


def has_statistics(module: nn.Module) -> bool:
    """Return True for a batch norm that uses running statistics in eval mode."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None and "forward" not in module.__dict__
