"""Drawing in SVG: a frame with scales and ticks, and marks in it. Colours are classes: light and dark both work."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from torch import Tensor

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
TEXT_HEIGHT = 12
CHARACTER = 6.7  # width of an average character at the size the drawings use


class Scale:
    """Data to pixels, linear or logarithmic, with round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        if not (math.isfinite(low) and math.isfinite(high)) or (log and low <= 0):
            raise ValueError(f"expected a finite range{', above zero' if log else ''}, got {low} to {high}")
        if high <= low:
            low, high = (low / 2, low * 2) if log else (low - 0.5, low + 0.5)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers within the range."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            return [m * 10.0**d for d in decades for m in steps if self.low <= m * 10.0**d <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / about))
        step *= min((1, 2, 5, 10), key=lambda m: abs((self.high - self.low) / (step * m) - about))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(k * step, 10) for k in range(first, last + 1)]


class Plot:
    """A frame to draw in: ranges first, then marks, then ``svg()``."""

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str = "",
        y_label: str = "",
        log_x: bool = False,
        width: int = 460,
        height: int = 300,
        left: int = 54,
        top: int = 12,
    ) -> None:
        self.title, self.width, self.height = title, width, height
        self.left, self.right, self.top, self.bottom = left, width - 14, top, height - 40
        self.x = Scale(*x, self.left, self.right, log=log_x)
        self.y = Scale(*y, self.bottom, self.top)
        self.x_label, self.y_label = x_label, y_label
        self.behind: list[str] = []  # ends where the frame does
        self.marks: list[str] = []  # may reach over it by their own size
        self.places: list[Point] = []  # of the marks
        self.labels: list[tuple[float, float, str]] = []
        self.legend: list[tuple[str, str, str]] = []

    # --- marks ---

    def line(self, points: Sequence[Point], style: str, label: str = "") -> None:
        """Through all points; its label goes into the legend."""
        self.behind.append(f'<path class="line {style}" d="{self._path(points)}"/>')
        if label:
            self.legend.append(("line", style, label))

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """Between two lines."""
        self.behind.append(f'<path class="band {style}" d="{self._path([*low, *reversed(high)])}Z"/>')

    def dot(
        self, point: Point, style: str, note: str = "", *, shape: str = "circle", spread: float = 0.0, label: str = ""
    ) -> None:
        """A mark, with a vertical line of its spread; the note shows under the pointer, the label beside it."""
        x, y = self.x(point[0]), self.y(point[1])
        if spread:
            ends = self.y(point[1] - spread), self.y(point[1] + spread)
            self.behind.append(f'<path class="whisker {style}" d="M{x:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
        self.marks.append(_shape(shape, x, y, style, note))
        self.places.append((x, y))
        if label:
            self.labels.append((x, y, label))

    def bars(self, edges: Sequence[float], heights: Sequence[float], style: str, label: str = "") -> None:
        """A histogram."""
        zero = self.y(0)
        for (low, high), value in zip(pairwise(edges), heights, strict=True):
            x, y = self.x(low), self.y(value)
            size = f'width="{max(self.x(high) - x - 0.6, 0.4):.1f}" height="{max(zero - y, 0):.1f}"'
            self.behind.append(f'<rect class="bar {style}" x="{x:.1f}" y="{y:.1f}" {size}/>')
        if label:
            self.legend.append(("bar", style, label))

    def vertical(self, x: float, style: str, label: str = "") -> None:
        """A line from bottom to top."""
        at = self.x(x)
        self.behind.append(f'<path class="line {style}" d="M{at:.1f} {self.bottom}V{self.top}"/>')
        if label:
            self.legend.append(("line", style, label))

    def name(self, kind: str, style: str, label: str) -> None:
        """A legend entry of its own: kind is line, bar or a shape."""
        self.legend.append((kind, style, label))

    # --- all together ---

    def svg(self) -> str:
        """The whole drawing, to stand in a page or in a file of its own."""
        legend, rows = self.key()
        shift = rows * (TEXT_HEIGHT + 6)
        clip = f"clip-{zlib.crc32((self.title + ''.join(self.behind + self.marks)).encode()):08x}"  # unique in a page
        body = [
            legend,
            f'<g transform="translate(0 {shift})">' if shift else "<g>",
            f'<clipPath id="{clip}">{self._area(0)}</clipPath><clipPath id="{clip}-marks">{self._area(6)}</clipPath>',
            *self._axes(),
            f'<g clip-path="url(#{clip})">{"".join(self.behind)}</g>',
            f'<g clip-path="url(#{clip}-marks)">{"".join(self.marks)}{self._placed_labels()}</g>',
            "</g>",
        ]
        return frame(self.title, self.width, self.height + shift, "".join(body))

    def _placed_labels(self) -> str:
        """Each right of its mark, or left, above or below it, where it covers the fewest marks and other labels."""
        half = TEXT_HEIGHT / 2
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in self.places]
        parts = []
        for x, y, text in self.labels:
            width = CHARACTER * len(text)
            starts = [(x + 9, y), (x - 9 - width, y), (x - width / 2, y - 15), (x - width / 2, y + 15)]
            boxes = [(left, at - half, left + width, at + half) for left, at in starts]

            def covered(box: Box) -> int:
                outside = box[0] < self.left or box[2] > self.right
                return 3 * outside + sum(_overlap(box, other) for other in taken)

            box = min(boxes, key=covered)
            taken.append(box)
            parts.append(f'<text x="{box[0]:.1f}" y="{box[1] + half + 4:.1f}">{escape(text)}</text>')
        return "".join(parts)

    def _area(self, around: int) -> str:
        """The frame and so many pixels around it."""
        wide, high = self.right - self.left + 2 * around, self.bottom - self.top + 2 * around
        return f'<rect x="{self.left - around}" y="{self.top - around}" width="{wide}" height="{high}"/>'

    def _axes(self) -> list[str]:
        parts = []
        for value in self.y.ticks():
            y = self.y(value)
            parts.append(f'<path class="rule" d="M{self.left} {y:.1f}H{self.right}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
        for value in self.x.ticks(6):
            x = self.x(value)
            parts.append(f'<path class="axis" d="M{x:.1f} {self.bottom}v4"/>')
            parts.append(f'<text x="{x:.1f}" y="{self.bottom + 17}" text-anchor="middle">{tick_text(value)}</text>')
        parts.append(f'<path class="axis" d="M{self.left} {self.bottom}H{self.right}"/>')
        middle = (self.left + self.right) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        at = (self.top + self.bottom) / 2
        parts.append(
            f'<text class="label" transform="translate(12 {at}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return parts

    def key(self, left: float | None = None) -> tuple[str, int]:
        """The legend and its number of rows: entries from left to right, in as many as they need."""
        left = float(self.left if left is None else left)
        parts, x, row = [], left, 0
        for kind, style, label in self.legend:
            wide = 30 + CHARACTER * len(label)
            if x > left and x + wide > self.width:
                x, row = left, row + 1
            y = 10 + row * (TEXT_HEIGHT + 6)
            if kind == "line":
                parts.append(f'<path class="line {style}" d="M{x:.0f} {y}h18"/>')
            elif kind == "bar":
                parts.append(f'<rect class="bar {style}" x="{x + 4:.0f}" y="{y - 5}" width="10" height="10"/>')
            else:
                parts.append(_shape(kind, x + 9, y, style))
            parts.append(f'<text x="{x + 23:.0f}" y="{y + 4}">{escape(label)}</text>')
            x += wide
        return "".join(parts), row + 1 if self.legend else 0

    def _path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def frame(title: str, width: float, height: float, body: str) -> str:
    """An image that a screen reader can name."""
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{body}</svg>'
    )


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def tick_text(value: float) -> str:
    """As short as can be.

    >>> tick_text(2_000_000), tick_text(-0.5), tick_text(50_000), tick_text(150)
    ('2 M', '−0.5', '50 k', '150')
    """
    text = f"{value / 1e6:g} M" if abs(value) >= 1e6 else f"{value / 1e3:g} k" if abs(value) >= 1e4 else f"{value:g}"
    return text.replace("-", "−")


def _shape(kind: str, x: float, y: float, style: str, note: str = "") -> str:
    title = f"<title>{escape(note)}</title>" if note else ""
    r = 4.5
    if kind == "circle":
        return f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{r - 0.5}">{title}</circle>'
    if kind == "square":
        return (
            f'<rect class="dot {style}" x="{x - r + 0.5:.1f}" y="{y - r + 0.5:.1f}" width="8" height="8">{title}</rect>'
        )
    corners = f"M{x:.1f} {y - r - 1:.1f}L{x + r + 1:.1f} {y:.1f}L{x:.1f} {y + r + 1:.1f}L{x - r - 1:.1f} {y:.1f}Z"
    return f'<path class="dot {style}" d="{corners}">{title}</path>'


# --- pictures ---------------------------------------------------------------------------------------------------------


def image_grid(title: str, images: Tensor, columns: int = 5, zoom: int = 3) -> str:  # (N, C, H, W) uint8
    """Images side by side."""
    n, channels, height, width = images.shape
    rows = -(-n // columns)
    gap = 2
    canvas = images.new_full((channels, rows * (height + gap) - gap, columns * (width + gap) - gap), 255)
    for index, image in enumerate(images):
        top, left = (index // columns) * (height + gap), (index % columns) * (width + gap)
        canvas[:, top : top + height, left : left + width] = image
    high, wide = canvas.shape[1:]
    data = base64.b64encode(png(canvas)).decode()
    picture = f'<image class="pixels" width="{wide}" height="{high}" href="data:image/png;base64,{data}"/>'
    return frame(title, wide, high, picture).replace('class="plot"', f'class="plot" width="{wide * zoom}"', 1)


def png(image: Tensor) -> bytes:  # (C, H, W) uint8, C = 1 or 3
    """A PNG file of an image."""
    channels, height, width = image.shape
    lines = image.permute(1, 2, 0).reshape(height, width * channels).cpu().contiguous()
    raw = b"".join(b"\0" + bytes(line.tolist()) for line in lines)  # each line without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
