"""Put the tables of the records of the language model into docs/guides/yours.md.

python benchmarks/language_model_page.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing
from language_model_speed import RATIOS

PAGE = timing.RESULTS.parent.parent / "docs" / "guides" / "yours.md"
SPEEDS = {"tokens/s": "tokens/s read", "written/s": "tokens/s written", "written/s, graph": "by a CUDA graph"}
BEGIN, END = "<!-- made by benchmarks/language_model_page.py -->", "<!-- end of what it made -->"


def speed_lines(found: dict[str, Any]) -> list[str]:
    """Return the table of a record of benchmarks/language_model_speed.py."""
    threads = "1 thread" if found["machine"]["threads"] == 1 else f"{found['machine']['threads']} threads"
    where = found["machine"]["gpu"] or f"{found['machine']['cpu']}, {threads}"
    caption, rows = next(iter(found["tables"].items()))
    measured = {name: title for name, title in SPEEDS.items() if name in rows[0]}
    columns = [column for title in measured.values() for column in (f"{title}, dense", "cut", "ratio")] + ["file, MB"]
    lines = [f"| speed and size | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for row in rows:
        cells = []
        for name in measured:
            medians = [row[key]["median"] for key in (f"{name} dense", name)]
            cells += [f"{median:,.{0 if median > 99 else 1}f}" for median in medians]
            cells.append(f"{row[RATIOS[name]]['median']:.2f}×")
        cells.append(f"{row['file in bf16, MB']:.0f} of {row['file in bf16, MB, dense']:.0f}")
        lines.append(f"| {row['method']}, {100 * row['removed']:.0f} % removed | {' | '.join(cells)} |")
    return [*lines, "", f"{caption}; written one at a time; files in bfloat16 ({where})."]


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
    for speed in speeds:
        lines += ["", *speed_lines(speed)]
    if held_out:
        lines += ["", *held_out_lines(held_out)]
    return "\n".join(lines)


def speed_records() -> list[Path]:
    files = [timing.RESULTS / f"language_model_speed_{device}.json" for device in ("cuda", "cpu")]
    return [file for file in files if file.exists()]


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
