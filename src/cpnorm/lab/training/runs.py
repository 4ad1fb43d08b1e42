"""A run's folder: config, environment, data and record as JSON, metrics.jsonl, checkpoint.pt, model.safetensors."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import zipfile
from collections.abc import Iterator
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


class RunError(RuntimeError):
    """A run folder that cannot be used, with the reason."""


class InUseError(RunError):
    """A run that another process is at work on."""


FILES = (
    "config.json",
    "environment.json",
    "data.json",
    "checkpoint.pt",
    "metrics.jsonl",
    "cut.json",
    "start.safetensors",
    "model.safetensors",
    "record.json",
)


class RunFolder:
    """One run on disk. Every file is replaced as a whole or not at all, so that a kill at any moment loses nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def claimed(self, config: Config, extra: dict[str, Any] | None = None) -> Iterator[None]:
        """Hold the folder for this process and this config; another of either is an error."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self / ".lock").acquire(blocking=False)
        except Timeout as error:
            raise InUseError(f"{self.path} is in use by another process") from error
        except OSError as error:
            raise RunError(f"cannot use {self.path} as a run folder: {error.strerror}") from error
        with lock:
            settings = {**config.to_json(), **({"compress": extra} if extra else {})}
            if (self / "config.json").exists():
                self._check_same(settings)
            else:
                write_json(self / "config.json", settings)
            for name in FILES:  # of a process that was killed
                for leftover in (*self.path.glob(f".{name}.*.tmp"), *self.path.glob(f".{name}.*.part")):
                    leftover.unlink(missing_ok=True)
            if self.record() is None:
                write_json(self / "environment.json", environment())
            else:
                (self / "checkpoint.pt").unlink(missing_ok=True)  # killed in the last moment of finish()
            yield

    def _check_same(self, settings: dict[str, Any]) -> None:
        there = {**Config().to_json(), **read_json(self / "config.json")}  # of an older version: without newer settings
        changed = [key for key in {**there, **settings} if there.get(key) != settings.get(key)]
        if changed:
            differences = ", ".join(f"{k}: {there.get(k)!r} there, {settings.get(k)!r} now" for k in sorted(changed))
            raise RunError(f"{self.path} holds a run with other settings ({differences})")

    def config(self) -> Config:
        """The settings stored with the run."""
        if not (self / "config.json").exists():
            raise RunError(f"{self.path} holds no run: config.json is missing")
        values = read_json(self / "config.json")
        values.pop("compress", None)
        try:
            return Config.from_json(values)
        except ValueError as error:
            raise RunError(f"{self / 'config.json'}: {error}") from error

    def keep_data(self, data: ImageSet) -> None:
        """Store which data the run is trained on; raise a RunError where it began with others."""
        if not data.sha256:
            return
        if change := describe_change(data, self.data().get("sha256")):
            raise RunError(f"{self.path} cannot go on: {change}")
        folder = None if data.folder is None else str(data.folder.resolve())
        write_json(self / "data.json", {"name": data.name, "folder": folder, "sha256": data.sha256})

    def data(self) -> dict[str, Any]:
        """Return the name, the folder and the SHA-256 of the data of the run; empty where none were stored."""
        return read_json(self / "data.json") if (self / "data.json").exists() else {}

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Everything needed to go on, bit for bit."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self / "checkpoint.pt", buffer.getvalue())

    def has_checkpoint(self) -> bool:
        """Whether there is a state to go on from."""
        return (self / "checkpoint.pt").exists()

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """The last state saved, or None; runs no code from the file."""
        path = self / "checkpoint.pt"
        if not self.has_checkpoint():
            return None
        try:
            _refuse_packed(path)
            return torch.load(path, map_location=device, weights_only=True)
        except Exception as error:
            raise RunError(f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """One line an epoch; the checkpoint has them too, so that nobody waits for the disk."""
        content = "".join(json.dumps(line) + "\n" for line in history).encode()
        write_atomically(self / "metrics.jsonl", content, durable=False)

    def metrics(self) -> list[dict[str, Any]]:
        """The epochs so far."""
        path = self / "metrics.jsonl"
        try:
            return read_lines(path) if path.exists() else []
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def finish(self, model: nn.Module, record: dict[str, Any]) -> None:
        """The trained model and the record of the run; the checkpoint is no longer needed."""
        cpnorm.save(model, self / "model.safetensors", metadata={"model": record["config"]["model"]})
        write_json(self / "record.json", record)
        (self / "checkpoint.pt").unlink(missing_ok=True)

    def record(self) -> dict[str, Any] | None:
        """What finish() wrote, or None."""
        return read_json(self / "record.json") if (self / "record.json").exists() else None


def environment() -> dict[str, Any]:
    """Versions, hardware and commit."""
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
    """Of the source tree when it was first asked for; $CPNORM_COMMIT speaks for a copy without its history."""
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
    """Replace a file as a whole: a reader, or the next start after a kill, sees the old content or the new.

    If ``durable``, so does the next start after a power cut.
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
    """Readable JSON, atomically."""
    write_atomically(path, (to_json(value, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """With an error that names the file."""
    try:
        return read_object(path)
    except ValueError as error:
        raise RunError(str(error)) from error


def _refuse_packed(path: Path) -> None:
    """torch packs nothing: a file that says it unpacks to more than it holds would only take all memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if (
        any(m.compress_type != zipfile.ZIP_STORED for m in members)
        or sum(m.file_size for m in members) > path.stat().st_size
    ):
        raise ValueError("it claims to hold more than its own size")
