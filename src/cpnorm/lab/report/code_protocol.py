"""The section on the second protocol: the paper's rows with the settings of the authors' code instead of its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.authors_runs import Curves, authors_runs
from cpnorm.lab.paper.protocols import CODE
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.report import against_authors
from cpnorm.lab.report.comparison import Agreement, Comparison, compare, count_agreement, last_epochs, undecided
from cpnorm.lab.report.document import Column, Fold, Gallery, Grid, Section, Text, mean_sd, number, p_cell, words
from cpnorm.lab.report.drawing import finish, style
from cpnorm.lab.report.paper_tables import outcome, runs_cell
from cpnorm.lab.report.records import Records, Run, numbers, read_results
from cpnorm.lab.report.statistics import summarize
from cpnorm.lab.report.tally import difference_cells, difference_columns


def read(records: Records, results: Path) -> Records | None:
    """Return the records of the second protocol, or None where the results have none."""
    folder = CODE.below(results)
    return with_recorded(read_results(folder), records) if folder.is_dir() else None


def section(records: Records, coded: Records) -> Section:
    """Return the section on the second protocol."""
    about = (
        "The tables above follow the text of the paper. Here the settings are those that the authors' public code and "
        "logs show, fixed from that evidence before they were run. Three rows of CIFAR-10 with SGD are an exception: "
        "their batch and momentum are fitted to the published accuracies, so that agreement is a matter of choice. "
        "Runs of the tables above count here too where their settings are the same. Cuts are tested with the network "
        "that they start from as the unit (a random effect), everything else by Welch's test. “Mean curve” is the "
        "highest mean over the runs of any epoch."
    )
    part = Section("code", "With the settings of the authors' code", [Text(agreement_sentence(coded))])
    part.blocks += [Fold("Where these settings come from", [Text(about), evidence_grid()])]
    for table in CODE.tables.values():
        lines = [compare(row, table, coded) for row in table.rows if coded.finished(row.same_as or row.key)]
        below = Section(f"code-{table.key}", table.title, note=outcome(lines) or f"{len(table.ranks)} layers")
        if table.ranks and any((table.key, layer.layer) in coded.estimates for layer in table.ranks):
            below.blocks.append(rank_grid(table, coded))
        elif lines and table.rows[0].published:
            below.blocks.append(code_grid(table, lines, records))
        elif lines:
            below.note = f"{len(lines)} rows"
            below.blocks.append(arms_grid(table, [entry.row for entry in lines], coded))
        part.sections += [below] if below.blocks else []
    missing = [r.key for t in CODE.tables.values() for r in t.rows if not coded.finished(r.same_as or r.key)]
    if missing:
        part.blocks.append(Fold(f"{len(missing)} rows not measured yet", [Text(f"{', '.join(missing)}.")]))
    part.sections += authors_section({"text": records, "code": coded})
    return part


def agreement(coded: Records) -> Agreement:
    """Count the distinct rows that agree with the paper; rows that show the runs of another one count once."""
    tables = [table for table in CODE.tables.values() if table.rows and table.rows[0].published]
    return count_agreement([compare(row, table, coded) for table in tables for row in table.rows if row.published])


def agreement_sentence(coded: Records) -> str:
    """Say how many distinct rows agree with the paper."""
    found = agreement(coded)
    few = f" {clause}." if (clause := undecided(found)) else ""
    rows = "all" if found.measured == found.rows else f"{found.measured} of"
    return (
        f"With the settings of the authors' code, {rows} {found.rows} distinct rows are measured; {found.agree} of "
        f"them agree with the paper: {found.within} lie within one published standard deviation, the others show no "
        f"significant difference after Holm's correction over all of them.{few}"
    )


def with_recorded(coded: Records, records: Records) -> Records:
    """Return the records of the protocol with those of the first one that have the very same settings."""
    runs: dict[str, list[Run]] = {}
    for key, row in CODE.rows().items():
        there = coded.runs.get(key, []) + [run for other in row.recorded_as for run in records.runs.get(other, [])]
        if there:
            runs[key] = there
    return replace(coded, runs=runs)


def code_grid(table: Table, lines: list[Comparison], records: Records) -> Grid:
    """Return a table of the paper beside both protocols."""
    rows = []
    for entry in lines:
        row = entry.row
        assert row.published is not None
        in_words = paper.row(row.key)
        rows.append(
            [
                words(row.name),
                words(_verdict(entry), entry.status),
                mean_sd(entry.published),
                number(row.published.max),
                mean_sd(last_epochs(records.finished(in_words.same_as or row.key))),
                mean_sd(entry.last),
                number(entry.best_of_mean),
                number(entry.best.max if entry.best else None),
                runs_cell(entry),
                *difference_cells(entry.difference),
            ]
        )
    columns = [
        Column("row", words=True),
        Column("verdict", words=True),
        *(Column(name, "paper") for name in ("mean ± sd", "max")),
        Column("last epoch", "ours, settings of the text"),
        *(Column(name, "ours, settings of the code") for name in ("last epoch", "mean curve", "max", "n")),
        *difference_columns("code − paper"),
    ]
    return Grid(f"{table.title}: accuracy under both protocols; n of a cut is runs / networks", columns, rows)


def _verdict(entry: Comparison) -> str:
    difference = entry.difference
    position = entry.words.partition(",")[0].partition(";")[0]
    if difference is None or difference.p is None:
        return position
    return f"{position}, {'different' if difference.significant else 'no difference shown'}"


def rank_grid(table: Table, coded: Records) -> Grid:
    """Return published ranks beside those that the authors' stopping rule gives, over several networks."""
    rows = []
    for layer in table.ranks:
        estimates = coded.estimates.get((table.key, layer.layer), {})
        found = summarize(float(estimate.rank) for estimate in estimates.values())
        row = [words(layer.layer), number(layer.rank, 0), mean_sd(found, 1), number(len(estimates), 0)]
        rows.append(row)
    columns = [Column("layer", words=True), Column("published rank"), Column("ours"), Column("networks")]
    return Grid(f"{table.title}, estimated by the authors' stopping rule: mean ± sd over networks", columns, rows)


