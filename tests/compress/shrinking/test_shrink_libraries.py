"""Networks of libraries that cpnorm does not know go through ``shrink`` in a few lines, as they are built."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpnorm


def library(name: str) -> Any:
    """Import a library, or skip: where torchvision does not fit torch, what needs it fails in its own ways."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs {name}: {error}")


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(24, 3, size, size, generator=torch.Generator().manual_seed(1))


def check(small: cpnorm.Shrunk, network: nn.Module, share: float) -> None:
    """Within the budget, in plain layers, and close to the network, whose outputs a wrong result would miss."""
    assert small.report.parameters_after <= share * small.report.parameters_before
    assert not [m for m in small.model.modules() if type(m).__module__.startswith("cpnorm")]
    assert small.report.output_error < 0.35
    assert sum(p.numel() for p in network.parameters()) == small.report.parameters_before


def test_pytorchcv() -> None:
    resnet = library("pytorchcv.models.resnet")
    torch.manual_seed(0)
    network = resnet.ResNet([[16, 16], [32, 32]], 16, bottleneck=False, conv1_stride=True, num_classes=10).eval()
    network.features.final_pool = nn.AdaptiveAvgPool2d(1)
    small = cpnorm.shrink(network, images(), parameters=0.5)
    check(small, network, 0.5)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_timm(name: str) -> None:
    timm = library("timm")
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=10).eval()
    small = cpnorm.shrink(network, images(network.default_cfg["input_size"][-1])[:8], parameters=0.8)
    check(small, network, 0.8)


@pytest.mark.slow
def test_torchvision() -> None:
    models = library("torchvision.models")
    torch.manual_seed(0)
    network = models.resnet18(num_classes=10).eval()
    small = cpnorm.shrink(network, images(), parameters=0.5, samples=8)
    check(small, network, 0.5)


def test_transformers() -> None:
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    network = transformers.BertForSequenceClassification(config).eval()
    tokens = torch.randint(50, (24, 12), generator=torch.Generator().manual_seed(1))
    small = cpnorm.shrink(network, {"input_ids": tokens}, parameters=0.8)
    check(small, network, 0.8)


def test_onnx2torch(tmp_path: Path) -> None:
    converted = library("onnx2torch")
    for needed in ("onnx", "onnxscript"):
        library(needed)
    torch.manual_seed(0)
    source = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 5, 3)
    )
    cpnorm.export_onnx(source, images(8), tmp_path / "source.onnx")
    network = converted.convert(str(tmp_path / "source.onnx")).eval()
    small = cpnorm.shrink(network, images(8), parameters=0.5)
    check(small, network, 0.5)
