"""Claim: a report and a dry run of the paper take seconds with 5,000 records, and time in proportion to their number.

For folders with 500 and 5,000 synthetic records of all rows of the paper:
1. `cpnorm report` takes at most 30 s at 5,000 records, and `cpnorm reproduce --dry-run` at most 10 s.
2. Each takes at 5,000 records at most 12 times as long as at 500.

Times are those of the CPU in one process, without the import of torch; the smallest of --rounds rounds in which the
sizes take turns, since a report draws the same figures whatever their number.

    python benchmarks/scaling_records.py --threads 1 [--rounds 2]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timing
from cpnorm.lab.cli import main as cli

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import synthetic_results

SIZES = (500, 5000)


def seconds_of(call: Callable[[], int]) -> float:
    """Return the CPU time of a command, which must succeed; what it prints is dropped."""
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = call()
    assert code == 0, code
    return time.process_time() - start


def records(folder: Path, wanted: int) -> int:
    """Write at least this many records and return their number."""
    one = synthetic_results.write(folder / "one", seeds=8)
    each = sum(len(path.read_text().splitlines()) for path in one.glob("*.jsonl")) / 8
    synthetic_results.write(folder / "results", seeds=round(1.15 * wanted / each))
    return sum(len(path.read_text().splitlines()) for path in (folder / "results").glob("*.jsonl"))


def main() -> None:
    args: argparse.Namespace = timing.start(timing.parser(__doc__, rounds=2))
    with tempfile.TemporaryDirectory() as place:
        counts, calls = {}, {}
        for size in SIZES:
            folder = Path(place) / str(size)
            counts[size] = records(folder, size)
            results = str(folder / "results")
            report = ["report", results, "--out", str(folder / "report.html")]
            dry_run = ["reproduce", "--dry-run", "--results", results, "--work", str(folder / "work"), "--seeds", "8"]
            calls["report", size] = lambda words=report: cli.main(words)
            calls["reproduce --dry-run", size] = lambda words=dry_run: cli.main(words)
        assert counts[5000] >= 5000
        seconds_of(calls["report", SIZES[0]])  # the first call loads libraries
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        for _ in range(args.rounds):
            for key, call in calls.items():
                seconds[key].append(seconds_of(call))
    best = {key: min(values) for key, values in seconds.items()}
    few, many = SIZES
    claims = [
        timing.at_most("report of 5,000 records", best["report", many], 30, "s"),
        timing.at_most("dry run with 5,000 records", best["reproduce --dry-run", many], 10, "s"),
        *(
            timing.at_most(f"{name}, 5,000 records against 500", best[name, many] / best[name, few], 12)
            for name in ("report", "reproduce --dry-run")
        ),
    ]
    rows = [
        {"command": name, **{f"{counts[size]:,} records: s": best[name, size] for size in SIZES}}
        for name in ("report", "reproduce --dry-run")
    ]
    timing.write(
        "scaling_records",
        args.device,
        title="Growth with the number of records",
        claims=claims,
        tables={"seconds of the CPU": rows},
    )


if __name__ == "__main__":
    main()
