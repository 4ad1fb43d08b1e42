"""With equal_angles a step of Adam turns vectors of all lengths by similar angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cpnorm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 36, 10))
    return cpnorm.canonical_norm(model, rank=8, init="kaiming_normal", generator=torch.Generator().manual_seed(0))


def angles_of_a_step(groups: Any, model: nn.Module, kind: type[torch.optim.Optimizer]) -> dict[int, float]:
    """Mean angle by the length of the vectors."""
    optimizer = kind(groups, lr=0.001)
    before = {f: f.detach().clone() for layer in cpnorm.canonical_layers(model).values() for f in layer.factors}
    model(torch.randn(4, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    cpnorm.renormalize(model)
    return {len(f): torch.acos((f.detach() * old).sum(0).clamp(max=1)).mean().item() for f, old in before.items()}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_vectors_of_all_lengths_turn_by_similar_angles(kind: type[torch.optim.Optimizer]) -> None:
    model = network().double()
    alike = angles_of_a_step(cpnorm.equal_angles(model, 0.001), model, kind)
    assert set(alike) == {3, 10, 32, 32 * 36}
    assert max(alike.values()) < 1.6 * min(alike.values())  # the radial part of a short vector's step is lost
    other = network().double()
    apart = angles_of_a_step(other.parameters(), other, kind)
    assert apart[32 * 36] > 10 * apart[3]


def test_every_parameter_is_in_one_group() -> None:
    model = network()
    groups = cpnorm.equal_angles(model, 0.01, entries=16)
    held = [p for group in groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    layer = model[0]
    assert isinstance(layer, cpnorm.CPConv2d)
    assert [rates[id(f)] for f in layer.factors] == pytest.approx([0.01 * (16 / n) ** 0.5 for n in (32, 3, 3, 3)])
    assert {rates[id(p)] for p in (layer.sigma, layer.lambdas, layer.bias, model[1].weight)} == {0.01}


def test_schedulers_and_truncation_work_with_the_groups() -> None:
    model = network()
    optimizer = torch.optim.Adam(cpnorm.equal_angles(model, 0.01))
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 2 for rate in rates])
    cpnorm.truncate(model, rate=0.5, optimizer=optimizer)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
