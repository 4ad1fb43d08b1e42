"""Inputs and gradients of layers from one pass over the data: what is shared, and what is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.compress.fitting import calibration
from cpnorm.compress.fitting.layer_inputs import input_moments, inputs_and_sensitivity
from cpnorm.compress.fitting.moments import PRODUCT_ROWS, output_sensitivity, symmetric_product
from cpnorm.nn.siblings import stack_siblings


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return made


class OnOther(Gated):
    """The second layer gets another tensor of the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.gate(x).sigmoid() * self.up(2 * x))
        return made


class ChangedInPlace(Gated):
    """The second layer gets the same tensor with other values."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        made = self.gate(x)
        with torch.no_grad():
            x.mul_(2)
        result: Tensor = self.down(made.sigmoid() * self.up(x))
        return result


def batches() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, 16) for size in (40, 30, 20)]


def canonical(model: nn.Module) -> nn.Module:
    return cpnorm.canonical_norm(nn.Sequential(model, copy.deepcopy(model)).eval())


@pytest.mark.parametrize("kind", [Gated, OnOther, ChangedInPlace])
@torch.no_grad()
def test_layers_with_a_common_input_have_their_own_sums(kind: type[Gated]) -> None:
    model, data = canonical(kind()), batches()
    found = input_moments(model, cpnorm.canonical_layers(model), data)
    x = torch.cat(data).double()
    factor = 1 if kind is Gated else 2
    for name, scale in (("0.gate", 1), ("0.up", factor)):
        squares, _ = found.moments[name].second(centered=False)
        torch.testing.assert_close(squares[0], scale**2 * x.T @ x / len(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 1000])
def test_one_pass_measures_what_two_do(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpnorm.compress.fitting.moments.SENSITIVITY_INPUTS", limit)
    model, data = canonical(Gated()), batches()
    layers = cpnorm.canonical_layers(model)
    inputs, metrics = inputs_and_sensitivity(model, layers, data)
    apart, expected = input_moments(model, layers, data), output_sensitivity(model, layers, data)
    assert metrics is not None
    assert expected is not None
    assert inputs.bytes == apart.bytes
    for name in layers:
        torch.testing.assert_close(metrics[name], expected[name])
        for one, other in zip(inputs.moments[name].second(True), apart.moments[name].second(True), strict=True):
            torch.testing.assert_close(one, other)


def test_outputs_without_a_gradient_are_measured_once() -> None:
    class Chooses(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    model, data = canonical(Chooses())[0], batches()
    inputs, metrics = inputs_and_sensitivity(model, cpnorm.canonical_layers(model), data)
    assert metrics is None
    assert inputs.moments["gate"].count == 90


def test_the_whole_of_stacked_layers_runs_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Gated(), Gated()).eval()
    stack_siblings(model, torch.randn(2, 16))
    cpnorm.canonical_norm(model)
    whole = model[0].gate.stacked
    calls, forward = [], type(whole).forward

    def counted(self: nn.Module, x: Tensor) -> Tensor:
        calls.append(self)
        made: Tensor = forward(self, x)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(type(whole), "forward", counted)
        found = cpnorm.calibrate(model, batches())
    assert calls.count(whole) == 3  # batches; there are two parts
    assert "forward" not in whole.__dict__
    monkeypatch.setattr(calibration, "_remembering", lambda forward: forward)
    expected = cpnorm.calibrate(model, batches())
    assert found.layers.keys() == expected.layers.keys()
    for name, each in found.layers.items():
        other = expected.layers[name]
        assert each.importance == pytest.approx(other.importance, rel=1e-4)
        torch.testing.assert_close(each.sensitivity, other.sensitivity, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(each.errors, other.errors)


@pytest.mark.parametrize("columns", [PRODUCT_ROWS, 2 * PRODUCT_ROWS, 2 * PRODUCT_ROWS + 17])
def test_a_symmetric_product_in_blocks(columns: int) -> None:
    x = torch.randn(2, 30, columns, dtype=torch.float64)
    torch.testing.assert_close(symmetric_product(x), x.mT @ x)
