"""Eigenvectors and singular vectors of many small matrices, which GPUs find more slowly than the host does."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 256  # rows: below, the host is faster, the way there and back included


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (..., n, n) -> (..., n), (..., n, n)
    """Return ascending eigenvalues and the eigenvectors of symmetric matrices."""
    if matrix.is_cuda and matrix.shape[-1] <= SMALL:
        values, vectors = torch.linalg.eigh(matrix.cpu())
        return values.to(matrix.device), vectors.to(matrix.device)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (..., m, n) -> (..., m, r), (..., r), (..., n, r)
    """Return left singular vectors, descending singular values and right singular vectors.

    They come from the eigenvectors of the smaller Gram matrix, in double precision: values below 1e-8 of the largest
    are not accurate, and their vectors need not be orthogonal.
    """
    wide = matrix.double()
    is_tall = matrix.shape[-2] >= matrix.shape[-1]
    tall = wide if is_tall else wide.mT
    right = eigh(tall.mT @ tall)[1].flip(-1)
    left = tall @ right
    values = torch.linalg.vector_norm(left, dim=-2)
    is_known = values > 1e-12 * values.amax(-1, keepdim=True)
    unit = left / values.clamp_min(torch.finfo(torch.float64).tiny)[..., None, :]
    unit = torch.where(is_known[..., None, :], unit, unit[..., :1])  # any direction will do
    left, right = (unit, right) if is_tall else (right, unit)
    return left.to(matrix.dtype), values.to(matrix.dtype), right.to(matrix.dtype)
