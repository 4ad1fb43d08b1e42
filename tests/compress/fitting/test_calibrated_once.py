"""Measurements of a network are made once for several budgets, and layers decomposed together are measured as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.nn.siblings import stack_siblings


class Attention(nn.Module):
    """Three linear layers with one input, apart or as one layer."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.before = nn.Linear(12, 16)
        if fused:
            self.qkv: Any = nn.Linear(16, 36)
        else:
            self.q, self.k, self.v = (nn.Linear(16, size) for size in (16, 8, 12))
        self.after = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(x))
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).split((16, 8, 12), -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return self.after(torch.tanh(v) * (q[..., :8] * k).sum(-1, keepdim=True).sigmoid())


class Wrapped(nn.Module):
    """Stacking needs layers inside a module."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.inside = Attention(fused)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def inputs() -> Tensor:
    return torch.randn(64, 12, generator=torch.Generator().manual_seed(1))


def stacked_and_fused() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    apart, fused = Wrapped(False), Wrapped(True)
    for name, layer in apart.inside.named_children():
        if name in ("before", "after"):
            fused.inside.get_submodule(name).load_state_dict(layer.state_dict())
    for key in ("weight", "bias"):
        parts = [getattr(apart.inside.get_submodule(name), key).detach() for name in "qkv"]
        getattr(fused.inside.qkv, key).data = torch.cat(parts)
    assert stack_siblings(apart, inputs(), ()) == {"inside.q.stacked": ("inside.q", "inside.k", "inside.v")}
    torch.testing.assert_close(apart(inputs()), fused(inputs()))
    return cpnorm.canonical_norm(apart), cpnorm.canonical_norm(fused)


def test_stacked_layers_are_measured_as_one_layer_with_all_outputs() -> None:
    stacked, fused = (cpnorm.calibrate(model, inputs()) for model in stacked_and_fused())
    one, other = stacked.layers["inside.q.stacked"], fused.layers["inside.qkv"]
    assert not one.repeated
    torch.testing.assert_close(one.problem.inputs, other.problem.inputs)
    torch.testing.assert_close(one.problem.outputs, other.problem.outputs)
    assert one.problem.outputs[0, :16, 16:24].abs().max() > 1e-3  # of queries with keys
    assert one.importance == pytest.approx(other.importance)


def test_stacked_layers_are_fitted_like_one_layer() -> None:
    stacked, fused = stacked_and_fused()
    for model in (stacked, fused):
        cpnorm.truncate(model, params=0.5, data=inputs())
    torch.testing.assert_close(stacked(inputs()), fused(inputs()), rtol=1e-3, atol=1e-4)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.Flatten(2)]
    return nn.Sequential(*layers).eval()


def images() -> Tensor:
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_truncating_measured_copies_gives_what_the_data_give() -> None:
    model = cpnorm.canonical_norm(network())
    measured = cpnorm.calibrate(model, images())
    for share in (0.6, 0.3):
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        cpnorm.truncate(one, params=share, data=measured)
        cpnorm.truncate(other, params=share, data=images())
        assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_another_model_is_refused() -> None:
    model = cpnorm.canonical_norm(network())
    measured = cpnorm.calibrate(model, images())
    cpnorm.truncate(model, params=0.6, data=measured)
    with pytest.raises(ValueError, match="calibrated on another model, of which 3 differs"):
        cpnorm.truncate(model, params=0.5, data=measured)


def test_a_shrinker_makes_what_shrink_makes_and_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpnorm.compress.shrinking.job as module

    calls = []
    monkeypatch.setattr(
        module, "calibrate", lambda *args, **options: calls.append(args) or cpnorm.calibrate(*args, **options)
    )
    shrinker = cpnorm.Shrinker(network(), images())
    several = [shrinker.shrink(parameters=share) for share in (0.6, 0.4)]
    assert len(calls) == 1
    for share, small in zip((0.6, 0.4), several, strict=True):
        alone = cpnorm.shrink(network(), images(), parameters=share)
        torch.testing.assert_close(small.model(images()), alone.model(images()), rtol=1e-4, atol=1e-5)
        assert small.report.parameters_after == alone.report.parameters_after


def test_nothing_runs_after_the_last_layer_is_fitted() -> None:
    class Head(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Head.calls += 1
            return x

    model = cpnorm.canonical_norm(nn.Sequential(network(), Head()))
    measured = cpnorm.calibrate(model, images())
    Head.calls = 0
    cpnorm.truncate(model, params=0.5, data=measured)
    assert Head.calls == 1  # the run that finds out what follows each layer
