"""The file: safetensors and JSON in one, written whole or not at all, and read without trust in what it says.

The tensors are those of a state dict, each stored once. The JSON, in the metadata of safetensors' own header under
"cpnorm", holds the version of the format, kind, modes, rank and path of every canonical layer, which keys are tied to
which, and the user's own metadata. Readers of safetensors can read these files, and plain ones are read here.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cpnorm.nn.layers import PATHS

Shape = tuple[int, ...]

VERSION = 1
LARGEST_HEADER = 8 * 2**20  # some 80,000 tensors; a larger one is no model's, and would cost memory to find out


@dataclass(frozen=True)
class StoredLayer:
    """A canonical layer in a file: modes and rank as its tensors have them, kind and path as the JSON says."""

    modes: Shape
    rank: int
    kind: str | None = None
    path: str = "auto"

    def shapes(self) -> dict[str, Shape]:
        """Of its tensors, by the last part of their keys."""
        factors = {f"factors.{mode}": (size, self.rank) for mode, size in enumerate(self.modes)}
        return {"sigma": (), "lambdas": (self.rank,), **factors}


@dataclass(frozen=True)
class Content:
    """What a file holds: the shapes of all keys, tied ones among them, its canonical layers, the user's metadata."""

    path: Path
    shapes: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    layers: dict[str, StoredLayer] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def source(self, key: str) -> str:
        """The key a tensor is stored under."""
        return self.tied.get(key, key)


def join(name: str, last: str) -> str:
    """The key of a tensor of the module of this name, which is empty for the whole model."""
    return f"{name}.{last}" if name else last


# --- writing ------------------------------------------------------------------------------------------------------


def write(
    path: Path, state: Mapping[str, Any], layers: Mapping[str, StoredLayer], metadata: Mapping[str, Any] | None
) -> None:
    """Beside it first, then safely on the disk, then under its name: there is never half a file at ``path``."""
    tensors, tied = _stored_once(state)
    described = {
        name: {"kind": layer.kind, "modes": list(layer.modes), "rank": layer.rank, "path": layer.path}
        for name, layer in layers.items()
    }
    content = {"version": VERSION, "layers": described, "tied": tied, "metadata": dict(metadata or {})}
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected metadata that can be written as JSON: {error}") from error

    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(draft, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)  # safetensors' own files are for their owner only
        save_file(tensors, draft, {"format": "pt", "cpnorm": text})
        os.chmod(draft, mode)
        with open(draft, "rb+") as file:
            if (size := int.from_bytes(file.read(8), "little")) > LARGEST_HEADER:
                raise ValueError(f"expected at most {LARGEST_HEADER} bytes of names and metadata, got {size}")
            os.fsync(file.fileno())
        os.replace(draft, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)


def _stored_once(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and the keys tied to one of them."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[object, str] = {}
    storages: set[object] = set()
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = f"a {value.layout} tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"expected a dense tensor with values, got {kind} for {key}")
        where = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and where in owners:
            tied[key] = owners[where]
            continue
        owners[where] = key
        storage = (value.device, value.untyped_storage().data_ptr())
        overlaps = storage in storages  # another part of the same memory, which safetensors refuses
        storages.add(storage)
        stored[key] = value.clone(memory_format=torch.contiguous_format) if overlaps else value.contiguous()
    return stored, tied


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """safe_open, with every complaint about the file as a ValueError."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise ValueError(f"{path} is not a safetensors file of ours: its header claims to take {size} bytes")
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def read_content(path: Path, reader: Any) -> Content:
    """What the header says, checked against the tensors."""
    shapes = {key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()}  # noqa: SIM118 - no mapping
    text = (reader.metadata() or {}).get("cpnorm")
    if text is None:
        return Content(path, shapes, layers=_canonical_in(shapes))

    def insist(true: object, what: str) -> None:
        if not true:
            raise ValueError(what)

    try:
        said = json.loads(text, parse_constant=lambda constant: insist(False, f"{constant} is not JSON"))
        insist(isinstance(said, dict) and type(said.get("version")) is int, "it has no version")
        insist(said["version"] <= VERSION, f"format {said['version']} is newer than this cpnorm, which knows {VERSION}")
        for name in ("tied", "layers", "metadata"):
            insist(isinstance(said.get(name), dict), f"it has no {name}")
        for key, source in said["tied"].items():
            tells = isinstance(source, str) and source in shapes and key not in shapes
            insist(tells, f"{key} is tied to what is not there")
        shapes |= {key: shapes[source] for key, source in said["tied"].items()}
        layers = _canonical_in(shapes)
        for name, entry in said["layers"].items():
            insist(name in layers, f"{name} is not there")
            insist(isinstance(entry, dict) and entry.get("path") in PATHS, f"{name} has no path")
            insist(isinstance(entry.get("kind"), str), f"{name} has no kind")
            has = list(layers[name].modes), layers[name].rank
            insist((entry.get("modes"), entry.get("rank")) == has, f"modes and rank of {name} are really {has}")
            layers[name] = replace(layers[name], kind=entry["kind"], path=entry["path"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of {path} cannot be trusted: {error}") from error
    return Content(path, shapes, said["tied"], layers, said["metadata"])


def _canonical_in(shapes: Mapping[str, Shape]) -> dict[str, StoredLayer]:
    """Canonical layers by the names and shapes of their tensors."""
    layers = {}
    for key, shape in shapes.items():
        name, _, last = key.rpartition(".")
        if last != "lambdas" or len(shape) != 1 or shape[0] < 1 or shapes.get(join(name, "sigma")) != ():
            continue
        factors: list[Shape] = []
        while (factor := shapes.get(join(name, f"factors.{len(factors)}"))) is not None:
            factors.append(factor)
        if len(factors) > 1 and all(len(factor) == 2 and factor[1] == shape[0] for factor in factors):
            layers[name] = StoredLayer(tuple(factor[0] for factor in factors), shape[0])
    return layers
