"""The paper's two networks in plain torch layers: LeNet-like for MNIST, AlexNet-like for CIFAR-10 and SVHN.

Both are ``features``, ``flatten``, ``classifier``, so that ``features.3`` or ``classifier.1`` names a layer everywhere:
in ranks, in records and in reports. Parameters start as torch draws them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from cpnorm.lab.training import networks
from cpnorm.lab.training.config import MODELS
from cpnorm.lab.training.networks import scaled
from cpnorm.lab.training.small_networks import SmallResNet
from cpnorm.lab.training.users_code import build_network, check_outputs


def lenet(channels: int = 1, classes: int = 10, image_size: int = 28, width: float = 1.0) -> nn.Sequential:
    """Return the LeNet-like network: two convolutions without padding, two linear layers, 1.20 M parameters on MNIST.

    ``width`` makes every layer but the last this many times as wide.

    >>> lenet().classifier[1]
    Linear(in_features=9216, out_features=128, bias=True)
    """
    side = (_at_least(6, image_size) - 4) // 2
    c1, c2, hidden = scaled((32, 64, 128), width)
    features = nn.Sequential(
        nn.Conv2d(channels, c1, 3),
        nn.ReLU(),
        nn.Conv2d(c1, c2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(0.25),
        nn.Linear(c2 * side**2, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )
    return _network(features, classifier)


def alexnet(channels: int = 3, classes: int = 10, image_size: int = 32, width: float = 1.0) -> nn.Sequential:
    """Return the AlexNet-like network: five convolutions, three linear layers, 6.98 M parameters on CIFAR-10.

    ``width`` makes every layer but the last this many times as wide.

    >>> alexnet().classifier[1]
    Linear(in_features=4096, out_features=1024, bias=True)
    """
    side = (_at_least(6, image_size) + 2) // 8  # + 2: the first convolution pads by 2, so that 32 becomes 34
    c1, c2, c3, c4, c5, hidden, last = scaled((64, 192, 384, 256, 256, 1024, 512), width)
    features = nn.Sequential(
        nn.Conv2d(channels, c1, 3, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c1, c2, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c4, c5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(c5 * side**2, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, last),
        nn.ReLU(),
        nn.Linear(last, classes),
    )
    return _network(features, classifier)


def build(
    name: str,
    channels: int,
    classes: int,
    image_size: int,
    width: float = 1.0,
    design: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the network of this name for images of this shape.

    Args:
        name: one of ``MODELS``, or "module:function" for a network of your own. The function is called with those of
            the arguments ``channels``, ``classes``, ``image_size`` and ``width`` that it has.
        channels: of the images.
        classes: number of outputs.
        image_size: height and width of the images.
        width: factor on the width of every layer but the last.
        design: further arguments of "small_resnet" or of a function of your own.
    """
    if name == "small_resnet":
        return SmallResNet(channels, classes, width, **(design or {}))
    if design and ":" not in name:
        raise ValueError(f"design: {name} takes no further arguments, got {', '.join(design)}")
    match name:
        case "alexnet":
            return alexnet(channels, classes, image_size, width)
        case "lenet":
            return lenet(channels, classes, image_size, width)
        case "resnet20" | "resnet32" | "resnet44" | "resnet56":
            return networks.cifar_resnet(int(name.removeprefix("resnet")), channels, classes, width)
        case "resnet18":
            return networks.resnet18(channels, classes, width)
        case "vgg16":
            _at_least(32, image_size)
            return networks.vgg16(channels, classes, width)
    if ":" not in name:
        raise ValueError(f"expected a model among {', '.join(MODELS)} or module:function, got {name!r}")
    given = {"channels": channels, "classes": classes, "image_size": image_size, "width": width}
    network = build_network(name, given, design or {})
    check_outputs(name, network, (channels, image_size, image_size), classes)
    return network


def _at_least(smallest: int, image_size: int) -> int:
    if image_size < smallest:
        raise ValueError(f"expected images of at least {smallest} x {smallest} pixels, got {image_size}")
    return image_size


def _network(features: nn.Module, classifier: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
