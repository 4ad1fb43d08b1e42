"""JSON for anyone to read, and files of it as anyone may have left them.

That is: too large, too deep, of another kind, or cut off in their last line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST = 2**24  # bytes of a file of one object; our own have a few hundred thousand
LARGEST_OF_LINES = 2**29  # bytes of a file of records, of which a long one has a hundred thousand


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object a file holds; anything else is a ValueError that names the file."""
    try:
        return parse_object(read_bytes(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one in each line; a bad one is a ValueError that names file and line."""
    lines = []
    for number, text in enumerate(whole_lines(read_bytes(path, LARGEST_OF_LINES)), 1):
        try:
            if text.strip():
                lines.append(parse_object(text))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return lines


def whole_lines(content: bytes) -> list[bytes]:
    """All lines but a last one that has no end: it was being written when the process was killed or the disk full."""
    *lines, last = content.split(b"\n")
    try:
        parse_object(last)
    except ValueError:
        return lines
    return [*lines, last]  # whole, though nobody ended it


def parse_object(text: bytes) -> dict[str, Any]:
    """One JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """For anyone to read: NaN and infinity, as a diverged run has them, are no JSON and become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a file, or raise a ValueError where it has more than ``largest`` bytes."""
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"expected at most {largest} bytes in {path}, got more")
    return content
