"""Fit the vectors of a canonical form by preconditioned quasi-Newton steps, in the metric of a layer's outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from cpnorm.cp.als import solve_with_ridge
from cpnorm.cp.output_metric import Factors, Problem
from cpnorm.cp.tensor import khatri_rao

NORM_CONTROL = 1e-2  # penalty on the squared lengths of the vectors, relative to the error, so that terms do not cancel
RIDGE = 1e-6  # of the normal equations of the output vectors, relative to their mean diagonal
DAMPING = 3e-2  # added to each side of the preconditioner, relative to its mean diagonal
MEMORY = 5  # steps that the approximate curvature remembers; the preconditioner is renewed as often
LEAST_GAIN = 2e-3  # of the objective in as many steps
MOST_WORK = {"cpu": 3e11, "cuda": 4e13}  # multiplications with S in one fit: a few seconds, and a second
LEAST_STEPS = 10  # however large the problem


def solve_outputs(problem: Problem, factors: Factors) -> Factors:
    """Return the factors with the best output vectors for the other vectors, which is a linear regression."""
    if problem.output_modes > 1:
        return factors
    right = problem.right(factors)
    images = problem.inputs @ right  # (g, D, R)
    normal = (right.mT @ images).double()
    solved = solve_with_ridge(normal, (problem.weight @ images).double().mT, RIDGE).mT
    return [solved.flatten(0, 1).to(factors[0].dtype), *factors[1:]]


def quasi_newton(problem: Problem, factors: Factors, steps: int) -> Factors:
    """Return the factors after steps of L-BFGS, until they gain next to nothing.

    The first guess of the inverse curvature is that of alternating least squares: for each mode the product of its
    metric and the Gram matrix of all other modes. One evaluation of the error and its gradient takes one product with
    the metric of the inputs, which is nearly all of the work, and a step takes one evaluation or a few more. Where
    steps in single precision end, rounding may be the reason, and steps in double precision go on.
    """
    rank, columns, device = factors[0].shape[1], problem.weight.shape[2], factors[0].device.type
    affordable = MOST_WORK.get(device, MOST_WORK["cpu"]) / (problem.groups * columns**2 * rank)
    steps = min(steps, max(LEAST_STEPS, int(affordable)))
    factors = _balanced(factors)
    ridge = NORM_CONTROL * problem.error(factors) / rank
    found, left = _descend(problem, factors, steps, ridge)
    if left and found[0].dtype != torch.float64:
        wide, _ = _descend(problem.double(), [f.double() for f in found], left, ridge)
        found = [f.to(factors[0].dtype) for f in wide]
    solved = solve_outputs(problem, found)
    return solved if problem.error(solved) < problem.error(found) else found


def _descend(problem: Problem, factors: Factors, steps: int, ridge: float) -> tuple[Factors, int]:
    """Return the factors where steps end, and how many of the steps are left."""
    at = OutputsEliminated if problem.output_modes == 1 else AllModes
    here: Point = at(problem, factors, ridge)
    memory: deque[tuple[Factors, Factors]] = deque(maxlen=MEMORY)  # changes of the vectors and of the gradient
    before = here.objective
    for step in range(steps if before > 0 else 0):
        if step % MEMORY == 0:
            if step and not here.objective < (1 - LEAST_GAIN) * before:
                return here.factors, steps - step
            before, inverse = here.objective, here.preconditioner()
        direction = _direction(here.gradient, memory, inverse)
        there = _line_search(here, direction)
        if there is None:
            return here.factors, steps - step
        change = [b - a for a, b in zip(here.free, there.free, strict=True)]
        bend = [b - a for a, b in zip(here.gradient, there.gradient, strict=True)]
        if _dot(change, bend) > 0:
            memory.append((change, bend))
        here = there
    return here.factors, 0


class Point:
    """The least-squares problem at some factors.

    Attributes:
        factors: of all modes.
        free: those that steps change.
        objective: the error and the penalty on the squared lengths of the vectors.
        gradient: half the derivative of the objective with respect to ``free``.
    """

    objective: float
    gradient: Factors

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        self.problem, self.factors, self.free, self.ridge = problem, factors, factors, ridge

    def preconditioner(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each free mode, the inverses of its metric and of the Gram matrix of the other modes."""
        raise NotImplementedError

    def moved(self, direction: Factors, length: float) -> Point:
        """Return the problem after a step in this direction."""
        fixed = self.factors[: len(self.factors) - len(self.free)]
        free = [x - length * d for x, d in zip(self.free, direction, strict=True)]
        return type(self)(self.problem, [*fixed, *free], self.ridge)


class OutputsEliminated(Point):
    """The problem of all vectors but those of the outputs, which are always the best ones for the others."""

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        super().__init__(problem, factors, ridge)
        self.free = factors[1:]
        right = khatri_rao(self.free)
        image = problem.inputs @ right  # (g, D, R)
        normal = (right.mT @ image).double()
        size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
        normal = normal + (ridge + RIDGE * size) * torch.eye(len(normal[0]), dtype=normal.dtype, device=normal.device)
        left = torch.linalg.solve(normal, (problem.weight @ image).double().mT).mT.to(right)
        self.factors = [left.flatten(0, 1), *self.free]
        measured = problem.outputs @ left
        self.left_gram = left.mT @ measured
        missing = problem.weight - left @ right.mT
        weighted = problem.projected - measured @ image.mT  # G (W - V) S, without another product with S
        penalty = self.left_gram.diagonal(dim1=-2, dim2=-1).sum() + _dot(self.free, self.free)
        error = (weighted * missing).sum(dtype=torch.float64)
        self.objective = (error + ridge * penalty).item()
        # The derivative with respect to the output vectors vanishes, so that their dependence does not matter.
        gradient = -(weighted.mT @ left).sum(0)
        self.gradient = [_contract(gradient, self.free, mode) + ridge * own for mode, own in enumerate(self.free)]

    def preconditioner(self) -> list[tuple[Tensor, Tensor]]:
        return _inverses(self.problem.marginals[1:], self.free, self.left_gram.sum(0))


