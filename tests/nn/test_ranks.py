"""Ranks from a budget: met, used, bounded, and what canonical_norm takes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm import flatten_modes
from cpnorm.lab.training.models import alexnet, lenet
from cpnorm.nn.ranks import ranks_for_budget


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("params", [1_000_000, 210_000, 70_000])
@pytest.mark.parametrize("with_modes", [False, True])
def test_the_budget_is_met_within_one_percent(params: int, with_modes: bool) -> None:
    model = alexnet()
    modes = flatten_modes(model, torch.randn(1, 3, 32, 32)) if with_modes else None
    ranks = ranks_for_budget(model, params=params, modes=modes)
    cpnorm.canonical_norm(model, ranks, "kaiming_normal", modes=modes)
    assert 0.99 * params <= weights(model) <= params
    assert {name: layer.rank for name, layer in cpnorm.canonical_layers(model).items()} == ranks
    assert ranks["features.0"] <= 27
    assert ranks["classifier.6"] == 10  # small layers are cheap: they keep all they can use


def test_a_share_of_the_plain_model() -> None:
    model = alexnet()
    assert ranks_for_budget(model, params=0.1) == ranks_for_budget(model, params=weights(model) // 10)


def test_close_to_the_best_of_all_choices() -> None:
    """Greedy choices may miss the best by what one term is worth, since terms do not fill a budget exactly."""
    model = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    costs, exact, fixed = [19, 16, 14], [6, 6, 4], 6 + 9 + 4 + 3  # of a term; biases and sigmas

    def size(ranks) -> int:
        return fixed + sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))

    def bottleneck(ranks) -> float:
        return sum(1 / rank for rank in ranks)

    for params in range(fixed + sum(costs), 300, 7):
        got = list(ranks_for_budget(model, params=params).values())
        choices = [c for c in itertools.product(*(range(1, n + 1) for n in exact)) if size(c) <= params]
        assert size(got) <= params
        assert bottleneck(got) <= min(map(bottleneck, choices)) + 1 / min(got) - 1 / (min(got) + 1) + 1e-9


def test_a_large_budget_gives_exact_ranks() -> None:
    assert list(ranks_for_budget(lenet(), params=10**9).values()) == [9, 288, 128, 10]


def test_skipped_layers_count_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    ranks = ranks_for_budget(model, params=1500, skip="1")
    assert list(ranks) == ["0"]
    cpnorm.canonical_norm(model, ranks, "kaiming_normal", skip="1")
    assert 1500 - 61 < weights(model) <= 1500


def test_shared_weights_count_once() -> None:
    first, second = nn.Linear(30, 30), nn.Linear(30, 30)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    ranks = ranks_for_budget(model, params=600)
    assert ranks["0"] == ranks["1"]
    cut = cpnorm.canonical_norm(copy.deepcopy(model))
    cpnorm.truncate(cut, ranks=ranks)  # which takes them too, by either name
    cpnorm.canonical_norm(model, ranks, "kaiming_normal")
    assert 600 - 61 < weights(model) <= 600
    assert weights(cut) == weights(model)
    with pytest.raises(ValueError, match="ranks: 0 and 1 share a weight, but got 2 and 1"):
        cpnorm.truncate(cut, ranks={"0": 2, "1": 1})


def test_modes_are_those_of_canonical_norm() -> None:
    first, second = nn.Linear(64, 16), nn.Linear(64, 16)
    second.weight = first.weight
    model, finer = nn.ModuleList([first, second]), (16, 4, 4, 4)
    assert ranks_for_budget(model, params=1000, modes={"1": finer}) == ranks_for_budget(
        model, params=1000, modes={"0": finer}
    )
    with pytest.raises(ValueError, match="modes: no convertible layer named '2'"):
        ranks_for_budget(model, params=1000, modes={"2": finer})


def test_impossible_budgets_are_an_error() -> None:
    model = lenet()
    with pytest.raises(ValueError, match=r"expected params >= .*, which give every layer one term, got 100") as error:
        ranks_for_budget(model, params=100)
    least = int(str(error.value).split(">= ")[1].split(", which")[0].replace(",", ""))
    assert set(ranks_for_budget(model, params=least).values()) == {1}
    with pytest.raises(ValueError, match="canonical already"):
        ranks_for_budget(cpnorm.canonical_norm(nn.Linear(4, 4)), params=100)
