"""Gradual truncation during training, and the penalty on the lambdas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cpnorm
from cpnorm.compress.gradual import GradualTruncation
from cpnorm.nn.training import lambda_penalty


def network() -> nn.Sequential:
    return cpnorm.canonical_norm(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), lambdas="normal")


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ranks(model: nn.Module) -> list[int]:
    return [layer.rank for layer in cpnorm.canonical_layers(model).values()]


def test_every_step_keeps_the_same_share_and_the_last_meets_the_budget() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    gradual = GradualTruncation(model, optimizer, steps=4, params=400)
    start, sizes = weights(model), []
    while not gradual.done:
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()  # raises if the state did not come along
        report = gradual.step()
        assert report.parameters_after == weights(model)
        sizes.append(report.parameters_after)
    assert sizes[-1] <= 400
    for step, size in enumerate(sizes, start=1):
        assert size == pytest.approx(start * (400 / start) ** (step / 4), rel=0.15)
    assert gradual.step() is None
    assert weights(model) == sizes[-1]


@pytest.mark.parametrize("budget", [{"rate": 0.75}, {"ranks": {"0": 8, "2": 2}}, {"ranks": 8}], ids=str)
def test_a_gradual_way_ends_where_the_direct_one_does(budget: dict) -> None:
    model, direct = network(), network()
    cpnorm.truncate(direct, **budget)
    gradual = GradualTruncation(model, None, steps=3, **budget)
    first = gradual.step()
    assert first.layers[0].rank_after > 8
    gradual.step()
    gradual.step()
    assert ranks(model) == ranks(direct)


def test_flops_and_options_are_passed_to_truncate() -> None:
    model, x = network(), torch.randn(16, 32)
    data = iter([(x, torch.randint(8, (16,)))])  # an iterator is read once, and used at every step
    options = {"criterion": "gram", "refit": "outputs", "data": data, "example_input": x[:1], "skip": "2"}
    gradual = GradualTruncation(model, None, steps=2, flops=2500, **options)
    gradual.step()
    assert gradual.step().flops_after <= 2500
    assert ranks(model)[1] == 8


def test_a_budget_out_of_reach_is_an_error_at_once() -> None:
    model = network()
    before = ranks(model)
    with pytest.raises(ValueError, match="expected params >= "):
        GradualTruncation(model, None, steps=3, params=10)
    with pytest.raises(ValueError, match="expected exactly one budget"):
        GradualTruncation(model, None, steps=3)
    with pytest.raises(TypeError, match=r"has no dry_run: use truncate\(\.\.\., dry_run=True\)"):
        GradualTruncation(model, None, steps=2, rate=0.5, dry_run=True)
    with pytest.raises(ValueError, match="expected steps >= 1, got 0"):
        GradualTruncation(model, None, steps=0, rate=0.5)
    assert ranks(model) == before


def test_a_resumed_run_takes_the_same_steps() -> None:
    model = network()
    through = GradualTruncation(copy.deepcopy(model), None, steps=3, params=500)
    stopped = GradualTruncation(model, None, steps=3, params=500)
    for _ in range(3):
        through.step()
    stopped.step()
    resumed = GradualTruncation(model, None, steps=3, params=500)
    resumed.load_state_dict(stopped.state_dict())
    resumed.step()
    resumed.step()
    assert resumed.done
    assert ranks(model) == ranks(through.model)
    with pytest.raises(ValueError, match="expected the layers"):
        GradualTruncation(network(), None, steps=3, rate=0.5).load_state_dict(stopped.state_dict())


def test_the_penalty_measures_evenness_at_any_scale() -> None:
    model = network()
    with torch.no_grad():
        for layer in cpnorm.canonical_layers(model).values():
            layer.lambdas.fill_(-3.0)
    assert lambda_penalty(model).item() == pytest.approx(1.0)
    with torch.no_grad():
        model[0].lambdas[1:] = 0
    low = lambda_penalty(model).item()
    shares = [layer.rank * sum(layer.modes) for layer in cpnorm.canonical_layers(model).values()]
    assert low == pytest.approx((shares[0] * 32**-0.5 + shares[1]) / sum(shares))
    with torch.no_grad():
        model[0].lambdas.mul_(100)
        model[0].sigma.div_(7)
    assert lambda_penalty(model).item() == pytest.approx(low)
    with torch.no_grad():
        model[0].lambdas.zero_()
    lambda_penalty(model).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with pytest.raises(ValueError, match="Linear has no canonical layer"):
        lambda_penalty(nn.Linear(2, 2))


def test_the_penalty_makes_truncation_cheaper() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 32, generator=generator), torch.randint(8, (256,), generator=generator)
    kept = {}
    for pressure in (0.0, 5.0):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + pressure * lambda_penalty(model)).backward()
            optimizer.step()
        kept[pressure] = cpnorm.truncate(model, rate=0.5, dry_run=True).energy
    assert kept[5.0] > kept[0.0] + 0.02


def test_a_share_of_the_energy_is_reached_in_steps() -> None:
    torch.manual_seed(0)
    model = cpnorm.canonical_norm(nn.Linear(32, 32))
    at_once = cpnorm.truncate(copy.deepcopy(model), energy=0.8).layers[0].rank_after
    gradual = GradualTruncation(model, None, steps=2, energy=0.8)
    ranks = [report.layers[0].rank_after for _ in range(2) if (report := gradual.step())]
    assert 32 > ranks[0] > ranks[1] == at_once


@pytest.mark.parametrize(("scale", "dtype"), [(1e-25, torch.float32), (1e25, torch.float32), (50, torch.float16)])
def test_the_penalty_stays_in_range_at_any_scale(scale: float, dtype: torch.dtype) -> None:
    layer = cpnorm.canonical_norm(nn.Linear(64, 64), rank=60, init="kaiming_normal", lambdas="normal")
    expected = lambda_penalty(layer).item()
    layer.to(dtype).lambdas.data *= scale
    penalty = lambda_penalty(layer)
    assert penalty.item() == pytest.approx(expected, rel=2e-3)
    penalty.backward()
    assert layer.lambdas.grad is not None
    assert layer.lambdas.grad.isfinite().all()
