"""Tables and the Pareto figure of compression_accuracy.py, from its records alone."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpnorm.lab.report.networks import method_of

Record = Mapping[str, Any]
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"  # what stands between them in a page is made
TICKS = (2, 3, 5, 10, 20, 33, 50, 100)  # per cent
LEAST_LOSS, LOSSES = 0.1, (0.1, 0.3, 1, 3, 10, 30)  # points; smaller losses, and gains, are drawn as the least
COLOURS = {
    "cpnorm": "#c1272d",
    "cpnorm, 8,192 images": "#5c0a0d",
    "cpnorm-outputs": "#e8787c",
    "cpnorm-weights": "#f0b0b0",
    "svd": "#4477aa",
    "whitened-svd": "#66ccee",
    "tucker2": "#228833",
    "cp-als": "#ccbb44",
    "tensorly-torch": "#aa3377",
    "torch-pruning": "#777777",
}


def read(paths: Iterable[Path]) -> list[Record]:
    """Return the records of these files, in their order; of two with one key the later counts."""
    found: dict[tuple[Any, ...], Record] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            record = json.loads(text)
            if record.get("benchmark") == "compression_accuracy":
                found[key(record)] = record
    return list(found.values())


def key(record: Record) -> tuple[Any, ...]:
    """Return what makes two records the same measurement."""
    label = record["finetuning"]["label"] if "finetuning" in record else None
    names, dense = ("network", "data", "network_seed", "share"), round(record["dense_accuracy"], 2)
    return (method_of(record), *(record[name] for name in names), record.get("seed"), label, dense)


def networks(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each dense network by its name; of several of one kind it has the accuracy in it."""
    groups: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["network"], record["data"], round(record["dense_accuracy"], 2)].append(record)

    def name(network: str, data: str, dense: float) -> str:
        several = sum(other[:2] == (network, data) for other in groups) > 1
        return f"{network}, {data}" + (f" (dense {dense:.2f} %)" if several else "")

    return {name(*group): groups[group] for group in sorted(groups)}


def line(record: Record) -> str:
    """Return a record in one line."""
    if record.get("failed"):
        return f"{record['network']} {method_of(record)} {100 * record['share']:g} %: failed, {record['failed']}"
    how = f"fine-tuned ({record['finetuning']['label']}, seed {record['seed']})" if "finetuning" in record else "cut"
    fresh, raw = record.get("accuracy_fresh_statistics"), record.get("accuracy_as_cut")
    return (
        f"{record['network']} {method_of(record)} {100 * record['share']:g} %, {how}: {record['accuracy']:.2f} %"
        + (f" (as cut {raw:.2f}, with fresh statistics {fresh:.2f})" if fresh is not None else "")
        + f" of {record['dense_accuracy']:.2f}, {record['parameters']:,} parameters"
        + (f", {record['seconds']:.1f} s" if record.get("seconds") else "")
    )


