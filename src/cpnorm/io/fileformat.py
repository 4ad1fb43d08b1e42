"""Write and read files: safetensors with a JSON header, written completely or not at all, and checked when read.

The tensors are those of a state dict, each stored once. The JSON, in the metadata of safetensors' own header under
"cpnorm", holds the version of the format, kind, modes, rank and path of every canonical layer, the form of every layer
that ``factorize`` rewrote, which keys are tied to which, the user's metadata, and checksums. Other readers of
safetensors can read these files, and plain safetensors files can be read here.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cpnorm.nn.canonical import PATHS

Shape = tuple[int, ...]

VERSION = 2  # version 1 has no rewritten layers; files without them are still written as version 1
LARGEST_HEADER = 8 * 2**20  # about 80,000 tensors; a larger header would take memory before it could be checked
TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin: a zip archive, or a pickle before 1.6


@dataclass(frozen=True)
class StoredLayer:
    """A canonical layer in a file: modes and rank from its tensors, kind and path from the JSON."""

    modes: Shape
    rank: int
    kind: str | None = None
    path: str = "auto"

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of its tensors, by the last part of their keys."""
        factors = {f"factors.{mode}": (size, self.rank) for mode, size in enumerate(self.modes)}
        return {"sigma": (), "lambdas": (self.rank,), **factors}


@dataclass(frozen=True)
class StoredForm:
    """A layer that ``factorize`` rewrote: a chain, a dense layer with a folded batch norm, or that norm."""

    form: str
    bias: bool = False
    rank: int = 1
    modes: Shape = ()


@dataclass(frozen=True)
class Content:
    """The contents of a file: the shapes of all keys, tied ones included, its layers, and the user's metadata."""

    path: Path
    shapes: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    layers: dict[str, StoredLayer] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, StoredForm] = field(default_factory=dict)
    channels_last: bool = False
    dilated: tuple[str, ...] = ()  # 1x1 convolutions that ``factorize`` gave a dilation, which makes them faster
    checksum: str | None = None  # of the tensors

    def source(self, key: str) -> str:
        """Return the key under which a tensor is stored."""
        return self.tied.get(key, key)


def join(name: str, last: str) -> str:
    """Return the key of a tensor of the module of this name, which is empty for the whole model."""
    return f"{name}.{last}" if name else last


# --- writing ------------------------------------------------------------------------------------------------------


