"""JSON as others can read it, and readers for JSON files that may be too large, too deep or cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST = 2**24  # bytes of a file of one object; our own have a few hundred thousand
LARGEST_OF_LINES = 2**29  # bytes of a file of records, of which a long one has a hundred thousand


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; anything else raises a ValueError that names the file."""
    try:
        return parse_object(read_bytes(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the JSON object of every line of a file; an unfinished last line is skipped.

    Raises:
        ValueError: a line is not a JSON object; the message names the file and the line.
    """
    for number, text in enumerate(whole_lines(read_bytes(path, LARGEST_OF_LINES)), 1):
        if text.strip():
            try:
                value = parse_object(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, value


def whole_lines(content: bytes) -> list[bytes]:
    """Return all lines but an unfinished last one, as a kill or a full disk leaves it."""
    *lines, last = content.split(b"\n")
    try:
        parse_object(last)
    except ValueError:
        return lines
    return [*lines, last]  # whole, only its line end is missing


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object that a text holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: NaN and infinity, as a diverged run has them, become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a file; raise a ValueError if it has more than ``largest`` bytes."""
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"expected at most {largest} bytes in {path}, got more")
    return content
