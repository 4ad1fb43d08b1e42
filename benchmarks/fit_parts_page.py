"""Put the tables of the records of benchmarks/fit_parts.py into docs/cuts.md.

python benchmarks/fit_parts_page.py
"""

from __future__ import annotations

import json
from typing import Any

import timing

PAGE = timing.RESULTS.parent.parent / "docs" / "cuts.md"
BEGIN, END = "<!-- made by benchmarks/fit_parts_page.py -->", "<!-- end of what it made -->"


def section(found: dict[str, Any]) -> str:
    """Return a table for each network of a record."""
    lines = []
    for caption, rows in found["tables"].items():
        lines += [f"| {caption} | divergence | ÷ as it is | held-out accuracy, % | processor seconds |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for row in rows:
            far, ratio, seconds = row["divergence"], row["÷ as it is"], row["processor seconds"]
            times = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            cells = [f"{far['median']:.4f}", times, f"{row['held-out accuracy, %']:.2f}", f"{seconds['median']:.0f}"]
            lines.append(f"| {row['fit']} | {' | '.join(cells)} |")
        lines.append("")
    where = f"{found['machine']['cpu']}, {found['machine']['threads']} thread, busy"
    return "\n".join([*lines, f"`python benchmarks/fit_parts.py`, commit {found['commit']} ({where})."])


def made() -> str:
    """Return what belongs between the markers of the page."""
    return section(json.loads((timing.RESULTS / "fit_parts_cpu.json").read_text()))


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
