"""A results folder -> the document: every table, figure and claim, each number computed here and nowhere typed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Table
from cpnorm.lab.report import charts, explorer, figures, recipes
from cpnorm.lab.report.ablations import explanations
from cpnorm.lab.report.claims import claims
from cpnorm.lab.report.comparison import LAST, PUBLISHED_RUNS, Comparison, compare, exact_bound
from cpnorm.lab.report.document import (
    MISSING,
    Cell,
    Column,
    Document,
    Drawing,
    Explorer,
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
from cpnorm.lab.report.records import Records, read_results
from cpnorm.lab.report.statistics import SIGNIFICANT
from cpnorm.lab.report.tally import Claim

TITLE = "Canonical convolutional networks, measured again"


def build(results: str | Path, data_dir: str | Path | None = None) -> Document:
    """The whole report from a results folder; data sets are looked for only to show samples of them."""
    records = read_results(results)
    compared = {table.key: [compare(row, table, records) for row in table.rows] for table in paper.tables()}
    everything = [entry for entries in compared.values() for entry in entries]
    answers = claims(records)
    sections = [
        agreement(everything, records),
        claims_section(answers),
        Section(
            "tables",
            "The paper's tables",
            [Text(READING)],
            [table_section(table, compared[table.key], records) for table in paper.tables()],
        ),
        figures_section(records, data_dir),
        recipes.section(records),
        explorer_section(records),
        provenance(records),
    ]
    return Document(TITLE, summary(everything), sections)


# --- what agrees ------------------------------------------------------------------------------------------------------


def summary(entries: Sequence[Comparison]) -> str:
    """The report in three sentences."""
    measured = [entry for entry in entries if entry.difference]
    if not measured:
        return f"None of the paper's {len(entries)} accuracies has been measured yet."
    complete = sum(entry.runs >= PUBLISHED_RUNS for entry in measured)
    share = "all" if complete == len(measured) else str(complete)
    counts = Counter(entry.status for entry in measured)
    return (
        f"{len(measured)} of the paper's {len(entries)} accuracies are measured, {share} of them with "
        f"{PUBLISHED_RUNS} seeds or more. {counts['within']} lie within one published standard deviation of the "
        f"published mean, {counts['above']} above it and {counts['below']} below."
    )


def agreement(entries: Sequence[Comparison], records: Records) -> Section:
    """Which rows agree with the paper, which do not, and why, where that was tested."""
    measured = [entry for entry in entries if entry.difference]
    section = Section("agreement", "What agrees, what does not")
    if not measured:
        section.blocks.append(Text("No row of the paper has a finished run yet."))
        return section
    tested = [entry for entry in measured if entry.difference and entry.difference.p is not None]
    apart = sum(bool(entry.difference and entry.difference.significant) for entry in tested)
    best = [e.difference_of_best for e in measured if e.difference_of_best and e.difference_of_best.p is not None]
    section.blocks.append(
        Text(
            f"Welch's test at {100 * SIGNIFICANT:g} % tells {apart} of {len(tested)} rows apart from the paper when "
            f"the last epoch is compared, and {sum(d.significant for d in best)} of {len(best)} when each run's best "
            f"epoch is. By chance alone about {math.ceil(SIGNIFICANT * len(tested))} would be."
        )
    )
    drawing = charts.overview(measured)
    if drawing:
        section.blocks.append(Gallery([drawing]))
    below = [entry for entry in measured if entry.status == "below"]
    if below:
        section.blocks.append(
            Grid(
                "Rows below the paper",
                [
                    Column("row", words=True),
                    Column("by the last epoch", words=True),
                    Column("by each run's best", words=True),
                    Column("explanation, and what was tested", words=True),
                ],
                [
                    [
                        words(entry.row.key),
                        words(entry.words, entry.status),
                        words(entry.words_of_best),
                        words(records.explanations.get(entry.row.key, "none yet")),
                    ]
                    for entry in below
                ],
            )
        )
    else:
        section.blocks.append(Text("No measured row lies below the paper by more than one standard deviation."))
    tested_changes = explanations(records)
    section.blocks += [tested_changes] if tested_changes else []
    missing = [entry.row.key for entry in entries if entry.status == "missing"]
    if missing:
        section.blocks.append(Text(f"{', '.join(missing)}.", lead=f"{len(missing)} rows not measured yet:"))
    return section


def claims_section(answers: Sequence[Claim]) -> Section:
    """Each claim: the paper's words, the answer, the numbers."""
    section = Section(
        "claims",
        "The paper's claims",
        [
            Text(
                "Each is answered by our runs alone: accuracies of the last epoch and Welch's test unless said "
                "otherwise, p corrected for the number of tests within a claim (Holm). “Not shown” means that the "
                "test sees no difference, which is not the same as there being none."
            )
        ],
    )
    for claim in answers:
        below = Section(f"claim-{claim.key}", claim.question)
        below.blocks += [Text(claim.paper, quote=True)] if claim.paper else []
        below.blocks.append(Text(claim.explanation, lead=claim.answer))
        if claim.grid:
            below.blocks.append(claim.grid)
        section.sections.append(below)
    return section


