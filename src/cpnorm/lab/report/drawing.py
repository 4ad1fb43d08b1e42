"""Draw with matplotlib for pages that may be light or dark: one look, and SVG whose colours are CSS variables."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from torch import Tensor

from cpnorm.lab.report.document import Drawing

THEME = {  # name: light, dark
    "paper": ("#ffffff", "#14171a"),
    "ink": ("#1a1d21", "#e6e9ec"),
    "soft": ("#59626d", "#a2abb5"),
    "rule": ("#e3e6ea", "#2b3036"),
    "axis": ("#8b939d", "#717a84"),
    "s0": ("#6d7580", "#a3acb7"),
    "s1": ("#c05a08", "#f0964a"),
    "s2": ("#1a5fc8", "#74a9f7"),
    "s3": ("#17803d", "#5cc586"),
    "s4": ("#8a46c2", "#c39bf0"),
    "s5": ("#0c7a83", "#4fc2cb"),
    "below": ("#c2410c", "#f58a5c"),
    "within": ("#17803d", "#5cc586"),
    "above": ("#1a5fc8", "#74a9f7"),
    "missing": ("#8b939d", "#717a84"),
}
INK = {name: light for name, (light, _) in THEME.items()}
DASHES: dict[str, Any] = {"s0": (0, (6, 3)), "s1": (0, (2, 2.5))}  # lines differ without colour, too
NOTE = "note:"  # prefix of the id of an artist whose note becomes a tooltip
STYLE = {
    "axes.edgecolor": INK["axis"],
    "axes.labelcolor": INK["soft"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.prop_cycle": cycler(color=[INK[name] for name in ("s2", "s1", "s3", "s4", "s5", "s0")]),
    "axes.titlecolor": INK["soft"],
    "axes.titlesize": "medium",
    "figure.dpi": 72,  # so that all lengths are those of the SVG
    "font.size": 11.0,
    "grid.color": INK["rule"],
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.labelcolor": INK["soft"],
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "text.color": INK["soft"],
    "xtick.color": INK["axis"],
    "xtick.labelcolor": INK["soft"],
    "ytick.color": INK["rule"],
    "ytick.labelcolor": INK["soft"],
    "ytick.major.size": 0,
}


def variables(dark: bool = False) -> str:
    """Return the colours of a theme as CSS variables."""
    return " ".join(f"--{name}: {colours[dark]};" for name, colours in THEME.items())


@contextmanager
def style() -> Iterator[None]:
    """Draw in the look of the report; matplotlib's own settings come back afterwards."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def panel(x_label: str, y_label: str, width: int = 420, height: int = 290) -> tuple[Figure, Axes]:
    """Return a figure of this many pixels with one set of axes."""
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    FigureCanvasAgg(figure)  # to measure texts with
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return figure, axes


def legend(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """Name what is drawn, above the axes."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.5)


def count_axis(axes: Axes, low: float, high: float) -> None:
    """Make the x axis a logarithmic one of numbers of parameters."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def tick_text(value: float) -> str:
    """Return a number in as few characters as possible.

    >>> tick_text(2_000_000), tick_text(-0.5), tick_text(50_000), tick_text(150)
    ('2 M', '−0.5', '50 k', '150')
    """
    text = f"{value / 1e6:g} M" if abs(value) >= 1e6 else f"{value / 1e3:g} k" if abs(value) >= 1e4 else f"{value:g}"
    return text.replace("-", "−")


def label_points(
    axes: Axes, labels: Sequence[tuple[float, float, str]], marks: Sequence[tuple[float, float, float]]
) -> int:
    """Write names beside points where they cover no mark, no other name and not the edge; return how many fit.

    Names that fit nowhere are left out: their points still have tooltips.

    Args:
        axes: with final limits.
        labels: x, y and name of the points.
        marks: x, and the lowest and highest y, of everything that is drawn.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # the layout must be final, or positions mean nothing
    figure.set_layout_engine("none")
    taken = []
    for x, low, high in marks:
        (left, bottom), (_, top) = axes.transData.transform([(x, low), (x, high)])
        taken.append(Bbox.from_extents(left - 6, bottom - 6, left + 6, top + 6))
    written = 0
    for x, y, name in labels:
        text = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=10)
        start = text.get_window_extent()
        wide, high = start.width, start.height
        beside, centred = -high / 3, -wide / 2
        for dx, dy in ((centred, 9), (9, beside), (-9 - wide, beside), (centred, -9 - high), (8, 8), (8, -16)):
            box = Bbox.from_bounds(start.x0 + dx, start.y0 + dy, wide, high)
            if all(axes.bbox.contains(*corner) for corner in (box.min, box.max)) and not box.count_overlaps(taken):
                text.set_position((dx, dy))
                taken.append(box)
                written += 1
                break
        else:
            text.remove()
    return written


# --- SVG --------------------------------------------------------------------------------------------------------------


def finish(figure: Figure, key: str, title: str, caption: str) -> Drawing:
    """Return a figure as SVG: named for screen readers, notes as tooltips, colours as variables, ids of its own."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(rf'<g id="{NOTE}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure, and used in none
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    width, height = (72 * size for size in figure.get_size_inches())
    start = (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
    )
    svg = start + svg[svg.index(">") + 1 :]
    return Drawing(key, _colours(svg, {light: f"var(--{name})" for name, (light, _) in THEME.items()}), caption)


def _colours(svg: str, names: dict[str, str]) -> str:
    """Replace colours, outside the pictures that an SVG may hold."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: names.get(found[0], found[0]), svg)


FONT = ".plot text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif !important; }"
BOTH_THEMES = f":root {{ {variables()} }} @media (prefers-color-scheme: dark) {{ :root {{ {variables(dark=True)} }} }}"
GROUND = '<rect width="100%" height="100%" fill="var(--paper)"/>'  # the page around a picture may have the other theme


def standalone(drawing: Drawing, theme: str = "") -> str:
    """Return the SVG of a drawing as a file: in one theme, "light" or "dark", or by default in that of the reader."""
    start = drawing.svg.index(">") + 1
    sheet = FONT if theme else f"{BOTH_THEMES} {FONT}"
    svg = f"{drawing.svg[:start]}<style>{sheet}</style>{GROUND}{drawing.svg[start:]}\n"
    for name, colours in THEME.items() if theme else ():
        svg = svg.replace(f"var(--{name})", colours[theme == "dark"])
    return svg


def image_grid(key: str, title: str, images: Tensor, caption: str, columns: int = 5) -> Drawing:  # (N, C, H, W) uint8
    """Return images side by side as a drawing."""
    count, _, high, wide = images.shape
    rows, gap = -(-count // columns), 2
    mosaic = images.new_full((rows * (high + gap) - gap, columns * (wide + gap) - gap, 3), 255)
    for index, image in enumerate(images):
        top, left = (index // columns) * (high + gap), (index % columns) * (wide + gap)
        mosaic[top : top + high, left : left + wide] = image.expand(3, -1, -1).permute(1, 2, 0)
    figure = Figure(figsize=(2 * mosaic.shape[1] / 72, 2 * mosaic.shape[0] / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic.numpy(), interpolation="none")
    axes.set_axis_off()
    return finish(figure, key, title, caption)


def as_image(svg: bytes) -> str:
    """Return a file's SVG as the address of an image, in which no script of it can run."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
