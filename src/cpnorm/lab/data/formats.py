"""File formats read as bytes that nobody vouches for: every size is checked before memory is taken for it.

A reader returns what the file says or raises a ValueError about what is wrong with it. None writes to disk, and none
executes anything: pickles are interpreted here, as data.
"""

from __future__ import annotations

import gzip
import io
import math
import pickletools
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


def plain_or_packed(path: Path) -> Path:
    """The file itself, or where only that exists, the same file with .gz behind its name."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.is_file() and not path.is_file() else path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever is wrong with the content of a file becomes a ValueError that names the file."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_file(path: Path) -> bytes:
    """The bytes of a file, plain or packed; an error where they are more than LIMIT."""
    path = plain_or_packed(path)
    with naming(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        data = stream.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise ValueError(f"expected at most {LIMIT} bytes, got more")
        return data


def read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """These members of a .tar.gz, read in memory: no path in the archive is ever used as one."""
    found = {}
    data = io.BytesIO(read_file(path))
    # As a stream ("r|") it is read forwards only: offsets in a crafted header cannot send it round in circles.
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
    """An idx file of unsigned bytes: its header says how many dimensions follow, and how large they are."""
    magic = bytes([0, 0, 8, order])
    if data[:4] != magic:
        raise ValueError(f"expected an idx file that starts with {magic.hex()}, got {data[:4].hex()}")
    start = 4 + 4 * order
    if len(data) < start:
        raise ValueError(f"expected a header of {start} bytes, got {len(data)}")
    shape = struct.unpack_from(f">{order}I", data, 4)
    if len(data) != start + math.prod(shape):
        raise ValueError(f"expected {start + math.prod(shape)} bytes for the shape {shape} it tells, got {len(data)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


class PickledArray:
    """Stands for a numpy array in a pickle; becomes one only when asked, and only if it holds rows of bytes."""

    state: Any = None

    def rows(self, length: int) -> NDArray[np.uint8]:  # (N, length)
        match self.state:
            case (_, (int(), int(width)), "u1", int(fortran), str(raw)) if width == length:
                values = np.frombuffer(raw.encode("latin-1"), np.uint8)
                if self.state[1][0] * length == len(values):
                    return values.reshape((-1, length), order="F" if fortran else "C")
        raise ValueError(f"expected an array of unsigned bytes in rows of {length}")


def parse_pickle(data: bytes) -> Any:
    """The value of a pickle of dicts, lists, tuples, strings, numbers and arrays of bytes; anything else is refused.

    Python's own unpickler looks names up and calls what it finds, and even with that forbidden a few bytes can make it
    take all memory. Here strings stay str (bytes as latin-1), arrays stay a PickledArray, and work is linear in size.
    """
    try:
        return _run_pickle(data)
    except (IndexError, KeyError, TypeError, OverflowError, Warning) as error:  # a warning may have been made an error
        raise ValueError(f"expected a pickle, it breaks with {type(error).__name__}") from error


def _run_pickle(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count > 100_000:  # an official batch has 30 thousand
            raise ValueError("expected a pickled batch, this pickle is far too long for one")
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "BINSTRING" | "SHORT_BINSTRING" | "BINUNICODE":
                stack.append(argument)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(opcode.name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                _take(list, stack[-2]).append(stack.pop())
            case "APPENDS":
                items = since_mark()
                _take(list, stack[-1]).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _take(dict, stack[-1])[_take(str, key)] = value  # hashing a nested tuple may take forever
            case "SETITEMS":
                items = since_mark()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    _take(dict, stack[-1])[_take(str, key)] = value
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(argument)
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                match function:
                    case "numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct":
                        stack.append(PickledArray())
                    case "numpy dtype" | "_codecs encode":  # the name of the type; a str that stands for bytes
                        stack.append(_take(str, arguments[0]))
                    case _:
                        raise ValueError(f"expected nothing but arrays, got a call of {str(function)[:80]}")
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], PickledArray):
                    stack[-1].state = state
                elif stack[-1] != "u1":
                    raise ValueError("expected nothing but arrays of bytes")
            case name:
                raise ValueError(f"expected nothing but dicts, lists and arrays, got the opcode {name}")
    raise ValueError("the pickle has no end")


def _take(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__} in the pickle, got a {type(value).__name__}")
    return value


MAT_MATRIX, MAT_COMPRESSED = 14, 15
MAT_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}


def parse_mat(data: bytes, names: set[str]) -> dict[str, NDArray[Any]]:
    """These numeric variables of a MATLAB 5 file (MathWorks' "MAT-File Format").

    SciPy reads such files too, but a type number that does not exist makes it (1.17) read foreign memory and crash.
    """
    if data[124:128] != b"\x00\x01IM":
        raise ValueError("expected a little-endian MATLAB 5 file")
    found: dict[str, NDArray[Any]] = {}
    at, left = 128, LIMIT
    while at < len(data) and found.keys() != names:
        kind, content, at = _mat_element(memoryview(data), at)
        if kind == MAT_COMPRESSED:
            inflater = zlib.decompressobj()
            inflated = inflater.decompress(content, left + 1)
            left -= len(inflated)
            if left < 0:
                raise ValueError(f"expected at most {LIMIT} bytes, got more")
            if not inflater.eof:
                raise ValueError("the file is cut short")
            kind, content, _ = _mat_element(memoryview(inflated), 0)
        if kind != MAT_MATRIX:
            raise ValueError(f"expected a variable, got an element of type {kind}")
        _, _, after = _mat_element(content, 0)  # flags: class and complexity, which the stored type tells as well
        _, dimensions, after = _mat_element(content, after)
        _, name, after = _mat_element(content, after)
        if (title := bytes(name).decode("latin-1")) in names:
            found[title] = _mat_array(*_mat_element(content, after)[:2], bytes(dimensions))
    missing = sorted(names - found.keys())
    if missing:
        raise ValueError(f"expected a variable {missing[0]}, found none")
    return found


def _mat_element(data: memoryview, at: int) -> tuple[int, memoryview, int]:
    """Type and content of the element that begins here, and where the next one begins."""
    if at + 8 > len(data):
        raise ValueError("the file is cut short")
    kind, size = struct.unpack_from("<II", data, at)
    start = at + 8
    if kind >> 16:  # up to four bytes share the eight of their own tag
        kind, size, start = kind & 0xFFFF, min(kind >> 16, 4), at + 4
    if start + size > len(data):
        raise ValueError("the file is cut short")
    padding = 0 if kind == MAT_COMPRESSED else -(start + size - at) % 8
    return kind, data[start : start + size], start + size + padding


def _mat_array(kind: int, content: memoryview, dimensions: bytes) -> NDArray[Any]:
    if kind not in MAT_TYPES:
        raise ValueError(f"expected numbers, got data of type {kind}")
    dtype = np.dtype(MAT_TYPES[kind])
    shape = struct.unpack(f"<{len(dimensions) // 4}I", dimensions[: len(dimensions) // 4 * 4])
    if not 1 <= len(shape) <= 4 or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"expected a variable of shape {shape[:4]}, got {len(content)} bytes of {dtype}")
    return np.frombuffer(content, dtype).reshape(shape, order="F")
