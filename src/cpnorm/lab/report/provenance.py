"""The section on where the numbers come from: versions, hardware, computing time, and what records lack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.document import MISSING, Block, Column, Fold, Grid, Section, Text, number, words
from cpnorm.lab.report.records import Records, Run


def section(records: Records, coded: Records | None = None) -> Section:
    """Return the section on versions, hardware and computing time."""
    runs = records.all_runs()
    part = Section("provenance", "Where the numbers come from")
    diverged = sum(run.diverged is not None for run in runs)
    papers = [run for table in paper.TABLES for row in table.rows for run in records.runs.get(row.key, [])]
    minutes = sum(run.device_seconds for run in papers) / 60
    part.blocks.append(
        Text(
            f"{len(runs)} runs, {diverged} of them diverged. {len(papers)} belong to the paper's rows and took "
            f"{minutes:.0f} minutes of a device; runs that shared one are counted with their share of it. Every number "
            "of ours on this page is computed from the result files, except those in the explanations, which are "
            "written by hand."
        )
    )
    part.blocks += incomplete_records([*runs, *(coded.all_runs() if coded else ())])
    keys = ("gpu", "torch", "cuda", "python", "cpnorm", "commit")
    found = Counter(tuple(str(env.get(key) or MISSING) for key in keys) for env in records.environments)
    if found:
        columns = [*(Column(key, words=True) for key in keys), Column("records")]
        rows = [
            [
                *(words(short_commit(v) if k == "commit" else v[:24]) for k, v in zip(keys, environment, strict=True)),
                number(n, 0),
            ]
            for environment, n in found.most_common()
        ]
        part.blocks.append(Fold("Environments", [Grid("Environments of the records", columns, rows)]))
    return part


def incomplete_records(runs: Sequence[Run]) -> list[Block]:
    """Say which records do not carry their commit, precision and kind of training step."""
    found: Counter[tuple[str, str]] = Counter()
    for run in {id(run): run for run in runs}.values():  # a run may count for a row of both protocols
        environment = run.raw.get("environment")
        parts = {
            "commit": environment.get("commit") if isinstance(environment, dict) else None,
            "precision": run.raw.get("precision"),
            "step": run.raw.get("step_mode"),
        }
        if missing := [name for name, value in parts.items() if not value]:
            found[run.row, ", ".join(missing)] += 1
    if not found:
        return [Text("Every record carries its commit, its precision and its kind of training step.")]
    lacking = sum(found.values())
    text = (
        f"{lacking} records lack a part of commit, precision and kind of training step. Where the precision is missing "
        "it was not written yet: settings say “auto”, which meant bfloat16 on a GPU and float32 on a CPU. A record is "
        "never edited: the three that were given another row, and the four from which a wrong part was taken out, are "
        "listed with their commits in superseded/README.md."
    )
    columns = [Column("row", words=True), Column("not in the record", words=True), Column("records")]
    rows = [[words(row), words(missing), number(n, 0)] for (row, missing), n in sorted(found.items())]
    return [
        Fold(
            f"{lacking} records lack a part of their settings",
            [Text(text), Grid("Parts that records lack", columns, rows)],
        )
    ]


def short_commit(commit: str) -> str:
    """Return ten digits of a commit, and whether the tree had changes.

    >>> short_commit("0123456789abcdef0123-dirty")
    '0123456789-dirty'
    """
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") and len(commit) > 10 else "")
