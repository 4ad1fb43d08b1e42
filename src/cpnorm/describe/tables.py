"""Format numbers and plain-text tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

BARS = "▁▂▃▄▅▆▇█"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Return aligned columns of text, without columns that are empty in all rows."""
    full = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    shown = [n for n in range(len(header)) if any(row[n].strip(" –") for row in full)]
    widths = {n: max(len(line[n]) for line in (header, *full)) for n in shown}
    lines = [
        "  ".join(line[n].ljust(widths[n]) if n in left else line[n].rjust(widths[n]) for n in shown).rstrip()
        for line in (header, *full)
    ]
    return "\n".join(lines)


def share(part: int | None, whole: int | None) -> str:
    """Return a share in percent with three significant digits, such as 25 % or 0.71 %."""
    if part is None or not whole:
        return "–"
    return f"{100 * part / whole:.3g} %"


def mega(number: int | None) -> str:
    """Return a number in millions."""
    return "–" if number is None else f"{number / 1e6:,.2f}"


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return descending values as bars relative to the first, in at most ``width`` characters.

    >>> sparkline([8, 4, 2, 1])
    '█▄▂▁'
    """
    count = min(width, len(values))
    picked = [values[n * (len(values) - 1) // max(count - 1, 1)] for n in range(count)]
    largest = picked[0] or 1.0
    if not all(map(math.isfinite, picked)):
        return "?" * count
    return "".join(BARS[max(0, math.ceil(len(BARS) * value / largest) - 1)] for value in picked)
