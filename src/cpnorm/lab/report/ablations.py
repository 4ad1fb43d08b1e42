"""Tested explanations of differences from the paper: its rows beside the same rows with one change."""

from __future__ import annotations

from dataclasses import replace
from statistics import stdev

from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.comparison import LAST, Comparison, compare
from cpnorm.lab.report.document import Column, Grid, mean_sd, number, words
from cpnorm.lab.report.records import Records
from cpnorm.lab.report.statistics import Difference, summarize
from cpnorm.lab.report.tally import corrected, difference_cells, difference_columns, minus


def explanations(records: Records) -> Grid | None:
    """Return a table of every change that was tried on a row of the paper, with its effect."""
    tables = {table.key: table for table in paper.TABLES}
    pairs: list[tuple[Comparison, Comparison]] = []
    for changed in beyond.rows():
        row = paper.row(changed.variant_of) if changed.variant_of and records.finished(changed.key) else None
        if row and row.config.epochs == changed.config.epochs:  # shorter runs are explained in words
            after = compare(replace(changed, published=row.published), tables[row.table], records)
            before = compare(row, tables[row.table], records)
            pairs += [(before, after)] if before.last else []
    pairs.sort(key=lambda pair: pair[0].row.key)
    differences = corrected([_difference(before, after) for before, after in pairs])
    return _grid(pairs, differences, records) if pairs else None


def _difference(before: Comparison, after: Comparison) -> Difference | None:
    """Compare means over the last 20 epochs, which vary less than one epoch, where both have them."""
    return minus(after.late, before.late) if before.late and after.late else minus(after.last, before.last)


def _grid(pairs: list[tuple[Comparison, Comparison]], differences: list[Difference | None], records: Records) -> Grid:
    columns = [
        Column("row", words=True),
        Column("changed", words=True),
        Column("then, by the last epoch", words=True),
        Column("mean ± sd", "paper"),
        *(Column(name, "ours") for name in ("last epoch", f"last {LAST}", "sd within")),
        *(Column(name, "changed") for name in ("last epoch", f"last {LAST}", "sd within", "n")),
        *difference_columns("changed − ours"),
    ]
    rows = []
    for (before, after), difference in zip(pairs, differences, strict=True):
        rows.append(
            [
                words(before.row.key),
                words(after.row.name),
                words(after.words, after.status),
                mean_sd(before.published),
                mean_sd(before.last),
                mean_sd(before.late),
                number(_restlessness(before, records)),
                mean_sd(after.last),
                mean_sd(after.late),
                number(_restlessness(after, records)),
                number(after.runs, 0),
                *difference_cells(difference),
            ]
        )
    return Grid(
        f"Rows of the paper, run again with one change. “sd within” is the standard deviation over the last {LAST} "
        f"epochs of a run. The difference is that of the means over these {LAST} epochs, for shorter runs that of the "
        "last epoch; p is Welch's, corrected for the number of changes.",
        columns,
        rows,
    )


def _restlessness(entry: Comparison, records: Records) -> float | None:
    """Return the mean standard deviation over the last 20 epochs of a run; short runs, which still rise, have none."""
    curves = [run.curve[-LAST:] for run in records.finished(entry.row.key) if len(run.curve) >= 2 * LAST]
    spread = summarize(stdev(curve) for curve in curves)
    return spread.mean if spread else None
