"""The two networks against the layer tables of the paper, its weight counts, and shapes of other images."""

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.models import alexnet, build, lenet
from cpnorm.lab.training.run_networks import blank
from cpnorm.lab.training.setup import build_model

# As the paper's tables print them: inputs x outputs x height x width.
ALEXNET = {
    "features.0": "3x64x3x3",
    "features.3": "64x192x3x3",
    "features.6": "192x384x3x3",
    "features.8": "384x256x3x3",
    "features.10": "256x256x3x3",
    "classifier.1": "4096x1024",
    "classifier.4": "1024x512",
    "classifier.6": "512x10",
}
LENET = {"features.0": "1x32x3x3", "features.2": "32x64x3x3", "classifier.1": "9216x128", "classifier.4": "128x10"}


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def printed_sizes(model: nn.Module) -> dict[str, str]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    return {n: "x".join(map(str, m.weight.transpose(0, 1).shape)) for n, m in layers.items()}


@pytest.mark.parametrize(("network", "sizes"), [(alexnet, ALEXNET), (lenet, LENET)])
def test_layers_are_those_of_the_papers_tables(network, sizes):
    assert printed_sizes(network()) == sizes


def test_weights_with_biases_are_those_of_the_paper():
    assert weights(alexnet()) == 6_976_842  # published: 6.98 M
    assert weights(lenet()) == 1_199_882  # published: 1.19 M, which is 1.1999 cut off


def test_the_order_of_operations_is_the_papers():
    kinds = [type(m).__name__ for m in alexnet().modules() if not list(m.children())]
    pool, conv, linear = "MaxPool2d", ["Conv2d", "ReLU"], ["Linear", "ReLU"]
    assert kinds == [*conv, pool, *conv, pool, *conv * 3, pool, "Flatten", *["Dropout", *linear] * 2, "Linear"]
    kinds = [type(m).__name__ for m in lenet().modules() if not list(m.children())]
    assert kinds == [*conv * 2, pool, "Flatten", "Dropout", *linear, "Dropout", "Linear"]


def test_padding_and_dropout_are_the_papers():
    assert [m.padding for m in alexnet().features if isinstance(m, nn.Conv2d)] == [(2, 2), *[(1, 1)] * 4]
    assert [m.padding for m in lenet().features if isinstance(m, nn.Conv2d)] == [(0, 0)] * 2
    assert [m.p for m in alexnet().modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert [m.p for m in lenet().modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]


@pytest.mark.parametrize("name", ["alexnet", "lenet"])
@pytest.mark.parametrize(("channels", "classes", "size"), [(1, 10, 28), (3, 10, 32), (1, 3, 8), (2, 7, 13), (1, 2, 6)])
def test_any_image_shape_fits(name, channels, classes, size):
    model = build(name, channels, classes, size).eval()
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


@pytest.mark.parametrize("name", ["alexnet", "lenet"])
def test_too_small_an_image_is_refused(name):
    with pytest.raises(ValueError, match="at least 6 x 6 pixels, got 5"):
        build(name, 1, 10, 5)


def test_an_unknown_network_is_named():
    with pytest.raises(ValueError, match=r"expected a model among alexnet, lenet, resnet18, .*, got 'vgg'"):
        build("vgg", 3, 10, 32)


def test_the_same_seed_draws_the_same_network():
    first, second = (torch.manual_seed(3) and lenet() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_width_scales_all_layers_but_the_last() -> None:
    narrow = alexnet(width=0.14)
    assert sum(p.numel() for p in narrow.parameters()) == 138_483
    assert (narrow.features[0].out_channels, narrow.classifier[6].out_features) == (9, 10)
    assert lenet(width=2).classifier[1].out_features == 256
    assert narrow(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(ValueError, match="width > 0, got 0"):
        lenet(width=0)


def test_long_modes_of_linear_layers_are_split() -> None:
    config = Config(model="lenet", data="mnist", rank=5, init="kaiming_normal", modes=True, split_modes=64)
    network = build_model(config, blank("mnist"), torch.device("cpu"))
    modes = {name: layer.modes for name, layer in cpnorm.canonical_layers(network).items()}
    assert modes["classifier.1"] == (8, 16, 64, 12, 12)
    assert modes["classifier.4"] == (10, 8, 16)
    assert modes["features.2"] == (64, 32, 3, 3)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    whole = cpnorm.canonical_layers(build_model(config.replace(split_modes=0), blank("mnist"), torch.device("cpu")))
    assert whole["classifier.1"].modes == (128, 64, 12, 12)
