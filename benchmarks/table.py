"""Make docs/benchmarks.md from the records in benchmarks/results.

python benchmarks/table.py          # the page, and the plots it shows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
SCRIPTS = (
    "training_step",
    "scaling",
    "scaling_layers",
    "scaling_records",
    "plan",
    "decompose",
    "calibration",
    "inference",
    "any_network_inference",
    "startup",
)  # in the order of the page

HEAD = """# Benchmarks

<!-- Made by benchmarks/table.py from benchmarks/results; do not edit. -->

Claims about speed, what was measured, and the commands that measure it again: `make bench` (CPU, a quarter of an hour
on two quiet cores) and `make bench-gpu`. Every ratio was taken inside one run in which the competitors took turns. The
tables show the median over the turns, with the smallest and the largest in brackets. If the load of a machine is above
the number of threads of the benchmark, it was busy with other work: ratios are still meaningful then, times are
not.

*Captured* is recorded and replayed as a CUDA graph; *weights ahead* are those of all layers, built together before the
forward pass. The *FLOPs' promise* is the speed-up that a network with fewer FLOPs would have if time were proportional
to them. How often terms *cancel* is the sum of the squared norms of the terms over the squared norm of the weight.
"""


HOW = "SGD with momentum and `renormalize_after`; ratios of medians to the plain network's."  # any_network.py


def page(results: Path = RESULTS) -> str:
    """Return the whole page as Markdown."""
    records = [(path.stem, json.loads(path.read_text())) for path in _in_order(results)]
    summary: list[dict[str, Any]] = []
    told: set[tuple[str, str]] = set()  # machine and claim: the main record of a script comes first
    for name, record in records:
        claims = [claim for claim in record["claims"] if (_on(name, record), claim["claim"]) not in told]
        told |= {(_on(name, record), claim["claim"]) for claim in claims}
        summary += [
            {
                "claim": f"[{claim['claim']}](#{_anchor(_heading(name, record))})",
                "on": _on(name, record),
                "target": claim["target"],
                "measured": _with_spread(claim["measured"], claim["unit"]),
                "": "met" if claim["met"] else "**not met**",
            }
            for claim in claims
        ]
    parts = [HEAD, *_table(summary)]
    for device in ("cuda", "cpu"):
        for path in sorted(results.glob(f"any_network_{device}*.jsonl")):
            parts += ["", *_any_network(path, device)]
    for name, record in records:
        parts += ["", *_section(name, record)]
    return "\n".join(parts) + "\n"


def _any_network(path: Path, device: str) -> list[str]:
    """Return a section on ordinary training loops: a row for each network, and a column for each form of it."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    first = records[-1]
    networks = "networks of timm and transformers" if device == "cuda" else f"small networks, {first['precision']}"
    lines = [
        f"## An ordinary training loop on {networks}: {first['hardware']}",
        "",
        f"`python benchmarks/any_network.py --device {device}`",
        "",
        f"{first['precision']}; torch {first['torch']}; {_commits(records)}. {HOW}",
    ]
    for key, caption in (
        ("train_of_plain", "Time of a training step, in plain steps"),
        ("evaluate_of_plain", "Time of evaluation, in that of the plain network"),
        ("own_memory", "Memory of a step with parameters and optimizer state, MB"),
    ):
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for record in (record for record in records if key in record):
            mode = _mode(record)
            if key == "own_memory" and mode == "reduce-overhead":
                continue  # a CUDA graph holds its memory all the time, and takes none during a step
            row = rows.setdefault(
                (record["network"], mode), {"network": record["network"], "batch": record["batch"], "mode": mode}
            )
            if key == "train_of_plain" and record["variant"] == "plain":
                row["plain, ms"] = record["train_ms"]
            elif key == "own_memory":
                row[record["variant"]] = record[key] / 1e6
            else:
                row[record["variant"]] = _range(_again(records, record, key))
        if rows:
            lines += ["", f"**{caption}**", "", *_table(rows.values())]
    return lines


