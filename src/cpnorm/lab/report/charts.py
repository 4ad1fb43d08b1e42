"""Drawings of many rows at once: convergence, and accuracy against parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.report.comparison import last_epochs
from cpnorm.lab.report.document import Document, Drawing, count
from cpnorm.lab.report.drawing import (
    DASHES,
    INK,
    NOTE,
    count_axis,
    finish,
    label_points,
    legend,
    panel,
    standalone,
    style,
)
from cpnorm.lab.report.networks import DATA_NAMES, NAMES, Cut, is_ours, name_of, network_name
from cpnorm.lab.report.records import Records, Run, that_learned
from cpnorm.lab.report.statistics import mean_curve, summarize
from cpnorm.lab.training.runs import write_atomically

STYLES = {"none": "s0", "weight": "s1", "cp": "s2", "tai": "s3"}  # a method looks the same in every drawing
OTHERS = ("s2", "s1", "s3", "s4", "s5", "s0")
OPTIMIZERS = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "adamw": "AdamW"}
LEAD = "accuracy-parameters"  # the figure with which the report opens


# --- convergence ------------------------------------------------------------------------------------------------------


def convergence(table: Table, records: Records) -> list[Drawing]:
    """Draw test accuracy over the epochs, mean and one sd, once for each optimizer of a table."""
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


@style()
def curves(key: str, title: str, series: Sequence[tuple[str, str, Sequence[Run]]]) -> Drawing | None:
    """Draw the mean and one standard deviation of each named set of runs."""
    lines = [
        (f"{name} (n = {len(shown)})", colour, mean_curve([run.curve for run in shown]))
        for name, colour, runs in series
        if (shown := that_learned(runs)) and all(run.curve for run in shown)
    ]
    if not lines:
        return None
    epochs = max(len(summaries) for _, _, summaries in lines)
    # The steep start would flatten everything else: what happens in the first twelfth of the epochs may be cut off.
    starts = [summaries[min(len(summaries) - 1, epochs // 12)] for _, _, summaries in lines]
    low = min(start.mean - (start.sd or 0) for start in starts)
    high = max(s.mean + (s.sd or 0) for _, _, summaries in lines for s in summaries)
    margin = 0.06 * (high - low) or 0.5
    figure, axes = panel("epoch", "test accuracy, %")
    axes.set(xlim=(1, max(epochs, 2)), ylim=(low - margin, min(high + margin, 100.0)))
    for name, colour, summaries in lines:
        means, spreads = [s.mean for s in summaries], [s.sd or 0 for s in summaries]
        over = range(1, len(summaries) + 1)
        if any(spreads):
            below, above = zip(*((m - d, m + d) for m, d in zip(means, spreads, strict=True)), strict=True)
            axes.fill_between(over, below, above, color=INK[colour], alpha=0.16, linewidth=0)
        mark = {"linestyle": DASHES.get(colour, "-")} if len(summaries) > 1 else {"marker": "o", "linestyle": ""}
        axes.plot(over, means, color=INK[colour], linewidth=1.8, label=name, **mark)
    legend(figure, axes)
    caption = f"{title}: mean and one standard deviation over the seeds, as far as all of them ran."
    if left_out := sum(len(runs) - len(that_learned(runs)) for _, _, runs in series):
        caption += f" Not drawn: {left_out} of the runs, which never learned."
    return finish(figure, f"curve-{key}", f"Test accuracy over the epochs: {title}", caption)


# --- accuracy against parameters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """One network in a drawing of accuracy against parameters."""

    parameters: float
    accuracy: float
    sd: float
    row: str
    note: str
    label: str = ""  # written beside it where there is room


Kinds = dict[str, list[Mark]]
LOOKS = {  # kind: colour, marker, name in the legend
    "published": ("soft", "o", "the paper"),
    "again": ("s2", "o", "the paper's canonical rows, run here"),
    "own": ("s1", "D", "our recipes in canonical form"),
    "cut": ("s3", "^", "trained networks, cut by cpnorm"),
    "peers": ("s0", "s", "peers: dense, low-rank, pruned"),
}


def accuracy_against_parameters(records: Records, own_rows: Sequence[str]) -> list[Drawing]:
    """Draw accuracy against parameters for each data set: the paper's points, our runs, our recipes, and peers."""
    kinds = {data: marks_of(data, records, own_rows) for data in DATA_NAMES}
    return [
        _scatter(f"weights-{data}", name, kinds[data]) for data, name in DATA_NAMES.items() if _measured(kinds[data])
    ]


def lead(
    records: Records, own_rows: Sequence[str], cuts: Sequence[Cut] = (), smallest: Records | None = None
) -> Drawing | None:
    """Draw the figure that opens the report: accuracy against parameters on CIFAR-10, for wide and narrow screens."""
    data = "cifar10"
    kinds = marks_of(data, records, own_rows)
    if smallest is not None:
        add_own(kinds, data, smallest, list(smallest.runs))
    for cut in (cut for cut in cuts if cut.data == data):
        if is_ours(cut):
            kinds["cut"] += cut_marks(cut)
        elif cut.method in NAMES:  # others by more images lie where they lie by the usual number
            kinds["peers"] += cut_marks(cut)
    if not _measured(kinds):
        return None
    wide = _scatter(LEAD, DATA_NAMES[data], kinds, 620, 440)
    return replace(wide, narrow=_scatter(f"{LEAD}-narrow", DATA_NAMES[data], kinds, 390, 420).svg)


def write_lead(document: Document, folder: Path) -> list[Path]:
    """Write the figure that opens the report for light and for dark pages; return where the files are."""
    if document.lead is None:
        raise ValueError("expected records of CIFAR-10 for a figure of accuracy against parameters, found none")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"accuracy_vs_parameters_{theme}.svg" for theme in ("light", "dark")]
    for path, theme in zip(paths, ("light", "dark"), strict=True):
        write_atomically(path, standalone(document.lead, theme).encode())
    return paths


