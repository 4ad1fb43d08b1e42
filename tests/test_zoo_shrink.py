"""Other people's networks through ``shrink``, as they are: within the budget, plain, and exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cpnorm
from zoo_models import ZOO, Inputs, outputs

QUICK = ["MobileNetV3-S", "ViT-Ti", "nn.TransformerEncoder", "BERT-mini"]
SLOW = [name for name in ZOO if name not in QUICK]


def sixteen(example: Inputs) -> Inputs:
    """Samples of the example's shape."""
    torch.manual_seed(3)
    if isinstance(example, dict):
        return {key: torch.randint(100, (16, *value.shape[1:])) for key, value in example.items()}
    return torch.randn(16, *example.shape[1:])


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_network_is_shrunk_as_it_is(name: str) -> None:
    entry = ZOO[name]
    if entry.needs != "torch":
        pytest.importorskip(entry.needs)
    check(entry.model(small=True), sixteen(entry.example(small=True)))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_a_network_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="needs timm, which needs torchvision", exc_type=ImportError)
    torch.manual_seed(0)
    check(timm.create_model(name, num_classes=10).eval(), torch.randn(4, 3, 224, 224))


def check(model: nn.Module, data: Any) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = cpnorm.shrink(model, data, parameters=0.8)
    report = small.report
    assert report.parameters_after <= 0.8 * report.parameters_before
    assert report.parameters_after == sum(p.numel() for p in small.model.parameters())
    assert report.layers
    assert all(each.reason for each in report.dense)
    assert not [m for m in small.model.modules() if type(m).__module__.startswith("cpnorm")]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    wanted, got = outputs(model, data), outputs(small.model, data)
    error = ((got - wanted).norm() / wanted.norm()).item()
    assert error == pytest.approx(report.output_error, rel=0.02, abs=1e-4)
    assert 0 < error < 0.7  # random weights have no spectrum to cut
    canonical = outputs(small.canonical, data)
    assert (got - canonical).norm() < 1e-3 * canonical.norm()