# --- tables -----------------------------------------------------------------------------------------------------------

READING = (
    "Accuracies are in percent of the test set, mean ± one sample standard deviation over seeds. The paper does not "
    "say which epoch its numbers belong to, and the authors' code prints the best one on the test set; since its "
    "means and maxima cannot come from the same eight values, the mean of our last epochs is compared with the "
    "published mean, and the best epoch of any run with the published maximum. Beside the last epoch stands the "
    f"mean over the last {LAST}, of runs that have {2 * LAST} or more. Best epochs are chosen on the test set "
    "and therefore flatter. p is Welch's test from means, deviations and numbers of runs (the paper's: 8); below 0.05 "
    "the verdict says “different”, otherwise “no difference shown”, which with few runs says little. Runs that "
    "diverged are counted in the verdict and left out of the means. Two things are not the paper's: on a GPU runs are "
    "trained in mixed precision (bfloat16, with weights and optimizer in float32) unless their settings say otherwise, "
    "and the sizes of batches, which it does not give, are those of its code or came nearest to its accuracies in "
    "trials (docs/paper.md), so that agreement is in part by choice."
)


def table_section(table: Table, entries: Sequence[Comparison], records: Records) -> Section:
    """One table of the paper beside ours, and the curves behind it."""
    section = Section(table.key, table.title)
    if table.ranks:
        section.blocks.append(rank_grid(table, records))
        return section
    section.blocks.append(accuracy_grid(table, entries))
    curves = charts.convergence(table, records)
    if curves:
        section.blocks.append(Gallery(curves))
    return section


def accuracy_grid(table: Table, entries: Sequence[Comparison]) -> Grid:
    """Published, ours, and the comparison."""
    columns = [
        Column("row", words=True),
        Column("verdict", words=True),
        *(Column(name, "paper") for name in ("mean ± sd", "max", "weights")),
        *(Column(name, "ours") for name in ("last epoch", f"last {LAST}", "best epoch", "max", "weights", "n")),
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
                count(published.weights),
                mean_sd(entry.last),
                mean_sd(entry.late),
                mean_sd(best),
                number(best.max if best else None),
                count(entry.weights),
                Cell(str(entry.runs), entry.runs),
                signed(difference.value if difference else None),
                p_cell(difference.p if difference else None),
                p_cell(of_best.p if of_best else None),
            ]
        )
    counted = f" Weights of {', '.join(table.counted)} only." if table.counted else ""
    return Grid(f"{table.title}: {settings(table)}.{counted}", columns, rows)


