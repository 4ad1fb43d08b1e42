"""Read the file formats of the official data sets without trusting the files.

Every reader returns what the file holds or raises a ValueError that says what is wrong with it. None writes to disk and
none executes anything. idx files and archives are safe to read whatever they hold. Pickles and MATLAB files are not:
a few bytes can make the standard readers use all memory or crash. Both are therefore read only after `expect_md5`
has found a checksum that is known, and pickles by an unpickler that can rebuild numpy arrays and nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 2**28  # bytes out of one file; the largest official one, SVHN's training set, holds 225 million
MAT_HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"  # text, then the version and the byte order


def plain_or_packed(path: Path) -> Path:
    """Return the path, or that of the same file with ``.gz`` appended if only that one exists."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.is_file() and not path.is_file() else path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn every error about the content of a file into a ValueError that names the file."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_file(path: Path) -> bytes:
    """Return the bytes of a file, plain or packed; raise where there are more than LIMIT."""
    path = plain_or_packed(path)
    with naming(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        data = stream.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise ValueError(f"expected at most {LIMIT} bytes, got more")
        return data


def read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return these members of a .tar.gz, read in memory: no path in the archive is ever used as one."""
    found = {}
    data = io.BytesIO(read_file(path))
    # As a stream ("r|") it is read forwards only: offsets in a crafted header cannot make it loop.
    with naming(path), tarfile.open(fileobj=data, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name in names and member.isfile() and not member.issparse():
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                found[name] = content.read()
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"expected {missing[0]} in it, found no such file")
    return {name: found[name] for name in names}


def parse_idx(data: bytes, order: int) -> NDArray[np.uint8]:
    """Return the array of an idx file of unsigned bytes, whose header holds the number and sizes of its dimensions."""
    magic = bytes([0, 0, 8, order])
    if data[:4] != magic:
        raise ValueError(f"expected an idx file that starts with {magic.hex()}, got {data[:4].hex()}")
    start = 4 + 4 * order
    if len(data) < start:
        raise ValueError(f"expected a header of {start} bytes, got {len(data)}")
    shape = struct.unpack_from(f">{order}I", data, 4)
    if len(data) != start + math.prod(shape):
        raise ValueError(f"expected {start + math.prod(shape)} bytes for the shape {shape}, got {len(data)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def md5(data: bytes) -> str:
    """Return the MD5 checksum, by which the publishers of the data sets name their files."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def expect_md5(data: bytes, known: str) -> bytes:
    """Return the data if they have the known checksum; raise a ValueError otherwise."""
    if md5(data) != known:
        raise ValueError(f"expected the official file, with md5 {known}, got {md5(data)}")
    return data


class ArrayUnpickler(pickle.Unpickler):
    """Rebuild dicts, lists, strings, numbers and numpy arrays; refuse every other name a pickle asks for."""

    ALLOWED = ("numpy ndarray", "numpy dtype", "_codecs encode")

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module} {name}"
        if wanted in ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"):
            return np.empty(0).__reduce__()[0]  # numpy moved it, and warns where it is asked for by its old name
        if wanted not in self.ALLOWED:
            raise ValueError(f"expected nothing but arrays, got {wanted[:80]}")
        return super().find_class(module, name)


def parse_pickle(data: bytes) -> Any:
    """Return the value of a pickle of known content, with Python 2's strings as str; nothing is executed."""
    try:
        return ArrayUnpickler(io.BytesIO(data), encoding="latin-1").load()
    except ValueError:
        raise
    except Exception as error:  # whatever the opcodes of a damaged pickle run into
        raise ValueError(f"expected a pickle of arrays, reading it raised {type(error).__name__}") from error


def parse_mat(data: bytes, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return these variables of a MATLAB 5 file of known content."""
    from scipy.io import loadmat

    try:
        found = loadmat(io.BytesIO(data), variable_names=names)
    except Exception as error:
        raise ValueError(f"expected a MATLAB 5 file, reading it raised {type(error).__name__}") from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"expected a variable {missing[0]}, found none")
    return {name: found[name] for name in names}


def expect_mat(data: bytes, known: str, known_body: str) -> bytes:
    """Return a MATLAB file of known content with a header that is ours.

    The content is known by the checksum of the official file, or by that of what follows the header when the same
    variables were saved again without compression: the header holds the date of saving.
    """
    body = data[len(MAT_HEADER) :]
    return MAT_HEADER + body if md5(body) == known_body else expect_md5(data, known)
