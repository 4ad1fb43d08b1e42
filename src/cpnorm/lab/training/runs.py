"""The folder of a run: its settings, metrics, checkpoint, network and record as files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

import cpnorm
from cpnorm.lab.data.digests import describe_change
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import read_lines, read_object, to_json
from cpnorm.lab.training.records import with_current_keys


class RunError(RuntimeError):
    """Raised for a run folder that cannot be used, with the reason."""


class InUseError(RunError):
    """Raised for a run that another process is working on."""


TRUNCATION_KEYS = ("truncation_settings", "compress")  # in config.json; the second up to version 0.1
START_FILES = ("config.json", "environment.json", "data.json", "cut.json", "start.safetensors")
SEALED_FILES = ("config.json", "environment.json", "data.json", "cut.json", "metrics.jsonl")  # by the record
FILES = (*START_FILES, "checkpoint.pt", "metrics.jsonl", "best.safetensors", "model.safetensors", "record.json")


class RunFolder:
    """One run on disk. Every file is replaced as a whole or not at all, so that a kill at any moment loses nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._created: list[Path] = []  # folders that did not exist before, innermost first

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def claimed(self, config: Config, extra: dict[str, Any] | None = None) -> Iterator[None]:
        """Hold the folder for this process and this config; raise if another process or config holds it."""
        try:
            self._created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self / ".lock").acquire(blocking=False)
        except Timeout as error:
            raise InUseError(f"{self.path} is in use by another process") from error
        except OSError as error:
            raise RunError(f"cannot use {self.path} as a run folder: {error.strerror}") from error
        with lock:
            settings = {**config.to_json(), **({"truncation_settings": extra} if extra else {})}
            if (self / "config.json").exists():
                self._check_same(settings)
            else:
                write_json(self / "config.json", settings)
            for name in FILES:  # left by a process that was killed
                for leftover in (*self.path.glob(f".{name}.*.tmp"), *self.path.glob(f".{name}.*.part")):
                    leftover.unlink(missing_ok=True)
            if self.record() is None:
                write_json(self / "environment.json", environment())
            else:
                (self / "checkpoint.pt").unlink(missing_ok=True)  # a kill at the end of finish() may leave it
            yield

    def _check_same(self, settings: dict[str, Any]) -> None:
        there = {**Config().to_json(), **self._settings()}  # older versions had fewer settings
        changed = [key for key in {**there, **settings} if there.get(key) != settings.get(key)]
        if changed:
            differences = ", ".join(f"{k}: {there.get(k)!r} there, {settings.get(k)!r} now" for k in sorted(changed))
            raise RunError(f"{self.path} holds a run with other settings ({differences})")

    def discard(self, names: Iterable[str]) -> None:
        """Remove these files, and the folders that ``claimed`` created if they are empty then."""
        for name in (*names, *([".lock"] if self._created else [])):
            (self / name).unlink(missing_ok=True)
        for folder in self._created:
            if any(folder.iterdir()):
                break
            folder.rmdir()

    def _settings(self) -> dict[str, Any]:
        values = read_json(self / "config.json")
        truncation = next((values.pop(key) for key in TRUNCATION_KEYS if key in values), None)
        return values if truncation is None else {**values, "truncation_settings": truncation}

    def config(self) -> Config:
        """Return the settings stored with the run."""
        if not (self / "config.json").exists():
            what = "it has no config.json" if self.path.is_dir() else "there is no such folder"
            raise RunError(f"{self.path} is not the folder of a run: {what}")
        values = read_json(self / "config.json")
        for key in TRUNCATION_KEYS:
            values.pop(key, None)
        try:
            return Config.from_json(values)
        except ValueError as error:
            raise RunError(f"{self / 'config.json'}: {error}") from error

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Save all that is needed to resume, bit for bit."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self / "checkpoint.pt", buffer.getvalue())

    def has_checkpoint(self) -> bool:
        """Return True if there is a state to resume from."""
        return (self / "checkpoint.pt").exists()

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """Return the last state saved, or None; no code from the file is executed."""
        path = self / "checkpoint.pt"
        if not self.has_checkpoint():
            return None
        try:
            _refuse_packed(path)
            return torch.load(path, map_location=device, weights_only=True)
        except Exception as error:
            raise RunError(f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write one line per epoch; the checkpoint has them too, so that this need not wait for the disk."""
        content = "".join(json.dumps(line) + "\n" for line in history).encode()
        write_atomically(self / "metrics.jsonl", content, durable=False)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the epochs so far."""
        path = self / "metrics.jsonl"
        try:
            return [line for _, line in read_lines(path)] if path.exists() else []
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def finish(self, model: nn.Module, record: dict[str, Any], best: nn.Module | None = None) -> None:
        """Write the trained network, the best one where it was kept, and the record; remove the checkpoint."""
        metadata = {"model": record["config"]["model"]}
        if best is not None:
            label = {"chosen": "best epoch on test data", "epoch": record["best_epoch"]}
            cpnorm.save(best, self / "best.safetensors", metadata=metadata | label)
        cpnorm.save(model, self / "model.safetensors", metadata=metadata)
        if (self / "metrics.jsonl").exists():
            write_atomically(self / "metrics.jsonl", (self / "metrics.jsonl").read_bytes())  # durable from now on
        write_sealed(self / "record.json", {**record, "files_sha256": self._checksums()})
        (self / "checkpoint.pt").unlink(missing_ok=True)

    def record(self) -> dict[str, Any] | None:
        """Return the record that ``finish`` wrote, or None; raise if a file has changed since then."""
        if not (self / "record.json").exists():
            return None
        values = read_json(self / "record.json")
        known, found = values.pop("files_sha256", {}), self._checksums()  # none in records of version 0.1
        for name in (name for name in known if found.get(name) != known[name]):
            raise RunError(f"{self / name} is damaged: it is not what it was at the end of the run")
        return with_current_keys(values)

    def _checksums(self) -> dict[str, str]:
        there = [name for name in SEALED_FILES if (self / name).exists()]
        return {name: hashlib.sha256((self / name).read_bytes()).hexdigest() for name in there}

    def keep_data(self, data: ImageSet) -> None:
        """Store which data the run is trained on; raise a RunError if it began with others."""
        if not data.sha256:
            return
        if change := describe_change(data, self.data().get("sha256")):
            raise RunError(f"{self.path} cannot be resumed: {change}")
        folder = None if data.folder is None else str(data.folder.resolve())
        about: dict[str, Any] = {"name": data.name, "folder": folder, "sha256": data.sha256}
        if data.name == "images":  # of which the name says nothing
            about |= {"shape": list(data.train_images.shape[1:]), "classes": list(data.classes)}
        write_json(self / "data.json", about)

    def data(self) -> dict[str, Any]:
        """Return the name, the folder and the SHA-256 of the data of the run; empty if none were stored."""
        return read_json(self / "data.json") if (self / "data.json").exists() else {}


def environment() -> dict[str, Any]:
    """Return versions, hardware and commit."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpnorm": cpnorm.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


@cache
def _commit() -> str | None:
    """Return the commit of the source tree, or $CPNORM_COMMIT for a copy without its history."""
    if "CPNORM_COMMIT" in os.environ:
        return os.environ["CPNORM_COMMIT"]

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file as a whole: a reader, or the next start after a kill, finds the old content or the new.

    With ``durable`` this holds after a power cut, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically."""
    write_atomically(path, (to_json(value, indent=1) + "\n").encode())


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write an object with a checksum of it, which ``read_json`` compares."""
    write_json(path, {**value, "seal": _checksum(value)})


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, without its checksum; the error names the file."""
    try:
        values = read_object(path)
    except ValueError as error:
        raise RunError(str(error)) from error
    if "seal" in values and values.pop("seal") != _checksum(values):
        raise RunError(f"{path} is damaged: its content does not have the checksum that was written with it")
    return values


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def _refuse_packed(path: Path) -> None:
    """Raise for a compressed archive, which torch writes none of and which could fill the memory, or a damaged one."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
        packed = packed or sum(m.file_size for m in members) > path.stat().st_size
        damaged = None if packed else archive.testzip()  # torch itself compares no checksums
    if packed:
        raise ValueError("it claims to hold more than its own size")
    if damaged is not None:
        raise ValueError(f"its part {damaged!r} is damaged")
