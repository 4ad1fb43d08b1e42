"""Residual networks that are wide and thin: many channels, few terms in each convolution, few parameters in all.

A canonical 3 x 3 convolution of rank R from I to O channels has R (I + O + 7) numbers and one sigma, a dense one 9 I O.
So width is cheap in canonical form, and a few numbers describe a whole network: the width of each stage, how many
blocks it has, how often each block is applied, and the size of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.lab.training.networks import scaled

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


class SharedBlock(nn.Module):
    """Two convolutions added to their input, applied one or several times with batch statistics of their own.

    All rounds share the convolutions, so that another round costs the parameters of two batch normalisations only. With
    ``gated``, each channel is multiplied by a number between 0 and 1 that a linear layer computes from the means of all
    channels; in canonical form that layer costs R (2 C + 1) numbers.
    """

    def __init__(self, width: int, kernel: int, rounds: int, activation: str, gated: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.conv2 = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.bn1 = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(rounds))
        self.bn2 = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(rounds))
        self.activation = ACTIVATIONS[activation]()
        self.gate = nn.Linear(width, width, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        for bn1, bn2 in zip(self.bn1, self.bn2, strict=True):
            y = bn2(self.conv2(self.activation(bn1(self.conv1(x)))))
            if self.gate is not None:
                y = y * self.gate(y.mean((2, 3))).sigmoid()[:, :, None, None]
            x = self.activation(x + y)
        return x


class Widen(nn.Module):
    """Halve the image by the largest of four pixels and add channels of zeros: a transition without parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:  # (N, I, H, W) -> (N, O, H / 2, W / 2)
        x = F.max_pool2d(x, 2)
        return F.pad(x, (0, 0, 0, 0, 0, self.added)) if self.added else x


class SmallResNet(nn.Module):
    """A small residual network; ``canonical_norm`` makes its convolutions thin.

    It is a stem, stages of shared blocks with ``Widen`` between them, pooling over the image and a linear layer.

    Args:
        channels: of the images.
        classes: number of outputs.
        width: factor on all widths.
        widths: channels of each stage; all stages but the first halve the image.
        depths: blocks of each stage.
        rounds: how often each block of a stage is applied, with the same convolutions.
        kernels: sizes of the kernels of each stage.
        activation: "relu" or "silu".
        gated: multiply the channels of each block by numbers computed from their means.

    >>> network = SmallResNet(widths=(8, 16), depths=(1, 1), rounds=2)
    >>> sum(p.numel() for p in network.parameters())
    6354
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        width: float = 1.0,
        *,
        widths: Sequence[int] = (32, 64, 128),
        depths: Sequence[int] = (1, 1, 1),
        rounds: int | Sequence[int] = 1,
        kernels: int | Sequence[int] = 3,
        activation: str = "relu",
        gated: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        widths = scaled(widths, width)
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        self.activation = ACTIVATIONS[activation]()
        stages: list[nn.Module] = []
        inputs = widths[0]
        settings = {"depths": depths, "rounds": rounds, "kernels": kernels}
        each = (_for_stages(name, value, len(widths)) for name, value in settings.items())
        for outputs, depth, times, kernel in zip(widths, *each, strict=True):
            blocks: list[nn.Module] = [Widen(inputs, outputs)] if stages else []
            blocks += [SharedBlock(outputs, kernel, times, activation, gated) for _ in range(depth)]
            stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W) -> (N, classes)
        x = self.stages(self.activation(self.bn(self.stem(x))))
        return self.linear(x.mean((2, 3)))


def _for_stages(name: str, value: int | Sequence[int], stages: int) -> list[int]:
    values = [value] * stages if isinstance(value, int) else list(value)
    if len(values) != stages or min(values) < 1:
        raise ValueError(f"expected {name} for {stages} stages, each at least 1, got {values}")
    return values
