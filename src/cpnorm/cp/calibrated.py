"""Decompose a weight in the norm of its layer's inputs: what counts is the error of the outputs, not of the weight.

A layer with the inputs (patches) x computes y = W x. With S = E[x x^T] and a metric G on the outputs, the error of an
approximation V is E[(Wx - Vx)^T G (Wx - Vx)] = tr(G (W - V) S (W - V)^T). For a matrix the optimum of a given rank is
the truncated SVD of G^1/2 W S^1/2; for more modes it is found by damped Gauss-Newton steps on all vectors at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from cpnorm._checks import check_int, check_type
from cpnorm.cp.decompose import in_full_precision
from cpnorm.cp.elimination import elimination_order
from cpnorm.cp.tensor import CPTensor, khatri_rao

TRUST_IN_INPUTS = 1e-5  # ridge on S, relative to its mean diagonal: directions that the data hardly show keep a price
TRUST_IN_OUTPUTS = 1e-2  # the same for G, which is estimated from far fewer numbers
NORM_CONTROL = 1e-2  # price on the squared lengths of the vectors, relative to the error: terms must not cancel
MOST_CANDIDATES = 1536  # terms of a start among which the elimination chooses; its Gram matrix has this size
MOST_WORK = 4e11  # multiplications with S that one fit may take; very large layers get fewer steps

Factors = list[Tensor]


@in_full_precision
def cp_calibrated(
    weight: Tensor,
    rank: int,
    inputs: Tensor,
    *,
    outputs: Tensor | None = None,
    groups: int = 1,
    output_modes: int = 1,
    init: CPTensor | None = None,
    steps: int = 16,
) -> CPTensor:
    """Return the canonical form of least error in a layer's outputs, tr(G (W - V) S (W - V)^T).

    Args:
        weight: of shape (O, I / groups, k, ...), or (O, I) for a linear layer, or any finer shape of these.
        rank: number of terms.
        inputs: S, the second moments of the inputs, of shape (D, D) or (groups, D, D) with D = I / groups * k * ...;
            it may be singular. With centred moments, errors that a bias can correct are not counted.
        outputs: G, of shape (O, O) or (groups, O / groups, O / groups); the identity by default.
        groups: of a convolution.
        output_modes: how many of the leading modes make up the outputs.
        init: terms to start from if they are better than the ones found here.
        steps: Gauss-Newton steps at most; 0 returns the start with the best output vectors.

    >>> weight, x = torch.randn(16, 8, 3, 3), torch.randn(500, 72) * torch.linspace(0, 1, 72)
    >>> fitted = cp_calibrated(weight, 20, x.T @ x / 500)
    >>> def error(cp):
    ...     return ((weight - cp.to_dense()).reshape(16, 72) @ x.T).norm()
    >>> from cpnorm import cp_als
    >>> bool(error(fitted) < error(cp_als(weight, 20)))
    True
    """
    check_type(weight, Tensor, "a tensor as weight")
    problem = Problem.of(weight, inputs, outputs, groups=groups, output_modes=output_modes)
    candidates = problem.candidates() if init is None or output_modes == 1 else None
    fitted = fit(problem, check_int("rank", rank), candidates, init, steps=steps)
    return fitted.to(weight.dtype)


@dataclass(frozen=True, eq=False)
class Problem:
    """One weight with its two metrics, scaled so that the error of a weight of zeros is 1."""

    weight: Tensor  # (g, o, D)
    inputs: Tensor  # S: (g, D, D), mean diagonal 1
    outputs: Tensor  # G: (g, o, o), mean diagonal 1
    shape: tuple[int, ...]
    output_modes: int
    scale: float  # weight times this is the one given
    total: float  # the error of a weight of zeros, in the units given

    @classmethod
    def of(
        cls, weight: Tensor, inputs: Tensor, outputs: Tensor | None = None, *, groups: int = 1, output_modes: int = 1
    ) -> Problem:
        """Check the shapes, and bring everything to size one."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        rows = math.prod(weight.shape[:output_modes]) // groups
        columns = math.prod(weight.shape[output_modes:])
        if tuple(inputs.shape[-2:]) != (columns, columns):
            expected = f"second moments of shape ({columns}, {columns})"
            raise ValueError(f"inputs: expected {expected} for a weight of {tuple(weight.shape)}, got {inputs.shape}")
        if outputs is not None and tuple(outputs.shape[-2:]) != (rows, rows):
            expected = f"a metric of shape ({rows}, {rows})"
            raise ValueError(f"outputs: expected {expected} for a weight of {tuple(weight.shape)}, got {outputs.shape}")
        matrix = weight.detach().reshape(groups, rows, columns).double()
        metric, input_size = _conditioned(inputs.to(matrix).expand(groups, -1, -1), TRUST_IN_INPUTS)
        eye = torch.eye(rows, dtype=torch.float64, device=weight.device)
        output_metric, output_size = _conditioned(
            (eye if outputs is None else outputs.to(matrix)).expand(groups, -1, -1), TRUST_IN_OUTPUTS
        )
        total = ((output_metric @ matrix @ metric) * matrix).sum().item()
        scale = math.sqrt(total) if total > 0 else 1.0
        return cls(
            (matrix / scale).to(dtype),
            metric.to(dtype),
            output_metric.to(dtype),
            tuple(weight.shape),
            output_modes,
            scale,
            total * input_size * output_size,
        )

    @property
    def groups(self) -> int:
        return len(self.weight)

    @property
    def is_matrix(self) -> bool:
        """Whether the optimum is a singular value decomposition."""
        return self.groups == 1 and self.output_modes == 1 and sum(size > 1 for size in self.shape[1:]) <= 1

    @cached_property
    def projected(self) -> Tensor:  # G W S: (g, o, D)
        return self.outputs @ self.weight @ self.inputs

    @cached_property
    def marginals(self) -> list[Tensor]:  # (d, d) for every mode
        """Return the metric of each mode by itself, averaged over the others."""
        sides = ((self.outputs, self.output_sizes), (self.inputs, self.shape[self.output_modes :]))
        found = []
        for metric, sizes in sides:
            mean = metric.mean(0).reshape(*sizes, *sizes)
            for mode, size in enumerate(sizes):
                rest = [m for m in range(len(sizes)) if m != mode]
                order = (mode, len(sizes) + mode, *rest, *(len(sizes) + m for m in rest))
                others = mean.numel() // size**2
                blocks = mean.permute(order).reshape(size, size, math.isqrt(others), math.isqrt(others))
                found.append(blocks.diagonal(dim1=2, dim2=3).mean(-1))
        return found

    @cached_property
    def spectra(self) -> list[tuple[Tensor, Tensor]]:
        """Return eigenvalues and eigenvectors of the marginals."""
        return [(values.clamp_min(0), vectors) for values, vectors in map(torch.linalg.eigh, self.marginals)]

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Return the modes of the outputs within one group."""
        return (self.weight.shape[1],) if self.output_modes == 1 else self.shape[: self.output_modes]

    def left(self, factors: Sequence[Tensor]) -> Tensor:  # -> (g, o, R)
        return khatri_rao(factors[: self.output_modes]).reshape(self.groups, -1, factors[0].shape[1])

    def right(self, factors: Sequence[Tensor]) -> Tensor:  # -> (D, R)
        return khatri_rao(factors[self.output_modes :])

    def error(self, factors: Sequence[Tensor]) -> float:
        """Return the error relative to that of a weight of zeros."""
        difference = self.weight - self.left(factors) @ self.right(factors).mT
        return ((self.outputs @ difference @ self.inputs) * difference).sum(dtype=torch.float64).item()

    def gram(self, factors: Sequence[Tensor]) -> Tensor:  # -> (R, R)
        """Return the inner products of the terms in this metric."""
        left, right = self.left(factors), self.right(factors)
        return sum(
            (a.mT @ g @ a) * (right.mT @ s @ right) for a, g, s in zip(left, self.outputs, self.inputs, strict=True)
        )

    def candidates(self) -> Candidates:
        """Return the terms of a start in the order in which they should go, from which every rank takes its last.

        The kernel modes are turned into the principal axes of the inputs, where natural images have nearly all their
        energy in few; in these axes each slice of the weight gives its whitened singular vectors.
        """
        sizes = self.shape[1:]
        longest = max(range(len(sizes)), key=lambda mode: sizes[mode])
        rest = [mode for mode in range(len(sizes)) if mode != longest]
        turned = self.weight.reshape(-1, *sizes)
        for mode in rest:
            turned = torch.tensordot(turned, self.spectra[1 + mode][1], dims=([1 + mode], [0])).movedim(-1, 1 + mode)
        slices = turned.permute(*(1 + m for m in rest), 0, 1 + longest).reshape(
            -1, self.groups, self.weight.shape[1], sizes[longest]
        )
        root, inverse = _roots(self.outputs)
        input_root, input_inverse = _roots(self.marginals[1 + longest])
        whitened = (root @ slices @ input_root).flatten(1, 2)  # (K, O, I)
        u, values, v = torch.linalg.svd(whitened, full_matrices=False)
        u = (inverse @ u.reshape(len(u), self.groups, -1, u.shape[-1])).flatten(1, 2)
        kept = values.flatten().argsort(descending=True, stable=True)[:MOST_CANDIDATES]
        factors = [torch.empty(0)] * len(self.shape)
        factors[0] = (u * values[:, None]).movedim(0, 1).flatten(1)[:, kept]
        factors[1 + longest] = (input_inverse @ v.mT).movedim(0, 1).flatten(1)[:, kept]
        position = kept // values.shape[1]
        for mode in reversed(rest):
            factors[1 + mode] = self.spectra[1 + mode][1][:, position % sizes[mode]]
            position = position // sizes[mode]
        lost = values.square().sum() - values.flatten()[kept].square().sum()
        return Candidates.of(self, factors, lost.item())


@dataclass(frozen=True, eq=False)
class Candidates:
    """Terms in the order in which they should go, and the relative error once so many of them have gone."""

    factors: Factors
    order: Tensor
    errors: Tensor  # after 0, 1, ..., n - 1 terms have gone
    exact: bool  # whether no fit can do better: the terms are singular vectors

    @classmethod
    def of(cls, problem: Problem, factors: Factors, lost: float = 0.0) -> Candidates:
        """Order these terms by elimination; ``lost`` is the error with all of them there."""
        order, errors = elimination_order(problem.gram(factors))
        return cls(factors, order, (errors + lost).clamp(0.0, 1.0), problem.is_matrix)

    def last(self, rank: int) -> Factors:
        """Return the terms that are left at this rank."""
        kept = self.order[max(0, len(self.order) - rank) :].sort().values
        return [factor[:, kept.to(factor.device)] for factor in self.factors]

    def expected_error(self, rank: int) -> float:
        """Return about the error that a fit reaches at this rank.

        On convolutions of trained networks the fit was found to bring an error e of the start down to about e^1.5.
        """
        start = self.errors[max(0, len(self.errors) - rank)].item()
        return start if self.exact else start**1.5


def fit(
    problem: Problem, rank: int, candidates: Candidates | None, init: CPTensor | None = None, *, steps: int = 16
) -> CPTensor:
    """Return the canonical form of this rank, from the better of the candidates and ``init``; see ``cp_calibrated``."""
    starts = []
    if candidates is not None:
        starts.append(_padded(problem, candidates.last(rank), rank))
    if init is not None:
        scaled = init.factors[0] * (init.sigma * init.lambdas / problem.scale)
        starts.append([scaled.to(problem.weight), *(factor.to(problem.weight) for factor in init.factors[1:])])
    starts = [_solve_outputs(problem, start) for start in starts]
    best = min(starts, key=problem.error)
    if steps and not (problem.is_matrix and candidates is not None):
        best = _gauss_newton(problem, best, steps)
    scale = best[0].new_tensor(problem.scale)
    return CPTensor(scale, scale.new_ones(rank), tuple(best)).normalize()


def _padded(problem: Problem, factors: Factors, rank: int) -> Factors:
    """Repeat terms with small random output vectors where there are fewer candidates than asked for."""
    missing = rank - factors[0].shape[1]
    if missing <= 0:
        return factors
    again = torch.arange(missing, device=factors[0].device) % factors[0].shape[1]
    return [torch.cat([f, f[:, again] * (0.0 if mode == 0 else 1.0)], 1) for mode, f in enumerate(factors)]


def regression_target(weight: Tensor, squares: Tensor, products: Tensor, trust: float = 1e-3) -> Tensor:
    # (g, o, D), (g, D, D), (g, o, D) -> (g, o, D)
    """Return the weight with which inputs x give the outputs y best: E[y x^T] E[x x^T]^-1, near ``weight`` in doubt.

    ``squares`` is E[x x^T] and ``products`` E[y x^T]. In directions in which x hardly varies the weight stays as it is.
    """
    size = squares.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(squares.dtype).tiny)
    eye = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    missing = products - weight.to(squares) @ squares
    change = torch.linalg.solve(squares + trust * size * eye, missing.mT).mT
    return (weight.to(squares) + change).to(weight.dtype)


# --- steps --------------------------------------------------------------------------------------------------------


def _solve_outputs(problem: Problem, factors: Factors) -> Factors:
    """Return the factors with the best output vectors for the other vectors, which is a linear regression."""
    if problem.output_modes > 1:
        return factors
    right = problem.right(factors)
    images = problem.inputs @ right  # (g, D, R)
    normal = (right.mT @ images).double()
    size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    solved = torch.linalg.solve(normal + 1e-6 * size * eye, (problem.weight @ images).double().mT).mT
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


class _Linearized:
    """The least-squares problem around some factors: its gradient, its curvature and an approximate inverse."""

    def __init__(self, problem: Problem, factors: Factors, ridge: float) -> None:
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
        self.spectra = self._spectra()

    def _by_mode(self, left: Tensor, right: Tensor) -> Factors:  # (g, o, R), (D, R)
        left = left.flatten(0, 1)
        return [_contract(left, self.outs, mode) for mode in range(len(self.outs))] + [
            _contract(right, self.ins, mode) for mode in range(len(self.ins))
        ]

    def _spectra(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
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
            values, vectors = torch.linalg.eigh(among)
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


def _gauss_newton(problem: Problem, factors: Factors, steps: int, inner: int = 15) -> Factors:
    """Take Levenberg-Marquardt steps on all vectors at once, until one gains next to nothing."""
    factors = _balanced(factors)
    rank, columns = factors[0].shape[1], problem.weight.shape[2]
    products = problem.groups * columns**2 * rank * (inner + 4)
    steps = max(1, min(steps, int(MOST_WORK / products)))
    error = problem.error(factors)
    ridge = NORM_CONTROL * error / rank
    penalised = error + ridge * _dot(factors, factors).item()
    damping, factor = None, 2.0
    for _ in range(steps):
        if not penalised > 0:
            break
        around = _Linearized(problem, factors, ridge)
        damping = 1e-3 * around.largest_curvature() if damping is None else damping
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
        gained, penalised, factors = 1 - there / penalised, there, _balanced(moved)
        penalised = problem.error(factors) + ridge * _dot(factors, factors).item()
        if gained < 3e-3:
            break
    return _solve_outputs_if_better(problem, factors)


def _solve_outputs_if_better(problem: Problem, factors: Factors) -> Factors:
    solved = _solve_outputs(problem, factors)
    return solved if problem.error(solved) < problem.error(factors) else factors


# --- matrices -----------------------------------------------------------------------------------------------------


def _conditioned(metric: Tensor, trust: float) -> tuple[Tensor, float]:  # (g, d, d) -> (g, d, d), its mean diagonal
    """Return a positive definite metric with mean diagonal 1, and by what it was divided."""
    size = metric.diagonal(dim1=-2, dim2=-1).mean().item()
    if not size > 0:
        eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
        return eye.expand_as(metric).clone(), 0.0
    symmetric = (metric + metric.mT) / (2 * size)
    symmetric.diagonal(dim1=-2, dim2=-1).add_(trust)
    return symmetric, size


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:  # (..., d, d) -> the same twice
    """Return the square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = values.clamp_min(1e-12 * values.amax())
    root = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
    inverse = (vectors * values.rsqrt()[..., None, :]) @ vectors.mT
    return root.to(metric.dtype), inverse.to(metric.dtype)
