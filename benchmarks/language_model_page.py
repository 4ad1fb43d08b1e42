"""Put the tables of the records of the language model into docs/guides/yours.md.

python benchmarks/language_model_page.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing

PAGE = timing.RESULTS.parent.parent / "docs" / "guides" / "yours.md"
BEGIN, END = "<!-- made by benchmarks/language_model_page.py -->", "<!-- end of what it made -->"


def speed_lines(found: dict[str, Any]) -> list[str]:
    """Return the table of a record of benchmarks/language_model_speed.py."""
    where = found["machine"]["gpu"] or f"{found['machine']['cpu']}, {found['machine']['threads']} threads"
    lines = [f"| tokens a second, {where} | dense | cut | ratio |", "|---|---:|---:|---:|"]
    for row in next(iter(found["tables"].values())):
        speeds = [f"{row[key]['median']:,.0f}" for key in ("tokens/s dense", "tokens/s")]
        name = f"{row['method']}, {100 * row['removed']:.0f} % removed"
        lines.append(f"| {name} | {' | '.join(speeds)} | {row['times as fast']['median']:.2f}× |")
    return lines


def section(found: dict[str, Any], speeds: Sequence[dict[str, Any]] = ()) -> str:
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
    for speed in speeds:
        lines += ["", *speed_lines(speed)]
    return "\n".join(lines)


def speed_records() -> list[Path]:
    files = [timing.RESULTS / f"language_model_speed_{device}.json" for device in ("cuda", "cpu")]
    return [file for file in files if file.exists()]


def main() -> None:
    found = json.loads((timing.RESULTS / "language_model_cuda.json").read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    speeds = [json.loads(file.read_text()) for file in speed_records()]
    PAGE.write_text(f"{before}{BEGIN}\n\n{section(found, speeds)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