def settings(table: Table) -> str:
    """How the networks of a table are trained, or fine-tuned where it compresses."""
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
    """Published ranks beside the bound that always suffices, and our estimate where there is one."""
    rows = []
    for layer in table.ranks:
        bound = exact_bound(layer)
        estimate = records.ranks.get((table.key, layer.layer))
        remark = "no larger than the bound"
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
        Column("exact bound"),
        Column("ours, estimated"),
        Column("published rank is", words=True),
    ]
    largest = "The bound is the number of entries over the largest dimension."
    ours = "Ours is where alternating least squares with a growing rank reach a fit of 0.99, with one seed."
    return Grid(f"{table.title}. {largest} {ours}", columns, rows)


# --- figures ----------------------------------------------------------------------------------------------------------


def figures_section(records: Records, data_dir: str | Path | None) -> Section:
    """The paper's figures that show results; each is there or said to be missing."""
    by_key = {figure.key: figure for figure in paper.figures()}
    drawn: dict[str, list[Drawing | None]] = {
        "samples": [*figures.samples(data_dir)],
        "lambda-progress": [figures.lambda_progress(by_key["lambda-progress"], records)],
        "lambda-before": [figures.lambda_histogram(by_key["lambda-before"], "before", records)],
        "lambda-after": [figures.lambda_histogram(by_key["lambda-after"], "after", records)],
        "fit-rank": [figures.fit_against_rank(by_key["fit-rank"], records)],
    }
    section = Section("figures", "The paper's figures")
    absent = [by_key[key].title for key, drawings in drawn.items() if not any(drawings)]
    samples = [drawing for drawing in drawn.pop("samples") if drawing]
    rest = [drawing for drawings in drawn.values() for drawing in drawings if drawing]
    section.blocks += [Gallery(drawings) for drawings in (samples, rest) if drawings]
    if absent:
        section.blocks.append(Text("; ".join(absent) + ".", lead="Not in these results:"))
    return section


# --- the explorer, and where all this comes from ----------------------------------------------------------------------


def explorer_section(records: Records) -> Section:
    """Trained networks to be truncated by hand."""
    networks = explorer.networks(records)
    section = Section("explorer", "Explorer: truncate a trained network")
    if networks:
        section.blocks += [
            Text(
                "The same share of each layer's terms is removed, smallest |λ| first. Accuracy was measured on the "
                "test set right after the cut, without fine-tuning, at the rates the slider stops at."
            ),
            Explorer(networks),
        ]
    else:
        section.blocks.append(Text("No trained network with measured truncation is in the results yet."))
    return section


def provenance(records: Records) -> Section:
    """Versions, hardware, and how much computing it took."""
    runs = records.all_runs()
    section = Section("provenance", "Where the numbers come from")
    diverged = sum(run.diverged is not None for run in runs)
    papers = [run for table in paper.tables() for row in table.rows for run in records.runs.get(row.key, [])]
    minutes = sum(run.device_seconds for run in papers) / 60
    section.blocks.append(
        Text(
            f"{len(runs)} runs, {diverged} of them diverged. {len(papers)} belong to the paper's rows and took "
            f"{minutes:.0f} minutes of a device, each counted with its part where several shared one. Every number of "
            "ours on this page is computed from the result files, but for those in the explanations, which are "
            "written by hand."
        )
    )
    keys = ("gpu", "torch", "cuda", "python", "cpnorm", "commit")
    found = Counter(tuple(str(env.get(key) or MISSING) for key in keys) for env in records.environments)
    if found:
        section.blocks.append(
            Grid(
                "Environments",
                [*(Column(key, words=True) for key in keys), Column("records")],
                [
                    [
                        *(
                            words(value[:24] if key != "commit" else short_commit(value))
                            for key, value in zip(keys, env, strict=True)
                        ),
                        number(n, 0),
                    ]
                    for env, n in found.most_common()
                ],
            )
        )
    return section


def short_commit(commit: str) -> str:
    """Ten digits, and whether the tree had changes.

    >>> short_commit("0123456789abcdef0123-dirty")
    '0123456789-dirty'
    """
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") and len(commit) > 10 else "")
