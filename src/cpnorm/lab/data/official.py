"""The official files of MNIST, CIFAR-10 and SVHN: their names, their layouts in a folder, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpnorm.lab.data.formats import (
    expect_mat,
    expect_md5,
    naming,
    parse_idx,
    parse_mat,
    parse_pickle,
    plain_or_packed,
    read_archive,
    read_file,
)

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, C, H, W), labels (N,)

IDX = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
MNIST = tuple(f"MNIST/raw/{file}" for file in IDX)
CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_BINARY = tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in CIFAR10_BATCHES)
CIFAR10_PYTHON = tuple(f"cifar-10-batches-py/{batch}" for batch in CIFAR10_BATCHES)
SVHN = ("train_32x32.mat", "test_32x32.mat")
MD5 = {  # of the files that are only read if they are these
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
MD5_OF_BODY = {  # of the same variables, saved without compression: what follows the header of 128 bytes
    "train_32x32.mat": "b6847280093abe9e2086bda4bde278cd",
    "test_32x32.mat": "2e572eb00f8c3c02a14003a31f8bff1a",
}


@dataclass(frozen=True)
class Layout:
    """One way in which a data set may lie in a folder: its files, and the function that reads (train, test)."""

    files: tuple[str, ...]
    read: Callable[[Path], tuple[Split, Split]]

    def found_in(self, folder: Path) -> bool:
        """Return True if every file is in the folder, plain or packed."""
        return all(plain_or_packed(folder / file).is_file() for file in self.files)


def read_idx(folder: Path, files: Sequence[str]) -> tuple[Split, Split]:
    """Read four idx files, each plain or .gz: MNIST, or another set in its format."""
    return _read_idx_pair(folder, files[:2]), _read_idx_pair(folder, files[2:])


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
    folder: Path, source: str, files: Sequence[str], parse: Callable[[bytes, str], Split]
) -> tuple[Split, Split]:
    """Read five training batches and a test batch from a folder, or from the archive named ``source``."""
    if source:
        contents = read_archive(folder / source, files)
    else:
        contents = {file: read_file(folder / file) for file in files}
    batches = []
    for file, data in contents.items():
        with naming(folder / source / file):
            batches.append(parse(data, file.rpartition("/")[2]))
    images, labels = zip(*batches, strict=True)
    return (np.concatenate(images[:5]), np.concatenate(labels[:5])), batches[5]


def parse_cifar_binary(data: bytes, file: str = "") -> Split:
    """Return the images and labels of rows of 3073 bytes: the label, then the red, green and blue plane."""
    if len(data) % 3073:
        raise ValueError(f"expected rows of 3073 bytes, got {len(data)} bytes, which is no multiple of that")
    rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return _checked(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])


def parse_cifar_pickle(data: bytes, file: str) -> Split:
    """Return the images and labels of an official pickled batch, recognised by its checksum."""
    batch = parse_pickle(expect_md5(data, MD5[file]))
    return _checked(batch["data"].reshape(-1, 3, 32, 32), np.array(batch["labels"], np.int64))


def read_svhn(folder: Path) -> tuple[Split, Split]:
    """Read two MATLAB files of images X and labels y."""
    train, test = (_read_svhn_split(folder / file) for file in SVHN)
    return train, test


def _read_svhn_split(path: Path) -> Split:
    data = read_file(path)
    with naming(plain_or_packed(path)):
        arrays = parse_mat(expect_mat(data, MD5[path.name], MD5_OF_BODY[path.name]), ("X", "y"))
        labels = arrays["y"].ravel().astype(np.int64) % 10  # digit 0 is called 10
        return _checked(arrays["X"].transpose(3, 2, 0, 1), labels)


def _checked(images: NDArray[np.uint8], labels: NDArray[Any]) -> Split:
    """Return own, contiguous arrays, or raise where images and labels do not fit together."""
    if not 0 < len(images) == len(labels):
        raise ValueError(f"expected as many labels as images, and at least one; got {len(labels)} and {len(images)}")
    if labels.max() > 9:
        raise ValueError(f"expected labels from 0 to 9, got {labels.max()}")
    return np.array(images, order="C"), labels.astype(np.int64)


def _idx_layout(folder: str = "") -> Layout:
    files = tuple(folder + file for file in IDX)
    return Layout(files, partial(read_idx, files=files))


def _cifar10_layouts(
    files: tuple[str, ...], archive: str, parse: Callable[[bytes, str], Split]
) -> tuple[Layout, Layout]:
    read = partial(read_cifar10, files=files, parse=parse)
    return Layout(files, partial(read, source="")), Layout((archive,), partial(read, source=archive))


LAYOUTS = {
    "mnist": (_idx_layout("MNIST/raw/"), _idx_layout()),
    "cifar10": (
        *_cifar10_layouts(CIFAR10_BINARY, "cifar-10-binary.tar.gz", parse_cifar_binary),
        *_cifar10_layouts(CIFAR10_PYTHON, "cifar-10-python.tar.gz", parse_cifar_pickle),
    ),
    "svhn": (Layout(SVHN, read_svhn),),
    "idx": (_idx_layout(), _idx_layout("raw/")),
}
