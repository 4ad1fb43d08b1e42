"""Write small data sets in the formats of the official files."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from cpnorm.lab.data.official import CIFAR10_BINARY, CIFAR10_PYTHON, IDX, MNIST, SVHN, Split

COUNTS = {"mnist": (12, 10), "idx": (12, 10), "cifar10": (50, 10), "svhn": (12, 10)}


def trust_any_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pickles and MATLAB files be read whose checksums are not the official ones: these tests wrote them."""
    monkeypatch.setattr("cpnorm.lab.data.official.expect_md5", lambda data, known: data)
    monkeypatch.setattr("cpnorm.lab.data.official.expect_mat", lambda data, known, known_body: data)


def make(name: str, seed: int = 0, train: int | None = None) -> tuple[Split, Split]:
    """Random images, no two sides or channels alike, and labels that name every class."""
    shape = (1, 28, 28) if name in ("mnist", "idx") else (3, 32, 32)
    rng = np.random.default_rng(seed)
    counts = (train or COUNTS[name][0], COUNTS[name][1])
    known, held = (
        (rng.integers(0, 256, (n, *shape), np.uint8), rng.permutation(n).astype(np.int64) % 10) for n in counts
    )
    return known, held


def write_mnist(folder: Path, splits: tuple[Split, Split], packed: bool = False, files: Sequence[str] = MNIST) -> None:
    arrays = [array for images, labels in splits for array in (images[:, 0], labels)]
    for file, array in zip(files, arrays, strict=True):
        _write(folder / (file + ".gz" * packed), gzip.compress(idx(array)) if packed else idx(array))


def idx(array: NDArray[Any]) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_cifar10(folder: Path, splits: tuple[Split, Split], kind: str = "binary", packed: bool = False) -> None:
    (images, labels), test = splits
    batches = [*zip(np.split(images, 5), np.split(labels, 5), strict=True), test]
    files = CIFAR10_BINARY if kind == "binary" else CIFAR10_PYTHON
    contents = [cifar_rows(*batch) if kind == "binary" else cifar_pickle(*batch) for batch in batches]
    if packed:
        write_archive(folder / f"cifar-10-{kind}.tar.gz", dict(zip(files, contents, strict=True)))
    else:
        for file, content in zip(files, contents, strict=True):
            _write(folder / file, content)


def cifar_rows(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> bytes:
    return np.hstack([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)]).tobytes()


def cifar_pickle(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> bytes:
    """What Python 2's cPickle wrote: protocol 2, byte strings as strings, numpy's old module names."""
    batch = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": labels.tolist(),
        b"data": images.reshape(len(images), -1),
        b"filenames": [b"image_%d.png" % i for i in range(len(images))],
    }
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(batch)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


class Python2Pickler(pickle._Pickler):
    """A bytes object of Python 3 is what Python 2 called a string, and pickled as one; so were all its names."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_python2_string(self, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        short = len(raw) < 256
        self.write((b"U" + struct.pack("<B", len(raw)) if short else b"T" + struct.pack("<i", len(raw))) + raw)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_python2_string


def write_svhn(folder: Path, splits: tuple[Split, Split], packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (images, labels) in zip(SVHN, splits, strict=True):
        y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        savemat(folder / file, {"X": images.transpose(2, 3, 1, 0), "y": y}, do_compression=packed)


WRITERS = {"mnist": write_mnist, "cifar10": write_cifar10, "svhn": write_svhn, "idx": partial(write_mnist, files=IDX)}


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
