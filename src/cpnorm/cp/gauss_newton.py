"""Take damped Gauss-Newton steps on all vectors of a canonical form at once, in the metric of a layer's outputs."""

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
    solved = solve_with_ridge(normal, (problem.weight @ images).double().mT, 1e-6).mT
    return [solved.flatten(0, 1).to(factors[0].dtype), *factors[1:]]


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


class Linearized:
    """The least-squares problem around some factors: its gradient, its curvature and an approximate inverse."""

    def __init__(self, problem: Problem, factors: Factors, ridge: float, spectra: list[Spectrum] | None = None) -> None:
        self.problem, self.factors, self.ridge = problem, factors, ridge
        self.outs, self.ins = factors[: problem.output_modes], factors[problem.output_modes :]
        self.left, self.right = problem.left(factors), problem.right(factors)
        self.left_image, self.right_image = problem.outputs @ self.left, problem.inputs @ self.right  # G A, S M
        self.left_gram = self.left.mT @ self.left_image  # (g, R, R)
        self.right_gram = self.right.mT @ self.right_image
        gradient_left = self.left_image @ self.right_gram - problem.projected @ self.right
        gradient_right = (self.right_image @ self.left_gram - problem.projected.mT @ self.left).sum(0)
        self.gradient = [
            part + ridge * factor
            for part, factor in zip(self._by_mode(gradient_left, gradient_right), factors, strict=True)
        ]
        self.spectra = self._spectra() if spectra is None else spectra

    def _by_mode(self, left: Tensor, right: Tensor) -> Factors:  # (g, o, R), (D, R)
        left = left.flatten(0, 1)
        return [_contract(left, self.outs, mode) for mode in range(len(self.outs))] + [
            _contract(right, self.ins, mode) for mode in range(len(self.ins))
        ]

    def _spectra(self) -> list[Spectrum]:
        """Diagonalise the Kronecker products that the curvatures would be if the metrics had no cross terms."""
        marginals = self.problem.marginals
        grams = [f.mT @ m @ f for f, m in zip(self.outs, marginals, strict=False)] if len(self.outs) > 1 else []
        grams_in = [f.mT @ m @ f for f, m in zip(self.ins, marginals[len(self.outs) :], strict=True)]
        left_gram, right_gram = self.left_gram.sum(0), self.right_gram.mean(0)
        found = []
        for mode in range(len(self.factors)):
            place = mode - len(self.outs)
            rest, whole = (grams, right_gram) if place < 0 else (grams_in, left_gram)
            own = mode if place < 0 else place
            among = reduce(torch.mul, [g for n, g in enumerate(rest) if n != own], whole)
            values, vectors = eigh(among)
            found.append((*self.problem.spectra[mode], values.clamp_min(0), vectors))
        return found

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

    def curvature(self, changes: Factors, damping: float) -> Factors:
        """Apply the damped Gauss-Newton curvature."""
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

    def step(self, damping: float, inner: int) -> Factors:
        """Solve for the step by preconditioned conjugate gradients."""
        x = [torch.zeros_like(part) for part in self.gradient]
        residual = [-part for part in self.gradient]
        direction = corrected = self.inverse(residual, damping)
        product = _dot(residual, corrected)
        for _ in range(inner):
            curved = self.curvature(direction, damping)
            length = product / _dot(direction, curved).clamp_min(torch.finfo(x[0].dtype).tiny)
            x = [a + length * b for a, b in zip(x, direction, strict=True)]
            residual = [a - length * b for a, b in zip(residual, curved, strict=True)]
            corrected = self.inverse(residual, damping)
            before, product = product, _dot(residual, corrected)
            ratio = product / before.clamp_min(torch.finfo(x[0].dtype).tiny)
            direction = [a + ratio * b for a, b in zip(corrected, direction, strict=True)]
        return x

    def predicted(self, step: Factors) -> float:
        """Return by how much the linearised objective falls."""
        curved = self.curvature(step, 0.0)
        return -(2 * _dot(self.gradient, step) + _dot(step, curved)).item()


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [(a * b).sum() for a, b in zip(left, right, strict=True)])


def gauss_newton(problem: Problem, factors: Factors, steps: int, inner: int = 15) -> Factors:
    """Return the factors after Levenberg-Marquardt steps on all vectors, until a step gains next to nothing."""
    factors = _balanced(factors)
    rank, columns, device = factors[0].shape[1], problem.weight.shape[2], factors[0].device.type
    products = problem.groups * columns**2 * rank * (inner + 4)
    steps = max(1, min(steps, int(MOST_WORK.get(device, MOST_WORK["cpu"]) / products)))
    error = problem.error(factors)
    ridge = NORM_CONTROL * error / rank
    penalised = error + ridge * _dot(factors, factors).item()
    damping, factor = 0.0, 2.0
    spectra: list[Spectrum] | None = None
    age = 0  # of the spectra, in steps
    for _ in range(steps):
        if not penalised > 0:
            break
        around = Linearized(problem, factors, ridge, spectra)
        spectra = around.spectra
        damping = damping or 1e-3 * around.largest_curvature()
        for _ in range(8):
            step = around.step(damping, inner)
            moved = [a + b for a, b in zip(factors, step, strict=True)]
            there = problem.error(moved) + ridge * _dot(moved, moved).item()
            if there < penalised:
                break
            damping, factor = damping * factor, 2 * factor
        else:
            break
        ratio = (penalised - there) / max(around.predicted(step), 1e-30)
        damping, factor = damping * max(0.2, 1 - (2 * min(ratio, 1.0) - 1) ** 3), 2.0
        gained, factors, age = 1 - there / penalised, _balanced(moved), age + 1
        penalised = problem.error(factors) + ridge * _dot(factors, factors).item()
        if gained < LEAST_GAIN and age == 1:
            break
        if gained < LEAST_GAIN or age == SAME_SPECTRA:
            spectra, age = None, 0
    return _solve_outputs_if_better(problem, factors)


def _solve_outputs_if_better(problem: Problem, factors: Factors) -> Factors:
    solved = solve_outputs(problem, factors)
    return solved if problem.error(solved) < problem.error(factors) else factors
