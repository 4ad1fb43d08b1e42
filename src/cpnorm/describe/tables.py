"""Format numbers and plain-text tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

BARS = "▁▂▃▄▅▆▇█"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Aligned columns; one that says nothing in any row is left out."""
    full = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    said = [n for n in range(len(header)) if any(row[n].strip(" –") for row in full)]
    widths = {n: max(len(line[n]) for line in (header, *full)) for n in said}
    lines = [
        "  ".join(line[n].ljust(widths[n]) if n in left else line[n].rjust(widths[n]) for n in said).rstrip()
        for line in (header, *full)
    ]
    return "\n".join(lines)


def share(part: int | None, whole: int | None) -> str:
    """In percent, with the digits that say something: 25 %, 0.71 %."""
    if part is None or not whole:
        return "–"
    return f"{100 * part / whole:.3g} %"


def mega(number: int | None) -> str:
    """In millions."""
    return "–" if number is None else f"{number / 1e6:,.2f}"


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Bars of descending values relative to the first, in ``width`` characters or fewer.

    >>> sparkline([8, 4, 2, 1])
    '█▄▂▁'
    """
    count = min(width, len(values))
    picked = [values[n * (len(values) - 1) // max(count - 1, 1)] for n in range(count)]
    largest = picked[0] or 1.0
    if not all(map(math.isfinite, picked)):
        return "?" * count
    return "".join(BARS[max(0, math.ceil(len(BARS) * value / largest) - 1)] for value in picked)
