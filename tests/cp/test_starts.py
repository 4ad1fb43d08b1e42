"""Alternating least squares on tensors of many modes, where one random start is often not enough: against TensorLy."""

from __future__ import annotations

import warnings

import pytest
import torch

import cpnorm


@pytest.mark.parametrize(
    ("shape", "rank", "noise"),
    [((4, 5, 6, 3, 4), 5, 0.0), ((5, 5, 5, 5, 5), 8, 0.0), ((8, 6, 5, 4), 6, 0.1), ((8, 6, 5, 4), 6, 0.0)],
)
def test_the_fit_is_no_worse_than_parafac_s(shape: tuple[int, ...], rank: int, noise: float) -> None:
    tensorly = pytest.importorskip("tensorly")
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        made = cpnorm.CPTensor.from_terms(
            torch.ones(rank), [torch.randn(size, rank, generator=generator) for size in shape]
        ).to_dense()
        dense = made + noise * made.std() * torch.randn(shape, generator=generator)
        found = cpnorm.cp_als(dense, rank, generator=torch.Generator().manual_seed(seed)).fit(dense)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = cpnorm.CPTensor.from_tensorly(parafac(dense, rank, random_state=seed)).fit(dense)
        assert found > theirs - 1e-3
        if not noise:
            assert found > 0.999


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e-19, 1e-10, 1e10, 1.8e19, 1e25, 1e38])
def test_the_length_of_vectors_does_not_matter(scale: float) -> None:
    torch.manual_seed(0)
    layer = cpnorm.canonical_norm(torch.nn.Conv2d(4, 6, 3), rank=5, init="kaiming_normal")
    expected, x = layer.weight.detach().clone(), torch.randn(2, 4, 5, 5)
    y = layer(x).detach()
    with torch.no_grad():
        layer.factors[1].mul_(scale)
    assert torch.allclose(layer.weight, expected, rtol=1e-5, atol=1e-7)
    assert torch.allclose(layer(x), y, rtol=1e-4, atol=1e-6)
    layer(x).square().sum().backward()
    assert layer.factors[1].grad is not None
    if scale > 1e-30:  # below, the gradient itself leaves the range
        assert layer.factors[1].grad.isfinite().all()
    cpnorm.renormalize(layer)
    assert torch.allclose(layer.factors[1].norm(dim=0), torch.ones(5))
    assert torch.allclose(layer.weight, expected, rtol=1e-5, atol=1e-7)