def arms_grid(table: Table, rows: list[Row], coded: Records) -> Grid:
    """Return the second arms: rows with one setting changed, beside the unchanged row."""
    lines = []
    for row in rows:
        runs = coded.finished(row.key)
        unchanged = last_epochs(coded.finished(row.variant_of)) if row.variant_of else None
        lines.append(
            [
                words(row.key.partition("/")[2]),
                words(row.name),
                mean_sd(last_epochs(runs)),
                number(len(runs), 0),
                words(row.variant_of or ""),
                mean_sd(unchanged),
            ]
        )
    columns = [
        Column("row", words=True),
        Column("change", words=True),
        *(Column(name, "changed") for name in ("last epoch", "n")),
        Column("row", "unchanged", words=True),
        Column("last epoch", "unchanged"),
    ]
    return Grid(table.title, columns, lines)


def evidence_grid() -> Grid:
    """Return where the settings of every row come from."""
    columns = [Column("row", words=True), Column("evidence", words=True)]
    rows = [[words(row.key), words(row.evidence)] for row in CODE.rows().values() if row.evidence]
    return Grid("Where the settings come from; commits are those of the authors' repository", columns, rows)


# --- MNIST beside the authors' own runs -------------------------------------------------------------------------------


def authors_section(protocols: dict[str, Records]) -> list[Section]:
    """Return our MNIST runs beside the authors' own, whose logs have every epoch."""
    grids, drawings = [], []
    for name, records in protocols.items():
        runs = {row: _curves(records, row) for row in authors_runs()}
        found = against_authors.compare_rows(runs)
        if not found:
            continue
        columns = [
            Column("row", words=True),
            *(Column(side, "runs") for side in ("ours", "the authors'")),
            *difference_columns("last epoch, ours − theirs"),
            *(Column(label, "p of equal mean curves") for label in against_authors.METRICS.values()),
        ]
        rows = [
            [
                words(entry.row),
                number(entry.ours, 0),
                number(entry.theirs, 0),
                *difference_cells(entry.last),
                *(p_cell(entry.curves[metric]) for metric in against_authors.METRICS),
            ]
            for entry in found
        ]
        caption = (
            f"Settings of the {name}. The test of curves exchanges whole runs between both sides. Cuts are not tested: "
            "all of the authors' start from one network."
        )
        grids.append(Grid(caption, columns, rows))
        for cut, key, what in ((False, f"authors-{name}", "MNIST runs"), (True, f"authors-{name}-cuts", "MNIST cuts")):
            shown = [entry.row for entry in found if against_authors.is_cut(entry.row) == cut]
            if shown:
                title = f"Our {what} over the authors' own, settings of the {name}"
                caption = f"Settings of the {name}: mean and range of our {what} over the authors' own."
                with style():
                    drawings.append(finish(against_authors.draw_curves(runs, shown), key, title, caption))
    if not grids:
        return []
    text = Text("The authors' repository has the logs of their own MNIST runs, so that whole curves can be compared.")
    curves = [Gallery(drawings)] if drawings else []
    return [Section("authors", "MNIST beside the authors' own runs", [text, *grids, *curves], note="whole curves")]


def _curves(records: Records, row: str) -> list[Curves]:
    """Return the curves of the finished runs of a row that have all of them."""
    found: list[Curves] = []
    for run in records.finished(row):
        curve = run.raw.get("curve")
        curves = {metric: numbers(curve.get(metric)) for metric in against_authors.METRICS} if curve else {}
        if curves and all(curves.values()):
            found.append(curves)
    return found
