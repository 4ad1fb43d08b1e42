"""Singular vectors from Gram matrices, against torch's own."""

from __future__ import annotations

import pytest
import torch

from cpnorm.cp.spectra import svd


@pytest.mark.parametrize("shape", [(3, 7, 5), (3, 5, 7), (6, 6), (1, 4)])
def test_singular_vectors_are_those_of_torch(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = svd(matrix)
    assert left.shape[-1] == right.shape[-1] == values.shape[-1] == min(shape[-2:])
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix))
    torch.testing.assert_close((left * values[..., None, :]) @ right.mT, matrix)
    eye = torch.eye(values.shape[-1]).expand(*values.shape, -1)
    torch.testing.assert_close(left.mT @ left, eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(right.mT @ right, eye, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8)])
def test_a_matrix_of_low_rank_is_restored_by_unit_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
    left, values, right = svd(matrix)
    torch.testing.assert_close((left * values) @ right.mT, matrix, rtol=1e-4, atol=1e-5)
    for vectors in (left, right):
        torch.testing.assert_close(vectors.norm(dim=0), torch.ones(5), rtol=1e-4, atol=0)
