"""Fit the vectors of a canonical form by damped Gauss-Newton steps, in the metric of a layer's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from cpnorm.cp.als import solve_with_ridge
from cpnorm.cp.output_metric import Factors, Problem
from cpnorm.cp.spectra import eigh
from cpnorm.cp.tensor import khatri_rao

NORM_CONTROL = 1e-2  # penalty on the squared lengths of the vectors, relative to the error, so that terms do not cancel
RIDGE = 1e-6  # of the normal equations of the output vectors, relative to their mean diagonal
SAME_SPECTRA = 4  # steps with the same approximate inverse: its eigenvectors take longer than a step, and change slowly
LEAST_GAIN = 1e-3  # of the objective in one step
MOST_WORK = {"cpu": 1e12, "cuda": 4e13}  # multiplications with S in one fit: about a minute, and a second

Spectrum = tuple[Tensor, Tensor, Tensor, Tensor]  # eigenvalues and eigenvectors of a mode's metric, and of its terms


def solve_outputs(problem: Problem, factors: Factors) -> Factors:
    """Return the factors with the best output vectors for the other vectors, which is a linear regression."""
    if problem.output_modes > 1:
        return factors
    right = problem.right(factors)
    images = problem.inputs @ right  # (g, D, R)
    normal = (right.mT @ images).double()
    solved = solve_with_ridge(normal, (problem.weight @ images).double().mT, RIDGE).mT
    return [solved.flatten(0, 1).to(factors[0].dtype), *factors[1:]]


def gauss_newton(problem: Problem, factors: Factors, steps: int, inner: int = 15) -> Factors:
    """Return the factors after Levenberg-Marquardt steps, until a step gains next to nothing."""
    linearize = OutputsEliminated if problem.output_modes == 1 else AllModes
    factors = _balanced(factors)
    rank, columns, device = factors[0].shape[1], problem.weight.shape[2], factors[0].device.type
    products = problem.groups * columns**2 * rank * (inner + 4)
    steps = max(1, min(steps, int(MOST_WORK.get(device, MOST_WORK["cpu"]) / products)))
    ridge = NORM_CONTROL * problem.error(factors) / rank
    here = linearize(problem, factors, ridge)
    damping, factor = 0.0, 2.0
    spectra: list[Spectrum] | None = None
    age = 0  # of the spectra, in steps
    for _ in range(steps):
        if not here.objective > 0:
            break
        here.prepare(spectra)
        spectra = here.spectra
        damping = damping or 1e-3 * here.largest_curvature()
        for _ in range(8):
            step = here.step(damping, inner)
            there = linearize(problem, here.moved(step), ridge)
            if there.objective < here.objective:
                break
            damping, factor = damping * factor, 2 * factor
        else:
            break
        ratio = (here.objective - there.objective) / max(here.predicted(step), 1e-30)
        damping, factor = damping * max(0.2, 1 - (2 * min(ratio, 1.0) - 1) ** 3), 2.0
        gained, age = 1 - there.objective / here.objective, age + 1
        here = linearize(problem, _balanced(there.factors), ridge)
        if gained < LEAST_GAIN and age == 1:
            break
        if gained < LEAST_GAIN or age == SAME_SPECTRA:
            spectra, age = None, 0
    solved = solve_outputs(problem, here.factors)
    return solved if problem.error(solved) < problem.error(here.factors) else here.factors


class Linearized:
    """The least-squares problem around some factors: its gradient, its curvature and an approximate inverse.

    Attributes:
        factors: of all modes.
        free: those that steps change.
        objective: half of it has this gradient: the error and the penalty on the squared lengths of the vectors.
        gradient, spectra: with respect to ``free``, once ``prepare`` has been called.
    """

    gradient: Factors
    spectra: list[Spectrum]

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        self.problem, self.factors, self.ridge = problem, factors, ridge
        self.free = factors
        self.objective = 0.0

    def prepare(self, spectra: list[Spectrum] | None = None) -> None:
        """Compute the gradient, and the spectra of an approximate inverse if none are given."""
        raise NotImplementedError

    def curvature(self, changes: Factors, damping: float) -> Factors:
        """Apply the damped Gauss-Newton curvature."""
        raise NotImplementedError

    def moved(self, step: Factors) -> Factors:
        """Return the factors of all modes after a step."""
        before = self.factors[: len(self.factors) - len(self.free)]
        return [*before, *(a + b for a, b in zip(self.free, step, strict=True))]

    def largest_curvature(self) -> float:
        """Return a bound for the damping to start from."""
        return max((own[-1] * terms[-1]).item() for own, _, terms, _ in self.spectra)

    def inverse(self, vectors: Factors, damping: float) -> Factors:
        """Apply the approximate inverse of the damped curvature."""
        solved = []
        for x, (own, axes, terms, term_axes) in zip(vectors, self.spectra, strict=True):
            turned = axes.mT @ x.reshape(-1, len(own), x.shape[1]) @ term_axes
            turned = turned / (own[:, None] * terms + self.ridge + damping)
            solved.append((axes @ turned @ term_axes.mT).reshape(x.shape))
        return solved

    def step(self, damping: float, inner: int) -> Factors:
        """Solve for the step by preconditioned conjugate gradients."""
        x = [torch.zeros_like(part) for part in self.gradient]
        residual = [-part for part in self.gradient]
        direction = corrected = self.inverse(residual, damping)
        product = _dot(residual, corrected)
        for _ in range(inner):
            curved = self.curvature(direction, damping)
            length = product / _dot(direction, curved).clamp_min(torch.finfo(x[0].dtype).tiny)
            x = [torch.addcmul(a, length, b) for a, b in zip(x, direction, strict=True)]
            residual = [torch.addcmul(a, length, b, value=-1) for a, b in zip(residual, curved, strict=True)]
            corrected = self.inverse(residual, damping)
            before, product = product, _dot(residual, corrected)
            ratio = product / before.clamp_min(torch.finfo(x[0].dtype).tiny)
            direction = [torch.addcmul(a, ratio, b) for a, b in zip(corrected, direction, strict=True)]
        return x

    def predicted(self, step: Factors) -> float:
        """Return by how much the linearised objective falls."""
        curved = self.curvature(step, 0.0)
        return -(2 * _dot(self.gradient, step) + _dot(step, curved)).item()


class OutputsEliminated(Linearized):
    """The problem of all vectors but those of the outputs, which are always the best ones for the others.

    With the input terms M and their images S M, the best output vectors are a linear regression. A change of M counts
    as far as they cannot make up for it, that is, with S - S M (M^T S M)^-1 M^T S in the place of S (variable
    projection). Steps on all modes together need more than twice as many products with S for the same error.
    """

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        super().__init__(problem, factors, ridge)
        self.free = factors[1:]
        right = khatri_rao(self.free)
        self.image = problem.inputs @ right  # (g, D, R)
        normal = (right.mT @ self.image).double()
        size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
        normal = normal + (ridge + RIDGE * size) * torch.eye(len(normal[0]), dtype=normal.dtype, device=normal.device)
        products = torch.cat([problem.weight @ self.image, self.image], 1).double()  # (g, o + D, R)
        solved = torch.linalg.solve(normal, products.mT).mT.to(right)
        self.left, self.solved_image = solved.split([problem.weight.shape[1], len(right)], 1)
        self.factors = [self.left.flatten(0, 1), *self.free]
        self.left_image = problem.outputs @ self.left
        self.left_gram = self.left.mT @ self.left_image
        penalty = self.left_gram.diagonal(dim1=-2, dim2=-1).sum() + _dot(self.free, self.free)
        self.objective = problem.error(self.factors) + ridge * penalty.item()

    def prepare(self, spectra: list[Spectrum] | None = None) -> None:
        problem = self.problem
        gradient = (self.image @ self.left_gram - problem.projected.mT @ self.left).sum(0)
        self.gradient = [
            _contract(gradient, self.free, mode) + self.ridge * factor for mode, factor in enumerate(self.free)
        ]
        self.spectra = spectra or _spectra(problem, 1, self.free, self.left_gram.sum(0))

    def curvature(self, changes: Factors, damping: float) -> Factors:
        right = _varied(changes, self.free)
        image = self.problem.inputs @ right - self.solved_image @ (self.image.mT @ right)
        change = (image @ self.left_gram).sum(0)
        damping = damping + self.ridge
        return [_contract(change, self.free, mode) + damping * own for mode, own in enumerate(changes)]


class AllModes(Linearized):
    """The problem of the vectors of all modes together, for outputs of several modes."""

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
        super().__init__(problem, factors, ridge)
        self.objective = problem.error(factors) + ridge * _dot(factors, factors).item()

    def prepare(self, spectra: list[Spectrum] | None = None) -> None:
        problem, factors = self.problem, self.factors
        modes = problem.output_modes
        self.outs, self.ins = factors[:modes], factors[modes:]
        self.left, self.right = problem.left(factors), problem.right(factors)
        self.left_image, self.right_image = problem.outputs @ self.left, problem.inputs @ self.right  # G A, S M
        self.left_gram = self.left.mT @ self.left_image  # (g, R, R)
        self.right_gram = self.right.mT @ self.right_image
        gradient_left = self.left_image @ self.right_gram - problem.projected @ self.right
        gradient_right = (self.right_image @ self.left_gram - problem.projected.mT @ self.left).sum(0)
        self.gradient = [
            part + self.ridge * factor
            for part, factor in zip(self._by_mode(gradient_left, gradient_right), factors, strict=True)
        ]
        self.spectra = spectra or [
            *_spectra(problem, 0, self.outs, self.right_gram.mean(0)),
            *_spectra(problem, modes, self.ins, self.left_gram.sum(0)),
        ]

    def _by_mode(self, left: Tensor, right: Tensor) -> Factors:  # (g, o, R), (D, R)
        sides = (left.flatten(0, 1), self.outs), (right, self.ins)
        return [_contract(tangent, factors, mode) for tangent, factors in sides for mode in range(len(factors))]

    def curvature(self, changes: Factors, damping: float) -> Factors:
        modes = self.problem.output_modes
        left = _varied(changes[:modes], self.outs).reshape(self.left.shape)
        right = _varied(changes[modes:], self.ins)
        image = self.problem.inputs @ right  # (g, D, R)
        left_part = self.problem.outputs @ (left @ self.right_gram) + self.left_image @ (image.mT @ self.right)
        right_part = (self.right_image @ (left.mT @ self.left_image) + image @ self.left_gram).sum(0)
        damping = damping + self.ridge
        return [
            part + damping * change for part, change in zip(self._by_mode(left_part, right_part), changes, strict=True)
        ]


def _spectra(problem: Problem, first: int, factors: Factors, others: Tensor) -> list[Spectrum]:
    """Diagonalise the Kronecker products that the curvatures would be if the metrics had no cross terms.

    ``factors`` are those of adjacent modes beginning with ``first``, and ``others`` the products of the terms in all
    other modes, (R, R).
    """
    metrics = problem.marginals[first : first + len(factors)]
    grams = [factor.mT @ metric @ factor for factor, metric in zip(factors, metrics, strict=True)]
    found = []
    for mode in range(len(factors)):
        values, vectors = eigh(reduce(torch.mul, [gram for n, gram in enumerate(grams) if n != mode], others))
        found.append((*problem.spectra[first + mode], values.clamp_min(0), vectors))
    return found


def _balanced(factors: Sequence[Tensor]) -> Factors:
    """Give all vectors of a term the same length."""
    norms = [torch.linalg.vector_norm(f, dim=0).clamp_min(1e-30) for f in factors]
    length = reduce(torch.mul, [norm.pow(1 / len(factors)) for norm in norms])
    return [f * (length / norm) for f, norm in zip(factors, norms, strict=True)]


def _contract(tangent: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:  # (d1 * d2 ..., R) -> (d_mode, R)
    """Contract with the vectors of all modes but one: the adjoint of ``_varied``."""
    tensor = tangent.reshape(*(len(f) for f in factors), -1)
    for other in reversed(range(len(factors))):
        if other != mode:
            shape = [1] * other + [len(factors[other])] + [1] * (tensor.ndim - other - 2) + [-1]
            tensor = (tensor * factors[other].reshape(shape)).sum(other, keepdim=True)
    return tensor.reshape(len(factors[mode]), -1)


def _varied(changes: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:  # -> (d1 * d2 ..., R)
    """Return the change of the Khatri-Rao product when the factors change."""
    parts = [khatri_rao([*factors[:mode], change, *factors[mode + 1 :]]) for mode, change in enumerate(changes)]
    return reduce(torch.add, parts)


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [(a * b).sum() for a, b in zip(left, right, strict=True)])
