"""The paper's claims: each is answered from our runs with a test, or reported as not measured yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Row
from cpnorm.lab.report.comparison import LAST, NETWORKS, last_epochs, over_the_last, p_words, published_mean
from cpnorm.lab.report.compression_claims import against_tai, compresses, cuts_beat_whole_networks
from cpnorm.lab.report.document import Column, Grid, mean_sd, number, signed, words
from cpnorm.lab.report.late_epochs import still_rises
from cpnorm.lab.report.records import Records, Run
from cpnorm.lab.report.statistics import SIGNIFICANT, Summary, epochs_to_reach, mann_whitney, summarize
from cpnorm.lab.report.tally import (
    NOT_MEASURED,
    Claim,
    Tally,
    corrected,
    difference_cells,
    difference_columns,
    minus,
    tally,
)

OPTIMIZERS = {"sgd": "SGD", "rmsprop": "RMSprop"}
METHODS = {"none": "none", "weight": "weight", "cp": "CP"}
# A level of accuracy is set by the error left: this many times that of the weakest method at its end.
ERROR_FACTORS = {"early": 2.0, "late": 1.25}


def claims(records: Records) -> list[Claim]:
    """Return all claims, in the paper's order."""
    return [
        converges_faster(records),
        beats_weight_normalization(records),
        beats_it_over_many_epochs(records),
        beats_it_once_explained(records),
        still_rises(records),
        needs_power_method(records),
        compresses(records),
        cuts_beat_whole_networks(records),
        against_tai(records),
    ]


Settings = list[tuple[str, dict[str, Row]]]  # ("CIFAR-10, SGD", rows by method)


def training_settings() -> Settings:
    """Return the six settings in which no, weight and CP normalisation are compared."""
    return [
        (f"{network}, {optimizer}", {method: paper.row(f"{table}/{method}-{short}") for method in METHODS})
        for table, network in NETWORKS.items()
        for short, optimizer in OPTIMIZERS.items()
    ]


# The rows with the change that explains a difference from the paper: of none and weight, and of CP. What is never
# renormalised differs for CP alone.
EXPLAINED = {
    "CIFAR-10, SGD, whole batches alone": ("checks/{}-sgd-drop-last", "checks/cp-sgd-drop-last"),
    "CIFAR-10, SGD, batch 128, momentum 0.6": ("checks/{}-sgd-momentum", "checks/cp-sgd-momentum"),
    "CIFAR-10, RMSprop, never renormalised": ("cifar10/{}-rmsprop", "checks/cp-rmsprop-free"),
    "MNIST, RMSprop, never renormalised": ("mnist/{}-rmsprop", "checks/mnist-cp-free"),
}


def explained_settings() -> Settings:
    """Return the settings that differ from the paper, as the paper most likely had them."""
    published = {row.key: row for row in paper.rows()}
    for row in beyond.rows():
        if row.variant_of:
            published[row.key] = replace(row, published=published[row.variant_of].published)
    return [
        (setting, {method: published[(cp if method == "cp" else others).format(method)] for method in METHODS})
        for setting, (others, cp) in EXPLAINED.items()
    ]


# --- 1 ----------------------------------------------------------------------------------------------------------------


