"""Files that are wrong, truncated, hostile or noise: always a ValueError, in little time and memory."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.io import savemat

from cpnorm.lab.data.formats import (
    LIMIT,
    expect_mat,
    naming,
    parse_idx,
    parse_mat,
    parse_pickle,
    read_archive,
    read_file,
)
from cpnorm.lab.data.official import MD5, parse_cifar_binary, parse_cifar_pickle
from official_files import cifar_pickle, cifar_rows, idx, make, write_archive

IMAGES, LABELS = (array[:3] for array in make("cifar10")[0])


def mat(compressed: bool = False, **variables: object) -> bytes:
    stream = io.BytesIO()
    savemat(stream, variables, do_compression=compressed)
    return stream.getvalue()


VALID = {
    "idx": (lambda data: parse_idx(data, 3), idx(IMAGES[:, 0])),
    "binary": (parse_cifar_binary, cifar_rows(IMAGES, LABELS)),
    "pickle": (lambda data: parse_cifar_pickle(data, "data_batch_1"), cifar_pickle(IMAGES, LABELS)),
    "mat": (lambda data: parse_mat(expect_mat(data, MD5["test_32x32.mat"], ""), ["X", "y"]), mat(X=IMAGES, y=LABELS)),
}


@pytest.fixture(autouse=True, scope="module")
def known_checksums() -> Iterator[None]:
    """The valid pickle and MATLAB file count as official ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("data_batch_1", "pickle"), ("test_32x32.mat", "mat")):
            patch.setitem(MD5, name, hashlib.md5(VALID[kind][1]).hexdigest())
        yield


@pytest.mark.parametrize("kind", VALID)
def test_valid_content_is_read(kind: str) -> None:
    parse(kind, VALID[kind][1])


def parse(kind: str, data: bytes) -> object:
    with naming(Path("some.file")):
        return VALID[kind][0](data)


def value_error_or_value(read: Callable[[], object]) -> None:
    """Any other exception fails the test."""
    with contextlib.suppress(ValueError):
        read()


@pytest.mark.parametrize("kind", VALID)
@given(noise=st.binary(max_size=300))
def test_noise_is_a_value_error(kind: str, noise: bytes) -> None:
    with pytest.raises(ValueError, match=r"some\.file: "):
        parse(kind, noise)
    for start in (4, 124, 128, 136):  # noise after the part that says what kind of file this is
        value_error_or_value(lambda start=start: parse(kind, VALID[kind][1][:start] + noise))


@pytest.mark.parametrize("kind", VALID)
@given(st.data())
def test_truncated_is_a_value_error(kind: str, data: st.DataObject) -> None:
    valid = VALID[kind][1]
    cut = data.draw(st.integers(1, len(valid) - 1))
    if kind == "binary" and cut % 3073 == 0:
        cut += 1
    with pytest.raises(ValueError, match=r"some\.file: "):
        parse(kind, valid[:cut])


@pytest.mark.parametrize("kind", VALID)
@given(st.data())
def test_damaged_is_a_value_error_or_read(kind: str, data: st.DataObject) -> None:
    valid = VALID[kind][1]
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, min(300, len(valid) - 1)), st.integers(0, len(valid) - 1)))
        damaged[at] = data.draw(st.integers(0, 255))
    value_error_or_value(lambda: parse(kind, bytes(damaged)))


