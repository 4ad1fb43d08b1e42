"""Timing by ratios inside one run, and the form in which every benchmark leaves its claims, tables and machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import cpnorm

RESULTS = Path(__file__).parent / "results"
Spread = dict[str, float]  # median, min, max
Row = Mapping[str, Any]  # column -> text, number, truth or spread


def parser(claim: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has; its docstring is the help."""
    made = argparse.ArgumentParser(description=claim, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--rounds", type=int, default=rounds, help="turns of each competitor")
    made.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of the CPU")
    return made


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options as given, with the threads set and the random numbers seeded."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return args


# --- measuring ----------------------------------------------------------------------------------------------------


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every run in every round; each round runs all of them, in turn from either end.

    Competitors that take turns are slowed alike by a busy machine: their ratios are worth more than their times.
    """
    for _ in range(warmup):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs) if turn % 2 == 0 else list(reversed(runs))
        for name in names:
            synchronize()
            start = clock()
            runs[name]()
            synchronize()
            seconds[name].append(clock() - start)
    return seconds


def in_turns(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    turn_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of one call of every run; in a turn the fastest makes calls for ``turn_seconds``."""
    shortest = min(values[0] for values in interleaved(runs, 1, warmup=2).values())
    calls = max(1, round(turn_seconds / shortest))
    turns = {name: lambda run=run: [run() for _ in range(calls)] for name, run in runs.items()}
    taken = interleaved(turns, rounds, clock=clock)
    return {name: [value / calls for value in values] for name, values in taken.items()}


def kernels(run: Callable[[], Any], calls: int) -> list[tuple[str, float, float]]:
    """Return name, number and microseconds of the GPU kernels of one call, the costliest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            run()
        synchronize()
    rows = [(e.key, e.count / calls, e.device_time_total / calls) for e in profiled.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def captured(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the run, on a GPU as a CUDA graph, so that kernels are timed and not their launches."""
    if device == "cpu":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.synchronize()

    def replay(_kept: Callable[[], Any] = run) -> None:  # with it live the tensors that the graph reads and writes
        graph.replay()

    return replay


def spread(values: Iterable[float]) -> Spread:
    """Return the median, the smallest and the largest value."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> Spread:
    """Return the time of ``name`` over that of ``base``, round by round: above 1 where ``name`` is slower."""
    return spread(one / other for one, other in zip(seconds[name], seconds[base], strict=True))


def milliseconds(values: Iterable[float], calls: int = 1) -> Spread:
    """Return the milliseconds of one call, where each value is the seconds of several."""
    return spread(1e3 * value / calls for value in values)


# --- claiming -----------------------------------------------------------------------------------------------------


def at_most(text: str, measured: Spread | float, bound: float, unit: str = "×") -> dict[str, Any]:
    """Return a claim that the median keeps below a bound."""
    return _claim(text, measured, f"≤ {bound:g}{_after_number(unit)}", unit, lambda median: median <= bound)


def at_least(text: str, measured: Spread | float, bound: float, unit: str = "×") -> dict[str, Any]:
    """Return a claim that the median reaches a bound."""
    return _claim(text, measured, f"≥ {bound:g}{_after_number(unit)}", unit, lambda median: median >= bound)


def _claim(
    text: str, measured: Spread | float, target: str, unit: str, holds: Callable[[float], bool]
) -> dict[str, Any]:
    found = measured if isinstance(measured, dict) else spread([measured])
    return {"claim": text, "target": target, "measured": found, "unit": unit, "met": bool(holds(found["median"]))}


def _after_number(unit: str) -> str:
    return unit if unit == "×" else f" {unit}".rstrip()


# --- leaving it ---------------------------------------------------------------------------------------------------


def write(
    script: str,
    device: str,
    *,
    title: str,
    claims: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Sequence[Row]],
    left_out: Mapping[str, str] | None = None,
    plots: Mapping[str, str] | None = None,
) -> Path:
    """Store and print what was found, as ``benchmarks/results/<script>_<device>.json``.

    Tables are rows of the same columns under a caption; ``left_out`` says why a peer did not take part; ``plots`` are
    captions by file name under docs/assets.
    """
    for claim in claims:
        figure = claim["measured"]
        print(f"{'met    ' if claim['met'] else 'NOT MET'} {claim['claim']}: {figure['median']:.3g}{claim['unit']}"
              f" ({figure['min']:.3g} to {figure['max']:.3g}), target {claim['target']}")  # fmt: skip
    for peer, reason in (left_out or {}).items():
        print(f"left out: {peer}, {reason}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{script}_{device}.json"
    record = {
        "title": title,
        "command": command(script),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine(),
        "left_out": left_out or {},
        "claims": claims,
        "tables": tables,
        "plots": plots or {},
    }
    path.write_text(json.dumps(_rounded(record), indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")
    return path


def command(script: str) -> str:
    """Return the command line of this process, with the last part of each absolute path, as it is wherever it runs."""
    given = [Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{script}.py", *given])


def machine() -> dict[str, Any]:
    """Return hardware and versions, to be stored with every result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cpnorm": cpnorm.__version__}
    for package in ("numpy", "tensorly", "tensorly-torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("OMP_", "MALLOC_"))},
        "load": round(os.getloadavg()[0], 2),  # over the last minute; above the threads of the script: others ran too
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "versions": versions,
    }


def _rounded(value: Any) -> Any:
    """Round all numbers to four digits, which say all that a timing knows."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def synchronize() -> None:
    """Wait until a GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Return the commit of the code, or $CPNORM_COMMIT for a copy without its history."""
    if "CPNORM_COMMIT" in os.environ:
        return os.environ["CPNORM_COMMIT"][:7]

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "*.py", "../src")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