def converges_faster(records: Records) -> Claim:
    """Compare the epochs until an accuracy that every method of a setting reaches."""
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
    smallest = min(
        (2 / math.comb(n + m, n) for n, m in sizes if n and m), default=1.0
    )  # p of two samples that do not overlap
    grid = Grid(
        "Epochs until the test accuracy reaches a level",
        [
            Column("setting", words=True),
            Column("level, %"),
            *(Column(name, "epochs") for name in METHODS.values()),
            *difference_columns("CP − none", "epochs"),
            *difference_columns("CP − weight", "epochs"),
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
        f"By the means alone it needs fewer in {by_mean}. {_on_cifar10(of_cifar10.below, of_cifar10, 'fewer epochs')}"
        + (
            f"With so few runs no difference can be significant: the smallest possible p is {smallest:.2g}. "
            if smallest > SIGNIFICANT
            else ""
        )
        + "A level is the accuracy at which 2 times (early) or 1.25 times (late) the final error of the weakest method "
        "is left; a run that never reaches it counts with one epoch more than it had. The test is that of Mann and "
        "Whitney, by ranks. Epochs are not time: an epoch in canonical form takes longer."
    )
    cifar10 = [d for i, d in enumerate(differences) if d and lines[i // 2][0].startswith(NETWORKS["cifar10"])]
    fewer = sum(d.value < 0 for d in cifar10)
    headline = (
        f"On CIFAR-10, where the paper claims faster convergence, CP normalisation needs fewer epochs than no or "
        f"weight normalisation in {_all_or(fewer, len(cifar10))} comparisons ({of_cifar10.below} significant); "
        f"over all data sets it needs significantly fewer in {counts.below} of {counts.total} and more in "
        f"{counts.above}."
    )
    return Claim(
        "faster",
        "Does CP-normalisation converge faster?",
        "In the CP-case, we additionally observe faster convergence.",
        counts.answer(good=counts.below, bad=counts.above),
        explanation if counts.total else "",
        grid if lines else None,
        headline if of_cifar10.total else "",
        counts.counts(good=counts.below, bad=counts.above),
    )


def _all_or(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"


def _on_cifar10(good: int, counts: Tally, what: str) -> str:
    """Return the result on CIFAR-10: the paper makes its claims in the section on CIFAR-10."""
    if not counts.total:
        return ""
    bad = counts.total - good - counts.neither
    return f"On CIFAR-10, where the paper claims this: {what} in {good} of {counts.total}, the opposite in {bad}. "


# --- 2 ----------------------------------------------------------------------------------------------------------------


def beats_weight_normalization(records: Records) -> Claim:
    """Compare the accuracy of the last epoch in the six settings of the training tables."""
    return _against_both(
        records,
        training_settings(),
        last_epochs,
        "Accuracy of the last epoch, and CP against both",
        "weight",
        "Does it beat weight normalisation?",
        "For both SGD and RMSProp, our canonical formulation outperforms weight normalization and the un-normalized "
        "network. (On CIFAR-10; “competitively” overall.)",
    )


def beats_it_over_many_epochs(records: Records) -> Claim:
    """Compare means over many epochs, which vary less than one epoch; no epoch is chosen on test data."""
    return _against_both(
        records,
        training_settings(),
        over_the_last(LAST),
        f"Mean accuracy of each run's last {LAST} epochs, and CP against both",
        "steady",
        f"Does it beat weight normalisation over the last {LAST} epochs?",
        "",
        " The paper does not ask this. At a constant learning rate single epochs fall far below their neighbours, and "
        "a run may end in such an epoch.",
    )


def beats_it_once_explained(records: Records) -> Claim:
    """Compare in the settings that most likely gave the paper's numbers."""
    return _against_both(
        records,
        explained_settings(),
        last_epochs,
        "Accuracy of the last epoch, and CP against both, with the changes that explain differences from the paper",
        "ablations",
        "Does it beat weight normalisation with what explains the paper's numbers?",
        "",
        " The paper does not ask this: these are the settings tested above, chosen after their results were known, "
        "and with fewer runs than the paper's rows.",
    )


def _against_both(
    records: Records,
    asked: Settings,
    measure: Callable[[list[Run]], Summary | None],
    title: str,
    key: str,
    question: str,
    quote: str,
    remark: str = "",
) -> Claim:
    settings = [
        (setting, rows, {m: measure(records.finished(row.key)) for m, row in rows.items()}) for setting, rows in asked
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
            *difference_columns("CP − none"),
            *difference_columns("CP − weight"),
            Column("published", "CP − weight"),
        ],
        [
            [
                words(setting),
                *(mean_sd(accuracies[method]) for method in METHODS),
                *difference_cells(to_none[line]),
                *difference_cells(to_weight[line]),
                signed(published_mean(rows["cp"]) - published_mean(rows["weight"])),
            ]
            for line, (setting, rows, accuracies) in enumerate(settings)
        ],
    )
    explanation = (
        f"Of {counts.total} settings, CP is significantly more accurate than weight normalisation in {counts.above}, "
        f"less in {counts.below}; in {counts.neither} the test shows no difference. "
        f"{_on_cifar10(of_cifar10.above, of_cifar10, 'more accurate')}Against no normalisation: more in {plain.above}, "
        f"less in {plain.below}, no difference in {plain.neither} of {plain.total}.{remark}"
    )
    answer = counts.answer(good=counts.above, bad=counts.below)
    headline = (
        f"By the last epoch, CP normalisation is significantly more accurate than weight normalisation in "
        f"{counts.above} of {counts.total} settings and less accurate in {counts.below}; against no "
        f"normalisation it is more accurate in {plain.above} of {plain.total} and less accurate in {plain.below}."
    )
    shown = explanation if counts.total else ""
    told = headline if counts.total else ""
    rests_on = counts.counts(good=counts.above, bad=counts.below)
    return Claim(key, question, quote, answer, shown, grid if settings else None, told, rests_on)


# --- 3 ----------------------------------------------------------------------------------------------------------------


def needs_power_method(records: Records) -> Claim:
    """Compare the decomposition with vectors drawn at random, in the two initialisation tables."""
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
            f"Starting from the power method is significantly better than a random start in {counts.above} of "
            f"{counts.total} tests, and worse in {counts.below}. "
            + " ".join(
                f"{name}: {d.value:+.2f} points ({p_words(d.p) or 'a single run'}).".replace("-", "−")
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
            *difference_columns("power − random"),
            Column("published", "power − random"),
        ],
        [
            [
                words(name),
                mean_sd(power),
                mean_sd(random),
                *difference_cells(difference),
                signed(published_mean(power_row) - published_mean(row)),
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
        counts=counts.counts(good=counts.above, bad=counts.below),
    )
