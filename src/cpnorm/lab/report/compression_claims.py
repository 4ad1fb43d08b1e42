"""The paper's claims about compression: each is answered from our runs with a test, or not measured yet."""

from __future__ import annotations

from statistics import fmean

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Row
from cpnorm.lab.report.comparison import NETWORKS, last_epochs, p_words, published_mean
from cpnorm.lab.report.document import MISSING, Cell, Column, Grid, mean_sd, number, signed, words
from cpnorm.lab.report.document import count as count_cell
from cpnorm.lab.report.nested import Measure, by_network, last_accuracy, of_networks
from cpnorm.lab.report.records import Records, Run
from cpnorm.lab.report.statistics import Difference, Summary, summarize
from cpnorm.lab.report.tally import NOT_MEASURED, Claim, corrected, difference_cells, difference_columns, minus, tally

LAST_OF_TUNING = 5  # epochs
TOLERATED = 1.0  # points of accuracy that compression may cost
BETTER_CUTS = ("compress-cifar10/25", "compress-cifar10/50", "compress-svhn/50")
OTHER_NORMS = {"weight": "weight normalisation", "none": "no normalisation"}


def compresses(records: Records) -> Claim:
    """Compare the accuracy after truncation and fine-tuning with that of the whole and of the plain networks."""
    lines: list[tuple[str, Row, Summary, Summary, Summary | None]] = []
    for key in ("compress-cifar10", "compress-svhn", "compress-mnist"):
        whole_row, *cut_rows = paper.table(key).rows
        whole = last_epochs(records.finished(whole_row.same_as or whole_row.key))
        plain_key = (whole_row.same_as or "").replace("/cp-", "/none-")
        plain = last_epochs(records.finished(plain_key))
        for row in cut_rows:
            cut = of_networks(records.finished(row.key))
            if cut and whole:
                network = NETWORKS[key.removeprefix("compress-")]
                lines.append((f"{network}, {row.name}", row, cut, whole, plain))
    losses = corrected([minus(cut, whole) for _, _, cut, whole, _ in lines])
    gains = corrected([minus(cut, plain) for _, _, cut, _, plain in lines])
    grid = Grid(
        "Accuracy of the last epoch after truncation and 20 epochs of fine-tuning: mean ± sd over the networks that "
        "were truncated, each the mean of its runs",
        [
            Column("network, terms removed", words=True),
            Column("parameters"),
            Column("accuracy, %"),
            Column("networks"),
            *difference_columns("− whole networks"),
            Column("accuracy, %", "truncated network"),
            Column("points", "− truncated network"),
            *difference_columns("− no normalisation"),
        ],
        [
            [
                words(name),
                count_cell(_parameters(records, row)),
                mean_sd(cut),
                number(cut.n, 0),
                *difference_cells(loss),
                words(" or ".join(f"{before:.2f}" for before in sorted(set(starts))) or MISSING),
                signed(cut.mean - fmean(starts) if starts else None),
                *difference_cells(gain),
            ]
            for (name, row, cut, whole, _), loss, gain in zip(lines, losses, gains, strict=True)
            for starts in [_before_truncation(records, row)]
        ],
    )
    measured = [(line, loss) for line, loss in zip(lines, losses, strict=True) if loss]
    if not measured:
        return Claim("compression", COMPRESSION_QUESTION, COMPRESSION_PAPER, NOT_MEASURED, "", grid if lines else None)
    sentences, kept, spared = [], 0, []
    for network in dict.fromkeys(line[0].partition(",")[0] for line, _ in measured):
        safe = [
            truncation.rate or 0.0
            for line, loss in measured
            if (truncation := line[1].truncation) and line[0].startswith(network) and _is_kept(loss)
        ]
        kept += bool(safe)
        spared += [f"{100 * max(safe):g} % ({network})"] if safe else []
        sentences.append(
            f"{network}: no loss is shown with {100 * max(safe):g} % of the terms gone."
            if safe
            else f"{network}: every rate that was measured loses accuracy."
        )
    answer = "Yes." if kept == len(sentences) else "Partly." if kept else "No."
    explanation = (
        " ".join(sentences) + f" A loss is a mean more than {TOLERATED:g} point below that of the whole networks, or a "
        "significant difference from it. Runs that start from the same network are not independent, so that the "
        "network is the unit of the test: with one or two of them it shows little, and bad last epochs of the whole "
        "networks hide a loss. The truncated network is the best of its seeds, chosen on the test set as in the paper. "
        "Where it was not kept it was trained again with the same seed, which on a GPU does not end at the same "
        "weights; where "
        "there are two, later seeds found a better one, or it was trained again twice. The difference from the "
        "truncated network itself is free of these effects."
    )
    listed = " and ".join(filter(None, (", ".join(spared[:-1]), *spared[-1:])))
    outcome = f"shows no loss with {listed} of the terms removed" if spared else "loses at every rate"
    headline = f"After 20 epochs of fine-tuning, truncation by λ {outcome}."
    rests_on = f"no loss shown with {listed} of the terms removed" if spared else ""
    return Claim("compression", COMPRESSION_QUESTION, COMPRESSION_PAPER, answer, explanation, grid, headline, rests_on)


