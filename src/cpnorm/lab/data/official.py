"""The official files of MNIST, CIFAR-10 and SVHN: which they are, how they may lie in a folder, what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpnorm.lab.data.formats import (
    PickledArray,
    naming,
    parse_idx,
    parse_mat,
    parse_pickle,
    plain_or_packed,
    read_archive,
    read_file,
)

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, C, H, W), labels (N,)

MNIST = tuple(f"MNIST/raw/{s}-{k}-ubyte" for s in ("train", "t10k") for k in ("images-idx3", "labels-idx1"))
CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_BINARY = tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in CIFAR10_BATCHES)
CIFAR10_PYTHON = tuple(f"cifar-10-batches-py/{batch}" for batch in CIFAR10_BATCHES)
SVHN = ("train_32x32.mat", "test_32x32.mat")


@dataclass(frozen=True)
class Layout:
    """One way a data set may lie in a folder: its files, and what reads (train, test) from them."""

    files: tuple[str, ...]
    read: Callable[[Path], tuple[Split, Split]]

    def found_in(self, folder: Path) -> bool:
        return all(plain_or_packed(folder / file).is_file() for file in self.files)


def read_mnist(folder: Path) -> tuple[Split, Split]:
    """Four idx files, each plain or .gz, in MNIST/raw."""
    return _read_idx_pair(folder, MNIST[:2]), _read_idx_pair(folder, MNIST[2:])


def _read_idx_pair(folder: Path, files: Sequence[str]) -> Split:
    arrays = []
    for file, order in zip(files, (3, 1), strict=True):
        data = read_file(folder / file)
        with naming(plain_or_packed(folder / file)):
            arrays.append(parse_idx(data, order))
    images, labels = arrays
    with naming(plain_or_packed(folder / files[0])):
        if images.shape[1:] != (28, 28):
            raise ValueError(f"expected images of 28 x 28 pixels, got {images.shape[1]} x {images.shape[2]}")
        return _checked(images[:, None], labels)


def read_cifar10(
    folder: Path, source: str, files: Sequence[str], parse: Callable[[bytes], Split]
) -> tuple[Split, Split]:
    """Five training batches and a test batch, out of a folder or an archive."""
    if source:
        contents = read_archive(folder / source, files)
    else:
        contents = {file: read_file(folder / file) for file in files}
    batches = []
    for file, data in contents.items():
        with naming(folder / source / file):
            batches.append(parse(data))
    images, labels = zip(*batches, strict=True)
    return (np.concatenate(images[:5]), np.concatenate(labels[:5])), batches[5]


def parse_cifar_binary(data: bytes) -> Split:
    """Rows of 3073 bytes: the label, then the red, green and blue plane."""
    if len(data) % 3073:
        raise ValueError(f"expected rows of 3073 bytes, got {len(data)} bytes, which is no multiple of that")
    rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return _checked(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])


def parse_cifar_pickle(data: bytes) -> Split:
    """A pickled dict with the images as an array under data and a list of integers under labels."""
    batch = parse_pickle(data)
    if not isinstance(batch, dict) or not {"data", "labels"} <= batch.keys():
        raise ValueError("expected a pickled dict with data and labels")
    images, labels = batch["data"], batch["labels"]
    if not isinstance(images, PickledArray):
        raise ValueError("expected an array of bytes as data")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise ValueError("expected a list of integers from 0 to 9 as labels")
    return _checked(images.rows(3072).reshape(-1, 3, 32, 32), np.array(labels, np.int64))


def read_svhn(folder: Path) -> tuple[Split, Split]:
    """Two MATLAB files of images X and labels y."""
    train, test = (_read_svhn_split(folder / file) for file in SVHN)
    return train, test


def _read_svhn_split(path: Path) -> Split:
    data = read_file(path)
    with naming(plain_or_packed(path)):
        arrays = parse_mat(data, {"X", "y"})
        images, labels = arrays["X"], arrays["y"].ravel()
        if images.dtype != np.uint8 or images.shape[:-1] != (32, 32, 3):
            raise ValueError(f"expected X of (32, 32, 3, N) unsigned bytes, got {images.shape} of {images.dtype}")
        if not np.isin(labels, np.arange(1, 11)).all():
            raise ValueError("expected y from 1 to 10")
        return _checked(images.transpose(3, 2, 0, 1), labels.astype(np.int64) % 10)  # digit 0 is called 10


def _checked(images: NDArray[np.uint8], labels: NDArray[Any]) -> Split:
    """Own, contiguous arrays, once they fit together."""
    if not 0 < len(images) == len(labels):
        raise ValueError(f"expected as many labels as images, and some; got {len(labels)} and {len(images)}")
    if labels.max() > 9:
        raise ValueError(f"expected labels from 0 to 9, got {labels.max()}")
    return np.array(images, order="C"), labels.astype(np.int64)


def _cifar10_layouts(files: tuple[str, ...], archive: str, parse: Callable[[bytes], Split]) -> tuple[Layout, Layout]:
    read = partial(read_cifar10, files=files, parse=parse)
    return Layout(files, partial(read, source="")), Layout((archive,), partial(read, source=archive))


LAYOUTS = {
    "mnist": (Layout(MNIST, read_mnist),),
    "cifar10": (
        *_cifar10_layouts(CIFAR10_BINARY, "cifar-10-binary.tar.gz", parse_cifar_binary),
        *_cifar10_layouts(CIFAR10_PYTHON, "cifar-10-python.tar.gz", parse_cifar_pickle),
    ),
    "svhn": (Layout(SVHN, read_svhn),),
}
