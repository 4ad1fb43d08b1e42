"""Published weights of trained networks: where they are, how to recognise them, and what their images look like.

A file is accepted in the container it was published in (.th) or as safetensors. What is compared is the content, so
that a converted file is recognised; pickles are read with ``weights_only``, which runs no code.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from cpnorm.lab.data.images import DataNotFoundError, data_folders

UNREADABLE = (  # what the two readers raise on bytes that are something else
    *(SafetensorError, pickle.UnpicklingError, struct.error, EOFError),
    *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
FOLDER = "pretrained"  # below a data folder
ORIGIN = "https://raw.githubusercontent.com/akamaster/pytorch_resnet_cifar10/d5489e8995e81e91ce6b1d69dcc98ad579b0b153"


@dataclass(frozen=True)
class Published:
    """The weights of one network, as their author published them."""

    depth: int  # of a CIFAR ResNet
    data: str  # what the network was trained on
    file: str
    size: int  # bytes of the file
    md5: str  # of the file
    sha256: str  # of the tensors, see ``digest``
    accuracy: float  # per cent of the test set
    source: str = "akamaster/pytorch_resnet_cifar10"
    licence: str = "BSD-2-Clause"
    address: str = f"{ORIGIN}/pretrained_models"
    mean: tuple[float, ...] = (0.485 * 255, 0.456 * 255, 0.406 * 255)  # ImageNet's, in pixel values
    std: tuple[float, ...] = (0.229 * 255, 0.224 * 255, 0.225 * 255)


NETWORKS = {
    "resnet20-cifar10": Published(
        depth=20,
        data="cifar10",
        file="resnet20-12fca82f.th",
        size=1_099_231,
        md5="1f38c81cdebd6bcce9b03d082161a36c",
        sha256="d02dde976e1c0fe6b979a783b9ca27c04777d3e13cd8299e844f867793c34f52",
        accuracy=91.73,
    ),
    "resnet32-cifar10": Published(
        depth=32,
        data="cifar10",
        file="resnet32-d509ac18.th",
        size=1_890_043,
        md5="1b290d0b1aad139b0f2be36cf1fa4846",
        sha256="e977065bd89a4e8432794dc028c47cf14dc54004d4c1bf9d3514c2fdaa606afb",
        accuracy=92.63,
    ),
    "resnet44-cifar10": Published(
        depth=44,
        data="cifar10",
        file="resnet44-014dd654.th",
        size=2_680_855,
        md5="953c35969bce8e16eba14f6de91ef262",
        sha256="b0ca46cd62c11161e12a021f8c57a160133047985b0f32e07804d8e6b02b0827",
        accuracy=93.10,
    ),
    "resnet56-cifar10": Published(
        depth=56,
        data="cifar10",
        file="resnet56-4bfd9763.th",
        size=3_471_733,
        md5="48a2383e717f38f02934658ab8d4d9a2",
        sha256="dc80dc269bce2413cbe5ddcc0a9cccdc7f74f4a5b871bcb68fccf9384a2de448",
        accuracy=93.39,
    ),
}


def read(name: str, data_dir: str | Path | None = None, *, file: str | Path | None = None) -> dict[str, Tensor]:
    """Return the published weights of a network from ``file``, or from the first data folder that has them."""
    return read_file(name, find(name, data_dir) if file is None else Path(file))


def find(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the file that has the weights of this network."""
    network = published(name)
    folders = data_folders(data_dir)
    for folder in folders:
        for file in (network.file, f"{name}.safetensors"):
            if (folder / FOLDER / file).is_file():
                return folder / FOLDER / file
    raise DataNotFoundError(
        f"{name} was not found in {' or '.join(map(str, folders))}; looked for {FOLDER}/{network.file} and "
        f"{FOLDER}/{name}.safetensors; get it with: cpnorm data get {name} --data-dir {folders[0]}"
    )


def store(name: str, file: str | Path, data_dir: str | Path | None = None) -> Path:
    """Check a local file and keep its weights in the first data folder; returns the path there."""
    weights = read_file(name, Path(file))
    target = data_folders(data_dir)[0] / FOLDER / f"{name}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    network = published(name)
    metadata = {"source": network.source, "licence": network.licence, "test_accuracy": str(network.accuracy)}
    part = target.with_name(target.name + ".part")
    safetensors.torch.save_file(weights, part, metadata)
    os.replace(part, target)
    return target


def read_file(name: str, path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, in either container; raise ValueError where they are not the published ones."""
    expected, content = published(name), path.read_bytes()
    try:
        if path.suffix == ".safetensors":
            weights = safetensors.torch.load(content)
        else:
            weights = _unwrapped(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except UNREADABLE as error:
        raise ValueError(f"{path}: expected the weights of {name}, got a file that cannot be read: {error}") from error
    found = digest(weights)
    if found != expected.sha256:
        raise ValueError(
            f"{path}: expected the weights of {name} (sha256 {expected.sha256[:16]}…), got others ({found[:16]}…)"
        )
    return weights


def digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values, whatever file they came in."""
    found = hashlib.sha256()
    for key in sorted(weights):
        value = weights[key].detach().to("cpu", torch.float32).contiguous()
        found.update(f"{key} {tuple(value.shape)} ".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def published(name: str) -> Published:
    """Return what is known about the weights of this name."""
    if name not in NETWORKS:
        raise ValueError(f"expected published weights among {', '.join(NETWORKS)}, got {name!r}")
    return NETWORKS[name]


def _unwrapped(checkpoint: Any) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint that was saved from a DataParallel model."""
    weights = checkpoint["state_dict"] if isinstance(checkpoint, dict) and "state_dict" in checkpoint else checkpoint
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"expected a state dict of tensors, got an object of type {type(checkpoint).__name__}")
    return {key.removeprefix("module."): value for key, value in weights.items()}
