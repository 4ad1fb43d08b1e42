"""Claim: cpnorm costs nothing to have: its import adds at most 50 ms to torch's own, `cpnorm --help` is there at once.

1. `import cpnorm` takes at most 50 ms on top of `import torch`.
2. `cpnorm --help` takes less than 1.5 times as long as importing torch.

Every figure is that of a fresh process, with bytecode in a cache of its own that the first turn fills; the processes
take turns. Peer: tensorly-torch, which brings TensorLy and SciPy along.

    python benchmarks/startup.py [--rounds 4]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import partial

import timing

AFTER_TORCH = """
import time, torch
start = time.perf_counter()
import {package}
print(time.perf_counter() - start)
"""


def run(*arguments: str, cache: str) -> str:
    """Return what a fresh Python prints; its bytecode comes from the cache."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = timing.parser(__doc__, rounds=4)
    args: argparse.Namespace = timing.start(parser)
    packages = [name for name in ("cpnorm", "tltorch") if importlib.util.find_spec(name)]
    left_out = {} if "tltorch" in packages else {"tensorly-torch": "tltorch is not installed"}
    with tempfile.TemporaryDirectory() as cache:
        scripts = {package: AFTER_TORCH.format(package=package) for package in packages}
        processes = {
            "import torch": partial(run, "-c", "import torch", cache=cache),
            "cpnorm --help": partial(run, "-m", "cpnorm", "--help", cache=cache),
        }
        inside: dict[str, list[float]] = {package: [] for package in packages}
        for package, script in scripts.items():
            processes[package] = lambda p=package, s=script: inside[p].append(float(run("-c", s, cache=cache)))
        seconds = timing.interleaved(processes, args.rounds)
    added = {
        package: timing.milliseconds(values[1:]) for package, values in inside.items()
    }  # the first filled the cache
    claims = [
        timing.at_most("import cpnorm, on top of torch's own", added["cpnorm"], 50, "ms"),
        timing.at_most(
            "cpnorm --help against importing torch", timing.ratio(seconds, "cpnorm --help", "import torch"), 1.5
        ),
    ]
    rows = [
        *({"process": name, "ms": timing.milliseconds(seconds[name])} for name in ("import torch", "cpnorm --help")),
        *({"process": f"import {package}, after torch", "ms": added[package]} for package in packages),
    ]
    title = "Start-up"
    timing.write(
        "startup", args.device, title=title, claims=claims, tables={"fresh processes": rows}, left_out=left_out
    )


if __name__ == "__main__":
    main()
