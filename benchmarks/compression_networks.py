"""Networks of compression_accuracy.py: wrapped, counted, compared, and stored in files of bounded size."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cpnorm
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training.evaluation import prepared

SHARD = 15 * 2**20  # bytes of a file with dense weights


class Renormalized(nn.Module):
    """A network for images that were normalised by other means and deviations."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.network(x * self.scale + self.shift))


class Mean(nn.Module):
    """Several classifiers as one: the logarithm of their mean probabilities."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [network(x).float().log_softmax(1) for network in self.networks]
        return torch.stack(outputs).logsumexp(0)  # without dividing by their number, which a softmax does


@torch.no_grad()
def divergence(model: nn.Module, dense: nn.Module, data: ImageSet) -> float:
    """Return the mean Kullback-Leibler divergence from the dense network's outputs on the test images."""
    total = 0.0
    for images in data.test_images.split(1000):
        x = prepared(images, data)
        found, wanted = (each(x).float().log_softmax(1) for each in (model, dense))
        total += nn.functional.kl_div(found, wanted, log_target=True, reduction="sum").item()
    return total / len(data.test_images)


@torch.no_grad()
def flops(model: nn.Module, image: Tensor) -> int:
    """Return the FLOPs for one image (two for each multiplication with addition); canonical layers as small layers."""
    plain = copy.deepcopy(model).eval()
    if cpnorm.canonical_layers(plain):
        plain = cpnorm.factorize(plain, image, goal="parameters", measure=False)
    with FlopCounterMode(display=False) as counter:
        plain(image)
    return counter.get_total_flops()


def write_shards(model: nn.Module, file: Path) -> None:
    """Store a network in half precision, in files of bounded size."""
    parts: list[dict[str, Tensor]] = [{}]
    room = SHARD
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        value = value.half() if value.is_floating_point() else value
        room -= value.nbytes
        if room < 0 and parts[-1]:
            parts, room = [*parts, {}], SHARD - value.nbytes
        parts[-1][name] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        safetensors.torch.save_file(part, f"{file}.{number}.safetensors")


def read_shards(file: Path) -> dict[str, Tensor]:
    """Return what ``write_shards`` has stored, in single precision."""
    found: Iterator[dict[str, Tensor]]
    found = (safetensors.torch.load_file(part) for part in sorted(file.parent.glob(f"{file.name}.*.safetensors")))
    return {k: v.float() if v.is_floating_point() else v for part in found for k, v in part.items()}
