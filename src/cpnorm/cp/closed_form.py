"""The best approximation of a matrix in the metrics of its layer's inputs and outputs, by singular vectors.

With S = L_S L_S^T and G = L_G L_G^T the error of V is ||L_G^T (W - V) L_S||^2, so that the best V of rank R is the
truncated singular value decomposition of L_G^T W L_S, taken back. Nothing has to be iterated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpnorm.cp.output_metric import Factors, Problem
from cpnorm.cp.spectra import eigh


def errors_by_rank(problem: Problem) -> Tensor:  # -> (min(o, D),)
    """Return the relative errors after 0, 1, ... terms are dropped, the smallest first; no vectors are computed."""
    squares = torch.linalg.eigvalsh(_Whitened.of(problem).gram()).clamp_min(0).cpu()  # of singular values, ascending
    gone = squares.cumsum(0)
    return torch.cat([gone.new_zeros(1), gone[:-1]]).clamp(0.0, 1.0)


def best_factors(problem: Problem, rank: int) -> Factors:
    """Return the factors of the best matrix of this rank, largest terms first; there are no more than min(o, D)."""
    whitened = _Whitened.of(problem)
    vectors = eigh(whitened.gram())[1].flip(-1)[:, :rank]
    others = whitened.tall @ vectors
    left, right = (others, vectors) if whitened.is_tall else (vectors, others)
    ones = left.new_ones(1, left.shape[1])
    modes = [torch.linalg.solve_triangular(whitened.output_root.mT, left, upper=True)]
    into = torch.linalg.solve_triangular(whitened.input_root.mT, right, upper=True)
    longest = max(range(1, len(problem.shape)), key=lambda mode: problem.shape[mode])
    modes += [into if mode == longest else ones for mode in range(1, len(problem.shape))]
    return [factor.to(problem.weight.dtype) for factor in modes]


@dataclass(frozen=True, eq=False)
class _Whitened:
    """L_G^T W L_S, with the roots."""

    matrix: Tensor  # (o, D)
    output_root: Tensor
    input_root: Tensor

    @classmethod
    def of(cls, problem: Problem) -> _Whitened:
        output_root, input_root = _root(problem.outputs[0]), _root(problem.inputs[0])
        dtype = problem.weight.dtype
        matrix = output_root.to(dtype).mT @ problem.weight[0] @ input_root.to(dtype)
        return cls(matrix.double(), output_root, input_root)

    @property
    def is_tall(self) -> bool:
        return self.matrix.shape[0] >= self.matrix.shape[1]

    @property
    def tall(self) -> Tensor:
        """Return the matrix with its smaller side in the columns."""
        return self.matrix if self.is_tall else self.matrix.mT

    def gram(self) -> Tensor:
        return self.tall.mT @ self.tall


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
