"""The paper's claims, each answered from our runs with a test, or left as not measured yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from cpnorm.lab import paper
from cpnorm.lab.paper import Row
from cpnorm.lab.report.comparison import best_epochs, last_epochs, p_words
from cpnorm.lab.report.document import MISSING, Column, Grid, mean_sd, number, signed, words
from cpnorm.lab.report.document import count as count_cell
from cpnorm.lab.report.records import Records, Run
from cpnorm.lab.report.statistics import SIGNIFICANT, Difference, Summary, epochs_to_reach, mann_whitney, summarize
from cpnorm.lab.report.tally import NOT_MEASURED, Tally, corrected, difference_cells, minus, tally

NETWORKS = {"cifar10": "CIFAR-10", "svhn": "SVHN", "mnist": "MNIST"}  # the training tables
OPTIMIZERS = {"sgd": "SGD", "rmsprop": "RMSprop"}
METHODS = {"none": "none", "weight": "weight", "cp": "CP"}
# A level of accuracy is set by the error left: this many times that of the weakest method at its end.
ERROR_FACTORS = {"early": 2.0, "late": 1.25}
LAST, LAST_OF_TUNING = 20, 5  # epochs
TOLERATED = 1.0  # points of accuracy that compression may cost


@dataclass(frozen=True)
class Claim:
    """One question, the paper's words on it (none: it is ours), and the answer of our numbers."""

    key: str
    question: str
    paper: str
    answer: str  # "Yes.", "No.", "Partly.", ...
    explanation: str
    grid: Grid | None = None


def claims(records: Records) -> list[Claim]:
    """All of them, in the paper's order."""
    return [
        converges_faster(records),
        beats_weight_normalization(records),
        beats_it_over_many_epochs(records),
        needs_power_method(records),
        compresses(records),
        against_tai(records),
    ]


def training_settings() -> list[tuple[str, dict[str, Row]]]:
    """The six places where no normalisation, weight and CP are compared: ("CIFAR-10, SGD", rows by method)."""
    return [
        (f"{network}, {optimizer}", {method: paper.row(f"{table}/{method}-{short}") for method in METHODS})
        for table, network in NETWORKS.items()
        for short, optimizer in OPTIMIZERS.items()
    ]


# --- 1 ----------------------------------------------------------------------------------------------------------------


