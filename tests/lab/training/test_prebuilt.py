"""Weights built before the forward pass give the gradients that the forward pass's own rebuilding gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.training.prebuilt import (
    PrebuiltWeights,
    front_and_back,
    rebuilt_weight,
    trained_layers,
    training_paths,
)

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
    paths = training_paths(model, images)
    assert paths == dict.fromkeys(cpnorm.canonical_layers(model).values(), "rebuild")

    expected = copy.deepcopy(model)
    expected(images).square().mean().backward()
    prebuilt = PrebuiltWeights(paths, "fp32", rebuilt_weight)
    prebuilt.hold()
    model(images).square().mean().backward()
    prebuilt.backward()
    prebuilt.release()

    assert all(layer.prebuilt is None for layer in paths)
    for name, gradient in gradients(expected).items():
        assert gradient is not None
        assert gradient.norm() > 0
        torch.testing.assert_close(gradients(model)[name], gradient, msg=name)


@pytest.mark.gpu
def test_which_layers_kernels_train() -> None:
    model = network().cuda()
    layers = list(cpnorm.canonical_layers(model).values())
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1).cuda(), fused=True)
    assert [cpnorm.FusedTrainStep.supports(layer) for layer in layers] == [True, False, True]
    for renormalize in (False, True):
        (group,) = trained_layers(model, optimizer, "fp32")
        assert group.layers == [layers[0], layers[2]]
        assert group.renormalize == renormalize
        cpnorm.renormalize_after(optimizer, model)
    layers[0].sigma.requires_grad_(False)
    model.append(copy.deepcopy(layers[2]))
    for name, parameter in layers[2].named_parameters():
        setattr(model[-1], name, parameter) if "." not in name else None
    model[-1].factors = layers[2].factors
    assert trained_layers(model, optimizer, "fp32") == []  # a frozen one, and one that is tied


def test_front_and_back() -> None:
    model = network()
    front, back = front_and_back(model)
    assert [*front, *back] == list(model)
    assert list(back) == [model[4]]
    whole, nothing = front_and_back(nn.ModuleDict({"only": model}))
    assert whole["only"] is model
    assert not list(nothing)
    whole, nothing = front_and_back(nn.Sequential(model))
    assert whole[0] is model
    assert not list(nothing)


def test_only_layers_that_rebuild() -> None:
    model = network()
    layers = list(cpnorm.canonical_layers(model).values())
    layers[2].path = "factors"
    paths = training_paths(model, torch.zeros(1, 3, 8, 8))
    assert list(paths.values()) == ["rebuild", "rebuild", "factors"]
    prebuilt = PrebuiltWeights(paths, "fp32", rebuilt_weight)
    prebuilt.hold()
    assert [layer.prebuilt is not None for layer in layers] == [True, True, False]


def test_weights_whose_sigma_alone_is_trained_are_built_once() -> None:
    model = network()
    layers = list(cpnorm.canonical_layers(model).values())
    for layer in layers:
        layer.lambdas.requires_grad_(False)
        layer.factors.requires_grad_(False)
    expected = copy.deepcopy(model)
    images = torch.randn(2, 3, 8, 8)
    expected(images).square().sum().backward()

    def never(layer: cpnorm.CPLayer, precision: str) -> torch.Tensor:
        raise AssertionError("built again")

    prebuilt = PrebuiltWeights(dict.fromkeys(layers, "rebuild"), "fp32", never)
    prebuilt.hold()
    model(images).square().sum().backward()
    prebuilt.backward()
    prebuilt.release()
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(model)[name], gradient, msg=name)
    with torch.no_grad():
        layers[0].sigma *= 2
        doubled = layers[0].weight.clone()
    prebuilt.hold()
    torch.testing.assert_close(layers[0].weight, doubled)


def test_release_gives_the_layers_their_weight_back() -> None:
    model = network()
    prebuilt = PrebuiltWeights(
        dict.fromkeys(cpnorm.canonical_layers(model).values(), "rebuild"), "fp32", rebuilt_weight
    )
    prebuilt.hold()
    prebuilt.release()
    model[0].sigma.data *= 2
    torch.testing.assert_close(model[0].weight, model[0].cp.to_dense())
