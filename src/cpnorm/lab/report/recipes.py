"""Beyond the paper: tables of our own recipes, and accuracy against parameters on every data set."""

from __future__ import annotations

from collections.abc import Sequence

from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report import charts, story
from cpnorm.lab.report.comparison import LAST, best_epochs, last_epochs, late_epochs
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
    words,
)
from cpnorm.lab.report.records import Records
from cpnorm.lab.report.statistics import summarize
from cpnorm.lab.report.tally import difference_cells, difference_columns, minus


def own_tables(records: Records) -> dict[str, list[str]]:
    """Return the keys of rows that are not the paper's, by table."""
    published = {row.key for row in paper.rows()}
    tables: dict[str, list[str]] = {}
    for key, runs in records.runs.items():
        if key not in published:
            tables.setdefault(runs[0].table, []).append(key)
    return tables


def section(records: Records, drawn: Sequence[str]) -> Section:
    """Return our own recipes beside the plain networks of our own runs; ``drawn`` are the rows in the drawings."""
    section = Section("beyond", "Beyond the paper")
    own = own_tables(records)
    section.blocks.append(
        Text(
            "Recipes of our own. Each is compared with our plain control: the most accurate plain network that we "
            "trained on the same data with one of our own recipes or, where there is none, with the paper's settings. "
            "A row of the paper with one change is compared with the unchanged row."
            if own
            else "No recipe of our own has a finished run yet."
        )
    )
    section.blocks += [Text(found)] if (found := story.low_rank(records, drawn)) else []
    if drawings := charts.accuracy_against_parameters(records, drawn):
        section.blocks.append(Fold("Accuracy against parameters, by data set", [Gallery(drawings)]))
    titles = {table.key: table.title for table in beyond.TABLES}
    for index, (table, keys) in enumerate(own.items(), 1):
        keys = sorted(keys, key=lambda key: -max((run.parameters or 0 for run in records.finished(key)), default=0))
        title = titles.get(table, table)
        below = Section(f"own-{index}", title, [own_grid(title, keys, records)], note=_best(keys, records))
        section.sections.append(below)
    return section


def _best(keys: Sequence[str], records: Records) -> str:
    """Return the best accuracy of a table and its parameters, in a few words."""
    found = [
        (last.mean, size.mean)
        for key in keys
        if (last := last_epochs(runs := records.finished(key)))
        and (size := summarize(run.parameters for run in runs if run.parameters))
    ]
    if not found:
        return ""
    accuracy, parameters = max(found)
    return f"{len(keys)} rows, up to {accuracy:.1f} % with {count(parameters).text} parameters"


def own_grid(title: str, keys: Sequence[str], records: Records) -> Grid:
    """Return accuracy and parameters of our recipes, and their differences from our plain control."""
    cuts = {
        key: summarize(value for run in records.finished(key) if (value := run.accuracy_after_truncation) is not None)
        for key in keys
    }
    unchanged = unchanged_rows()
    rows = []
    for key in keys:
        runs = records.finished(key)
        diverged = len(records.runs[key]) - len(runs)
        last, best = last_epochs(runs), best_epochs(runs)
        parameters = summarize(run.parameters for run in runs if run.parameters)
        control = unchanged.get(key) or plain_control(str(runs[0].config.get("data")) if runs else "", records)
        control_runs = records.finished(control) if control else []
        control_parameters = summarize(run.parameters for run in control_runs if run.parameters)
        difference = minus(last, last_epochs(control_runs)) if control != key else None
        factor = control_parameters.mean / parameters.mean if control_parameters and parameters else None
        rows.append(
            [
                words(key.partition("/")[2] or key),
                *([mean_sd(cuts[key])] if any(cuts.values()) else []),
                mean_sd(last),
                mean_sd(late_epochs(runs)),
                mean_sd(best),
                number(best.max if best else None),
                count(parameters.mean if parameters else None),
                Cell(f"{len(runs)}" + (f", {diverged} diverged" if diverged else ""), len(runs)),
                words(control or MISSING),
                *difference_cells(difference),
                Cell(MISSING) if factor is None else Cell(f"{factor:.1f} ×", factor),
            ]
        )
    columns = [
        Column("row", words=True),
        *([Column("after the cut", "ours")] if any(cuts.values()) else []),
        *(Column(name, "ours") for name in ("last epoch", f"last {LAST}", "best epoch", "max", "parameters", "n")),
        Column("control", "against", words=True),
        *difference_columns("against"),
        Column("fewer parameters", "against"),
    ]
    return Grid(title, columns, rows)


def unchanged_rows() -> dict[str, str]:
    """Return the rows that are a row of the paper with one change, with the unchanged row."""
    return {row.key: row.variant_of for row in beyond.rows() if row.variant_of}


def plain_control(data: str, records: Records) -> str | None:
    """Return the row without CP that is the most accurate on this data: of our own recipes or else of the paper's."""
    own = [key for keys in own_tables(records).values() for key in keys if not key.startswith("checks/")]
    theirs = [row.key for row in paper.rows() if not row.same_as and not row.truncation]
    for keys in (own, theirs):
        means = {
            key: last.mean
            for key in keys
            if (last := last_epochs(runs := records.finished(key)))
            and runs[0].config.get("data") == data
            and runs[0].config.get("norm") in ("none", "weight")
            and runs[0].config.get("width", 1.0) == 1.0
        }
        if means:
            return max(means, key=lambda key: means[key])
    return None
