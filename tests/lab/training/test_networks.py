"""Networks for 32 x 32 images: sizes, shortcuts against a formula, and the accuracy of published weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import DataNotFoundError, load, normalize
from cpnorm.lab.training import models
from cpnorm.lab.training.networks import PaddedShortcut, cifar_resnet, load_pretrained, resnet18, vgg16


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet20", 269_722),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("resnet18", 11_173_962),
        ("vgg16", 14_724_042),
    ],
)
def test_parameters_and_outputs(name: str, count: int) -> None:
    network = models.build(name, 3, 10, 32).eval()
    assert parameters(network) == count
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    narrow = models.build(name, 1, 7, 32, width=0.25).eval()
    assert narrow(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_layers_that_decide_the_size_of_a_resnet() -> None:
    assert len([m for m in cifar_resnet(56).modules() if isinstance(m, nn.Conv2d)]) == 55
    strides = [m.stride[0] for m in resnet18().modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert strides == [2, 2, 2]
    assert len([m for m in vgg16().modules() if isinstance(m, nn.Conv2d)]) == 13


def test_a_padded_shortcut_keeps_every_second_pixel_in_the_middle_channels() -> None:
    x = torch.randn(2, 16, 8, 8)
    y = PaddedShortcut(16, 32, 2)(x)
    expected = torch.zeros(2, 32, 4, 4)
    expected[:, 8:24] = x[:, :, [0, 2, 4, 6]][:, :, :, [0, 2, 4, 6]]
    assert torch.equal(y, expected)
    assert PaddedShortcut(2, 5, 1)(torch.ones(1, 2, 3, 3)).sum((0, 2, 3)).tolist() == [0, 9, 9, 0, 0]


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_a_depth_that_no_such_network_has_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth of 6 n \+ 2 layers, such as 20 or 56, got {depth}"):
        cifar_resnet(depth)


def test_images_too_small_for_five_poolings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 x 32 pixels, got 28"):
        models.build("vgg16", 1, 10, 28)


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_the_canonical_and_the_factorised_network_compute_what_the_dense_one_does(name: str) -> None:
    dense = models.build(name, 3, 10, 32, width=0.125).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = dense(x)
    canonical = cpnorm.canonical_norm(dense)
    torch.testing.assert_close(canonical(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cpnorm.factorize(canonical, x, goal="parameters")(x), expected, rtol=1e-4, atol=1e-5)


# --- published weights ---


def accuracy(name: str, images: int) -> float:
    try:
        network = load_pretrained(name)
    except DataNotFoundError as error:
        pytest.skip(str(error))
    about = pretrained.NETWORKS[name]
    data = dataclasses.replace(load(about.data), mean=about.mean, std=about.std)
    right = 0
    with torch.inference_mode():
        for x, y in zip(data.test_images[:images].split(250), data.test_labels[:images].split(250), strict=True):
            answers: Tensor = network(normalize(x, data.mean, data.std)).argmax(1)
            right += int((answers == y).sum())
    return 100 * right / images


@pytest.mark.data
def test_published_weights_fit_the_network() -> None:
    assert accuracy("resnet20-cifar10", 500) > 88


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", list(pretrained.NETWORKS))
def test_the_published_accuracy_is_found_again(name: str) -> None:
    assert accuracy(name, 10_000) == pytest.approx(pretrained.NETWORKS[name].accuracy, abs=0.021)  # two images
