"""Decompose a weight in the norm of its layer's inputs, which measures the error of the outputs.

A layer with the inputs (patches) x computes y = W x. With S = E[x x^T] and a metric G on the outputs, the error of an
approximation V is E[(Wx - Vx)^T G (Wx - Vx)] = tr(G (W - V) S (W - V)^T). For a matrix the optimum of a given rank is
the truncated SVD of G^1/2 W S^1/2; for more modes it is found by quasi-Newton steps on all vectors at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpnorm._checks import check_int, check_type
from cpnorm.cp.als import solve_with_ridge
from cpnorm.cp.closed_form import best_factors
from cpnorm.cp.decompose import in_full_precision
from cpnorm.cp.output_metric import Candidates, Factors, Problem
from cpnorm.cp.quasi_newton import quasi_newton, solve_outputs
from cpnorm.cp.tensor import CPTensor


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
    steps: int = 150,
) -> CPTensor:
    """Return the canonical form of least error in a layer's outputs, tr(G (W - V) S (W - V)^T).

    Args:
        weight: a tensor of shape (O, I / groups, k, ...), or (O, I) for a linear layer, or any finer shape of these.
        rank: the number of terms.
        inputs: S, the second moments of the inputs, of shape (D, D) or (groups, D, D) with D = I / groups * k * ...;
            it may be singular. With centred moments, errors that a bias can correct are not counted.
        outputs: G, of shape (O, O) or (groups, O / groups, O / groups); the identity by default.
        groups: the groups of a convolution.
        output_modes: how many of the leading modes make up the outputs.
        init: terms to start from, if they are better than those found here.
        steps: the largest number of quasi-Newton steps; 0 returns the start with the best output vectors.

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
    known = problem.is_matrix or not (init is None or output_modes == 1)
    candidates = None if known else problem.candidates()
    fitted = fit(problem, check_int("rank", rank), candidates, init, steps=steps)
    return fitted.to(weight.dtype)


def fit(
    problem: Problem, rank: int, candidates: Candidates | None, init: CPTensor | None = None, *, steps: int = 150
) -> CPTensor:
    """Return the canonical form of this rank, from the better of the candidates and ``init``; see ``cp_calibrated``.

    A matrix needs neither: its best approximation is computed directly.
    """
    if problem.is_matrix:
        return _scaled(problem, _padded(problem, best_factors(problem, rank), rank))
    starts = []
    if candidates is not None:
        starts.append(_padded(problem, candidates.last(rank), rank))
    if init is not None:
        scaled = init.factors[0] * (init.sigma * init.lambdas / problem.scale)
        starts.append([scaled.to(problem.weight), *(factor.to(problem.weight) for factor in init.factors[1:])])
    starts = [solve_outputs(problem, start) for start in starts]
    best = min(starts, key=problem.error)
    return _scaled(problem, quasi_newton(problem, best, steps) if steps else best)


def _scaled(problem: Problem, factors: Factors) -> CPTensor:
    scale = factors[0].new_tensor(problem.scale)
    return CPTensor(scale, scale.new_ones(factors[0].shape[1]), tuple(factors)).normalize()


def _padded(problem: Problem, factors: Factors, rank: int) -> Factors:
    """Repeat terms with zero output vectors if there are fewer candidates than the rank."""
    missing = rank - factors[0].shape[1]
    if missing <= 0:
        return factors
    again = torch.arange(missing, device=factors[0].device) % factors[0].shape[1]
    return [torch.cat([f, f[:, again] * (0.0 if mode == 0 else 1.0)], 1) for mode, f in enumerate(factors)]


def regression_target(weight: Tensor, squares: Tensor, products: Tensor, trust: float = 1e-3) -> Tensor:
    # (g, o, D), (g, D, D), (g, o, D) -> (g, o, D)
    """Return the weight of the linear regression of outputs y on inputs x, E[y x^T] E[x x^T]^-1.

    ``squares`` is E[x x^T] and ``products`` E[y x^T]. In directions in which x hardly varies, ``weight`` is kept.
    """
    missing = products - weight.to(squares) @ squares
    change = solve_with_ridge(squares, missing.mT, trust).mT
    return (weight.to(squares) + change).to(weight.dtype)
