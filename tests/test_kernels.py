"""The GPU kernel does what torch's operations do."""

from __future__ import annotations

import pytest
import torch

import cpnorm

SHAPES = [(3, 1), (3, 1626), (16, 129), (17, 8), (192, 571), (1024, 5), (1025, 9), (4096, 1024), (5000, 3)]


@pytest.mark.gpu
def test_renormalize_as_torch_does() -> None:
    from cpnorm.kernels import Renormalizer

    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=generator).cuda() for shape in SHAPES]
    lambdas = [torch.ones(shape[1]).cuda() for shape in SHAPES]
    for factor in factors[1:]:
        factor[:, 1] = 0  # a dead column becomes an arbitrary unit vector, and its lambda 0
    expected = [f.clone() for f in factors], [s.clone() for s in lambdas]
    cpnorm.renormalize_terms(*expected)
    Renormalizer(factors, lambdas)()
    for made, wanted in zip((*factors, *lambdas), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(made, wanted, rtol=2e-6, atol=1e-7)
    for factor in factors:
        torch.testing.assert_close(factor.norm(dim=0), torch.ones(factor.shape[1]).cuda())


@pytest.mark.gpu
def test_only_contiguous_float32_on_a_gpu() -> None:
    from cpnorm.kernels import Renormalizer

    for wrong in (torch.ones(3, 2), torch.ones(3, 2).cuda().half(), torch.ones(2, 3).cuda().mT):
        with pytest.raises(ValueError, match="contiguous float32"):
            Renormalizer([wrong], [torch.ones(2).cuda()])
