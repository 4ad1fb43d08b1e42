"""The first section of the report: does the paper hold, which statements do, and under which protocol?"""

from __future__ import annotations

from collections.abc import Sequence

from cpnorm.lab.report.comparison import Agreement, undecided
from cpnorm.lab.report.document import Cell, Column, Fold, Grid, Section, Text, words
from cpnorm.lab.report.tally import NOT_MEASURED, Claim


def section(
    in_words: Sequence[Claim], rows: Agreement, in_code: Sequence[Claim] = (), coded_rows: Agreement | None = None
) -> Section:
    """Return one table: the paper's accuracies and each of its claims, under both protocols."""
    coded = {claim.key: claim for claim in in_code}
    lines: list[list[Cell]] = [
        [words("Are its accuracies found again?"), words(_agreement(rows)), words(_agreement(coded_rows))]
    ]
    for claim in in_words:
        if claim.paper:
            lines.append([words(claim.question), words(_answer(claim)), words(_answer(coded.get(claim.key)))])
    columns = [
        Column("question", words=True),
        Column("with the settings of its text", words=True),
        Column("with the settings of its authors' code", words=True),
    ]
    text = Text(
        "The paper leaves settings open. Our protocol “words” follows its text, with our choice where it is silent; "
        "“code” follows what its authors' public code and logs show, as far as its rows are measured. A row agrees if "
        "its mean lies within one published standard deviation or if no significant difference is shown, which with "
        "few runs, or few networks that are cut, says little. The tests are below, with the numbers that they rest on."
    )
    table = Grid("", columns, lines)
    return Section("holds", "Does the paper hold?", [table, Fold("How this is decided", [text])])


def _agreement(found: Agreement | None) -> str:
    if found is None or not found.measured:
        return NOT_MEASURED
    untested = f"; {clause}" if (clause := undecided(found)) else ""
    measured = "" if found.measured == found.rows else f" ({found.rows - found.measured} are not measured yet)"
    return (
        f"{found.agree} of {found.measured} distinct rows agree, {found.within} of them within one published sd; "
        f"{found.apart} differ significantly after the correction, {found.apart_alone} where each is tested alone"
        f"{untested}{measured}"
    )


def _answer(claim: Claim | None) -> str:
    if claim is None or claim.answer == NOT_MEASURED:
        return NOT_MEASURED
    return f"{claim.answer} {claim.counts[:1].upper()}{claim.counts[1:]}".strip()
