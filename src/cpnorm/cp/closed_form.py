"""The best approximation of a matrix in the metrics of its layer's inputs and outputs, by singular vectors.

With S = L_S L_S^T and G = L_G L_G^T the error of V is ||L_G^T (W - V) L_S||^2, so that the best V of rank R is the
truncated singular value decomposition of M = L_G^T W L_S, taken back. Nothing has to be iterated. If W has at least as
many rows as columns, M^T M = L_S^T (W^T G W) L_S has the right singular vectors v as eigenvectors, and
V = sum (W L_S v) (L_S^-T v)^T needs no root of G; otherwise rows and columns change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpnorm.cp.output_metric import Factors, Problem
from cpnorm.cp.spectra import eigh

WORK_IN_DOUBLE = 2**28  # multiplications with the larger metric; more of them are in the weight's precision


def errors_by_rank(problem: Problem) -> Tensor:  # -> (min(o, D),)
    """Return the relative errors after 0, 1, ... terms are dropped, the smallest first; no vectors are computed."""
    squares = torch.linalg.eigvalsh(_gram(problem)[0]).clamp_min(0).cpu()  # of singular values, ascending
    gone = squares.cumsum(0)
    return torch.cat([gone.new_zeros(1), gone[:-1]]).clamp(0.0, 1.0)


def best_factors(problem: Problem, rank: int) -> Factors:
    """Return the factors of the best matrix of this rank, largest terms first; there are no more than min(o, D)."""
    gram, root = _gram(problem)
    vectors = eigh(gram)[1].flip(-1)[:, :rank]
    smaller = torch.linalg.solve_triangular(root.mT, vectors, upper=True)
    larger = _tall(problem).double() @ (root @ vectors)
    left, right = (larger, smaller) if _is_tall(problem) else (smaller, larger)
    longest = max(range(1, len(problem.shape)), key=lambda mode: problem.shape[mode])
    ones = right.new_ones(1, right.shape[1])
    factors = [left, *(right if mode == longest else ones for mode in range(1, len(problem.shape)))]
    return [factor.to(problem.weight.dtype) for factor in factors]


def _is_tall(problem: Problem) -> bool:
    return problem.weight.shape[1] >= problem.weight.shape[2]


def _tall(problem: Problem) -> Tensor:
    """Return the matrix with its smaller side in the columns."""
    return problem.weight[0] if _is_tall(problem) else problem.weight[0].mT


def _gram(problem: Problem) -> tuple[Tensor, Tensor]:  # -> (n, n), (n, n)
    """Return M^T M or M M^T, whichever is smaller, and the root of the metric of that side."""
    tall = _tall(problem)
    metrics = problem.outputs[0], problem.inputs[0]
    larger, smaller = metrics if _is_tall(problem) else metrics[::-1]
    exact = len(tall) * tall.numel() <= WORK_IN_DOUBLE
    image = larger.double() @ tall.double() if exact else larger @ tall
    root = _root(smaller)
    return root.mT @ (tall.mT.double() @ image.double()) @ root, root


def _root(metric: Tensor) -> Tensor:  # (d, d) -> (d, d), lower triangular
    """Return L of a positive definite matrix L L^T; of one that is not, up to rounding, that of the nearest."""
    wide = metric.double()
    root, failed = torch.linalg.cholesky_ex(wide)
    if not failed.any():
        return root
    values, vectors = eigh(wide)
    values = values.clamp_min(1e-12 * values.amax()).sqrt()
    triangle = torch.linalg.qr((vectors * values).mT)[1]  # R^T R = V diag(values)^2 V^T
    return triangle.mT
