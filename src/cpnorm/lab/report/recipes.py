"""Beyond the paper: tables of our own, and every network of ours as accuracy against weights."""

from __future__ import annotations

from collections.abc import Sequence

from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report import charts
from cpnorm.lab.report.comparison import LAST, best_epochs, last_epochs, late_epochs
from cpnorm.lab.report.document import (
    MISSING,
    Cell,
    Column,
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
from cpnorm.lab.report.statistics import summarize
from cpnorm.lab.report.tally import minus


def own_tables(records: Records) -> dict[str, list[str]]:
    """Rows that are not the paper's, by table."""
    published = {row.key for row in paper.rows()}
    tables: dict[str, list[str]] = {}
    for key, runs in records.runs.items():
        if key not in published:
            tables.setdefault(runs[0].table, []).append(key)
    return tables


def section(records: Records) -> Section:
    """Our own recipes beside the plain networks of our own runs."""
    section = Section("beyond", "Beyond the paper")
    own = own_tables(records)
    rows = [key for keys in own.values() for key in keys]
    section.blocks.append(
        Text(
            "Recipes of our own, compared with the most accurate plain or weight-normalised network that we trained on "
            "the same data with the paper's settings."
            if own
            else "No recipe of our own has a finished run yet."
        )
    )
    drawings = charts.accuracy_against_weights(records, rows)
    if drawings:
        section.blocks.append(Gallery(drawings))
    titles = {table.key: table.title for table in beyond.TABLES}
    for table, keys in own.items():
        keys = sorted(keys, key=lambda key: -max((run.parameters or 0 for run in records.finished(key)), default=0))
        section.blocks.append(own_grid(titles.get(table, table), keys, records))
    return section


def own_grid(title: str, keys: Sequence[str], records: Records) -> Grid:
    """Accuracy and weights of our recipes, and how they stand to the best network without CP."""
    cuts = {
        key: summarize(value for run in records.finished(key) if (value := run.accuracy_after_truncation) is not None)
        for key in keys
    }
    rows = []
    for key in keys:
        runs = records.finished(key)
        diverged = len(records.runs[key]) - len(runs)
        last, best = last_epochs(runs), best_epochs(runs)
        weights = summarize(run.parameters for run in runs if run.parameters)
        plain = plain_network(str(runs[0].config.get("data")) if runs else "", records)
        plain_runs = records.finished(plain) if plain else []
        plain_weights = summarize(run.parameters for run in plain_runs if run.parameters)
        difference = minus(last, last_epochs(plain_runs))
        factor = plain_weights.mean / weights.mean if plain_weights and weights else None
        rows.append(
            [
                words(key.partition("/")[2] or key),
                *([mean_sd(cuts[key])] if any(cuts.values()) else []),
                mean_sd(last),
                mean_sd(late_epochs(runs)),
                mean_sd(best),
                number(best.max if best else None),
                count(weights.mean if weights else None),
                Cell(f"{len(runs)}" + (f", {diverged} diverged" if diverged else ""), len(runs)),
                words(plain or MISSING),
                signed(difference.value if difference else None),
                p_cell(difference.p if difference else None),
                Cell(MISSING) if factor is None else Cell(f"{factor:.1f} ×", factor),
            ]
        )
    columns = [
        Column("row", words=True),
        *([Column("after the cut", "ours")] if any(cuts.values()) else []),
        *(Column(name, "ours") for name in ("last epoch", f"last {LAST}", "best epoch", "max", "weights", "n")),
        Column("best without CP", "against", words=True),
        *(Column(name, "against") for name in ("points", "p", "fewer weights")),
    ]
    return Grid(title, columns, rows)


def plain_network(data: str, records: Records) -> str | None:
    """The row without CP that comes out best on this data in our runs."""
    means = {
        row.key: last.mean
        for row in paper.rows()
        if row.config.data == data and row.config.norm in ("none", "weight") and not row.same_as and not row.truncation
        if (last := last_epochs(records.finished(row.key)))
    }
    return max(means, key=lambda key: means[key]) if means else None
