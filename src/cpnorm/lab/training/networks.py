"""Residual and VGG networks for 32 x 32 images, in plain torch layers: what compression is measured on.

The CIFAR ResNets (He et al. 2016, section 4.2) have shortcuts without parameters and the state dict of the published
weights that ``cpnorm.lab.data.pretrained`` fetches. ResNet-18 is the ImageNet network with a stem for small images,
VGG-16 has batch normalisation and a single linear layer after the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.lab.data import pretrained

VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


class PaddedShortcut(nn.Module):
    """Keep every ``stride``-th pixel and add zero channels on both sides: a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.before = stride, (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:  # (N, I, H, W) -> (N, O, H / stride, W / stride)
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, added to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = PaddedShortcut(inputs, outputs, stride) if padded else projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of blocks of which all but the first halve the image, average pooling and a linear layer."""

    def __init__(self, channels: int, classes: int, widths: Sequence[int], depths: Sequence[int], padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = len(widths)
        inputs = widths[0]
        for stage, (outputs, depth) in enumerate(zip(widths, depths, strict=True), 1):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 1 and index == 0 else 1
                blocks.append(Block(inputs, outputs, stride, padded))
                inputs = outputs
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W) -> (N, classes)
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return the shortcut of ResNet-18 where a block changes the shape: a 1 x 1 convolution, batch normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def cifar_resnet(depth: int, channels: int = 3, classes: int = 10, width: float = 1.0) -> ResNet:
    """Return the ResNet of 6 n + 2 layers for 32 x 32 images: 0.27 M parameters at depth 20, 0.85 M at depth 56.

    >>> sum(p.numel() for p in cifar_resnet(20).parameters())
    269722
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"expected a depth of 6 n + 2 layers, such as 20 or 56, got {depth}")
    return ResNet(channels, classes, scaled((16, 32, 64), width), [(depth - 2) // 6] * 3, padded=True)


def resnet18(channels: int = 3, classes: int = 10, width: float = 1.0) -> ResNet:
    """Return ResNet-18 with a 3 x 3 stem for 32 x 32 images: 11.17 M parameters.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    return ResNet(channels, classes, scaled((64, 128, 256, 512), width), (2, 2, 2, 2), padded=False)


def vgg16(channels: int = 3, classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Return VGG-16 with batch normalisation and one linear layer for 32 x 32 images: 14.72 M parameters.

    >>> sum(p.numel() for p in vgg16().parameters())
    14724042
    """
    layers: list[nn.Module] = []
    inputs = channels
    for size in VGG16:
        if isinstance(size, int):
            (outputs,) = scaled((size,), width)
            layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    network = nn.Sequential()
    network.add_module("features", nn.Sequential(*layers))
    network.add_module("pool", nn.AdaptiveAvgPool2d(1))
    network.add_module("flatten", nn.Flatten())
    network.add_module("classifier", nn.Linear(inputs, classes))
    return network


def load_pretrained(name: str, data_dir: str | Path | None = None, *, file: str | Path | None = None) -> ResNet:
    """Return a network with its published weights, in eval mode; ``cpnorm data get NAME`` downloads them.

    Images are normalised by the ``mean`` and ``std`` of ``pretrained.NETWORKS[name]``, which differ from the lab's.

    Args:
        name: "resnet20-cifar10", or the same of 32, 44 or 56 layers.
        data_dir: folder to look in before ``$CPNORM_DATA`` and the user's cache.
        file: the weights themselves, as published (.th) or as safetensors; their checksum is compared either way.
    """
    weights = pretrained.read(name, data_dir, file=file)
    network = cifar_resnet(pretrained.NETWORKS[name].depth)
    # Published without the counters of batches, which nothing reads while momentum is a number.
    missing, unexpected = network.load_state_dict(weights, strict=False)
    if unexpected or any(not key.endswith("num_batches_tracked") for key in missing):
        others = ", ".join([*missing, *unexpected][:3])
        raise ValueError(
            f"{name}: expected the weights of a ResNet-{pretrained.NETWORKS[name].depth}, got others ({others})"
        )
    return network.eval()


def scaled(sizes: Sequence[int], width: float) -> list[int]:
    """Return every size times ``width``, rounded, and at least 1."""
    if not width > 0:
        raise ValueError(f"expected a width > 0, got {width}")
    return [max(1, round(size * width)) for size in sizes]
