"""Choosing terms: orders inside a layer, prices between layers, budgets; against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm import CPTensor
from cpnorm.compress import budgets
from cpnorm.compress.budgets import Elimination


def test_rates_count_in_whole_numbers() -> None:
    assert budgets.terms_to_keep(270, 0.9) == 27
    for rank, percent in itertools.product(range(1, 300), range(100)):
        assert budgets.terms_to_keep(rank, percent / 100) == max(1, rank - rank * percent // 100)


def test_scores_go_from_the_smallest_and_ties_keep_the_first() -> None:
    lambdas = torch.tensor([3.0, -1.0, 2.0, 1.0, -2.0])
    order = budgets.by_score(lambdas.square())
    cp = CPTensor.from_terms(lambdas, [torch.rand(4, 5), torch.rand(3, 5)])
    for dropped in range(5):
        assert torch.equal(cp.lambdas[order.kept(dropped)], cp.largest(5 - dropped).lambdas)
    # While little is lost, the loss is what was lost; it grows beyond it as less is left.
    plain = torch.tensor([0.0, 1.0, 2.0, 6.0, 10.0], dtype=torch.float64)
    assert torch.allclose(order.loss[1], plain[1], rtol=0.05)
    assert (order.loss[1:] > plain[1:]).all()
    assert order.loss[4] == pytest.approx(-19 * math.log(9 / 19))


def test_gram_elimination_is_the_greedy_choice_and_knows_its_error() -> None:
    torch.manual_seed(1)
    factors = [torch.randn(4, 7, dtype=torch.float64) for _ in range(3)]
    cp = CPTensor.from_terms(torch.randn(7, dtype=torch.float64), factors)
    found = budgets.by_gram(cp.gram())
    whole = cp.to_dense()

    def error(dropped: list[int]) -> float:
        return cp.select(torch.tensor(dropped)).to_dense().square().sum().item() if dropped else 0.0

    for step in range(6):
        gone = found.order[:step].tolist()
        best = min(error([*gone, term]) for term in range(7) if term not in gone)
        assert error([*gone, int(found.order[step])]) == pytest.approx(best)
        share = error(gone) / whole.square().sum().item()
        assert budgets.energy_lost(cp.gram(), found.order)[step].item() == pytest.approx(share, abs=1e-12)


def test_gram_elimination_sees_that_cancelling_terms_do_nothing() -> None:
    vectors = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    cp = CPTensor.from_terms(torch.tensor([5.0, -5.0, 0.1]), [vectors, vectors])
    assert budgets.by_score(cp.lambdas.square()).kept(1).tolist() == [0, 1]
    # Greedy, it drops the small term first as well, and pays for it; its own error tells.
    assert budgets.energy_lost(cp.gram(), torch.tensor([0, 1, 2])).tolist() == pytest.approx([0, 2500, 0])


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(-5, 5)), min_size=2, max_size=12))
def test_hull_slopes_are_those_of_the_largest_convex_curve_below(steps: list[tuple[int, float]]) -> None:
    x = list(itertools.accumulate(width for width, _ in steps))
    y = [height for _, height in steps]
    slopes = budgets._hull_slopes(x, y)
    assert slopes == sorted(slopes)
    rises = [slope * (right - left) for slope, (left, right) in zip(slopes, itertools.pairwise(x), strict=True)]
    curve = list(itertools.accumulate(rises, initial=y[0]))
    assert all(low <= height + 1e-9 for low, height in zip(curve, y, strict=True))
    assert curve[-1] == pytest.approx(y[-1], abs=1e-9)
    for point in range(1, len(slopes)):
        if slopes[point] > slopes[point - 1] + 1e-9:  # a kink must touch
            assert curve[point] == pytest.approx(y[point], abs=1e-9)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Elimination], dict[str, list[int]], int]:
    eliminations, saved = {}, {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        rank = draw(st.integers(1, 5))
        scores = torch.tensor([draw(st.floats(0.01, 10)) for _ in range(rank)], dtype=torch.float64)
        eliminations[name] = budgets.by_score(scores)
        each = draw(st.integers(1, 9))
        saved[name] = [each * n for n in range(rank)]
    return eliminations, saved, draw(st.integers(0, sum(s[-1] for s in saved.values())))


@given(problems())
def test_spending_meets_the_budget_and_gives_back_what_it_can(problem) -> None:
    eliminations, saved, excess = problem
    sequence = budgets.cheapest_first({name: e.loss.tolist() for name, e in eliminations.items()}, saved)
    dropped = budgets.spend(sequence, saved, excess)
    total = sum(saved[name][n] for name, n in dropped.items())
    assert total >= excess
    for name, n in dropped.items():
        if n:
            assert total - (saved[name][n] - saved[name][n - 1]) < excess, "one more term would have fitted"


@given(problems())
def test_spending_is_optimal_where_all_terms_cost_the_same(problem) -> None:
    eliminations, saved, _ = problem
    saved = {name: [float(n) for n in range(len(values))] for name, values in saved.items()}
    sequence = budgets.cheapest_first({name: e.loss.tolist() for name, e in eliminations.items()}, saved)
    for excess in range(int(sum(s[-1] for s in saved.values())) + 1):
        got = budgets.spend(sequence, saved, excess)

        def loss(dropped: dict[str, int]) -> float:
            return sum(eliminations[name].loss[n].item() for name, n in dropped.items())

        choices = itertools.product(*(range(len(values)) for values in saved.values()))
        fitting = [dict(zip(saved, choice, strict=True)) for choice in choices if sum(choice) >= excess]
        assert loss(got) == pytest.approx(min(map(loss, fitting)))


def test_terms_in_the_way_of_a_saving_go_together() -> None:
    # Layer a saves nothing until two of its terms have gone; layer b saves at every step, at a higher price.
    eliminations = {name: Elimination(torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 3.0])) for name in "ab"}
    saved = {"a": [0.0, 0.0, 8.0, 8.0], "b": [0.0, 2.0, 4.0, 6.0]}
    sequence = budgets.cheapest_first({name: e.loss.tolist() for name, e in eliminations.items()}, saved)
    assert sequence[:2] == ["a", "a"]
    assert budgets.spend(sequence, saved, 8) == {"a": 2, "b": 0}
    assert budgets.spend(sequence, saved, 10) == {"a": 2, "b": 1}
    assert budgets.spend(sequence, saved, 0) == {"a": 0, "b": 0}


def test_bisection_finds_the_last_allowed_step() -> None:
    for steps, last in itertools.product(range(12), range(12)):
        asked: list[int] = []
        found = budgets.furthest(steps, lambda n, last=last, asked=asked: asked.append(n) or n <= last)
        assert found == min(steps, last)
        assert len(asked) <= 6


def test_steps_within_a_mean_loss() -> None:
    lost = {"a": [0.0, 0.1, 0.3], "b": [0.0, 0.2, 0.1]}
    assert budgets.steps_within(["a", "b", "b", "a"], lost, 0.0) == 0
    assert budgets.steps_within(["a", "b", "b", "a"], lost, 0.11) == 3  # 0.05, 0.15, 0.1, 0.2
    assert budgets.follow(["a", "b", "b", "a"], lost, 3) == {"a": 1, "b": 2}


def test_a_rate_may_be_a_tensor_or_come_from_a_subtraction() -> None:
    assert budgets.terms_to_keep(10, torch.tensor(0.5)) == 5
    assert budgets.terms_to_keep(10, 1 - 0.9) == 9
    assert budgets.terms_to_keep(270, 1 / 3) == 180


def test_rounding_gives_no_energy_back() -> None:
    gram = torch.tensor([[1.0, -1, 0], [-1, 1 - 1e-12, 0], [0, 0, 1e-6]], dtype=torch.float64)
    assert budgets.energy_lost(gram, torch.arange(3)).tolist() == [0.0, pytest.approx(1e6), 0.0]