def converges_faster(records: Records) -> Claim:
    """Epochs until an accuracy is reached that every method of a setting gets to."""
    lines: list[tuple[str, float, dict[str, list[int]]]] = []
    for setting, rows in training_settings():
        runs = {method: records.finished(row.key) for method, row in rows.items()}
        ends = [end for method in METHODS if (end := last_epochs(runs[method]))]
        if not runs["cp"] or len(ends) < 2:
            continue
        for name, factor in ERROR_FACTORS.items():
            level = 100 - factor * (100 - min(end.mean for end in ends))
            epochs = {m: [epochs_to_reach(run.curve, level) for run in runs[m] if run.curve] for m in METHODS}
            lines.append((f"{setting}, {name}", level, epochs))
    differences = corrected([mann_whitney(e["cp"], e[other]) for _, _, e in lines for other in ("none", "weight")])
    counts = tally(differences)
    of_cifar10 = tally(d for i, d in enumerate(differences) if lines[i // 2][0].startswith(NETWORKS["cifar10"]))
    by_mean = sum(d.value < 0 for d in differences if d)
    sizes = [(len(e["cp"]), len(e[other])) for _, _, e in lines for other in ("none", "weight")]
    smallest = min((2 / math.comb(n + m, n) for n, m in sizes if n and m), default=1.0)  # p of two that do not overlap
    grid = Grid(
        "Epochs until the test accuracy reaches a level",
        [
            Column("setting", words=True),
            Column("level, %"),
            *(Column(name, "epochs") for name in METHODS.values()),
            *(Column(name, f"CP − {other}") for other in ("none", "weight") for name in ("epochs", "p")),
        ],
        [
            [
                words(setting),
                number(level, 1),
                *(mean_sd(summarize(epochs[method]), 1) for method in METHODS),
                *difference_cells(differences[2 * line], 1),
                *difference_cells(differences[2 * line + 1], 1),
            ]
            for line, (setting, level, epochs) in enumerate(lines)
        ],
    )
    explanation = (
        f"Of {counts.total} comparisons with no or with weight normalisation, CP-normalisation needs significantly "
        f"fewer epochs in {counts.below}, more in {counts.above}; in {counts.neither} the test shows no difference. "
        f"By the means alone it needs fewer in {by_mean}. {_on_cifar10(of_cifar10.below, of_cifar10, 'fewer')}"
        + (
            f"With so few runs the test cannot say more: its smallest p is {smallest:.2g}. "
            if smallest > SIGNIFICANT
            else ""
        )
        + "A level is the accuracy at which 2 times (early) or 1.25 times (late) the final error of the weakest method "
        "is left; a run that never gets there counts with one epoch more than it had. The test is that of Mann and "
        "Whitney, by ranks. Epochs are not time: an epoch in canonical form takes longer."
    )
    return Claim(
        "faster",
        "Does CP-normalisation converge faster?",
        "In the CP-case, we additionally observe faster convergence.",
        counts.answer(good=counts.below, bad=counts.above),
        explanation if counts.total else "",
        grid if lines else None,
    )


def _on_cifar10(good: int, counts: Tally, what: str) -> str:
    """The paper's sentences stand in its section on CIFAR-10."""
    if not counts.total:
        return ""
    bad = counts.total - good - counts.neither
    return f"On CIFAR-10, of which the paper says it: {what} in {good} of {counts.total}, the opposite in {bad}. "


# --- 2 ----------------------------------------------------------------------------------------------------------------


def beats_weight_normalization(records: Records) -> Claim:
    """Accuracy of the last epoch, in the six settings of the training tables."""
    return _against_both(
        records,
        last_epochs,
        "Accuracy of the last epoch, and CP against both",
        "weight",
        "Does it beat weight normalisation?",
        "For both SGD and RMSProp, our canonical formulation outperforms weight normalization and the un-normalized "
        "network. (On CIFAR-10; “competitively” overall.)",
    )


def beats_it_over_many_epochs(records: Records) -> Claim:
    """The same by a steadier measure than one epoch is, and no epoch chosen on test data."""
    return _against_both(
        records,
        over_the_last(LAST),
        f"Mean accuracy of each run's last {LAST} epochs, and CP against both",
        "steady",
        f"Does it beat weight normalisation over the last {LAST} epochs?",
        "",
        " The paper does not ask this. At a constant learning rate single epochs fall far below their neighbours, and "
        "a run may end in one.",
    )


def over_the_last(epochs: int) -> Callable[[list[Run]], Summary | None]:
    """Of each run's mean over so many epochs at its end."""
    return lambda runs: summarize(fmean(run.curve[-epochs:]) for run in runs if run.curve)


def _against_both(
    records: Records,
    measure: Callable[[list[Run]], Summary | None],
    title: str,
    key: str,
    question: str,
    quote: str,
    remark: str = "",
) -> Claim:
    settings = [
        (setting, rows, {m: measure(records.finished(row.key)) for m, row in rows.items()})
        for setting, rows in training_settings()
    ]
    settings = [entry for entry in settings if entry[2]["cp"] and (entry[2]["weight"] or entry[2]["none"])]
    to_weight = corrected([minus(s["cp"], s["weight"]) for _, _, s in settings])
    to_none = corrected([minus(s["cp"], s["none"]) for _, _, s in settings])
    counts, plain = tally(to_weight), tally(to_none)
    of_cifar10 = tally(
        d for (name, *_), d in zip(settings, to_weight, strict=True) if name.startswith(NETWORKS["cifar10"])
    )
    grid = Grid(
        title,
        [
            Column("setting", words=True),
            *(Column(name, "accuracy, %") for name in METHODS.values()),
            Column("points", "CP − none"),
            Column("p", "CP − none"),
            Column("points", "CP − weight"),
            Column("p", "CP − weight"),
            Column("published", "CP − weight"),
        ],
        [
            [
                words(setting),
                *(mean_sd(accuracies[method]) for method in METHODS),
                *difference_cells(to_none[line]),
                *difference_cells(to_weight[line]),
                signed(_published_mean(rows["cp"]) - _published_mean(rows["weight"])),
            ]
            for line, (setting, rows, accuracies) in enumerate(settings)
        ],
    )
    explanation = (
        f"Of {counts.total} settings, CP is significantly more accurate than weight normalisation in {counts.above}, "
        f"less in {counts.below}; in {counts.neither} the test shows no difference. "
        f"{_on_cifar10(of_cifar10.above, of_cifar10, 'more')}Against no normalisation: more in {plain.above}, less in "
        f"{plain.below}, no difference in {plain.neither} of {plain.total}.{remark}"
    )
    answer = counts.answer(good=counts.above, bad=counts.below)
    return Claim(key, question, quote, answer, explanation if counts.total else "", grid if settings else None)


def _published_mean(row: Row) -> float:
    assert row.published is not None
    return row.published.mean


# --- 3 ----------------------------------------------------------------------------------------------------------------


def needs_power_method(records: Records) -> Claim:
    """The two initialisation tables: the decomposition against vectors drawn at random."""
    lines: list[tuple[str, Row, Summary | None, Row, Summary | None]] = []
    for key, optimizer in (("init-sgd", "SGD"), ("init-adam", "Adam")):
        power, *others = paper.table(key).rows
        summaries = {row.key: last_epochs(records.finished(row.same_as or row.key)) for row in (power, *others)}
        lines += [
            (f"{optimizer}, {row.name}", power, summaries[power.key], row, summaries[row.key])
            for row in others
            if summaries[power.key] and summaries[row.key]
        ]
    differences = corrected([minus(power, other) for _, _, power, _, other in lines])
    counts = tally(differences)
    if not counts.total:
        answer, explanation = NOT_MEASURED, ""
    else:
        without = "No." if counts.below else "Not shown."
        answer = without if not counts.above else "Yes." if counts.above == counts.total else "Not always."
        explanation = (
            f"Of {counts.total} comparisons, starting from the power method is significantly better than a random "
            f"start in {counts.above}, worse in {counts.below}; in {counts.neither} the test shows no difference. "
            + " ".join(
                f"{name}: {d.value:+.2f} points ({p_words(d.p)}).".replace("-", "−")
                for (name, *_), d in zip(lines, differences, strict=True)
                if d
            )
        )
    grid = Grid(
        "Accuracy of the last epoch: power method against random vectors",
        [
            Column("optimizer, random start", words=True),
            Column("power method", "accuracy, %"),
            Column("random", "accuracy, %"),
            Column("points", "power − random"),
            Column("p", "power − random"),
            Column("published", "power − random"),
        ],
        [
            [
                words(name),
                mean_sd(power),
                mean_sd(random),
                *difference_cells(difference),
                signed(_published_mean(power_row) - _published_mean(row)),
            ]
            for (name, power_row, power, row, random), difference in zip(lines, differences, strict=True)
        ],
    )
    return Claim(
        "power",
        "Is the power method needed?",
        "We conclude that running the power method is not required when using Adam.",
        answer,
        explanation,
        grid if lines else None,
    )


# --- 4 ----------------------------------------------------------------------------------------------------------------


def compresses(records: Records) -> Claim:
    """Accuracy after truncation and fine-tuning, against the untruncated networks and the plain one."""
    lines: list[tuple[str, Row, Summary, Summary, Summary | None]] = []
    for key in ("compress-cifar10", "compress-svhn", "compress-mnist"):
        whole_row, *cut_rows = paper.table(key).rows
        whole = last_epochs(records.finished(whole_row.same_as or whole_row.key))
        plain_key = (whole_row.same_as or "").replace("/cp-", "/none-")
        plain = last_epochs(records.finished(plain_key))
        for row in cut_rows:
            cut = last_epochs(records.finished(row.key))
            if cut and whole:
                network = NETWORKS[key.removeprefix("compress-")]
                lines.append((f"{network}, {row.name}", row, cut, whole, plain))
    losses = corrected([minus(cut, whole) for _, _, cut, whole, _ in lines])
    gains = corrected([minus(cut, plain) for _, _, cut, _, plain in lines])
    grid = Grid(
        "Accuracy of the last epoch after truncation and 20 epochs of fine-tuning",
        [
            Column("network, terms removed", words=True),
            Column("weights"),
            Column("accuracy, %"),
            Column("points", "− whole networks"),
            Column("p", "− whole networks"),
            Column("accuracy, %", "the network cut"),
            Column("points", "− the network cut"),
            Column("points", "− no normalisation"),
            Column("p", "− no normalisation"),
        ],
        [
            [
                words(name),
                count_cell(_weights(records, row)),
                mean_sd(cut),
                *difference_cells(loss),
                words(" or ".join(f"{before:.2f}" for before in sorted(set(starts))) or MISSING),
                signed(cut.mean - fmean(starts) if starts else None),
                *difference_cells(gain),
            ]
            for (name, row, cut, whole, _), loss, gain in zip(lines, losses, gains, strict=True)
            for starts in [_before_the_cut(records, row)]
        ],
    )
    tested = [(line, loss) for line, loss in zip(lines, losses, strict=True) if loss and loss.p is not None]
    if not tested:
        return Claim("compression", COMPRESSION_QUESTION, COMPRESSION_PAPER, NOT_MEASURED, "", grid if lines else None)
    sentences, kept = [], 0
    for network in dict.fromkeys(line[0].partition(",")[0] for line, _ in tested):
        safe = [
            line[1].compression.rate
            for line, loss in tested
            if line[1].compression and line[0].startswith(network) and _is_kept(loss)
        ]
        kept += bool(safe)
        sentences.append(
            f"{network}: no loss is shown with {100 * max(safe):g} % of the terms gone."
            if safe
            else f"{network}: every rate that was measured loses accuracy."
        )
    answer = "Yes." if kept == len(sentences) else "Partly." if kept else "No."
    explanation = (
        " ".join(sentences) + f" A loss is one that the test shows against the mean of the whole networks, or a mean "
        f"more than {TOLERATED:g} point lower: few runs show little, and bad last epochs of those hide a loss. "
        "The network that was cut is the best of its seeds, chosen on the test set as in the paper. Where it was not "
        "kept it was trained again with the same seed, which on a GPU ends elsewhere; where there are two, later seeds "
        "found a better one, or it was trained again twice. The difference to it leaves all that out."
    )
    return Claim("compression", COMPRESSION_QUESTION, COMPRESSION_PAPER, answer, explanation, grid)


def _before_the_cut(records: Records, row: Row) -> list[float]:
    """Accuracies of the networks that a row's runs began with."""
    return [value for run in records.finished(row.key) if (value := run.before_the_cut) is not None]


def _is_kept(loss: Difference) -> bool:
    return loss.value >= -TOLERATED and not (loss.significant and loss.value < 0)


COMPRESSION_QUESTION = "Does compression by λ work?"
COMPRESSION_PAPER = "Consequently, the CP-formulation allows straightforward weight compression by truncation."


def _weights(records: Records, row: Row) -> float | None:
    summary = summarize(run.weights for run in records.finished(row.key) if run.weights is not None)
    return summary.mean if summary else None


# --- 5 ----------------------------------------------------------------------------------------------------------------


def against_tai(records: Records) -> Claim:
    """Ten times fewer weights in the convolutions, by truncation or by Tai et al.'s low rank."""
    rows = paper.row("tai/canonical-91"), paper.row("tai/low-rank-90")
    measures = {
        "last epoch": last_epochs,
        f"mean of the last {LAST_OF_TUNING}": over_the_last(LAST_OF_TUNING),
        "best epoch": best_epochs,
    }
    pairs = [tuple(measure(records.finished(row.key)) for row in rows) for measure in measures.values()]
    differences = corrected([minus(ours, theirs) for ours, theirs in pairs])
    counts = tally(differences)
    grid = Grid(
        "Truncation against Tai et al.'s low-rank form after 20 epochs of fine-tuning",
        [
            Column("accuracy by", words=True),
            Column("truncation", "accuracy, %"),
            Column("low rank", "accuracy, %"),
            Column("points", "truncation − low rank"),
            Column("p", "truncation − low rank"),
        ],
        [
            [words(name), mean_sd(ours), mean_sd(theirs), *difference_cells(difference)]
            for name, (ours, theirs), difference in zip(measures, pairs, differences, strict=True)
        ],
    )
    first, gap = differences[0], _published_mean(rows[0]) - _published_mean(rows[1])
    explanation = ""
    if first and first.p is not None:
        better = "more accurate" if first.value > 0 else "less accurate"
        explanation = (
            f"With about a tenth of the convolutions' weights, truncation is by the last epoch {abs(first.value):.2f} "
            f"points {better} than the low-rank form ({p_words(first.p)}). By the {counts.total} measures below it is "
            f"significantly more accurate in {counts.above}, less in {counts.below}; best epochs are chosen on the "
            "test set. " + f"Published: {gap:+.2f} points.".replace("-", "−")
        )
    return Claim(
        "tai",
        "Does it beat the low-rank form of Tai et al.?",
        "We observe competitive performance for our approach, with slightly fewer parameters.",
        counts.answer(good=counts.above, bad=counts.below),
        explanation,
        grid if explanation else None,
    )