def _measured(kinds: Kinds) -> bool:
    return any(kinds[kind] for kind in ("again", "own", "peers"))


@style()
def _scatter(key: str, name: str, kinds: Kinds, width: int = 420, height: int = 330) -> Drawing:
    marks = [mark for group in kinds.values() for mark in group]
    sizes, accuracies = [m.parameters for m in marks], sorted(m.accuracy for m in marks)
    # One network that failed must not press all others into a line.
    low = min(a for a in accuracies if a >= accuracies[len(accuracies) // 2] - 12)
    margin = 0.08 * (accuracies[-1] - low) + 0.05
    bottom, top = low - margin, min(accuracies[-1] + margin, 100.0)
    figure, axes = panel("parameters of the network, logarithmic", "test accuracy, %", width, height)
    axes.set_ylim(bottom, top)
    count_axis(axes, min(sizes) / 1.5, max(sizes) * 1.5)
    for kind, (colour, shape, label) in LOOKS.items():
        face = "none" if kind == "published" else INK[colour]
        edge = INK[colour] if kind == "published" else INK["paper"]
        look: dict[str, Any] = {"marker": shape, "linestyle": "", "markersize": 9 if shape == "^" else 7}
        look |= {"markerfacecolor": face, "markeredgecolor": edge}
        for mark in kinds[kind]:
            if mark.sd:
                axes.plot([mark.parameters] * 2, [mark.accuracy - mark.sd, mark.accuracy + mark.sd], color=INK[colour])
            axes.plot([mark.parameters], [mark.accuracy], gid=NOTE + mark.note, **look)
        if kinds[kind]:
            axes.plot([], [], label=label, **look)
    legend(figure, axes, 2 if width > 600 else 1)
    ours = [*kinds["own"], *kinds["cut"]]
    front = sorted((m for m in ours if _is_on_the_front(m, ours)), key=lambda m: m.parameters)
    labels = [(m.parameters, m.accuracy, f"{m.accuracy:.1f} %, {count(m.parameters).text}") for m in front]
    labels += [(m.parameters, m.accuracy, m.label) for m in kinds["peers"] if m.label and m.accuracy > bottom]
    label_points(axes, labels, [(m.parameters, m.accuracy - m.sd, m.accuracy + m.sd) for m in marks])
    caption = (
        f"{name}: mean accuracy of the last epoch against the number of parameters; lines are one standard deviation."
    )
    if below := [f"{mark.row} ({mark.accuracy:.1f} %)" for mark in marks if mark.accuracy < bottom]:
        shown = "; ".join(below) if len(below) < 4 else f"{len(below)} networks, which the tables list"
        caption += f" Below the frame: {shown}."
    return finish(figure, key, f"Accuracy against parameters on {name}", caption)


def _is_on_the_front(mark: Mark, marks: Sequence[Mark]) -> bool:
    """Return True if no network with as few parameters, give or take a tenth, is more accurate."""
    return all(other.accuracy <= mark.accuracy for other in marks if other.parameters < 1.1 * mark.parameters)


def marks_of(data: str, records: Records, own_rows: Sequence[str]) -> Kinds:
    """Return the networks of a data set by kind: published, the paper's rows run again, our recipes, and peers."""
    kinds: Kinds = {kind: [] for kind in LOOKS}
    for row in paper.rows():
        if row.config.data != data or row.same_as:
            continue
        published = row.published
        if published and published.parameters and paper.table(row.table).counted is None:
            note = f"paper, {row.key}: {published.mean:.2f} %"
            kinds["published"].append(Mark(published.parameters, published.mean, 0.0, row.key, note))
        if mark := _mark(row.key, records):
            kinds["again" if (row.finetuning or row.config).norm == "cp" else "peers"].append(mark)
    add_own(kinds, data, records, own_rows)
    return kinds


def add_own(kinds: Kinds, data: str, records: Records, rows: Sequence[str]) -> None:
    """Add the rows of this data set: those in canonical form to our recipes, others to the peers."""
    for key in rows:
        settings = next((run.config for run in records.finished(key)), {})
        if settings.get("data") == data and (mark := _mark(key, records)):
            kinds["own" if settings.get("norm") == "cp" else "peers"].append(mark)


def cut_marks(cut: Cut) -> list[Mark]:
    """Return a cut network as it is right after the cut, and after training."""
    marks = []
    states = {"without training": cut.untrained, "fine-tuned": cut.tuned, "distilled": cut.distilled}
    for state, accuracies in states.items():
        if summary := summarize(accuracies):
            row = f"{cut.network}, {name_of(cut)}, {100 * cut.share:g} %, {state}"
            note = f"{row}: {summary.mean:.2f} %, {cut.parameters:,.0f} parameters, n = {summary.n}"
            label = f"{network_name(cut)}, {name_of(cut)}" if accuracies is cut.untrained else ""
            marks.append(Mark(cut.parameters, summary.mean, summary.sd or 0.0, row, note, label))
    return marks


def _mark(key: str, records: Records) -> Mark | None:
    everything = records.finished(key)
    runs = that_learned(everything)
    accuracy = last_epochs(runs)
    parameters = summarize(run.parameters for run in runs if run.parameters)
    if not accuracy or not parameters:
        return None
    note = f"{key}: {accuracy.mean:.2f} %, {parameters.mean:,.0f} parameters, n = {accuracy.n}"
    note += f" of {len(everything)}, the others never learned" if len(runs) < len(everything) else ""
    return Mark(parameters.mean, accuracy.mean, accuracy.sd or 0.0, key, note)
