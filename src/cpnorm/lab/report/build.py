"""Build the document from a results folder: every table, figure and claim, each number computed and none typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Table
from cpnorm.lab.report import charts, code_protocol, explorer, figures, networks, provenance, recipes, story
from cpnorm.lab.report.ablations import explanations
from cpnorm.lab.report.claims import claims
from cpnorm.lab.report.comparison import LAST, Comparison, compare, count_agreement, exact_bound
from cpnorm.lab.report.document import (
    MISSING,
    Cell,
    Column,
    Document,
    Drawing,
    Explorer,
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
from cpnorm.lab.report.records import Records, read_results
from cpnorm.lab.report.statistics import SIGNIFICANT
from cpnorm.lab.report.tally import Claim

FORWARD_ONLY = "beyond-batch/adam-free"  # vectors divided in the forward pass only, as in the authors' code
TITLE = "Canonical convolutional networks, measured again"


def build(results: str | Path, data_dir: str | Path | None = None) -> Document:
    """Build the whole report from a results folder.

    Data sets are read only to show samples of them; where their files are missing, the samples in the folder
    ``figures`` of the results are kept.
    """
    records = read_results(results)
    compared = {table.key: [compare(row, table, records) for row in table.rows] for table in paper.tables()}
    everything = [entry for entries in compared.values() for entry in entries]
    answers = claims(records)
    cuts = networks.read_cuts(Path(results))
    coded = code_protocol.read(records, Path(results))
    own = [key for keys in recipes.own_tables(records).values() for key in keys if not key.startswith("checks/")]
    sections = [
        agreement(everything, records),
        claims_section(answers),
        Section(
            "tables",
            "The paper's tables",
            [Fold("How to read the tables", [Text(READING)])],
            [table_section(table, compared[table.key], records) for table in paper.tables()],
        ),
        *([code_protocol.section(records, coded)] if coded else []),
        *([cut_networks] if (cut_networks := networks.section(cuts)) else []),
        recipes.section(records, own),
        explorer_section(records),
        figures_section(records, data_dir, Path(results) / "figures"),
        provenance.section(records, coded),
    ]
    in_short = code_protocol.agreement_sentence(coded) if coded else ""
    sentences = story.sentences(everything, answers, records, own, cuts, in_short)
    return Document(TITLE, charts.lead(records, own, cuts), sentences, sections)


# --- what agrees ------------------------------------------------------------------------------------------------------


def agreement(entries: Sequence[Comparison], records: Records) -> Section:
    """Return the section on which rows agree with the paper, which do not, and why, where that was tested."""
    measured = [entry for entry in entries if entry.difference]
    section = Section("agreement", "What agrees, what does not")
    if not measured:
        section.blocks.append(Text("No row of the paper has a finished run yet."))
        return section
    found = count_agreement(entries)
    section.blocks.append(
        Text(
            f"With the settings of the paper's text, {found.apart} of {found.tested} distinct rows differ "
            f"significantly from the paper by the last epoch (at {100 * SIGNIFICANT:g} %, after Holm's correction over "
            f"all of them; a row that repeats the runs of another one counts once). {found.agree} of {found.measured} "
            "lie within one published standard deviation or show no significant difference. Trainings are tested by "
            "Welch's test; cuts with the network that they start from as the unit, of which there are only one or two "
            "a table, so that their tests show little."
        )
    )
    drawing = charts.overview(measured)
    if drawing:
        section.blocks.append(Gallery([drawing]))
    below = [entry for entry in measured if entry.status == "below"]
    if below:
        section.blocks.append(
            Text(f"{len(below)} rows lie below the paper. Each opens with its explanation, and with what was tested.")
        )
        section.blocks += [below_the_paper(entry, records) for entry in below]
    else:
        section.blocks.append(Text("No measured row lies below the paper by more than one standard deviation."))
    changes = explanations(records)
    section.blocks += [Fold("All rows that were run again with one change", [changes])] if changes else []
    missing = [entry.row.key for entry in entries if entry.status == "missing"]
    if missing:
        section.blocks.append(Text(f"{', '.join(missing)}.", lead=f"{len(missing)} rows not measured yet:"))
    return section


def below_the_paper(entry: Comparison, records: Records) -> Fold:
    """Return a row that lies below the paper, with its explanation folded away."""
    explanation = records.explanations.get(entry.row.key, "No explanation yet.")
    return Fold(
        f"{entry.row.key}: {entry.words}", [Text(f"{entry.words_of_best}.", lead="By best epochs:"), Text(explanation)]
    )


def claims_section(answers: Sequence[Claim]) -> Section:
    """Return the section on the claims: the paper's words, our answer, and the numbers folded away."""
    section = Section(
        "claims",
        "The paper's claims",
        [
            Text(
                "Each claim is answered by our runs alone: accuracies of the last epoch and Welch's test unless stated "
                "otherwise, p corrected for the number of tests within a claim (Holm). “Not shown” means that the "
                "difference is not significant, which does not mean that there is none."
            )
        ],
    )
    for claim in answers:
        below = Section(f"claim-{claim.key}", claim.question)
        below.blocks += [Text(claim.paper, quote=True)] if claim.paper else []
        below.blocks.append(Text(claim.explanation, lead=claim.answer))
        if claim.grid:
            below.blocks.append(Fold("The numbers", [claim.grid]))
        section.sections.append(below)
    return section


# --- tables -----------------------------------------------------------------------------------------------------------

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


def table_section(table: Table, entries: Sequence[Comparison], records: Records) -> Section:
    """Return one table of the paper beside ours, with its curves folded away."""
    section = Section(table.key, table.title)
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
                count(published.weights),
                mean_sd(entry.last),
                mean_sd(entry.late),
                number(entry.best_of_mean),
                mean_sd(best),
                number(best.max if best else None),
                count(entry.parameters),
                code_protocol.runs_cell(entry),
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
    """Return a table of published ranks, the bound that always suffices, and our estimates."""
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
    ours = "Ours is the rank at which alternating least squares reach a fit of 0.99, with one seed."
    return Grid(f"{table.title}. {largest} {ours}", columns, rows)


# --- figures ----------------------------------------------------------------------------------------------------------


def figures_section(records: Records, data_dir: str | Path | None, earlier: Path) -> Section:
    """Return the paper's figures that show results; those that cannot be drawn are named."""
    by_key = {figure.key: figure for figure in paper.figures()}
    after = by_key["lambda-after"]
    if records.finished(FORWARD_ONLY):
        after = replace(after, row=FORWARD_ONLY)
    drawn: dict[str, list[Drawing | None]] = {
        "samples": [*figures.samples(data_dir, earlier)],
        "lambda-progress": [figures.lambda_progress(by_key["lambda-progress"], records)],
        "lambda-before": [figures.lambda_histogram(by_key["lambda-before"], "before", records)],
        "lambda-after": [figures.lambda_histogram(after, "after", records)],
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


# --- the explorer -----------------------------------------------------------------------------------------------------


def explorer_section(records: Records) -> Section:
    """Return the section in which trained networks can be truncated by hand."""
    found = explorer.networks(records)
    section = Section("explorer", "Explorer: truncate a trained network")
    if found:
        section.blocks += [
            Text(
                "The slider removes the same share of each layer's terms, smallest |λ| first. Accuracy was measured on "
                "the test set right after the cut, without fine-tuning, at the rates the slider stops at. Where the "
                "results have them, cuts to one budget for all layers, with other criteria and refits, are shown "
                "beside it, before and after fine-tuning."
            ),
            Explorer(found),
        ]
    else:
        section.blocks.append(Text("No trained network with measured truncation is in the results yet."))
    return section
