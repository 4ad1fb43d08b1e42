"""Every layout of every data set is read as it was written, and a file that does not fit is named."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpnorm.lab.data.images import find
from cpnorm.lab.data.official import CIFAR10_BINARY, IDX, MD5_OF_BODY, MNIST, SVHN, Split
from official_files import WRITERS, cifar_rows, idx, make, trust_any_content, write_cifar10, write_mnist, write_svhn

LAYOUTS: dict[str, tuple[str, Callable[[Path, tuple[Split, Split]], None]]] = {
    "mnist": ("mnist", write_mnist),
    "mnist-bare": ("mnist", lambda *a: write_mnist(*a, files=IDX)),
    "idx": ("idx", lambda *a: write_mnist(*a, files=IDX)),
    "idx-raw": ("idx", lambda *a: write_mnist(*a, files=[f"raw/{file}" for file in IDX], packed=True)),
    "mnist-gz": ("mnist", lambda *a: write_mnist(*a, packed=True)),
    "cifar10-binary": ("cifar10", write_cifar10),
    "cifar10-python": ("cifar10", lambda *a: write_cifar10(*a, kind="python")),
    "cifar10-binary-archive": ("cifar10", lambda *a: write_cifar10(*a, packed=True)),
    "cifar10-python-archive": ("cifar10", lambda *a: write_cifar10(*a, kind="python", packed=True)),
    "svhn": ("svhn", write_svhn),
    "svhn-compressed": ("svhn", lambda *a: write_svhn(*a, packed=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_what_was_written(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_any_content(monkeypatch)
    name, write = LAYOUTS[layout]
    written = make(name)
    write(tmp_path, written)
    folder, found = find(name, tmp_path)
    assert folder == tmp_path
    for read, expected in zip(found.read(folder), written, strict=True):
        for array, wanted in zip(read, expected, strict=True):
            assert array.dtype == wanted.dtype
            assert array.flags.c_contiguous
            assert array.flags.writeable
            np.testing.assert_array_equal(array, wanted)


def test_one_packed_file_among_plain_ones(tmp_path: Path) -> None:
    written = make("mnist")
    write_mnist(tmp_path, written)
    plain = tmp_path / MNIST[0]
    plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    train, _ = find("mnist", tmp_path)[1].read(tmp_path)
    np.testing.assert_array_equal(train[0], written[0][0])


def test_the_next_layout_where_a_file_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_any_content(monkeypatch)
    write_cifar10(tmp_path, make("cifar10", seed=1))
    (tmp_path / CIFAR10_BINARY[3]).unlink()
    write_cifar10(tmp_path, make("cifar10", seed=2), kind="python", packed=True)
    train, _ = find("cifar10", tmp_path)[1].read(tmp_path)
    np.testing.assert_array_equal(train[0], make("cifar10", seed=2)[0][0])


IMAGES, LABELS = make("cifar10")[1]
GREY = IMAGES[:, 0, :28, :28]

WRONG = {
    "few labels": (
        "mnist",
        MNIST[1],
        idx(LABELS[:3]),
        "expected as many labels as images, .*; got 3 and 12",
    ),
    "no images": ("mnist", MNIST[0], idx(GREY[:0]), "expected as many labels as images"),
    "not square": ("mnist", MNIST[2], idx(GREY[:, 1:]), "expected images of 28 x 28 pixels, got 27 x 28"),
    "labels as images": (
        "mnist",
        MNIST[2],
        idx(LABELS),
        "starts with 00000803, got 00000801",
    ),
    "label 10": ("mnist", MNIST[3], idx(LABELS + 1), "expected labels from 0 to 9, got 10"),
    "a cut batch": ("cifar10", CIFAR10_BINARY[4], cifar_rows(IMAGES, LABELS)[:-1], "expected rows of 3073 bytes"),
    "an empty batch": ("cifar10", CIFAR10_BINARY[5], b"", "expected as many labels as images"),
    "class 10": ("cifar10", CIFAR10_BINARY[0], cifar_rows(IMAGES, LABELS + 1), "expected labels from 0 to 9, got 10"),
    "not MATLAB": ("svhn", SVHN[0], b"<html>" * 99, "expected the official file, with md5 e26d"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_file_is_named(case: str, tmp_path: Path) -> None:
    name, file, content, message = WRONG[case]
    WRITERS[name](tmp_path, make(name))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        find(name, tmp_path)[1].read(tmp_path)
    assert str(tmp_path / "MNIST/raw" if name == "mnist" else tmp_path / file) in str(caught.value)


def test_svhn_is_known_by_its_checksum_with_any_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved again, the same content has another date in its header, which may also hold anything else."""
    written = make("svhn")
    write_svhn(tmp_path, written)
    for file in SVHN:
        data = (tmp_path / file).read_bytes()
        monkeypatch.setitem(MD5_OF_BODY, file, hashlib.md5(data[128:]).hexdigest())
        (tmp_path / file).write_bytes(b"\xff" * 128 + data[128:])
    train, _ = find("svhn", tmp_path)[1].read(tmp_path)
    np.testing.assert_array_equal(train[0], written[0][0])
    (tmp_path / SVHN[0]).write_bytes(data[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"train_32x32\.mat: expected the official file, with md5 e26d\w+, got \w+$"):
        find("svhn", tmp_path)[1].read(tmp_path)


def test_a_member_of_an_archive_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path, make("cifar10"), kind="python", packed=True)
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz/cifar-10-batches-py/data_batch_1: expected"):
        find("cifar10", tmp_path)[1].read(tmp_path)
