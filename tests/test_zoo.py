"""Other people's networks, through everything: exact form, truncation, small layers, file, dense again, export."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import cpnorm
from laws import close
from zoo_models import ZOO, Entry, outputs


def entry(name: str) -> Entry:
    found = ZOO[name]
    pytest.importorskip(found.needs, reason=f"needs {found.needs}: pip install 'cpnorm[frameworks]'")
    return found


def weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_a_network_goes_all_the_way(name: str, tmp_path: Path) -> None:
    network = entry(name)
    plain, x = network.model(small=True), network.example(small=True)
    expected = outputs(plain, x)
    model = cpnorm.canonical_norm(copy.deepcopy(plain), skip=network.skip)
    close(outputs(model, x), expected, 1e-5)

    converted = sum(layer.parameters_dense for layer in cpnorm.summary(model).layers)
    budget = weights(plain) - converted // 2
    cpnorm.truncate(model, params=budget)
    assert weights(model) <= budget
    small = outputs(model, x)
    assert (small - expected).norm() > 1e-3 * expected.norm()  # so that what follows says something

    factorized = cpnorm.factorize(model, x, measure=False, goal="parameters")
    assert not cpnorm.canonical_layers(factorized)
    close(outputs(factorized, x), small, 1e-5)
    assert weights(factorized) <= weights(plain)
    cpnorm.save(model, tmp_path / "small.safetensors")
    again = cpnorm.load(tmp_path / "small.safetensors", network.model(small=True))
    assert weights(again) == weights(model)
    close(outputs(again, x), small, 1e-6)
    folded = cpnorm.fold(again)
    assert weights(folded) == weights(plain)
    close(outputs(folded, x), small, 1e-5)


@pytest.mark.parametrize("name", ["MobileNetV3-S", "3-D video", "BERT-mini"])
def test_torch_export(name: str) -> None:
    network = entry(name)
    model, x = cpnorm.canonical_norm(network.model(small=True), 4, skip=network.skip), network.example(small=True)
    small = cpnorm.factorize(model, x, measure=False, goal="parameters")
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    exported = torch.export.export(small, args, kwargs).module()
    close(outputs(exported, x), outputs(model, x), 1e-5)


@pytest.mark.parametrize("name", ["U-Net", "ViT-Ti"])
def test_onnx(name: str, tmp_path: Path) -> None:
    """The export compares the file with the model by itself."""
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'cpnorm[onnx]'")
    network = entry(name)
    model, x = cpnorm.canonical_norm(network.model(small=True), 4, skip=network.skip), network.example(small=True)
    small = cpnorm.factorize(model, x, measure=False, goal="parameters")
    cpnorm.export_onnx(small, x, tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size > 1000


def test_packed_projections_stay_dense() -> None:
    """nn.MultiheadAttention keeps query, key and value in one bare parameter, which no layer computes with."""
    attention = nn.MultiheadAttention(16, 2)
    cpnorm.canonical_norm(attention)
    assert list(cpnorm.canonical_layers(attention)) == ["out_proj"]
    x = torch.randn(3, 2, 16)
    attention(x, x, x)[0].square().sum().backward()
    assert attention.in_proj_weight.grad.abs().sum() > 0
    assert attention.out_proj.lambdas.grad.abs().sum() > 0  # although the weight is read, not the layer called
