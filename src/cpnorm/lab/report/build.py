"""Build the document from a results folder: every table, figure and claim, each number computed and none typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report import (
    charts,
    code_protocol,
    explorer,
    figures,
    holds,
    networks,
    overview,
    paper_tables,
    provenance,
    recipes,
    story,
)
from cpnorm.lab.report.ablations import explanations
from cpnorm.lab.report.claims import claims
from cpnorm.lab.report.comparison import Comparison, compare, count_agreement
from cpnorm.lab.report.document import Document, Fold, Gallery, Section, Text
from cpnorm.lab.report.records import Records, read_results, without_trials
from cpnorm.lab.report.statistics import SIGNIFICANT
from cpnorm.lab.report.tally import NOT_MEASURED, Claim

TITLE = "Canonical convolutional networks, measured again"
SMALLEST = "records"  # the folder of our smallest networks, below the results


def build(results: str | Path, data_dir: str | Path | None = None) -> Document:
    """Build the whole report from a results folder.

    Data sets are read only to show samples of them; where their files are missing, the samples in the folder
    ``figures`` of the results are kept.
    """
    records = read_results(results)
    compared = {table.key: [compare(row, table, records) for row in table.rows] for table in paper.TABLES}
    everything = [entry for entries in compared.values() for entry in entries]
    answers = claims(records)
    cuts = networks.read_cuts(Path(results))
    folder = Path(results) / SMALLEST
    smallest = without_trials(read_results(folder)) if folder.is_dir() else None
    own = [key for keys in recipes.own_tables(records).values() for key in keys if not key.startswith("checks/")]
    coded = code_protocol.read(records, Path(results))
    optional = [code_protocol.section(records, coded) if coded else None, networks.section(cuts)]
    by_code = code_protocol.agreement(coded) if coded else None
    in_code = claims(coded) if coded else []
    sections = [
        holds.section(answers, count_agreement(everything), in_code, by_code),
        paper_tables.section(compared, records),
        agreement_section(everything, records),
        claims_section(answers, in_code),
        *(section for section in optional if section),
        recipes.section(records, own),
        explorer.section(records, cuts),
        figures.section(records, data_dir, Path(results) / "figures"),
        provenance.section(records, coded),
    ]
    sentences = story.sentences(everything, answers, records, own, cuts, by_code)
    return Document(TITLE, charts.lead(records, own, cuts, smallest), sentences, sections)


# --- what agrees ------------------------------------------------------------------------------------------------------


def agreement_section(entries: Sequence[Comparison], records: Records) -> Section:
    """Return the section on which rows agree with the paper, which do not, and why, where that was tested."""
    measured = [entry for entry in entries if entry.difference]
    section = Section("agreement", "What agrees and what does not")
    if not measured:
        section.blocks.append(Text("No row of the paper has a finished run yet."))
        return section
    found = count_agreement(entries)
    section.blocks.append(
        Text(
            f"With the settings of the paper's text, {found.apart} of {found.tested} distinct rows differ "
            f"significantly from the paper by the last epoch. {found.agree} of {found.measured} lie within one "
            "published standard deviation or show no significant difference."
        )
    )
    drawing = overview.overview(measured)
    if drawing:
        section.blocks.append(Gallery([drawing]))
    tests = (
        f"Differences are significant at {100 * SIGNIFICANT:g} %, after Holm's correction over all rows; a row that "
        "repeats the runs of another one counts once. Trainings are tested by Welch's test; cuts with the network that "
        "they start from as the unit, of which there are only one or two a table, so that their tests show little."
    )
    section.blocks.append(Fold("How rows are tested", [Text(tests)]))
    below = [entry for entry in measured if entry.status == "below"]
    if below:
        folds = [below_the_paper(entry, records) for entry in below]
        section.blocks.append(Fold(f"{len(below)} rows lie below the paper: why, and what was tested", folds))
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


def claims_section(answers: Sequence[Claim], in_code: Sequence[Claim] = ()) -> Section:
    """Return the section on the claims: our answers, and folded the paper's words and the numbers."""
    coded = {claim.key: claim for claim in in_code if claim.paper and claim.answer != NOT_MEASURED}
    tests = (
        "Each claim is answered by our runs alone: accuracies of the last epoch and Welch's test unless stated "
        "otherwise, p corrected for the number of tests within a claim (Holm). “Not shown” means that the difference "
        "is not significant, which does not mean that there is none. The first answer is for the settings of the "
        "paper's text, a second one that of the authors' code, as far as its rows are measured."
    )
    section = Section("claims", "The paper's claims", [Fold("How claims are tested", [Text(tests)])])
    for claim in answers:
        below = Section(f"claim-{claim.key}", claim.question, note=claim.answer)
        below.blocks += [Text(claim.paper, quote=True)] if claim.paper else []
        below.blocks += [Text(claim.explanation)] if claim.explanation else []
        below.blocks += [claim.grid] if claim.grid else []
        if again := coded.get(claim.key):
            below.blocks.append(Text(again.explanation, lead=f"With the settings of the code: {again.answer}"))
            below.blocks += [again.grid] if again.grid else []
        section.sections.append(below)
    return section
