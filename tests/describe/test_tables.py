"""The summary of a model: its numbers against direct counts, and its text."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm import CPTensor
from cpnorm.describe.tables import sparkline, table
from cpnorm.lab.training.models import alexnet


def test_the_numbers_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10), nn.LayerNorm(10))
    dense = sum(p.numel() for p in model.parameters())
    cpnorm.canonical_norm(model)
    exact = sum(p.numel() for p in model.parameters())
    cpnorm.truncate(model, rate=0.5)
    x = torch.randn(2, 3, 6, 6)
    found = cpnorm.summary(model, x)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.parameters_dense, found.parameters_exact) == (dense, exact)
    conv, linear = found.layers
    assert (conv.name, conv.kind, conv.shape, conv.rank, conv.exact_rank) == ("0", "Conv2d", (8, 3, 3, 3), 14, 27)
    assert conv.parameters == sum(p.numel() for p in model[0].canonical_parameters())
    assert (conv.parameters_dense, linear.parameters_dense) == (216, 1280)
    assert conv.lambdas == tuple(model[0].lambdas.abs().sort(descending=True).values.tolist())
    plan = model[0].plan(x.shape, training=False)
    assert conv.path == plan.path
    assert conv.flops == (plan.rebuild if plan.path == "rebuild" else plan.factors).flops
    assert linear.flops_dense == 2 * 2 * 1280
    assert conv.cancellation == pytest.approx(model[0].cp.cancellation(), rel=1e-4)
    assert json.loads(json.dumps(found.to_json()))["layers"][0]["rank"] == 14
    model[0].path = "rebuild"
    assert cpnorm.summary(model, x).layers[0].flops == plan.rebuild.flops


def test_the_text_contains_the_numbers() -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(20, 10)))
    text = str(cpnorm.summary(model))
    assert "10×20" in text
    assert "MFLOP" not in text
    assert "of the dense network's 210" in text
    assert "degenerate" not in text
    assert "MFLOP" in str(cpnorm.summary(model, torch.randn(1, 20)))
    assert "(this layer)" in str(cpnorm.summary(model[0]))


def test_degenerate_forms_are_flagged_in_words() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(4, 4))
    near = torch.tensor([[1.0, 1.0], [0.0, 0.1], [0.0, 0.0], [0.0, 0.0]])
    layer.replace_terms(CPTensor.from_terms(torch.tensor([5.0, -5.0]), [near, near]))
    found = cpnorm.summary(layer)
    assert found.layers[0].degenerate
    assert "degenerate: terms cancel" in str(found)


def test_the_papers_share() -> None:
    """At the paper's ranks, 75 % of the terms dropped leave a quarter of the canonical weights: a third of dense."""
    ranks = {"features.0": 36, "features.3": 571, "features.6": 1626, "features.8": 1948, "features.10": 1644}
    model = cpnorm.canonical_norm(alexnet(), ranks, "kaiming_normal")
    report = cpnorm.truncate(model, rate=0.75)
    assert report.parameters_before == pytest.approx(9.25e6, rel=0.01)
    assert report.parameters_after / report.parameters_before == pytest.approx(0.25, abs=0.005)
    assert report.parameters_after / report.parameters_dense == pytest.approx(0.33, abs=0.01)


def test_a_model_without_canonical_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="ReLU has no linear or convolutional layer to summarise"):
        cpnorm.summary(nn.ReLU())


def test_the_summary_of_a_plain_model_lists_possible_savings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 32))
    with torch.no_grad():
        model[3].weight.copy_(torch.randn(32, 4) @ torch.randn(4, 64))
    found = cpnorm.summary(model)
    conv, linear = found.layers
    assert (conv.parameters, conv.even_rank) == (1152, (1152 - 1) // 31)
    squares = cpnorm.cp_exact(model[0].weight.detach()).lambdas.square()
    assert conv.energy[0.5] == pytest.approx((squares[: 576 // 31].sum() / squares.sum()).item(), rel=1e-4)
    assert linear.energy[0.25] == pytest.approx(1.0)
    assert linear.energy[0.1] < 0.9
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert "3,200 of 3,248 parameters (98.5 %)" in str(found)
    assert not cpnorm.canonical_layers(model)


def test_shared_layers_are_listed_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = cpnorm.canonical_norm(nn.Sequential(first, second))
    found = cpnorm.summary(model, torch.randn(1, 4))
    assert len(found.layers) == 1
    assert found.layers[0].flops_dense == 2 * 32
    assert found.parameters_dense == 16 + 8


def test_calls_of_several_sizes_each_by_its_own_path() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(64, 64))
    few, many = torch.randn(1, 64), torch.randn(4000, 64)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[:1]).sum() + self.layer(x).sum()

    apart = [cpnorm.summary(layer, x).layers[0] for x in (few, many)]
    assert [row.path for row in apart] == ["factors", "rebuild"]
    together = cpnorm.summary(Twice(), many).layers[0]
    assert (together.path, together.flops) == ("both", apart[0].flops + apart[1].flops)


def test_sparklines() -> None:
    assert sparkline([1.0]) == "█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    line = sparkline([0.9**n for n in range(1000)])
    assert len(line) == 12
    assert line[0] == "█"
    assert line[-1] == "▁"


def test_tables_align_and_leave_out_empty_columns() -> None:
    text = table(["name", "n", "note"], [["a", "1,000", "–"], ["long", "2"]], left=(0,))
    assert text.splitlines() == ["name      n", "a     1,000", "long      2"]
