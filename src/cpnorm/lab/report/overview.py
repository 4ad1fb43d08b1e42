"""The drawing of agreement with the paper: every row's difference from the published mean, at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.comparison import Comparison
from cpnorm.lab.report.document import Drawing
from cpnorm.lab.report.drawing import INK, NOTE, finish, style

REACH = 3.0  # points
Groups = list[tuple[str, list[Comparison]]]  # rows by the title of their table


def overview(comparisons: Sequence[Comparison]) -> Drawing | None:
    """Draw our mean minus the published one for every row, with its 95 % interval, over the published spread."""
    measured = [c for c in comparisons if c.difference]
    if not measured:
        return None
    groups = list(_by_table(measured).items())
    caption = (
        f"Mean accuracy of the last epoch minus the published mean in points, {len(measured)} rows. Lines are 95 % "
        "confidence intervals of the difference (Welch; of cuts, by network), bars one published standard deviation. "
        f"Differences beyond {REACH:g} points are drawn at the edge with their size."
    )
    wide = _overview("overview", _columns(groups, 3), 1180, caption)
    return replace(wide, narrow=_overview("overview-narrow", [groups], 350, caption).svg)


def _by_table(measured: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    titles = {table.key: table.title for table in paper.TABLES}
    groups: dict[str, list[Comparison]] = {}
    for entry in measured:
        groups.setdefault(titles.get(entry.row.table, entry.row.table), []).append(entry)
    return groups


def _columns(groups: Groups, most: int) -> list[Groups]:
    """Return the groups in at most so many columns of about the same length, in their order."""
    length = sum(len(rows) + 1 for _, rows in groups) / most
    columns: list[Groups] = [[]]
    for title, rows in groups:
        filled = sum(len(others) + 1 for _, others in columns[-1])
        if filled and len(columns) < most and filled + (len(rows) + 1) / 2 > length:
            columns.append([])
        columns[-1].append((title, rows))
    return columns


@style()
def _overview(key: str, columns: list[Groups], width: int, caption: str) -> Drawing:
    lines = max(sum(len(rows) + 1 for _, rows in groups) for groups in columns)
    height, left, each = 18 * lines + 62, 132, width / len(columns)
    figure = Figure(figsize=(width / 72, height / 72))
    for index, groups in enumerate(columns):
        size = ((each - left - 10) / width, 1 - 62 / height)
        axes = figure.add_axes(((index * each + left) / width, 34 / height, *size))
        axes.set(xlim=(-REACH, REACH), ylim=(lines - 0.4, -0.6), yticks=[], xlabel="ours − paper, points")
        axes.xaxis.grid(True)
        axes.axvline(0, color=INK["axis"], linewidth=1)
        y = 0
        for title, rows in groups:
            axes.annotate(
                title,
                (0, y),
                xytext=(-left + 4, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                color=INK["ink"],
                fontweight="bold",
                bbox={"facecolor": INK["paper"], "edgecolor": "none", "pad": 1},  # it may reach over the grid
            )
            for line, entry in enumerate(rows, y + 1):
                _overview_row(axes, entry, line, left)
            y += len(rows) + 1
        if index == 0:
            axes.barh([-9], [0], color=INK["axis"], alpha=0.28, label="one published sd")
            for status, name in (("within", "within it"), ("above", "above"), ("below", "below")):
                axes.plot([], [], "o", color=INK[status], markersize=6, label=name)
    figure.legend(loc="upper left", ncols=4, handlelength=1, columnspacing=1, borderaxespad=0.2, handletextpad=0.5)
    return finish(figure, key, "Difference between our mean accuracy and the published one, row by row", caption)


def _overview_row(axes: Axes, entry: Comparison, y: float, left: float) -> None:
    difference, published = entry.difference, entry.row.published
    assert difference is not None
    assert published is not None

    def inside(value: float) -> float:
        return max(-REACH, min(REACH, value))

    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate(entry.row.name, (0, y), xytext=(-left + 14, 0), **place)
    if published.sd:
        low, high = inside(-published.sd), inside(published.sd)
        axes.barh([y], [max(high - low, 0.03)], 0.62, left=[low], color=INK["axis"], alpha=0.28, linewidth=0)
    if difference.low is not None and difference.high is not None:
        ends = [inside(difference.low), inside(difference.high)]
        axes.plot(ends, [y, y], color=INK[entry.status], linewidth=1.3, alpha=0.8)
    note = f"{NOTE}{entry.row.key}: {difference.value:+.2f} points, {entry.words}".replace("-", "−")
    at = inside(difference.value)
    axes.plot(
        [at], [y], "o", color=INK[entry.status], markersize=7, gid=note, markeredgecolor=INK["paper"], clip_on=False
    )
    if abs(difference.value) > REACH:  # its size, inside the frame and over the interval
        side = -1 if difference.value > 0 else 1
        text = f"{difference.value:+.1f}".replace("-", "−")
        box = {"facecolor": INK["paper"], "edgecolor": "none", "pad": 0.5}
        align = "left" if side > 0 else "right"
        axes.annotate(text, (at, y), (8 * side, 0), textcoords="offset points", ha=align, va="center", bbox=box)
