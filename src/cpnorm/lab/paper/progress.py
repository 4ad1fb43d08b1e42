"""Say what a sweep has done and what is left of it: means beside the published ones, missing runs with their cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cpnorm.lab.paper.jobs import Job, Results, wanted_rows

# Milliseconds of one H200 that a step with 64 images, and the test of an image, take when four or more runs share it.
STEP_MS = {"none": 0.29, "weight": 0.33, "cp": 0.47, "tai": 0.40}
TEST_MS = 0.003


def expected_seconds(job: Job) -> float:
    """Return an estimate from the measured cost of a step on one H200."""
    config = job.config
    images, tests = {"svhn": (73_257, 26_032), "mnist": (60_000, 10_000)}.get(config.data, (50_000, 10_000))
    steps = config.epochs * -(-images // config.batch_size)
    small = 0.6 if config.model == "lenet" else 1.0
    step = STEP_MS[config.norm] * (config.batch_size / 64) ** 0.5
    return small * (steps * step + config.epochs * tests * TEST_MS) / 1000


def shown_accuracies(record: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return the accuracy of the last and of the best epoch, and what it is of if not of the test images.

    Of a trial, which chooses settings by held-out training images, the test accuracy is not shown, lest it does.
    """
    config = record["config"]
    if config.get("validation") and not config.get("early_stopping"):
        held_out = record["curve"]["validation_accuracy"]
        return held_out[-1], max(held_out), " held out"
    return record["test_accuracy_last"], record["test_accuracy_best"], ""


def row_summaries(keys: Sequence[str], results: Results) -> list[str]:
    """Return a line for each row that has runs: mean and sample sd of their last epochs beside the published ones."""
    done, texts = results.done(), []
    for row in wanted_rows(keys, results.protocol):
        runs = [line for (key, _), line in done.items() if key == (row.same_as or row.key) and not line["diverged"]]
        if not runs:
            continue
        values, bests, (of, *_) = zip(*map(shown_accuracies, runs), strict=True)
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        text = (
            f"{row.key}: {statistics.fmean(values):.2f}{spread}{of} (best epoch {max(bests):.2f}), {len(values)} runs"
        )
        if row.published:
            sd = f" ± {row.published.sd:.2f}" if row.published.sd is not None else ""
            text += f"; published {row.published.mean:.2f}{sd}"
        texts.append(text)
    return texts


def missing_rows(jobs: Sequence[Job]) -> list[tuple[str, str, float]]:
    """Return, for each row with missing runs, its key, the seeds in words and the seconds that they take.

    >>> from cpnorm.lab.paper.protocols import CODE
    >>> missing_rows([Job(CODE.row("tai/low-rank-90"), seed) for seed in (0, 1, 2, 5)])[0][:2]
    ('tai/low-rank-90', 'seeds 0 to 2, 5')
    """
    by_row: dict[str, list[Job]] = {}
    for job in jobs:
        by_row.setdefault(job.row.key, []).append(job)
    return [(key, _seeds(group), sum(map(expected_seconds, group))) for key, group in by_row.items()]


def _seeds(jobs: Sequence[Job]) -> str:
    spans: list[list[int]] = []
    for seed in sorted(job.seed for job in jobs):
        if spans and seed == spans[-1][-1] + 1:
            spans[-1].append(seed)
        else:
            spans.append([seed])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return ("seed " if len(jobs) == 1 else "seeds ") + ", ".join(texts)