def table(records: Sequence[Record]) -> list[str]:
    """Return Markdown lines: one row for each network, method and share."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(lambda: {"tuned": defaultdict(list)})
    for record in records:
        row = rows[record["network"], record["data"], -record["share"], method_of(record)]
        if "finetuning" in record:
            row["tuned"][record["finetuning"]["label"]].append(record["accuracy"])
        else:
            row["cut"] = record
    head = "network | parameters left | method | not trained | as cut / fresh statistics | fine-tuned | FLOPs left"
    lines = [f"| {head} | time to compress |", "|---|---:|---|---:|---:|---|---:|---:|"]
    for (network, data, share, name), row in sorted(rows.items()):
        cut = row.get("cut", {})
        tuned = "; ".join(
            f"{'' if label == 'default' else label + ' '}{_spread(values)}" for label, values in row["tuned"].items()
        )
        flops = f"{100 * cut['flops'] / cut['dense_flops']:.1f} %" if cut.get("flops") else "–"
        lines.append(
            f"| {network} {data} | {-100 * share:g} % | {name} | {_percent(cut.get('accuracy'))} "
            f"| {_percent(cut.get('accuracy_as_cut'))} / {_percent(cut.get('accuracy_fresh_statistics'))} "
            f"| {tuned or '–'} | {flops} "
            f"| {_seconds(cut.get('seconds'))} |"
        )
    return lines


def print_table(paths: Iterable[Path]) -> None:
    """Print the table of these records."""
    for here in networks(read(path for path in paths if path.exists())).values():
        print("\n".join(table(here)))


def show(paths: Sequence[Path], figure: Path, page: Path | None = None) -> None:
    """Print the tables of these records, draw the figure, and put both into a page, between its two comments."""
    print_table(paths)
    draw(read(paths), figure)
    print(f"written to {figure}")
    if page is not None:
        page.write_text(with_figures(page.read_text(), read(paths), f"assets/{figure.name}"))


def with_figures(text: str, records: Sequence[Record], figure: str) -> str:
    """Return the text of a page with the tables of these records, a table for each network, and the figure."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [f"![points of accuracy that cuts cost, against parameters and FLOPs]({figure})"]
    for name, here in networks(records).items():
        parts.append(f"**{name}**: {_machines(here)}")
        parts.append("\n".join(table(here)))
    return before + BEGIN + "\n" + "\n\n".join(parts) + "\n" + END + after


def _machines(records: Sequence[Record]) -> str:
    """Return each machine with the commits of its records."""
    commits: dict[str, set[str]] = {}
    for record in records:
        machine = record["machine"]
        commits.setdefault(machine["gpu"] or machine["cpu"], set()).add(record["commit"] or "?")
    return "; ".join(f"{name}, commit {', '.join(sorted(found))}" for name, found in sorted(commits.items()))


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw what cuts cost against parameters and FLOPs, a row for each kind of network that was cut.

    Several dense networks of one kind share a row: what counts is how far a cut one is below its own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["method"] != "dense" and record["accuracy"] is not None:
            found[f"{record['network']}, {record['data']}"].append(record)
    figure, axes = pyplot.subplots(
        max(1, len(found)), 2, figsize=(11, 0.6 + 2.7 * len(found)), squeeze=False, layout="constrained", sharey="row"
    )
    for (name, here), row in zip(sorted(found.items()), axes, strict=False):
        for axis, quantity in zip(row, ("parameters", "flops"), strict=True):
            _curves(axis, here, quantity)
            axis.set_xscale("log")
            axis.set_xlim(1.7, 110)
            axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
            axis.set_yscale("log")
            axis.set_ylim(100, LEAST_LOSS / 1.3)
            axis.set_yticks(LOSSES, [f"{loss:g}" for loss in LOSSES])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("points below dense")
        row[0].set_title(name, loc="left")
    for axis, quantity in zip(axes[-1], ("parameters", "FLOPs"), strict=True):
        axis.set_xlabel(f"{quantity} left, % of dense")
    named = {
        label: handle for axis in axes[:, 0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle("cut without training (lines), trained afterwards (circles)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis: Any, records: Sequence[Record], quantity: str) -> None:
    """Draw the mean loss of each method's cuts, and of those that were trained afterwards."""
    points: dict[tuple[str, str | None, float], list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        if record[quantity]:
            lost = max(LEAST_LOSS, record["dense_accuracy"] - record["accuracy"])
            label = record["finetuning"]["label"] if "finetuning" in record else None
            left = 100 * record[quantity] / record[f"dense_{quantity}"]
            points[method_of(record), label, record["share"]].append((left, lost))
    means = {key: tuple(map(statistics.mean, zip(*found, strict=True))) for key, found in points.items()}
    for name, colour in COLOURS.items():
        cut = sorted(point for key, point in means.items() if key[:2] == (name, None))
        trained = [point for key, point in means.items() if key[0] == name and key[1] is not None]
        if cut:
            axis.plot(*zip(*cut, strict=True), color=colour, marker=".", label=name, linewidth=1.2)
        if trained:
            axis.scatter(*zip(*trained, strict=True), facecolors="none", edgecolors=colour, s=36)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"
