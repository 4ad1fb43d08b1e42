"""CPTensor against einsum and TensorLy, and at the edges: zero, tiny and huge columns, half precision, wrong shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cpnorm
from cpnorm.cp.tensor import CPTensor, UnitTerms, aligned, dense_from_terms, khatri_rao, split_modes, unit_columns
from laws import close

SHAPES = [(5, 4), (6, 5, 3), (7, 4, 3, 2), (4, 3, 2, 3, 2), (3, 2, 2, 2, 2, 2), (1, 4, 1), (1, 1)]


def random_cp(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> CPTensor:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(d, rank, generator=generator, dtype=torch.float64).to(dtype) for d in (*shape, 1)]
    return CPTensor(torch.tensor(1.5, dtype=dtype), draw[-1][0], tuple(draw[:-1]))


def by_einsum(cp: CPTensor) -> Tensor:
    letters = "abcdef"[: len(cp.shape)]
    equation = ",".join(f"{x}r" for x in letters) + ",r->" + letters
    return cp.sigma * torch.einsum(equation, *cp.factors, cp.lambdas)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_to_dense_is_the_sum_of_outer_products(shape, rank):
    cp = random_cp(shape, rank)
    torch.testing.assert_close(cp.to_dense(), by_einsum(cp))
    assert (cp.shape, cp.rank) == (shape, rank)
    assert cp.numel() == 1 + rank * (1 + sum(shape))


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple), st.integers(1, 8), st.integers(0, 99))
def test_to_dense_agrees_with_tensorly(shape, rank, seed):
    tensorly = pytest.importorskip("tensorly")
    cp = random_cp(shape, rank, seed=seed)
    with tensorly.backend_context("pytorch", local_threadsafe=True):
        expected = tensorly.cp_to_tensor(cp.to_tensorly())
    torch.testing.assert_close(cp.to_dense(), expected)


def test_to_dense_has_gradients_to_every_part():
    cp = random_cp((4, 3, 2), 3)
    parts = [cp.sigma.requires_grad_(), cp.lambdas.requires_grad_(), *(f.requires_grad_() for f in cp.factors)]

    def dense(sigma: Tensor, lambdas: Tensor, *factors: Tensor) -> Tensor:
        return CPTensor(sigma, lambdas, factors).to_dense()

    assert torch.autograd.gradcheck(dense, parts)


def test_the_last_index_of_khatri_rao_runs_fastest():
    a, b, c = (torch.randn(d, 4) for d in (3, 2, 5))
    expected = torch.einsum("ar,br,cr->abcr", a, b, c).reshape(30, 4)
    torch.testing.assert_close(khatri_rao([a, b, c]), expected)
    assert khatri_rao([a]) is a


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((64, 32), ((0,), (1,))), ((192, 64, 3, 3), ((0,), (1, 2, 3))), ((64, 64, 3, 3), ((0, 2), (1, 3)))],
)
def test_split_modes_balances_the_two_products(shape, groups):
    assert split_modes(shape) == groups


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6).map(tuple))
def test_split_modes_uses_every_mode_once_and_neither_side_is_empty(shape):
    left, right = split_modes(shape)
    assert left
    assert right
    assert sorted(left + right) == list(range(len(shape)))


def test_alignment_pads_on_a_gpu_only():
    matrix = torch.ones(3, 5)
    assert aligned(matrix) is matrix


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_normalize_keeps_the_tensor_and_makes_columns_unit(scale):
    cp = random_cp((5, 4, 3), 4, torch.float32)
    cp = CPTensor(cp.sigma, cp.lambdas, (cp.factors[0] * scale, cp.factors[1] / scale, cp.factors[2]))
    unit = cp.normalize()
    for factor in unit.factors:
        torch.testing.assert_close(factor.norm(dim=0), torch.ones(4))
    torch.testing.assert_close(unit.to_dense(), by_einsum(cp.to(torch.float64)).float())
    torch.testing.assert_close(unit.sigma, cp.sigma)


def test_normalize_gives_a_zero_term_lambda_zero_and_unit_vectors():
    cp = random_cp((5, 4), 3)
    cp.factors[1][:, 1] = 0
    unit = cp.normalize()
    assert unit.lambdas[1] == 0
    assert torch.count_nonzero(unit.lambdas) == 2
    torch.testing.assert_close(unit.factors[1].norm(dim=0), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(unit.to_dense(), by_einsum(cp))


def test_normalize_keeps_the_sign_of_lambda():
    cp = CPTensor.from_terms(torch.tensor([-2.0, 3.0]), [torch.randn(4, 2), torch.randn(3, 2)])
    assert cp.normalize().lambdas.sign().tolist() == [-1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_part_stays_in_the_given_precision(dtype):
    cp = random_cp((5, 4, 3), 4, dtype)
    for same in (cp.normalize(), cp.select(torch.tensor([0, 2])), cp.largest(2), cp.to(dtype)):
        assert {t.dtype for t in (same.sigma, same.lambdas, *same.factors)} == {dtype}
    assert cp.to_dense().dtype == dtype
    exact = by_einsum(cp.to(torch.float64))
    close(cp.to_dense(), exact, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unit_columns_survive_zero_and_large_columns(dtype):
    factor = torch.randn(6, 4).to(dtype)
    factor[:, 1] = 0
    factor[:, 2] *= 300  # its square is beyond the largest half
    factor.requires_grad_()
    unit = unit_columns(factor)
    unit.float().square().sum().backward()
    expected = torch.tensor([1.0, 0.0, 1.0, 1.0])
    torch.testing.assert_close(unit.float().norm(dim=0), expected, rtol=0.01, atol=0)
    assert factor.grad is not None
    assert factor.grad.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_gram_holds_the_inner_products_of_the_terms(shape):
    cp = random_cp(shape, 4)
    terms = torch.stack([by_einsum(cp.select(torch.tensor([r]))).flatten() for r in range(4)])
    torch.testing.assert_close(cp.gram(), terms @ terms.mT)
    torch.testing.assert_close(cp.norm(), by_einsum(cp).norm())
    expected = (terms.square().sum() / by_einsum(cp).square().sum()).item()
    assert math.isclose(cp.cancellation(), expected, rel_tol=1e-6)


def test_cancellation_is_one_for_orthogonal_terms_and_large_for_opposite_ones():
    eye = torch.eye(4, dtype=torch.float64)
    assert math.isclose(CPTensor.from_terms(torch.tensor([3.0, 1.0]).double(), [eye[:, :2]] * 3).cancellation(), 1.0)
    almost = torch.stack([eye[0], eye[0] + 0.01 * eye[1]], 1)
    opposite = CPTensor.from_terms(torch.tensor([1.0, -1.0]).double(), [almost, almost])
    assert opposite.cancellation() > 1000


def test_fit_is_the_papers_measure():
    cp = random_cp((5, 4, 3), 3)
    dense = cp.to_dense()
    assert math.isclose(cp.fit(dense), 1.0, abs_tol=1e-12)
    noise = torch.randn_like(dense)
    expected = 1 - (noise.norm() / (dense + noise).norm()).item()
    assert math.isclose(cp.fit(dense + noise), expected, rel_tol=1e-9)
    assert cp.fit(torch.zeros_like(dense)) == 0
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(5, 4, 3\), got \(4, 5, 3\)"):
        cp.fit(dense.transpose(0, 1))


def test_a_zero_tensor_is_fitted_perfectly_only_by_zero():
    zero = CPTensor.from_terms(torch.zeros(2), [torch.ones(3, 2), torch.ones(4, 2)])
    assert zero.fit(torch.zeros(3, 4)) == 1
    assert CPTensor.from_terms(torch.ones(2), zero.factors).fit(torch.zeros(3, 4)) == 0


def test_channels_last_is_another_layout_of_the_same_weight():
    scales, factors = torch.randn(5), [torch.randn(size, 5) for size in (6, 4, 3, 2)]
    dense = dense_from_terms(scales, factors)
    other = dense_from_terms(scales, factors, channels_last=True)
    torch.testing.assert_close(other, dense)
    assert other.stride()[1] == 1
    assert dense.stride()[1] != 1


def test_select_takes_indices_and_masks_in_the_order_given():
    cp = random_cp((5, 4, 3), 4)
    by_index, by_mask = cp.select(torch.tensor([3, 1])), cp.select(torch.tensor([False, True, False, True]))
    assert by_index.lambdas.tolist() == cp.lambdas[[3, 1]].tolist()
    torch.testing.assert_close(by_index.to_dense(), by_mask.to_dense())
    rest = cp.select(torch.tensor([0, 2]))
    torch.testing.assert_close(by_index.to_dense() + rest.to_dense(), cp.to_dense())


def test_largest_goes_by_absolute_lambda_and_keeps_the_order():
    lambdas = torch.tensor([0.1, -5.0, 2.0, -3.0])
    cp = CPTensor.from_terms(lambdas, [torch.randn(5, 4), torch.randn(3, 4)])
    assert cp.largest(3).lambdas.tolist() == [-5.0, 2.0, -3.0]
    assert cp.largest(4).lambdas.tolist() == lambdas.tolist()
    torch.testing.assert_close(cp.largest(1).factors[0], cp.factors[0][:, [1]])


def test_a_round_trip_through_tensorly_changes_nothing():
    cp = random_cp((5, 4, 3), 4)
    back = CPTensor.from_tensorly(cp.to_tensorly())
    torch.testing.assert_close(back.to_dense(), cp.to_dense())
    assert back.sigma == 1
    without_weights = CPTensor.from_tensorly((None, list(cp.factors)))
    assert without_weights.lambdas.tolist() == [1.0] * 4


def test_to_moves_every_part():
    cp = random_cp((5, 4), 3).to("meta")
    assert {t.device.type for t in (cp.sigma, cp.lambdas, *cp.factors)} == {"meta"}


def test_dense_from_terms_scales_either_side():
    scales = torch.tensor([2.0, -1.0])
    for shape in [(7, 3), (3, 7)]:
        factors = [torch.randn(d, 2) for d in shape]
        torch.testing.assert_close(dense_from_terms(scales, factors), (factors[0] * scales) @ factors[1].mT)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((torch.tensor(1.0), torch.ones(2), (torch.ones(3, 2),)), "expected at least 2 factors, got 1"),
        ((torch.ones(1), torch.ones(2), (torch.ones(3, 2),) * 2), r"expected a scalar sigma .*got shapes \(\(1,\)"),
        ((torch.tensor(1.0), torch.ones(2, 1), (torch.ones(3, 2),) * 2), "vector of lambdas"),
        ((torch.tensor(1.0), torch.ones(2), (torch.ones(3, 2), torch.ones(3, 3))), r"factor 1 of shape \(d, 2\)"),
        ((torch.tensor(1.0), torch.ones(2), (torch.ones(3), torch.ones(3, 2))), r"factor 0 .* got \(3,\)"),
    ],
)
def test_inconsistent_parts_are_an_error(parts, message):
    with pytest.raises(ValueError, match=message):
        CPTensor(*parts)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [3, 8, 571])
def test_unaligned_ranks_give_the_same_weight_on_a_gpu(rank):
    cp = random_cp((16, 8, 3, 3), rank)
    torch.testing.assert_close(cp.to("cuda").to_dense().cpu(), by_einsum(cp))
    padded = aligned(cp.to("cuda").factors[0])
    assert padded.shape[1] % 8 == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_norm_and_fit_stay_in_range_at_any_scale(scale: float) -> None:
    dense = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    cp = cpnorm.cp_power(dense, 8)
    scaled = cpnorm.CPTensor(cp.sigma * scale, cp.lambdas, cp.factors)
    assert scaled.fit(dense * scale) == pytest.approx(cp.fit(dense), abs=1e-5)
    assert 0.1 < cp.fit(dense) < 0.95
    assert scaled.norm().item() == pytest.approx(cp.norm().item() * scale, rel=1e-5)


def test_the_norm_of_half_precision_is_not_infinite() -> None:
    dense = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).half()
    assert cpnorm.cp_exact(dense).norm().item() == pytest.approx(dense.float().norm().item(), rel=0.01)


def test_second_derivatives_of_unit_terms_are_those_of_the_division() -> None:
    torch.manual_seed(0)
    scales = torch.randn(3, dtype=torch.float64, requires_grad=True)
    units = [torch.nn.functional.normalize(torch.randn(n, 3, dtype=torch.float64), dim=0) for n in (4, 5)]
    factors = [unit.requires_grad_() for unit in units]
    probe = torch.randn(4, 5, dtype=torch.float64)

    def second(terms: Callable[..., Sequence[Tensor]]) -> tuple[Tensor, ...]:
        s, a, b = terms(scales, *factors)
        loss = (((a * s) @ b.mT).sin() * probe).sum()
        first = torch.autograd.grad(loss, [scales, *factors], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return (*first, *torch.autograd.grad(penalty, [scales, *factors]))

    expected = second(lambda s, *f: (s, *(x / x.norm(dim=0) for x in f)))
    for got, want in zip(second(UnitTerms.apply), expected, strict=True):
        close(got, want, 1e-10)