class AllModes(Point):
    """The problem of the vectors of all modes together, for outputs of several modes."""

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        super().__init__(problem, factors, ridge)
        outs, ins = factors[: problem.output_modes], factors[problem.output_modes :]
        left, right = problem.left(factors), problem.right(factors)
        measured, image = problem.outputs @ left, problem.inputs @ right
        self.left_gram, self.right_gram = left.mT @ measured, right.mT @ image
        missing = problem.weight - left @ right.mT
        weighted = problem.projected - measured @ image.mT
        error = (weighted * missing).sum(dtype=torch.float64)
        self.objective = (error + ridge * _dot(factors, factors)).item()
        sides = (-(weighted @ right).flatten(0, 1), outs), (-(weighted.mT @ left).sum(0), ins)
        gradient = [_contract(side, own, mode) for side, own in sides for mode in range(len(own))]
        self.gradient = [part + ridge * factor for part, factor in zip(gradient, factors, strict=True)]

    def preconditioner(self) -> list[tuple[Tensor, Tensor]]:
        modes, metrics = self.problem.output_modes, self.problem.marginals
        return [
            *_inverses(metrics[:modes], self.factors[:modes], self.right_gram.mean(0)),
            *_inverses(metrics[modes:], self.factors[modes:], self.left_gram.sum(0)),
        ]


def _inverses(metrics: Sequence[Tensor], factors: Factors, others: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the damped inverses of each mode's metric and of the inner products of the terms in all other modes.

    ``factors`` are the modes of the inputs, or of the outputs, and ``others`` the inner products of the terms on the
    other side, (R, R).
    """
    grams = [factor.mT @ metric @ factor for factor, metric in zip(factors, metrics, strict=True)]
    terms = [reduce(torch.mul, [g for n, g in enumerate(grams) if n != mode], others) for mode in range(len(grams))]
    return [(_inverse(metric), _inverse(own)) for metric, own in zip(metrics, terms, strict=True)]


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive semidefinite matrix after damping."""
    size = matrix.diagonal().mean().double().clamp_min(1e-30)  # of a matrix of zeros
    eye = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    root = torch.linalg.cholesky(matrix.double() + DAMPING * size * eye)
    return torch.cholesky_inverse(root).to(matrix.dtype)


def _direction(
    gradient: Factors, memory: Sequence[tuple[Factors, Factors]], inverse: Sequence[tuple[Tensor, Tensor]]
) -> Factors:
    """Return the approximate inverse curvature times the gradient: the two loops of L-BFGS."""

    def preconditioned(vectors: Factors) -> Factors:
        parts = zip(vectors, inverse, strict=True)
        return [(own @ x.reshape(-1, len(own), len(terms)) @ terms).reshape(x.shape) for x, (own, terms) in parts]

    shares = []
    for change, bend in reversed(memory):
        share = _dot(change, gradient) / _dot(change, bend)
        gradient = _add(gradient, bend, -share)
        shares.append(share)
    result = preconditioned(gradient)
    if memory:
        change, bend = memory[-1]
        scale = _dot(change, bend) / _dot(bend, preconditioned(bend))
        result = [scale * part for part in result]
    for (change, bend), share in zip(memory, reversed(shares), strict=True):
        result = _add(result, change, share - _dot(bend, result) / _dot(change, bend))
    return result


def _line_search(here: Point, direction: Factors) -> Point | None:
    """Return a point in this direction with a lower objective, or None if there is none."""
    slope, length = 2 * _dot(direction, here.gradient), 1.0
    for _ in range(8):
        there = here.moved(direction, length)
        if there.objective < here.objective - 1e-4 * length * slope:
            return there
        length *= 0.3
    return None


def _balanced(factors: Sequence[Tensor]) -> Factors:
    """Give all vectors of a term the same length."""
    norms = [torch.linalg.vector_norm(f, dim=0).clamp_min(1e-30) for f in factors]
    length = reduce(torch.mul, [norm.pow(1 / len(factors)) for norm in norms])
    return [f * (length / norm) for f, norm in zip(factors, norms, strict=True)]


def _contract(tangent: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:  # (d1 * d2 ..., R) -> (d_mode, R)
    """Contract with the vectors of all modes but one."""
    tensor = tangent.reshape(*(len(f) for f in factors), -1)
    for other in reversed(range(len(factors))):
        if other != mode:
            shape = [1] * other + [len(factors[other])] + [1] * (tensor.ndim - other - 2) + [-1]
            tensor = (tensor * factors[other].reshape(shape)).sum(other, keepdim=True)
    return tensor.reshape(len(factors[mode]), -1)


def _add(vectors: Factors, others: Factors, scale: float) -> Factors:
    return [torch.add(a, b, alpha=scale) for a, b in zip(vectors, others, strict=True)]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return float(sum((a * b).sum(dtype=torch.float64) for a, b in zip(left, right, strict=True)))
