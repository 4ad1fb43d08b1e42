"""Decompositions against singular values, TensorLy and planted terms, and on extreme weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpnorm.cp.decompose import cp_als, cp_exact, cp_power, estimate_rank, exact_rank
from cpnorm.cp.tensor import CPTensor

# Every layer of the paper's networks with the rank the paper gives it.
ALEXNET = [
    ((64, 3, 3, 3), 36),
    ((192, 64, 3, 3), 571),
    ((384, 192, 3, 3), 1626),
    ((256, 384, 3, 3), 1948),
    ((256, 256, 3, 3), 1644),
    ((1024, 4096), 1024),
    ((512, 1024), 512),
    ((10, 512), 10),
]
LENET = [((32, 1, 3, 3), 11), ((64, 32, 3, 3), 270), ((128, 9216), 128), ((10, 128), 10)]
OTHER_LAYERS = [((24, 12, 5), None), ((8, 6, 3, 3, 3), None), ((12, 1, 3, 3), None), ((16, 8, 1, 1), None)]

shapes = st.lists(st.integers(1, 6), min_size=2, max_size=6).map(tuple)
seeds = st.integers(0, 999)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


def planted(shape: tuple[int, ...], rank: int, seed: int = 0) -> Tensor:
    """Return a sum of random terms of similar size."""
    factors = [torch.randn(d, rank, generator=seeded(seed + i)) for i, d in enumerate(shape)]
    return CPTensor.from_terms(torch.linspace(1.5, 1, rank), factors).to_dense()


def relative_error(cp: CPTensor, weight: Tensor) -> float:
    return ((cp.to(torch.float64).to_dense() - weight.double()).norm() / weight.double().norm()).item()


def assert_unit_columns(cp: CPTensor, tolerance: float = 1e-5) -> None:
    assert cp.sigma == 1
    for factor in cp.factors:
        norms = factor.double().norm(dim=0)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=tolerance)


def assert_equal(one: CPTensor, other: CPTensor) -> None:
    for a, b in zip((one.lambdas, *one.factors), (other.lambdas, *other.factors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "rank"), [((192, 64, 3, 3), 576), ((10, 512), 10), ((32, 1, 3, 3), 9), ((1, 1), 1)])
def test_exact_rank_is_the_product_of_all_modes_but_the_largest(shape, rank):
    assert exact_rank(shape) == rank


class TestExact:
    @pytest.mark.parametrize(("shape", "rank"), ALEXNET + LENET + OTHER_LAYERS)
    def test_every_layer_of_the_paper_is_exact_in_single_precision(self, shape, rank):
        weight = draw(shape) / 50
        cp = cp_exact(weight, max(rank or 0, exact_rank(shape)))
        assert relative_error(cp, weight) < 1e-5
        assert_unit_columns(cp)
        assert math.isclose(cp.cancellation(), 1, rel_tol=1e-4)

    @given(shapes, seeds)
    def test_exact_for_any_shape(self, shape, seed):
        weight = draw(shape, seed, torch.float64)
        cp = cp_exact(weight)
        assert cp.shape == shape
        assert cp.rank == exact_rank(shape)
        assert relative_error(cp, weight) < 1e-12
        assert (cp.lambdas >= 0).all()
        assert (cp.lambdas.diff() <= 0).all()
        assert_unit_columns(cp, 1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_lambdas_of_a_matrix_are_its_singular_values(self, dtype):
        weight = draw((20, 30), dtype=dtype)
        torch.testing.assert_close(cp_exact(weight).lambdas, torch.linalg.svdvals(weight))

    def test_a_smaller_rank_keeps_the_largest_terms_and_is_best_for_a_matrix(self):
        weight = draw((12, 8, 3, 3), dtype=torch.float64)
        full, part = cp_exact(weight), cp_exact(weight, 30)
        torch.testing.assert_close(part.to_dense(), full.largest(30).to_dense())
        slices = weight.permute(2, 3, 0, 1).flatten(0, 1)
        tail = torch.linalg.svdvals(slices).flatten().sort(descending=True).values[30:]
        assert math.isclose(relative_error(part, weight), (tail.norm() / weight.norm()).item(), rel_tol=1e-9)

    def test_terms_beyond_the_exact_rank_are_zero_with_random_unit_vectors(self):
        weight = draw((6, 2, 3))
        cp = cp_exact(weight, 9, generator=seeded(1))
        assert cp.rank == 9
        assert cp.lambdas[6:].tolist() == [0, 0, 0]
        assert (cp.lambdas[:6] > 0).all()
        assert_unit_columns(cp)
        assert relative_error(cp, weight) < 1e-6
        assert not torch.equal(cp.factors[0][:, 6], cp.factors[0][:, 7])
        assert_equal(cp, cp_exact(weight, 9, generator=seeded(1)))
        assert not torch.equal(cp.factors[0], cp_exact(weight, 9, generator=seeded(2)).factors[0])

    def test_a_matrix_of_low_rank_has_as_many_lambdas(self):
        weight = draw((40, 5)) @ draw((5, 30), 1)
        lambdas = cp_exact(weight).lambdas
        assert (lambdas[5:] < 1e-5 * lambdas[0]).all()
        assert lambdas[4] > 0.1 * lambdas[0]

    def test_no_intermediate_is_much_larger_than_the_weight(self):
        weight = draw((3, 100_000))  # a Gram matrix of the long side would take 40 GB
        assert relative_error(cp_exact(weight), weight) < 1e-5


class TestPower:
    @given(st.lists(st.integers(1, 5), min_size=2, max_size=5).map(tuple), st.integers(1, 6), seeds)
    def test_each_term_takes_its_square_off_the_residual(self, shape, rank, seed):
        weight = draw(shape, seed, torch.float64)
        cp = cp_power(weight, rank, restarts=3, iterations=3, generator=seeded(seed))
        assert cp.rank == rank
        assert (cp.lambdas >= 0).all()
        assert_unit_columns(cp, 1e-9)
        left_over = (weight - cp.to_dense()).square().sum()
        expected = weight.square().sum() - cp.lambdas.square().sum()
        torch.testing.assert_close(left_over, expected, rtol=1e-6, atol=1e-6 * weight.square().sum().item())

    def test_orthogonal_terms_are_found_largest_first(self):
        lambdas = torch.tensor([9.0, 7.0, 4.0, 2.0, 1.0])
        factors = [torch.linalg.qr(draw((d, 5), d)).Q for d in (8, 7, 6)]
        cp = cp_power(CPTensor.from_terms(lambdas, factors).to_dense(), 5, iterations=30, generator=seeded())
        torch.testing.assert_close(cp.lambdas, lambdas, rtol=1e-4, atol=1e-4)
        for found, true in zip(cp.factors, factors, strict=True):
            torch.testing.assert_close((found * true).sum(0).abs(), torch.ones(5), rtol=1e-3, atol=0)

    def test_terms_beyond_the_end_are_zero(self):
        weight = planted((6, 5, 4), 1)
        cp = cp_power(weight, 4, generator=seeded())
        assert relative_error(cp, weight) < 1e-5
        assert (cp.lambdas[1:] < 1e-5 * cp.lambdas[0]).all()
        assert_unit_columns(cp)

    def test_sparse_weights_leave_no_candidate_dead(self):
        weight = torch.zeros(6, 6, 6)
        weight[range(6), range(6), range(6)] = torch.arange(6, 0, -1).float()
        cp = cp_power(weight, 6, generator=seeded())
        assert relative_error(cp, weight) < 1e-4

    def test_fits_like_tensorly(self):
        tensorly = pytest.importorskip("tensorly")
        weight = draw((16, 12, 3, 3))
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            peer = tensorly.decomposition.CPPower(30, n_repeat=10, n_iteration=10).fit_transform(weight)
            peer_dense = tensorly.cp_to_tensor(peer)
        peer_fit = 1 - ((peer_dense - weight).norm() / weight.norm()).item()
        assert cp_power(weight, 30, generator=seeded()).fit(weight) > peer_fit - 0.01

    @pytest.mark.parametrize("shape", [(12, 9), (12, 9, 1, 1)])
    def test_for_a_matrix_it_is_the_singular_value_decomposition(self, shape):
        weight = draw(shape)
        assert_equal(cp_power(weight, 5), cp_exact(weight, 5))

    def test_progress_counts_the_terms(self):
        seen: list[tuple[int, int]] = []
        cp_power(draw((4, 3, 2)), 3, progress=lambda done, total: seen.append((done, total)))
        assert seen == [(1, 3), (2, 3), (3, 3)]

    @pytest.mark.parametrize("setting", [{"restarts": 0}, {"iterations": 0}])
    def test_settings_below_one_are_an_error(self, setting):
        with pytest.raises(ValueError, match=r"expected (restarts|iterations) >= 1, got"):
            cp_power(draw((4, 3, 2)), 3, **setting)


class TestAls:
    @pytest.mark.parametrize("init", ["random", "power", "exact"])
    def test_planted_terms_are_found_from_every_start(self, init):
        weight = planted((14, 12, 3, 3), 6)
        cp = cp_als(weight, 6, init=init, generator=seeded())
        assert cp.fit(weight) > 0.99
        assert (cp.lambdas >= 0).all()
        assert (cp.lambdas.diff() <= 0).all()
        assert_unit_columns(cp)

    def test_norm_control_keeps_terms_from_cancelling_where_the_plain_method_does_not(self):
        weight = draw((32, 16, 3, 3))
        controlled = cp_als(weight, 140, generator=seeded())
        plain = cp_als(weight, 140, ridge=0, generator=seeded())
        assert controlled.fit(weight) > 0.99
        assert plain.fit(weight) > 0.99
        assert controlled.cancellation() < 10
        assert plain.cancellation() > 10

    @pytest.mark.slow
    @pytest.mark.parametrize(("shape", "rank"), [ALEXNET[1], LENET[1]])
    def test_norm_control_at_the_ranks_of_the_paper(self, shape, rank):
        weight = draw(shape)
        cp = cp_als(weight, rank, generator=seeded())
        assert cp.fit(weight) > 0.99
        assert cp.cancellation() < 10

    def test_fits_no_worse_than_tensorly_after_as_many_sweeps(self):
        tensorly = pytest.importorskip("tensorly")
        weight = draw((16, 12, 3, 3), dtype=torch.float64)
        start = cp_als(weight, 70, sweeps=1, generator=seeded())
        ours = cp_als(weight, 70, init=start, sweeps=20, tolerance=0, ridge=0)
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            peer = tensorly.decomposition.parafac(weight, 70, n_iter_max=20, init=start.to_tensorly(), tol=0)
            peer_dense = tensorly.cp_to_tensor(peer)
        peer_fit = 1 - ((peer_dense - weight).norm() / weight.norm()).item()
        assert abs(ours.fit(weight) - peer_fit) < 0.02
        assert cp_als(weight, 70, init=start, sweeps=20, tolerance=0).fit(weight) > peer_fit - 0.01

    @given(st.lists(st.integers(1, 5), min_size=2, max_size=5).map(tuple), st.integers(1, 12), seeds, st.booleans())
    def test_never_nan_and_never_worse_than_nothing(self, shape, rank, seed, plain):
        weight = draw(shape, seed)
        cp = cp_als(weight, rank, sweeps=10, ridge=0 if plain else 0.1, generator=seeded(seed))
        assert all(part.isfinite().all() for part in (cp.lambdas, *cp.factors))
        assert cp.fit(weight) > 0
        assert_unit_columns(cp)

    @pytest.mark.parametrize("ridge", [0, 0.1])
    def test_equal_terms_make_a_singular_system_that_is_solved(self, ridge):
        weight = planted((6, 5, 4), 2)
        start = CPTensor.from_terms(torch.ones(3), [torch.ones(d, 3) for d in weight.shape])
        cp = cp_als(weight, 3, init=start, ridge=ridge)
        assert all(part.isfinite().all() for part in (cp.lambdas, *cp.factors))
        assert cp.fit(weight) > 0.1

    def test_a_start_is_never_made_worse(self):
        weight = draw((8, 6, 3))
        exact = cp_exact(weight)
        assert cp_als(weight, exact.rank, init=exact).fit(weight) > 0.99999
        assert cp_als(weight, exact.rank + 4, init="exact").fit(weight) > 0.99999
        greedy = cp_power(weight, 8, generator=seeded())
        assert cp_als(weight, 8, init=greedy).fit(weight) > greedy.fit(weight)

    def test_a_start_that_is_exact_is_left_alone(self):
        unit = cp_exact(torch.randn(5, 4, 3, generator=seeded()), 1)
        factors = [factor.repeat(1, 2) for factor in unit.factors]  # the same term twice, which could be split anyhow
        start = CPTensor.from_terms(torch.tensor([6.0, 3.0]), factors)
        torch.testing.assert_close(cp_als(start.to_dense(), 2, init=start).lambdas, torch.tensor([6.0, 3.0]))

    def test_a_start_may_have_another_scale_or_precision(self):
        weight = planted((8, 7, 3), 4) * 1e4
        start = cp_power(weight, 4, generator=seeded())
        start = CPTensor(start.sigma * 2, start.lambdas / 2, tuple(f * 3 for f in start.factors)).to(torch.float64)
        cp = cp_als(weight, 4, init=start)
        assert cp.lambdas.dtype == torch.float32
        assert cp.fit(weight) > 0.99

    def test_more_sweeps_fit_better_and_the_tolerance_stops_them(self):
        weight = draw((12, 8, 3, 3))
        fits = [cp_als(weight, 40, sweeps=n, tolerance=0, generator=seeded()).fit(weight) for n in (1, 5, 25)]
        assert fits[0] < fits[1] < fits[2]
        loose = cp_als(weight, 40, sweeps=25, tolerance=0.5, generator=seeded()).fit(weight)
        assert loose < fits[1]

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"sweeps": 0}, "expected sweeps >= 1"),
            ({"ridge": -1}, "ridge >= 0"),
            ({"tolerance": -1}, "tolerance >= 0"),
            (
                {"init": CPTensor.from_terms(torch.full((3,), math.nan), [torch.ones(d, 3) for d in (4, 3, 2)])},
                "finite",
            ),
            ({"init": "svd"}, "expected init to be 'random', 'power', 'exact' or a CPTensor, got 'svd'"),
            (
                {"init": cp_exact(torch.ones(4, 3, 2), 2)},
                r"init: expected rank 3 .* got rank 2 and shape \(4, 3, 2\)",
            ),
        ],
    )
    def test_wrong_settings_are_an_error(self, setting, message):
        with pytest.raises(ValueError, match=message):
            cp_als(draw((4, 3, 2)), 3, **setting)


class TestEstimateRank:
    @pytest.mark.parametrize(("shape", "rank"), [((16, 12, 3, 3), 9), ((20, 10, 5), 7), ((8, 7, 6, 5), 4), ((9, 8), 3)])
    def test_planted_ranks_are_found(self, shape, rank):
        estimate = estimate_rank(planted(shape, rank), fit=0.995, generator=seeded())
        assert rank - 1 <= estimate.rank <= rank + 1

    @given(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple), seeds)
    def test_never_above_the_exact_rank_and_the_curve_rises_to_it(self, shape, seed):
        rank, curve = estimate_rank(draw(shape, seed), sweeps=5, generator=seeded(seed))
        bound = exact_rank(shape)
        assert 1 <= rank <= bound
        assert curve[-1][0] == bound
        assert math.isclose(curve[-1][1], 1, abs_tol=1e-5)
        assert dict(curve)[rank] >= 0.99
        for (rank_before, fit_before), (rank_after, fit_after) in itertools.pairwise(curve):
            assert rank_before < rank_after
            assert fit_before <= fit_after

    def test_the_curve_covers_the_range(self):
        rank, curve = estimate_rank(draw((16, 8, 3, 3)), generator=seeded())
        assert 40 < rank < 72
        gaps = [b - a for (a, _), (b, _) in itertools.pairwise(curve) if b <= rank]
        assert max(gaps) <= 5  # sixteenths of 72
        assert cp_als(draw((16, 8, 3, 3)), rank, sweeps=300, generator=seeded()).fit(draw((16, 8, 3, 3))) > 0.97

    def test_powers_of_two_come_first_then_sixteenths_then_the_rest_is_halved(self):
        rank, curve = estimate_rank(draw((9, 8, 3, 3)), fit=1.0, sweeps=1, generator=seeded())
        tried = [r for r, _ in curve]
        assert tried[:18] == [1, 2, 4, 5, 9, 14, 18, 23, 27, 32, 36, 41, 45, 50, 54, 59, 63, 68]
        assert 68 < rank <= 72  # one sweep leaves an error until the last sixteenth
        assert tried[-1] == 72

    def test_a_higher_fit_needs_a_higher_rank(self):
        weight = draw((12, 6, 3, 3))
        ranks = [estimate_rank(weight, fit, generator=seeded()).rank for fit in (0.3, 0.6, 0.9)]
        assert ranks[0] < ranks[1] < ranks[2]

    def test_a_matrix_has_its_numerical_rank_and_the_curve_of_its_singular_values(self):
        weight = draw((40, 6)) @ draw((6, 30), 1)
        assert estimate_rank(weight, fit=1).rank == 6
        rank, curve = estimate_rank(weight, fit=0.9)
        values = torch.linalg.svdvals(weight.double())
        expected = [1 - (values[r:].norm() / values.norm()).item() for r in range(1, 31)]
        torch.testing.assert_close([f for _, f in curve], expected, rtol=0, atol=1e-6)
        assert rank == 1 + sum(f < 0.9 for f in expected)
        assert [r for r, _ in curve] == list(range(1, 31))

    def test_progress_ends_at_its_total(self):
        seen: list[tuple[int, int]] = []
        estimate_rank(draw((8, 6, 3, 3)), sweeps=3, progress=lambda done, total: seen.append((done, total)))
        done = [d for d, _ in seen]
        assert done == sorted(done)
        assert done[:5] == [1, 2, 3, 4, 5]
        assert done[-1] == seen[-1][1]

    @pytest.mark.parametrize("setting", [{"fit": 0}, {"fit": 1.5}, {"sweeps": 0}])
    def test_wrong_settings_are_an_error(self, setting):
        with pytest.raises(ValueError, match=r"expected (0 < fit <= 1|sweeps >= 1), got"):
            estimate_rank(draw((4, 3, 2)), **setting)


DECOMPOSITIONS = {
    "exact": cp_exact,
    "power": lambda weight, rank, **kw: cp_power(weight, rank, restarts=4, iterations=8, **kw),
    "als": cp_als,
}


@pytest.mark.parametrize("decompose", DECOMPOSITIONS.values(), ids=DECOMPOSITIONS.keys())
class TestAll:
    def test_the_same_seed_gives_the_same_factors(self, decompose):
        weight = draw((6, 5, 3))
        assert_equal(decompose(weight, 20, generator=seeded(3)), decompose(weight, 20, generator=seeded(3)))
        other = decompose(weight, 20, generator=seeded(4))
        assert not torch.equal(other.factors[0], decompose(weight, 20, generator=seeded(3)).factors[0])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_computes_in_single_precision_at_least_and_answers_in_the_given_one(self, decompose, dtype):
        weight = planted((8, 6, 3), 2).to(dtype)
        cp = decompose(weight, 18, generator=seeded())
        assert {t.dtype for t in (cp.sigma, cp.lambdas, *cp.factors)} == {dtype}
        assert relative_error(cp, weight) < {torch.float16: 0.01, torch.bfloat16: 0.05}.get(dtype, 0.003)
        assert_unit_columns(cp, 0.01)

    def test_autocast_changes_nothing(self, decompose):
        weight = draw((8, 6, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = decompose(weight, 10, generator=seeded())
        assert_equal(inside, decompose(weight, 10, generator=seeded()))

    @pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e20, 1e35])
    def test_the_scale_of_the_weight_does_not_matter(self, decompose, scale):
        weight = planted((8, 6, 3), 2)
        weight = weight / weight.norm()
        cp = decompose(weight * scale, 4, generator=seeded())
        plain = decompose(weight, 4, generator=seeded())
        torch.testing.assert_close(cp.lambdas / scale, plain.lambdas, rtol=1e-3, atol=1e-4)
        assert abs(relative_error(cp, weight * scale) - relative_error(plain, weight)) < 1e-3

    def test_a_weight_of_zeros_has_zero_lambdas_and_unit_vectors(self, decompose):
        cp = decompose(torch.zeros(4, 3, 2, 2), 5, generator=seeded())
        assert cp.lambdas.tolist() == [0.0] * 5
        assert cp.shape == (4, 3, 2, 2)
        assert_unit_columns(cp)

    def test_strided_and_differentiable_weights_are_read_and_left_alone(self, decompose):
        weight = draw((3, 5, 4))
        view = weight.permute(2, 0, 1).requires_grad_()
        before = view.detach().clone()
        cp = decompose(view, 9, generator=seeded())
        assert torch.equal(view, before)
        assert not cp.factors[0].requires_grad
        torch.testing.assert_close(
            cp.to_dense(), decompose(before, 9, generator=seeded()).to_dense(), rtol=1e-4, atol=1e-4
        )

    @pytest.mark.parametrize(
        ("weight", "message"),
        [
            (torch.ones(3), r"weight: expected 2 modes or more, got shape \(3,\)"),
            (torch.tensor(1.0), r"2 modes or more, got shape \(\)"),
            (torch.ones(3, 2, dtype=torch.int64), r"floating-point numbers, got torch.int64 of shape \(3, 2\)"),
            (torch.ones(3, 2, dtype=torch.complex64), "floating-point numbers, got torch.complex64"),
            (torch.ones(3, 0, 2), r"at least one entry, got shape \(3, 0, 2\)"),
            (torch.tensor([[1.0, math.nan], [0, 1]]), r"finite values, got NaN or infinity .* \(2, 2\)"),
            (torch.tensor([[1.0, -math.inf], [0, 1]]), "finite values"),
        ],
    )
    def test_weights_that_cannot_be_decomposed_are_an_error(self, decompose, weight, message):
        with pytest.raises(ValueError, match=message):
            decompose(weight, 2)
        with pytest.raises(ValueError, match=message):
            estimate_rank(weight)

    @pytest.mark.parametrize("rank", [0, -3, 2.5])
    def test_invalid_ranks_are_an_error(self, decompose, rank):
        with pytest.raises(ValueError, match=rf"expected rank >= 1, got {rank} for a weight of shape \(4, 3, 2\)"):
            decompose(draw((4, 3, 2)), rank)

    @pytest.mark.gpu
    def test_a_generator_on_the_cpu_gives_a_gpu_the_same_answer(self, decompose):
        weight = planted((16, 12, 3, 3), 3)
        here, there = decompose(weight, 12, generator=seeded()), decompose(weight.cuda(), 12, generator=seeded())
        assert there.factors[0].is_cuda
        torch.testing.assert_close(there.to_dense().cpu(), here.to_dense(), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_the_replayed_graph_finds_what_single_steps_find():
    weight = draw((32, 16, 3, 3)).cuda()
    cp = cp_power(weight, 60, generator=seeded())
    by_steps = cp_power(weight.cpu(), 60, generator=seeded())
    assert abs(cp.fit(weight) - by_steps.fit(weight.cpu())) < 0.01
    assert relative_error(cp.select(torch.arange(7, device="cuda")), weight) > relative_error(cp, weight)
    left_over = (weight - cp.to_dense()).square().sum()
    torch.testing.assert_close(left_over, weight.square().sum() - cp.lambdas.square().sum(), rtol=1e-3, atol=0)


def structured(name: str) -> Tensor:
    """Weights of a rank far below the exact rank, written by hand."""
    line = torch.tensor([0.25, 0.75, 0.75, 0.25])
    kernel = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    return {
        "constant": torch.full((16, 8, 3, 3), 0.01),
        "box": torch.full((8, 1, 3, 3), 1 / 9),
        "bilinear": torch.outer(line, line).expand(8, 1, 4, 4),
        "inflated": kernel.expand(8, 6, 3, 3) / 6,
    }[name]


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["constant", "box", "bilinear", "inflated"])
def test_power_gives_a_weight_of_low_rank_few_terms(name: str, dtype: torch.dtype, times: int) -> None:
    weight = structured(name).to(dtype)
    rank = times * exact_rank(weight.shape)
    for seed in range(4):
        cp = cp_power(weight, rank, generator=torch.Generator().manual_seed(seed))
        assert cp.fit(weight) > 0.99999
        assert cp.lambdas.abs().max() < 3 * weight.norm()
