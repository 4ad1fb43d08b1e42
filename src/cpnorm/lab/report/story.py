"""The sentences with which the report opens: what a reader should remember, each computed from the records."""

from __future__ import annotations

from collections.abc import Sequence

from cpnorm.lab.report import networks
from cpnorm.lab.report.charts import Mark, marks_of
from cpnorm.lab.report.comparison import PUBLISHED_RUNS, Agreement, Comparison, count_agreement, undecided
from cpnorm.lab.report.document import count
from cpnorm.lab.report.networks import DATA_NAMES, Cut
from cpnorm.lab.report.records import Records
from cpnorm.lab.report.tally import Claim

TOLD = ("faster", "weight", "compression")  # claims of which the opening speaks


def sentences(
    entries: Sequence[Comparison],
    answers: Sequence[Claim],
    records: Records,
    own_rows: Sequence[str],
    cuts: Sequence[Cut] = (),
    coded: Agreement | None = None,
) -> list[str]:
    """Return up to five: what was measured under both protocols, three claims, and our own smallest networks."""
    headlines = {claim.key: claim.headline for claim in answers}
    smallest = networks.sentence(cuts) or low_rank(records, own_rows)
    found = [reproduction(entries, coded), *(headlines[key] for key in TOLD), smallest]
    return [sentence for sentence in found if sentence]


def reproduction(entries: Sequence[Comparison], coded: Agreement | None = None) -> str:
    """Return how many of the paper's accuracies were measured, and how many agree."""
    found = count_agreement(entries)
    if not found.measured:
        return f"None of the paper's {found.rows} distinct accuracies has been measured yet."
    untested = f"; {clause}" if coded and (clause := undecided(coded)) else ""
    share = "all" if found.complete == found.measured else str(found.complete)
    return (
        f"With the settings of its text, {found.measured} of the paper's {found.rows} distinct accuracies are measured "
        f"({len(entries)} rows, of which {len(entries) - found.rows} repeat another), {share} of them with "
        f"{PUBLISHED_RUNS} seeds or more: {found.agree} agree with the paper, and {found.apart} differ significantly."
        + (f" With the settings of its code, {coded.agree} of {coded.measured} agree{untested}." if coded else "")
    )


def low_rank(records: Records, own_rows: Sequence[str]) -> str:
    """Return how the smallest of our networks compares with plain networks of its size and of full size."""
    data = "cifar10"
    kinds = marks_of(data, records, own_rows)
    plain = [mark for mark in kinds["peers"] if (records.runs[mark.row][0].config.get("norm")) == "none"]
    pairs = [
        (ours, peer)
        for ours in kinds["own"]
        for peer in plain
        if abs(ours.parameters - peer.parameters) < 0.1 * peer.parameters and peer.row in own_rows
    ]
    if not pairs or not plain:
        return ""
    ours, peer = max(pairs, key=lambda pair: pair[0].accuracy)
    full: Mark = max(plain, key=lambda mark: mark.accuracy)
    return (
        f"Trained at low rank from the start, {count(ours.parameters).text} parameters reach {ours.accuracy:.1f} % on "
        f"{DATA_NAMES[data]}; a plain network with as many reaches {peer.accuracy:.1f} %, and the best plain network, "
        f"with {full.parameters / ours.parameters:.0f} times as many, {full.accuracy:.1f} %."
    )