def write(
    path: Path,
    state: Mapping[str, Any],
    layers: Mapping[str, StoredLayer],
    forms: Mapping[str, StoredForm],
    channels_last: bool,
    dilated: Sequence[str],
    metadata: Mapping[str, Any] | None,
) -> None:
    """Write a draft in the same folder, flush it to the disk, then rename it, so that ``path`` is always complete."""
    tensors, tied = _stored_once(state)
    described = {
        name: {"kind": layer.kind, "modes": list(layer.modes), "rank": layer.rank, "path": layer.path}
        for name, layer in layers.items()
    }
    header: dict[str, Any] = {"version": VERSION if forms else 1, "layers": described, "tied": tied}
    header |= {"metadata": dict(metadata or {}), "checksum": checksum(tensors)}
    if forms:
        header |= {"forms": {name: asdict(form) for name, form in forms.items()}, "channels_last": channels_last}
        header |= {"dilated": list(dilated)} if dilated else {}
    try:
        header["header_checksum"] = _header_checksum(header, {key: tuple(t.shape) for key, t in tensors.items()})
        text = json.dumps(header, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected metadata that can be written as JSON: {error}") from error

    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(draft, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)  # safetensors makes files readable by their owner only
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
            os.fsync(folder)  # so that the new name is on the disk
        finally:
            os.close(folder)


def _stored_once(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, and the keys tied to one of them."""
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
        overlaps = storage in storages  # safetensors refuses tensors that share memory
        storages.add(storage)
        stored[key] = value.clone(memory_format=torch.contiguous_format) if overlaps else value.contiguous()
    return stored, tied


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a CRC of the values of all tensors, in the order of their keys."""
    total = 0
    for key in sorted(tensors):
        values = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total = zlib.crc32(values.numpy(), total)  # type: ignore[arg-type]
    return f"{total:08x}"


def _header_checksum(header: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """Return a CRC of the JSON without the CRC itself, and of the names and shapes of the tensors."""
    rest = {key: value for key, value in header.items() if key != "header_checksum"}
    total = zlib.crc32(json.dumps([rest, shapes], sort_keys=True, allow_nan=False).encode())
    return f"{total:08x}"


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raise a ValueError if it is not one or is damaged."""
    with open(path, "rb") as file:
        start = file.read(8)
    if int.from_bytes(start, "little") > LARGEST_HEADER:
        if start.startswith(TORCH_SAVE):  # a small size may begin with the same bytes
            raise ValueError(
                f"{path} is a file of torch.save, not of safetensors: read it with torch.load(path, weights_only=True) "
                "and model.load_state_dict"
            )
        raise ValueError(f"{path} is not a safetensors file: its first 8 bytes are not the size of a header")
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def read_content(path: Path, reader: Any) -> Content:
    """Return the contents of the header, checked against the shapes of the tensors."""
    shapes = {key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()}  # noqa: SIM118 - no mapping
    metadata = reader.metadata() or {}
    text = metadata.get("cpnorm")
    if text is None and any('"header_checksum": "' in value for value in metadata.values()):
        raise ValueError(f"the header of {path} is damaged: its entry is not called cpnorm")
    if text is None:
        return Content(path, shapes, layers=_canonical_in(shapes))

    def require(true: object, what: str) -> None:
        if not true:
            raise ValueError(what)

    try:
        header = json.loads(text, parse_constant=lambda constant: require(False, f"{constant} is not JSON"))
        require(isinstance(header, dict) and type(header.get("version")) is int, "it has no version")
        require(
            header["version"] <= VERSION, f"format {header['version']} is newer than {VERSION}, which this cpnorm knows"
        )
        for name in ("tied", "layers", "metadata"):
            require(isinstance(header.get(name), dict), f"it has no {name}")
        if "header_checksum" in header:  # not in files of cpnorm 0.1
            require(
                header["header_checksum"] == _header_checksum(header, shapes), "its checksum differs: it is damaged"
            )
        for key, source in header["tied"].items():
            known = isinstance(source, str) and source in shapes and key not in shapes
            require(known, f"{key} is tied to a key that does not exist")
        shapes |= {key: shapes[source] for key, source in header["tied"].items()}
        layers = _canonical_in(shapes)
        for name, entry in header["layers"].items():
            require(name in layers, f"{name} is not in the file")
            require(isinstance(entry, dict) and entry.get("path") in PATHS, f"{name} has no path")
            require(isinstance(entry.get("kind"), str), f"{name} has no kind")
            has = list(layers[name].modes), layers[name].rank
            require((entry.get("modes"), entry.get("rank")) == has, f"modes and rank of {name} are really {has}")
            layers[name] = replace(layers[name], kind=entry["kind"], path=entry["path"])
        forms = {name: _form_in(name, entry, require) for name, entry in header.get("forms", {}).items()}
        dilated = header.get("dilated", [])
        require(isinstance(dilated, list) and all(isinstance(n, str) for n in dilated), "dilated is no list of names")
        check = header.get("checksum")
        require(check is None or isinstance(check, str), "its checksum is not a string")
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"the header of {path} cannot be trusted: {error}") from error
    last = header.get("channels_last") is True
    return Content(path, shapes, header["tied"], layers, header["metadata"], forms, last, tuple(dilated), check)


def _form_in(name: str, entry: Any, require: Callable[[object, str], None]) -> StoredForm:
    """Return the form of a rewritten layer; raise if the header lacks a part of it."""
    require(isinstance(entry, dict) and isinstance(entry.get("form"), str), f"{name} has no form")
    require(type(entry.get("bias")) is bool and type(entry.get("rank")) is int, f"{name} has no bias or rank")
    modes = entry.get("modes")
    require(isinstance(modes, list) and all(type(n) is int and 0 < n < 2**31 for n in modes), f"{name} has no modes")
    require(0 < entry["rank"] < 2**31, f"the rank of {name} is {entry['rank']}")
    return StoredForm(entry["form"], entry["bias"], entry["rank"], tuple(modes))


def _canonical_in(shapes: Mapping[str, Shape]) -> dict[str, StoredLayer]:
    """Return the canonical layers, recognised by the names and shapes of their tensors."""
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
