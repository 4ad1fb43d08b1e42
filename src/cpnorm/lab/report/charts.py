"""Drawings of many rows at once: the overview, convergence with bands, accuracy against weights."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.report.comparison import Comparison, last_epochs
from cpnorm.lab.report.document import Drawing
from cpnorm.lab.report.plots import Plot, frame
from cpnorm.lab.report.records import Records, Run, that_learned
from cpnorm.lab.report.statistics import mean_curve, summarize

STYLES = {"none": "s0", "weight": "s1", "cp": "s2", "tai": "s3"}  # a method looks the same in every drawing
OTHERS = ("s2", "s1", "s3", "s4", "s5", "s0")
DATA_NAMES = {"cifar10": "CIFAR-10", "svhn": "SVHN", "mnist": "MNIST", "digits": "digits"}
OPTIMIZERS = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "adamw": "AdamW"}


# --- everything at a glance -------------------------------------------------------------------------------------------


def overview(comparisons: Sequence[Comparison], reach: float = 3.0) -> Drawing | None:
    """Ours minus the published mean for every row, with its 95 % interval, over the published spread."""
    measured = [c for c in comparisons if c.difference]
    if not measured:
        return None
    line, left, top = 18, 196, 34
    titles = {table.key: table.title for table in paper.tables()}
    groups = dict.fromkeys(c.row.table for c in measured)
    height = top + line * (len(measured) + len(groups)) + 34
    plot = Plot("", (-reach, reach), (0, 1), width=500, height=height, left=left)
    x, parts = plot.x, []
    for value in range(-int(reach), int(reach) + 1):
        style = "axis" if value == 0 else "rule"
        parts.append(f'<path class="{style}" d="M{x(value):.1f} {top - 8}V{height - 34}"/>')
        label = f"{value:+d}".replace("-", "−") if value else "0"
        parts.append(f'<text x="{x(value):.1f}" y="{height - 18}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text class="label" x="{x(0):.1f}" y="{height - 3}" text-anchor="middle">ours − paper, points</text>'
    )
    y = float(top)
    for key in groups:
        parts.append(f'<text class="strong" x="0" y="{y + 4:.1f}">{escape(titles.get(key, key))}</text>')
        y += line
        for entry in (c for c in measured if c.row.table == key):
            parts.append(_overview_row(plot, entry, y, reach))
            y += line
    plot.name("bar", "band", "one published sd")
    plot.name("circle", "within", "within it")
    plot.name("circle", "above", "above")
    plot.name("circle", "below", "below")
    legend, _ = plot.key(left=0)
    svg = frame(
        "Difference between our mean accuracy and the published one, row by row", 500, height, legend + "".join(parts)
    )
    return Drawing(
        "overview",
        svg,
        f"Mean accuracy of the last epoch minus the published mean, {len(measured)} rows. Lines are 95 % confidence "
        "intervals of the difference (Welch), bars one published standard deviation. "
        f"Differences beyond {reach:g} points are drawn at the edge with their size.",
    )


def _overview_row(plot: Plot, entry: Comparison, y: float, reach: float) -> str:
    x, difference, published = plot.x, entry.difference, entry.row.published
    assert difference is not None
    assert published is not None

    def inside(value: float) -> float:
        return x(max(-reach, min(reach, value)))

    parts = [f'<text x="12" y="{y + 4:.1f}">{escape(entry.row.name)}</text>']
    if published.sd:
        low, high = inside(-published.sd), inside(published.sd)
        parts.append(
            f'<rect class="bar band" x="{low:.1f}" y="{y - 5:.1f}" width="{max(high - low, 1):.1f}" height="10"/>'
        )
    if difference.low is not None and difference.high is not None:
        ends = inside(difference.low), inside(difference.high)
        parts.append(f'<path class="whisker {entry.status}" d="M{ends[0]:.1f} {y:.1f}H{ends[1]:.1f}"/>')
    note = f"{entry.row.key}: {difference.value:+.2f} points, {entry.words}".replace("-", "−")
    at = inside(difference.value)
    parts.append(
        f'<circle class="dot {entry.status}" cx="{at:.1f}" cy="{y:.1f}" r="4"><title>{escape(note)}</title></circle>'
    )
    if abs(difference.value) > reach:
        nearest = difference.low if difference.value > 0 else difference.high
        edge = inside(difference.value if nearest is None else nearest)
        # Behind the interval; where that ends at the right edge there is no room, but to the left of the dot there is.
        beside = difference.value < 0 and edge < x(reach) - 30
        x_text, anchor = (edge + 8, "start") if beside else (min(edge, at) - 8, "end")
        text = f"{difference.value:+.1f}".replace("-", "−")
        parts.append(f'<text x="{x_text:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


# --- convergence ------------------------------------------------------------------------------------------------------


def convergence(table: Table, records: Records) -> list[Drawing]:
    """Test accuracy over the epochs, mean and one sd, one drawing for each optimizer of a table."""
    panels: dict[str, list[Row]] = {}
    for row in table.rows:
        if row.same_as and row.table != "init-sgd":  # the networks before compression have their curves elsewhere
            continue
        panels.setdefault((row.finetuning or row.config).optimizer, []).append(row)
    drawings = []
    for optimizer, rows in panels.items():
        methods = [(row.finetuning or row.config).norm for row in rows]
        styles = [STYLES[m] for m in methods] if len(set(methods)) == len(rows) else OTHERS
        series = [
            (
                row.name.partition(",")[0] if table.key != "tai" else row.name,
                style,
                records.finished(row.same_as or row.key),
            )
            for row, style in zip(rows, styles, strict=False)
        ]
        drawing = curves(f"{table.key}-{optimizer}", f"{table.title}, {OPTIMIZERS[optimizer]}", series)
        if drawing:
            drawings.append(drawing)
    return drawings


def curves(key: str, title: str, series: Sequence[tuple[str, str, Sequence[Run]]]) -> Drawing | None:
    """Mean and band of each named set of runs."""
    lines = [
        (f"{name} (n = {len(shown)})", style, mean_curve([run.curve for run in shown]))
        for name, style, runs in series
        if (shown := that_learned(runs)) and all(run.curve for run in shown)
    ]
    if not lines:
        return None
    epochs = max(len(summaries) for _, _, summaries in lines)
    # The steep start would flatten all that matters: it leaves the frame where a twelfth of the epochs is over.
    starts = [summaries[min(len(summaries) - 1, epochs // 12)] for _, _, summaries in lines]
    low = min(start.mean - (start.sd or 0) for start in starts)
    high = max(s.mean + (s.sd or 0) for _, _, summaries in lines for s in summaries)
    margin = 0.06 * (high - low)
    plot = Plot(
        f"Test accuracy over the epochs: {title}",
        (1, epochs),
        (low - margin, min(high + margin, 100.0)),
        x_label="epoch",
        y_label="test accuracy, %",
    )
    for name, style, summaries in lines:
        if len(summaries) > 1:
            over = list(enumerate(summaries, 1))
            if any(s.sd for s in summaries):
                lower = [(epoch, s.mean - (s.sd or 0)) for epoch, s in over]
                plot.band(lower, [(epoch, s.mean + (s.sd or 0)) for epoch, s in over], style)
            plot.line([(epoch, s.mean) for epoch, s in over], style, name)
        else:
            plot.dot((1, summaries[0].mean), style, name)
            plot.name("circle", style, name)
    caption = f"{title}: mean and one standard deviation over the seeds, as far as all of them ran."
    if left_out := sum(len(runs) - len(that_learned(runs)) for _, _, runs in series):
        caption += f" Not drawn: {left_out} of the runs, which never learned."
    return Drawing(f"curve-{key}", plot.svg(), caption)


# --- accuracy against weights -----------------------------------------------------------------------------------------


def accuracy_against_weights(records: Records, own_rows: Sequence[str]) -> list[Drawing]:
    """One drawing for each data set: the paper's points, our runs of its rows, plain networks, our own recipes."""
    drawings = []
    for data, name in DATA_NAMES.items():
        published, plain, again, own = _points(data, records, own_rows)
        if not (plain or again or own):
            continue
        points = [*published, *plain, *again, *own]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        # One network that failed must not press all others into a line.
        low = max(min(ys), sorted(ys)[len(ys) // 2] - 12)
        margin = 0.08 * (max(ys) - low) + 0.05
        plot = Plot(
            f"Accuracy against weights on {name}",
            (min(xs) / 1.5, max(xs) * 3),  # names stand to the right of their points
            (low - margin, min(max(ys) + margin, 100.0)),
            x_label="weights",
            y_label="test accuracy, %",
            log_x=True,
        )
        kinds = (
            (published, "hollow", "circle", "published"),
            (again, "s2", "circle", "the paper's rows, ours"),
            (plain, "s0", "square", "plain networks, ours"),
            (own, "s1", "diamond", "our recipes"),
        )
        for entries, style, shape, label in kinds:
            for x, y, spread, note in entries:
                named = entries is own and _is_best_of_its_size((x, y), own)
                name_beside = note.partition(":")[0].rpartition("/")[2] if named else ""
                plot.dot((x, y), style, note, shape=shape, spread=spread, label=name_beside)
            if entries:
                plot.name(shape, style, label)
        caption = (
            f"{name}: mean accuracy of the last epoch, lines one standard deviation; weights on a logarithmic scale."
        )
        if below := [note for _, y, _, note in points if y < low - margin]:
            caption += f" Below the frame: {'; '.join(below)}."
        drawings.append(Drawing(f"weights-{data}", plot.svg(), caption))
    return drawings


Marked = tuple[float, float, float, str]  # weights, accuracy, sd, note


def _is_best_of_its_size(point: tuple[float, float], points: Sequence[Marked]) -> bool:
    """Whether none with as many weights, give or take a tenth, is more accurate: the others' names would cover it."""
    weights, accuracy = point
    return all(y <= accuracy for x, y, *_ in points if 0.9 < x / weights < 1.1)


def _points(
    data: str, records: Records, own_rows: Sequence[str]
) -> tuple[list[Marked], list[Marked], list[Marked], list[Marked]]:
    published: list[Marked] = []
    plain: list[Marked] = []
    again: list[Marked] = []
    for row in paper.rows():
        if row.config.data != data or row.same_as:
            continue
        counted = paper.table(row.table).counted
        if row.published and row.published.weights and counted is None:
            numbers = row.published
            published.append((numbers.weights or 0, numbers.mean, 0.0, f"paper, {row.key}: {numbers.mean:.2f} %"))
        mark = _mark(row.key, records)
        if mark:
            (plain if row.config.norm in ("none", "weight") and not row.truncation else again).append(mark)
    own: list[Marked] = []
    for key in own_rows:
        settings = next((run.config for run in records.finished(key)), {})
        if settings.get("data") == data and (mark := _mark(key, records)):
            (plain if settings.get("norm") == "none" else own).append(mark)
    return published, plain, again, own


def _mark(key: str, records: Records) -> Marked | None:
    everything = records.finished(key)
    runs = that_learned(everything)
    accuracy = last_epochs(runs)
    weights = summarize(run.parameters for run in runs if run.parameters)
    if not accuracy or not weights:
        return None
    note = f"{key}: {accuracy.mean:.2f} %, {weights.mean:,.0f} weights, n = {accuracy.n}"
    note += f" of {len(everything)}, the others never learned" if len(runs) < len(everything) else ""
    return weights.mean, accuracy.mean, accuracy.sd or 0.0, note
