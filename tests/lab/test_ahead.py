"""Weights rebuilt ahead of the forward pass give the gradients that the forward pass's own rebuilding gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab import ahead as ahead_module
from cpnorm.lab.ahead import WeightsAhead, has_kernel, rebuilding_layers, rebuilt_weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, stride=2),
        nn.Flatten(),
        nn.Linear(6 * 17 * 17, 10),
    )
    cpnorm.canonical_norm(model, rank=7, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = "rebuild"
    return model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_gradients(device: str) -> None:
    model = network().to(device)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for layer in cpnorm.canonical_layers(model).values():
        cpnorm.renormalize(layer)
        layer.columns_are_unit = True  # as kernels want it
    layers = rebuilding_layers(model, images)
    assert layers == list(cpnorm.canonical_layers(model).values())
    assert [has_kernel(layer) for layer in layers] == [device == "cuda", False, False]

    expected = copy.deepcopy(model)
    expected(images).square().mean().backward()
    ahead = WeightsAhead(layers, "fp32", rebuilt_weight)
    ahead.rebuild()
    model(images).square().mean().backward()
    ahead.backward()

    assert all(layer.ahead is None for layer in layers)
    for name, gradient in gradients(expected).items():
        assert gradient is not None
        assert gradient.norm() > 0
        torch.testing.assert_close(gradients(model)[name], gradient, msg=name)


def test_only_layers_that_rebuild() -> None:
    model = network()
    last = model[4]
    last.path = "factors"
    found = rebuilding_layers(model, torch.zeros(1, 3, 8, 8))
    assert last not in found
    assert len(found) == 2


def test_release_gives_the_layers_their_weight_back() -> None:
    model = network()
    ahead = WeightsAhead(list(cpnorm.canonical_layers(model).values()), "fp32", rebuilt_weight)
    ahead.rebuild()
    ahead.release()
    model[0].sigma.data *= 2
    torch.testing.assert_close(model[0].weight, model[0].cp.to_dense())


def test_weights_and_layers_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where some layers are rebuilt together, whatever their order."""
    model = network()
    layers = list(cpnorm.canonical_layers(model).values())
    monkeypatch.setattr(ahead_module, "has_kernel", lambda layer: layer is not layers[0])
    monkeypatch.setattr(ahead_module, "kernel_rebuild", lambda some, _: tuple(layer.weight for layer in some))
    monkeypatch.setattr(ahead_module, "AT_ONCE", 1)
    ahead = WeightsAhead(layers, "fp32", rebuilt_weight)
    ahead.rebuild()
    assert all(torch.equal(layer.ahead, layer.cp.to_dense().reshape(layer.ahead.shape)) for layer in layers)
