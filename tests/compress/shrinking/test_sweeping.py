"""A sweep over budgets: its points against truncate itself, and which layers it calls sensitive."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import cpnorm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6))
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(48, 2) @ torch.randn(2, 48) / 10)  # half of it is more than enough
    return model.eval()


def test_points_are_what_truncate_gives(tmp_path: Path) -> None:
    model, x = network(), torch.randn(300, 24)
    labels = model(x).argmax(1)
    state = copy.deepcopy(model.state_dict())
    reported = []
    found = cpnorm.sweep(model, (x, labels), parameters=(0.3, 0.6), progress=lambda *what: reported.append(what))
    assert [point.budget for point in found.points] == [0.6, 0.3]
    assert found.metric == 1.0
    for point in found.points:
        copied = cpnorm.canonical_norm(copy.deepcopy(model))
        report = cpnorm.truncate(copied, params=point.budget, data=(x, labels))
        assert point.parameters == report.parameters_after <= point.budget * found.parameters
        error = ((copied(x) - model(x)).norm() / model(x).norm()).item()
        assert point.output_error == pytest.approx(error, rel=1e-3)
        assert point.metric == pytest.approx((copied(x).argmax(1) == labels).float().mean().item())
    assert found.points[0].output_error < found.points[1].output_error
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert reported[-1] == ("", 2, 2)
    assert found.layers[-1].name == "2"
    text = str(found)
    assert "accuracy" in text
    assert "output error expected when one layer alone" in text
    assert json.loads(json.dumps(found.to_json()))["points"][0]["budget"] == 0.6
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_without_targets_there_is_an_error_and_no_metric() -> None:
    found = cpnorm.sweep(network(), torch.randn(100, 24), parameters=[0.5], evaluation=torch.randn(50, 24))
    assert found.metric is None
    assert found.points[0].metric is None
    assert 0 < found.points[0].output_error < 1
    scored = cpnorm.sweep(
        network(), (torch.randn(100, 24), torch.randn(100, 6)), parameters=[0.5], metric=lambda y, t: -(y - t).norm()
    )
    assert scored.metric is not None
    with pytest.raises(ValueError, match="parameters: expected shares between 0 and 1"):
        cpnorm.sweep(network(), torch.randn(100, 24), parameters=[50])
