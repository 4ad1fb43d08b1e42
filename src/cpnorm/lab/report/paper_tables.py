"""The paper's tables beside ours: the main ones at a glance, and each one whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import cpnorm
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Table
from cpnorm.lab.report import charts
from cpnorm.lab.report.comparison import LAST, NETWORKS, Comparison
from cpnorm.lab.report.document import (
    MISSING,
    Cell,
    Column,
    Fold,
    Gallery,
    Grid,
    Section,
    Text,
    count,
    mean_sd,
    number,
    p_cell,
    signed,
    words,
)
from cpnorm.lab.report.records import Records

METHODS = {"none": "none", "weight": "weight", "cp": "CP"}
Compared = Mapping[str, Sequence[Comparison]]  # rows by table

READING = (
    "Accuracies are in percent of the test set; ours are mean ± one sample standard deviation over seeds, the paper's "
    "as printed, with the standard deviation of the population of its eight runs, which the tests turn into that of "
    "the sample. By the authors' own logs a published mean is that of one epoch, usually the last, and a maximum the "
    "best epoch of any run: the mean of our last epochs is compared with the published mean, and the best epoch of any "
    "run with the published maximum. “Mean curve” is the highest mean over the runs of any epoch, which one published "
    f"mean (MNIST, CP with RMSprop) is. “Last {LAST}” is the mean over the last {LAST} epochs, for runs that have "
    f"{2 * LAST} or more. Best epochs are chosen on the test set and are therefore optimistic. p is Welch's test from "
    "means, deviations and numbers of runs (the paper's: 8). Runs of a cut that start from the same network are not "
    "independent: there the network is the unit (n is runs / networks, “points” the difference of the mean over "
    "networks), and with one network there is no test. Below 0.05 the verdict of a row says “different”, otherwise “no "
    "difference shown”, which with few runs says little; these p are not corrected for the number of rows. "
    "Runs that diverged are counted in the verdict and left out of the means. Two things are not the paper's: on a "
    "GPU, runs are trained in mixed precision (bfloat16, with weights and optimizer in float32) unless their settings "
    "say otherwise; and batch sizes, which the paper does not give, are those of its code or came closest to "
    "its accuracies in trials (docs/paper.md), so that agreement is in part a matter of choice."
)


def section(compared: Compared, records: Records) -> Section:
    """Return every table of the paper beside ours, each folded, after the main ones at a glance."""
    parts = [table_section(table, compared[table.key], records) for table in paper.TABLES]
    glance = [training_glance(compared), compression_glance(compared)]
    return Section("tables", "The paper's tables", [*glance, Fold("How to read the tables", [Text(READING)])], parts)


def training_glance(compared: Compared) -> Grid:
    """Return the accuracies of the three training tables, a line for each data set and optimizer."""
    entries = {entry.row.key: entry for table in NETWORKS for entry in compared[table]}
    rows = []
    for table, name in NETWORKS.items():
        for short, optimizer in (("sgd", "SGD"), ("rmsprop", "RMSprop")):
            cells = [cell for m in METHODS for cell in _pair(entries[f"{table}/{m}-{short}"])]
            rows.append([words(f"{name}, {optimizer}"), *cells])
    columns = [Column("training", words=True)]
    columns += [Column(side, f"{name}, %") for name in METHODS.values() for side in ("paper", "ours")]
    return Grid("Test accuracy without, with weight and with CP normalisation: last epoch, mean ± sd", columns, rows)


def compression_glance(compared: Compared) -> Grid:
    """Return the accuracies after truncation and fine-tuning, at the shares that several data sets have."""
    lines = {
        name: {entry.row.name: entry for entry in compared[f"compress-{table}"] if entry.row.truncation}
        for table, name in NETWORKS.items()
    }
    counts = Counter(share for line in lines.values() for share in line)
    shares = sorted((share for share, n in counts.items() if n > 1), key=lambda share: float(share.split()[0]))
    rows = []
    for name, line in lines.items():
        cells = [c for s in shares for c in (_pair(line[s]) if s in line else [Cell(MISSING), Cell(MISSING)])]
        rows.append([words(name), *cells])
    columns = [Column("terms removed", words=True)]
    columns += [Column(side, share) for share in shares for side in ("paper", "ours")]
    return Grid("Test accuracy in percent after truncation by λ and 20 epochs of fine-tuning", columns, rows)


def _pair(entry: Comparison) -> list[Cell]:
    ours = mean_sd(entry.last)
    return [mean_sd(entry.published), Cell(ours.text, ours.value, entry.status)]


def runs_cell(entry: Comparison) -> Cell:
    """Return the number of runs, and of the networks that they start from."""
    return Cell(f"{entry.runs} / {entry.networks}" if entry.networks else str(entry.runs), entry.runs)


def outcome(entries: Iterable[Comparison]) -> str:
    """Return in a few words how many rows lie within one published standard deviation, above it and below it."""
    counts: Counter[str] = Counter(entry.status for entry in entries)
    names = {"within": "within one published sd", "above": "above", "below": "below", "missing": "not measured"}
    return ", ".join(f"{counts[status]} {name}" for status, name in names.items() if counts[status])


def table_section(table: Table, entries: Sequence[Comparison], records: Records) -> Section:
    """Return one table of the paper beside ours, with its curves folded away."""
    section = Section(table.key, table.title, note=outcome(entries) or f"{len(table.ranks)} layers")
    if table.ranks:
        section.blocks.append(rank_grid(table, records))
        return section
    section.blocks.append(accuracy_grid(table, entries))
    curves = charts.convergence(table, records)
    if curves:
        section.blocks.append(Fold("Test accuracy over the epochs", [Gallery(curves)]))
    return section


def accuracy_grid(table: Table, entries: Sequence[Comparison]) -> Grid:
    """Return a table of the published numbers, ours, and the comparison."""
    columns = [
        Column("row", words=True),
        Column("verdict", words=True),
        *(Column(name, "paper") for name in ("mean ± sd", "max", "parameters")),
        *(
            Column(name, "ours")
            for name in ("last epoch", f"last {LAST}", "mean curve", "best epoch", "max", "parameters", "n")
        ),
        *(Column(name, "ours − paper") for name in ("points", "p, last", "p, best")),
    ]
    rows = []
    for entry in entries:
        published, best = entry.row.published, entry.best
        assert published is not None
        difference, of_best = entry.difference, entry.difference_of_best
        rows.append(
            [
                words(entry.row.name),
                words(entry.words, entry.status),
                mean_sd(entry.published),
                number(published.max),
                count(published.parameters),
                mean_sd(entry.last),
                mean_sd(entry.late),
                number(entry.best_of_mean),
                mean_sd(best),
                number(best.max if best else None),
                count(entry.parameters),
                runs_cell(entry),
                signed(difference.value if difference else None),
                p_cell(difference.p if difference else None),
                p_cell(of_best.p if of_best else None),
            ]
        )
    counted = f" Parameters of {', '.join(table.counted)} only." if table.counted else ""
    return Grid(f"{table.title}: {settings(table)}.{counted}", columns, rows)


def settings(table: Table) -> str:
    """Return in words how the networks of a table are trained, or fine-tuned where it compresses."""
    configs = [row.finetuning or row.config for row in table.rows if not row.same_as]
    epochs = " or ".join(str(value) for value in sorted({config.epochs for config in configs}))
    batches = " or ".join(str(value) for value in sorted({config.batch_size for config in configs}))
    rates: dict[str, list[str]] = {}
    for config in configs:
        rates.setdefault(charts.OPTIMIZERS[config.optimizer], []).append(f"{config.lr:g}")
    steps = "; ".join(f"{name} {' or '.join(dict.fromkeys(values))}" for name, values in rates.items())
    tuning = " of fine-tuning" if any(row.truncation for row in table.rows) else ""
    return f"{epochs} epochs{tuning}, batches of {batches}, {steps}"


def rank_grid(table: Table, records: Records) -> Grid:
    """Return a table of published ranks, the rank that always suffices, and our estimates."""
    rows = []
    for layer in table.ranks:
        bound = cpnorm.exact_rank(layer.size)
        estimate = records.ranks.get((table.key, layer.layer))
        remark = "no larger than the exact rank"
        if layer.rank > bound:
            remark = f"{layer.rank - bound} terms more than any tensor of this size needs"
        rows.append(
            [
                words(layer.layer),
                words(" × ".join(map(str, layer.size))),
                number(layer.rank, 0),
                number(bound, 0),
                number(estimate.rank, 0) if estimate else Cell(MISSING),
                words(remark),
            ]
        )
    columns = [
        Column("layer", words=True),
        Column("size, inputs first", words=True),
        Column("published rank"),
        Column("exact rank"),
        Column("ours, estimated"),
        Column("published rank is", words=True),
    ]
    largest = "The exact rank, the number of entries over the largest dimension, always suffices."
    ours = "Ours is the rank at which alternating least squares reach a fit of 0.99, with one seed."
    return Grid(f"{table.title}. {largest} {ours}", columns, rows)