def _again(records: list[dict[str, Any]], record: dict[str, Any], key: str) -> list[float]:
    """Return all measurements of what a record measured, at its commit."""
    same = ("network", "variant", "commit")
    return [
        other[key]
        for other in records
        if key in other and _mode(other) == _mode(record) and all(other[name] == record[name] for name in same)
    ]


def _mode(record: Mapping[str, Any]) -> str:
    """Return how a training loop ran: "eager", "compiled", or a mode of torch.compile by its name."""
    mode = record.get("mode", "default")
    return "eager" if not record["compiled"] else "compiled" if mode == "default" else str(mode)


def _range(values: list[float]) -> float | str:
    """Return one value as it is, and several as a range."""
    low, high = (_number(value) for value in (min(values), max(values)))
    return values[0] if low == high else f"{low} to {high}"


def _commits(records: list[dict[str, Any]]) -> str:
    """Return the commits at which each row was measured; later records replace earlier ones of the same cell."""
    cells = {(r["network"], _mode(r), r["variant"]): r["commit"][:7] for r in records}
    of_row: dict[str, list[str]] = {}
    for (network, mode, _), commit in cells.items():
        commits = of_row.setdefault(network if mode == "eager" else f"{network} ({mode})", [])
        if commit not in commits:
            commits.append(commit)
    by_commits: dict[str, list[str]] = {}
    for row, commits in of_row.items():
        by_commits.setdefault(", ".join(commits), []).append(row)
    return "; ".join(f"commit {commits}: {', '.join(rows)}" for commits, rows in by_commits.items())


def _in_order(results: Path) -> Iterable[Path]:
    for script in SCRIPTS:
        for device in ("cpu", "cuda"):
            yield from sorted(results.glob(f"{script}_{device}.json"))
            yield from sorted(results.glob(f"{script}_{device}_*.json"))  # other settings, by the rest of the name


def _section(name: str, record: Mapping[str, Any]) -> list[str]:
    machine = record["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    hardware = machine["gpu"] if "_cuda" in name else f"{machine['cpu']}, {machine['threads']} of its threads"
    lines = [
        f"## {_heading(name, record)}",
        "",
        f"`{record['command']}`",
        "",
        f"{hardware}; load {machine['load']}; {versions}; {record['date']}, commit {record['commit']}.",
    ]
    lines += [f"Left out: {peer}, {reason}." for peer, reason in record["left_out"].items()]
    for file, caption in record["plots"].items():
        lines += ["", f"![{caption}](assets/{file})"]
    for caption, rows in record["tables"].items():
        lines += ["", f"**{caption[0].upper()}{caption[1:]}**", "", *_table(rows)]
    return lines


def _on(name: str, record: Mapping[str, Any]) -> str:
    return record["machine"]["gpu"] if "_cuda" in name else "CPU"


def _heading(name: str, record: Mapping[str, Any]) -> str:
    settings = name.partition("_cuda_")[2].replace("-", " ")
    return f"{record['title']}: {_on(name, record)}" + (f", {settings}" if settings else "")


def _anchor(heading: str) -> str:
    """Return the anchor that Markdown readers make: lower-case letters, digits and hyphens."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(_cell(column, row.get(column, '–')) for column in columns)} |" for row in rows]


def _cell(column: str, value: Any) -> str:
    if isinstance(value, Mapping):
        if "median" not in value:
            return ", ".join(f"{key} {_number(one)}" for key, one in value.items())
        return _number(value["median"]) if column.endswith("ms") else _with_spread(value)
    return _number(value)


def _with_spread(spread: Mapping[str, float], unit: str = "") -> str:
    median, low, high = (_number(spread[key]) for key in ("median", "min", "max"))
    shown = f"{median}{unit}" if unit in ("", "×") else f"{median} {unit}"
    return shown if low == high else f"{shown} ({low} to {high})"


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the page and its plots."""
    PAGE.write_text(page())
    print(f"written to {PAGE}")
    if any(RESULTS.glob("scaling_*.json")):
        import scaling

        scaling.draw_all()


if __name__ == "__main__":
    main()
