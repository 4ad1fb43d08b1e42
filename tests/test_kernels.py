"""The GPU kernels do what torch's operations do: on a GPU, or by triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import cpnorm
from cpnorm.tensor import UnitTerms, dense_from_terms, unit_columns

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu

SIZES = [(3, 1), (3, 1626), (16, 129), (17, 8), (192, 571), (1024, 5), (1025, 9), (4096, 1024), (5000, 3)]
# Outputs, inputs, kernel and rank of the layers that are rebuilt at once.
LAYERS = {
    "one": [(70, 40, (3, 3), 45)],
    "three channels": [(64, 3, (3, 3), 20)],
    "no square": [(20, 40, (2, 5), 130)],
    "unequal": [(64, 3, (3, 3), 20), (16, 24, (1, 7), 33), (24, 8, (11, 2), 1), (130, 70, (3, 3), 150)],
}
if not INTERPRETED:  # which would take minutes
    LAYERS["AlexNet-like"] = [
        (64, 3, (3, 3), 21),
        (192, 64, (3, 3), 571),
        (384, 192, (3, 3), 1626),
        (256, 384, (3, 3), 1948),
        (256, 256, (3, 3), 1644),
    ]


def test_renormalize_as_torch_does() -> None:
    from cpnorm.kernels import Renormalizer

    generator = torch.Generator().manual_seed(0)
    sizes = [(n, min(rank, 130)) for n, rank in SIZES] if INTERPRETED else SIZES
    factors = [torch.randn(size, generator=generator).to(DEVICE) for size in sizes]
    lambdas = [torch.ones(rank).to(DEVICE) for _, rank in sizes]
    for factor in factors[1:]:
        factor[:, 1] = 0  # a dead column becomes an arbitrary unit vector, and its lambda 0
    expected = [f.clone() for f in factors], [s.clone() for s in lambdas]
    cpnorm.renormalize_terms(*expected)
    Renormalizer(factors, lambdas)()
    for made, wanted in zip((*factors, *lambdas), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(made, wanted, rtol=2e-6, atol=1e-7)
    for factor in factors:
        assert (factor.double().norm(dim=0) - 1).abs().max() < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter reads CPU tensors")
def test_only_contiguous_float32_on_a_gpu() -> None:
    from cpnorm.kernels import Renormalizer

    for wrong in (torch.ones(3, 2), torch.ones(3, 2).cuda().half(), torch.ones(2, 3).cuda().mT):
        with pytest.raises(ValueError, match="contiguous float32"):
            Renormalizer([wrong], [torch.ones(2).cuda()])


def terms_of(outputs: int, inputs: int, kernel: tuple[int, int], rank: int) -> list[Tensor]:
    """Sigma, lambdas and factors as a layer has them, one lambda of them 0."""
    lambdas = torch.randn(rank)
    lambdas[1:2] = 0
    factors = [unit_columns(torch.randn(n, rank)) for n in (outputs, inputs, *kernel)]
    return [term.to(DEVICE).requires_grad_() for term in (torch.tensor(1.7), lambdas, *factors)]


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_rebuild_as_torch_does(layers: list[tuple[int, int, tuple[int, int], int]]) -> None:
    from cpnorm.kernels import RebuiltConv2d

    torch.manual_seed(0)
    terms = [terms_of(*layer) for layer in layers]
    exact = [[term.detach().double().requires_grad_() for term in of_layer] for of_layer in terms]
    wanted, gradients = [], []
    for sigma, lambdas, *factors in exact:
        scales, *units = UnitTerms.apply(sigma * lambdas, *factors)
        wanted.append(dense_from_terms(scales, units))
        gradients.append(torch.randn(wanted[-1].shape, device=DEVICE))
        wanted[-1].backward(gradients[-1].double())
    precisions = [("fp32", 2e-5)] if INTERPRETED else [("fp32", 2e-5), ("tf32", 5e-3), ("bf16", 3e-2)]
    for precision, tolerance in precisions:
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        weights = RebuiltConv2d.apply(dtype, *(term for of_layer in terms for term in of_layer))
        for weight, want in zip(weights, wanted, strict=True):
            assert weight.is_contiguous(memory_format=torch.channels_last)
            assert (weight - want).norm() < tolerance * want.norm()
        torch.autograd.backward(weights, [gradient.to(dtype) for gradient in gradients])
        for of_layer, right in zip(terms, exact, strict=True):
            sigma, lambdas = right[:2]
            for place, (term, want) in enumerate(zip(of_layer, right, strict=True)):
                size = want.grad.norm()
                if place == 0 or len(want) == 1:  # what is left of many terms of both signs, or nothing at all
                    size = lambdas.grad.norm() * lambdas.norm() / (sigma if place == 0 else 1)
                assert (term.grad - want.grad).norm() < tolerance * size, (precision, place)
                term.grad = None
    torch.set_float32_matmul_precision("highest")
