"""Put the tables of the records of the language model into docs/guides/yours.md.

python benchmarks/language_model_page.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing
from language_model_speed import RATIOS

PAGE = timing.RESULTS.parent.parent / "docs" / "guides" / "yours.md"
SPEEDS = {"tokens/s": "read", "written/s": "written", "written/s, graph": "written by a CUDA graph"}
ROUNDED = ", ranks in 8s"
BEGIN, END = "<!-- made by benchmarks/language_model_page.py -->", "<!-- end of what it made -->"


def speed_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return one table of the records of benchmarks/language_model_speed.py: times as fast as the dense network."""
    cells: dict[tuple[str, float], dict[str, str]] = {}
    captions = []
    for found in records:
        machine = found["machine"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
        caption, rows = next(iter(found["tables"].items()))
        rounded = ROUNDED in rows[0]["method"]
        measured = {column: title for column, title in SPEEDS.items() if RATIOS[column] in rows[0]}
        if len(measured) == len(SPEEDS):
            del measured["written/s"]  # eager writing on a GPU waits for the host, and spreads by a half
        dense = ", ".join(
            f"{statistics.median(row[f'{column} dense']['median'] for row in rows):,.0f} {title}"
            for column, title in measured.items()
        )
        captions.append(f"- {where}{ROUNDED if rounded else ''}: {caption}. Dense, tokens a second: {dense}.")
        for row in rows:
            here = cells.setdefault((row["method"].replace(ROUNDED, ""), row["removed"]), {})
            for column, title in measured.items():
                device = "GPU" if machine["gpu"] else "CPU"
                here[f"{device}, {title}{', in 8s' * rounded}"] = f"{row[RATIOS[column]]['median']:.2f}"
            here["file, MB"] = f"{row['file in bf16, MB']:.0f} of {row['file in bf16, MB, dense']:.0f}"
    columns = sorted({column for here in cells.values() for column in here}, key=lambda c: (c == "file, MB", c))
    lines = [f"| tokens a second, times dense | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for (method, removed), here in cells.items():
        row = " | ".join(here.get(column, "–") for column in columns)
        lines.append(f"| {method}, {100 * removed:.0f} % removed | {row} |")
    return [*lines, "", *captions]


def held_out_lines(found: dict[str, Any]) -> list[str]:
    """Return the table of a record of benchmarks/language_model.py --held-out."""
    caption, rows = next(iter(found["tables"].items()))
    shares = sorted({round(row["removed"], 2) for row in rows if row["removed"]})
    lines = [f"| perplexity, held out | {' | '.join(f'{100 * share:.0f} % removed' for share in shares)} |"]
    lines.append("|---" + "|---:" * len(shares) + "|")
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        got = {round(row["removed"], 2): row["perplexity"] for row in rows if row["method"] == method}
        lines.append(f"| {method} | {' | '.join(f'{got[share]:.1f}' for share in shares)} |")
    where = found["machine"]["gpu"] or found["machine"]["cpu"]
    return [*lines, "", f"Dense: {rows[0]['perplexity']:.1f}. {caption} ({where})."]


def section(
    found: dict[str, Any], speeds: Sequence[dict[str, Any]] = (), held_out: dict[str, Any] | None = None
) -> str:
    """Return the tables of docs/guides/yours.md, made of the records; shares that were not measured are left out."""
    caption, rows = next(iter(found["tables"].items()))
    shares = sorted({round(row["removed"], 1) for row in rows if row["removed"]})
    lines = [f"| perplexity | {' | '.join(f'{100 * share:.0f} % removed' for share in shares)} |"]
    lines.append("|---" + "|---:" * len(shares) + "|")
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        got = {round(row["removed"], 1): row["perplexity"] for row in rows if row["method"] == method}
        cells = [f"{got[share]:.3g}" if share in got else "not measured" for share in shares]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += ["", f"Dense: {rows[0]['perplexity']:.3g}. {caption} ({found['machine']['gpu'] or 'CPU'})."]
    sizes = [row["file in bf16, MB"] for row in rows if row["method"] == "cpnorm" and "file in bf16, MB" in row]
    if sizes:
        lines.append(f"Files of cpnorm's networks in bfloat16: {', '.join(f'{size:.0f}' for size in sizes)} MB.")
    if speeds:
        lines += ["", *speed_lines(speeds)]
    if held_out:
        lines += ["", *held_out_lines(held_out)]
    return "\n".join(lines)


def speed_records() -> list[Path]:
    """Return the records of benchmarks/language_model_speed.py; those of rounded ranks are a record of their own."""
    return [timing.RESULTS / f"language_model_speed_{name}.json" for name in ("cuda", "cuda_multiples_of_8", "cpu")]


def made() -> str:
    """Return the section that the records make."""
    found, held_out = (
        json.loads((timing.RESULTS / f"language_model_{kind}.json").read_text()) for kind in ("cuda", "cpu_held_out")
    )
    return section(found, [json.loads(file.read_text()) for file in speed_records()], held_out)


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