@given(noise=st.binary(max_size=2000))
@example(noise=b"")
def test_noisy_archives(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    for content in (noise, gzip.compress(noise), gzip.compress(noise.ljust(512, b"\0"))):
        (folder / "a.tar.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.tar\.gz: "):
            read_archive(folder / "a.tar.gz", ["wanted"])


@given(st.data())
def test_damaged_archives(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.tar.gz"
    write_archive(path, {"other": b"1" * 600, "wanted": b"2" * 600})
    damaged = bytearray(gzip.decompress(path.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(gzip.compress(bytes(damaged)[: data.draw(st.integers(1, len(damaged)))]))
    value_error_or_value(lambda: read_archive(path, ["wanted"]))


# What is read is what was written -------------------------------------------------------------------------------------


def test_mat_variables_are_those_asked_for() -> None:
    data = mat(True, before="text", X=IMAGES, y=LABELS)
    assert parse_mat(data, ["X"]).keys() == {"X"}
    np.testing.assert_array_equal(parse_mat(data, ["X"])["X"], IMAGES)
    with pytest.raises(ValueError, match="expected a variable z, found none"):
        parse_mat(data, ["z"])
    with pytest.raises(ValueError, match="expected a MATLAB 5 file, reading it raised"):
        parse_mat(b"<html>" * 99, ["X"])


@pytest.mark.parametrize("order", ["C", "F"])
def test_pickled_arrays_as_any_python_writes_them(order: str) -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        value = parse_pickle(pickle.dumps({"a": np.asarray(rows, order=order)}, protocol=min(protocol, 4)))
        np.testing.assert_array_equal(value["a"], rows)
    value = parse_pickle(cifar_pickle(rows, np.arange(3)))
    np.testing.assert_array_equal(value["data"], rows)
    assert value["labels"] == [0, 1, 2]


# Hostile --------------------------------------------------------------------------------------------------------------


class Exploit:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch exploited",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_execute_nothing(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({"data": Exploit(), "labels": []}, protocol)
    with pytest.raises(ValueError, match=r"expected nothing but arrays, got \w+ system$"):
        parse_pickle(content)
    with pytest.raises(ValueError, match="expected the official file"):
        parse_cifar_pickle(content, "data_batch_1")
    assert not list(tmp_path.iterdir())


def nested_key() -> bytes:
    """A dict key whose hash takes 2**60 steps: ((), ()), then two of that, and so on."""
    levels = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    return b"\x80\x02})" + levels + b"Ns."


BOMBS = {
    "shared tuples": b"\x80\x02)" + b"q\x00h\x00\x86" * 30 + b".",  # 2**30 of them, were they printed
    "nested tuples": b"\x80\x02)" + b"\x85" * 2000 + b".",
    "memo": b"\x80\x02]r\xff\xff\xff\x7f.",  # an index of 2**31: Python's own unpickler takes 32 GiB for it
    "string": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "nested key": nested_key(),
    "array": b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86tR.",
    "opcodes": b"\x80\x02" + b"]" * 10_000_000,
}


def peak_memory(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"\w"):
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs(bomb: str) -> None:
    assert peak_memory(lambda: parse_cifar_pickle(BOMBS[bomb], "data_batch_1")) < 2**25
    with pytest.raises(ValueError, match=r"^expected the official file, with md5 \w{32}, got \w{32}$"):
        parse_cifar_pickle(BOMBS[bomb], "data_batch_1")


def test_idx_that_promises_too_much() -> None:
    header = struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    with pytest.raises(ValueError, match="expected 7922816"):
        parse_idx(header + b"123", 3)


@pytest.mark.parametrize("number", [0, 8, 19, 256, 65535])
def test_mat_of_a_type_that_does_not_exist(number: int) -> None:
    """SciPy (1.17) would read foreign memory: such a file never gets there."""
    data = VALID["mat"][1]
    at = data.index(struct.pack("<2I", 2, IMAGES.size))
    with pytest.raises(ValueError, match="expected the official file"):
        parse("mat", data[:at] + struct.pack("<I", number) + data[at + 4 :])


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("cpnorm.lab.data.formats.LIMIT", 2**20)
    return 2**20


def test_what_unpacks_without_end(tmp_path: Path, low_limit: int) -> None:
    for name, read in (("a.gz", read_file), ("a.tar.gz", lambda path: read_archive(path, ["a"]))):
        path = tmp_path / name
        path.write_bytes(gzip.compress(bytes(50 * low_limit)))
        assert peak_memory(lambda read=read, path=path: read(path)) < 4 * low_limit
        with pytest.raises(ValueError, match=f"{name}: expected at most {low_limit} bytes, got more"):
            read(path)


@pytest.mark.slow
def test_the_largest_file_that_is_read(tmp_path: Path) -> None:
    for size, fits in ((LIMIT, True), (LIMIT + 1, False)):
        with gzip.open(tmp_path / "a.gz", "wb", compresslevel=1) as stream:
            stream.write(bytes(size))
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="expected at most"):
            assert len(read_file(tmp_path / "a.gz")) == LIMIT


def test_archives_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind in (("../outside", tarfile.REGTYPE), ("wanted", tarfile.SYMTYPE), ("dev", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member, io.BytesIO())
    with pytest.raises(ValueError, match="expected wanted in it, found no such file"):
        read_archive(path, ["wanted"])
    assert list(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "outside").exists()
