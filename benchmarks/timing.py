"""Timing by ratios inside one run: competitors take turns, so that a busy machine slows them all alike."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(runs: Mapping[str, Callable[[], Any]], rounds: int = 5, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every run in every round; each round runs all of them, in turn from either end."""
    for _ in range(warmup):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs) if turn % 2 == 0 else list(reversed(runs))
        for name in names:
            _synchronize()
            start = time.perf_counter()
            runs[name]()
            _synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> dict[str, float]:
    """How often ``base`` fits into ``name``, round by round: above 1 where ``name`` is slower."""
    return spread(one / other for one, other in zip(seconds[name], seconds[base], strict=True))


def machine() -> dict[str, Any]:
    """Hardware and versions, to be stored with every result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("cpnorm", "numpy", "tensorly", "tensorly-torch", "onnxruntime"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "versions": versions,
    }


def write(name: str, results: Mapping[str, Any]) -> Path:
    """Stores the results with the machine and the commit they come from as ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"date": time.strftime("%Y-%m-%d"), "commit": _commit(), "machine": machine(), "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