def cuts_beat_whole_networks(records: Records) -> Claim:
    """Compare truncated networks with whole ones in other forms, in the rows where the paper finds them better."""
    names: list[str] = []
    cells: list[list[Cell]] = []
    pairs: list[tuple[Summary, Summary | None]] = []
    published: list[float] = []
    for key in BETTER_CUTS:
        row, training = paper.row(key), paper.table(key.partition("/")[0]).rows[0].same_as or ""
        cut = of_networks(records.finished(key))
        for norm, name in OTHER_NORMS.items():
            other = paper.row(training.replace("/cp-", f"/{norm}-"))
            accuracy = last_epochs(records.finished(other.key))
            if cut and accuracy:
                network = NETWORKS[row.table.removeprefix("compress-")]
                names.append(f"{network}, {row.name} of the terms removed, against {name}")
                cells.append([words(names[-1]), mean_sd(cut), number(cut.n, 0), mean_sd(accuracy)])
                pairs.append((cut, accuracy))
                published.append(published_mean(row) - published_mean(other))
    differences = corrected([minus(cut, other) for cut, other in pairs])
    counts = tally(differences)
    grid = Grid(
        "Accuracy of the last epoch: truncated and fine-tuned networks against whole ones",
        [
            Column("networks", words=True),
            *(Column(name, "truncated, %") for name in ("accuracy", "networks")),
            Column("whole, %"),
            *difference_columns("truncated − whole"),
            Column("published", "truncated − whole"),
        ],
        [
            [*line, *difference_cells(difference), signed(gap)]
            for line, difference, gap in zip(cells, differences, published, strict=True)
        ],
    )
    above = sum(d.value > 0 for d in differences if d)
    explanation = (
        f"Truncated networks are significantly more accurate in {counts.above} of {counts.total} tests and less in "
        f"{counts.below}; by the means alone they are more accurate in {above} of {len(names)}. The unit of a test is "
        "the network that was truncated, of which there are two or three, so that only large differences can be "
        "significant. The truncated networks were chosen among all seeds by their test accuracy, as in the paper, and "
        "trained for 20 epochs more; the whole ones were neither."
    )
    return Claim(
        "better-cuts",
        "Do truncated networks beat whole ones in other forms?",
        "Note, the 25% and 50% compressed networks outperform the weight normalized and un-normalized networks.",
        counts.answer(good=counts.above, bad=counts.below),
        explanation if counts.total else "",
        grid if names else None,
        counts=counts.counts(good=counts.above, bad=counts.below),
    )


def _before_truncation(records: Records, row: Row) -> list[float]:
    """Return the accuracies of the networks that were truncated for a row's runs."""
    groups = by_network(records.finished(row.key), lambda run: run.accuracy_before_truncation)
    return [fmean(group) for group in groups]


def _is_kept(loss: Difference) -> bool:
    return loss.value >= -TOLERATED and not (loss.significant and loss.value < 0)


COMPRESSION_QUESTION = "Does compression by λ work?"
COMPRESSION_PAPER = "Consequently, the CP-formulation allows straightforward weight compression by truncation."


def _parameters(records: Records, row: Row) -> float | None:
    summary = summarize(run.parameters for run in records.finished(row.key) if run.parameters is not None)
    return summary.mean if summary else None


def _end_of_tuning(run: Run) -> float | None:
    return fmean(run.curve[-LAST_OF_TUNING:]) if run.curve else None


def against_tai(records: Records) -> Claim:
    """Compare truncation with Tai et al.'s low-rank form, both with a tenth of the convolutions' parameters."""
    rows = paper.row("tai/canonical-91"), paper.row("tai/low-rank-90")
    measures: dict[str, Measure] = {
        "last epoch": last_accuracy,
        f"mean of the last {LAST_OF_TUNING}": _end_of_tuning,
        "best epoch": lambda run: run.accuracy_best,
    }
    pairs = [tuple(of_networks(records.finished(row.key), measure) for row in rows) for measure in measures.values()]
    differences = corrected([minus(ours, theirs) for ours, theirs in pairs])
    counts = tally(differences)
    grid = Grid(
        "Truncation against Tai et al.'s low-rank form after 20 epochs of fine-tuning: mean ± sd over the networks "
        "that they start from, each the mean of its runs",
        [
            Column("accuracy by", words=True),
            Column("truncation", "accuracy, %"),
            Column("low rank", "accuracy, %"),
            *difference_columns("truncation − low rank"),
        ],
        [
            [words(name), mean_sd(ours), mean_sd(theirs), *difference_cells(difference)]
            for name, (ours, theirs), difference in zip(measures, pairs, differences, strict=True)
        ],
    )
    first, gap = differences[0], published_mean(rows[0]) - published_mean(rows[1])
    explanation = ""
    if first:
        better = "more accurate" if first.value > 0 else "less accurate"
        explanation = (
            "With about a tenth of the convolutions' parameters, truncation is by the last epoch "
            f"{abs(first.value):.2f} points {better} than the low-rank form ({p_words(first.p) or 'no test'}). "
            f"By the {counts.total} tested measures below it is significantly more accurate in {counts.above}, less in "
            f"{counts.below}, with the network as the unit; best epochs are chosen on the test set. "
            + f"Published: {gap:+.2f} points.".replace("-", "−")
        )
    return Claim(
        "tai",
        "Does it beat the low-rank form of Tai et al.?",
        "We observe competitive performance for our approach, with slightly fewer parameters.",
        counts.answer(good=counts.above, bad=counts.below),
        explanation,
        grid if explanation else None,
        counts=counts.counts(good=counts.above, bad=counts.below),
    )
