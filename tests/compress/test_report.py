"""The report of a truncation: its numbers against direct counts, and its text."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm import truncate


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_report_adds_up() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10), nn.Linear(10, 10))
    cpnorm.canonical_norm(model, skip="4")
    x = torch.randn(2, 3, 6, 6)
    before = weights(model)
    plain = cpnorm.fold(copy.deepcopy(model))
    report = truncate(model, rate=0.5, example_input=x)
    assert (report.parameters_before, report.parameters_after) == (before, weights(model))
    assert report.parameters_dense == weights(plain)
    assert sum(row.parameters_before - row.parameters_after for row in report.layers) == before - weights(model)
    for (name, layer), row in zip(cpnorm.canonical_layers(model).items(), report.layers, strict=True):
        assert (row.name, row.rank_after) == (name, layer.rank)
        assert row.parameters_dense == plain.get_submodule(name).weight.numel()
        assert row.flops_after <= row.flops_before <= row.flops_dense
    assert report.energy == pytest.approx(sum(row.energy for row in report.layers) / 2)
    values = json.loads(json.dumps(report.to_json()))
    assert values["layers"][1]["rank_after"] == model[3].rank
    text = str(report)
    assert "rate=0.5" in text.splitlines()[0]
    assert text.splitlines()[-1].startswith("in all")
    assert f"{report.parameters_after:,}" in text.splitlines()[-1]
    assert "MFLOP" in text
    assert "MFLOP" not in str(truncate(model, rate=0))


def test_results_larger_than_dense_and_few_samples_warn() -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    with pytest.warns(UserWarning, match=r"has [\d,]+ parameters, more than the 544 of the dense one: .* params=0\.5"):
        truncate(model, rate=0.1)
    with pytest.warns(UserWarning, match="data: 2 samples are too few for a good fit; give a few hundred"):
        truncate(model, params=0.5, data=torch.randn(2, 16))


def test_an_energy_below_zero_is_explained() -> None:
    report = truncate(cpnorm.canonical_norm(nn.Linear(16, 16)), rate=0.5)
    assert "energy below 0 %" not in str(report)
    (layer,) = report.layers
    far = dataclasses.replace(report, layers=type(report.layers)([dataclasses.replace(layer, energy=-0.2)]))
    assert "energy below 0 %: outputs were fitted to the data" in str(far)
