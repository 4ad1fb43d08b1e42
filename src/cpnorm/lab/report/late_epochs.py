"""The end of the paper's trainings: does accuracy still rise, and is the last epoch like those before it?"""

from __future__ import annotations

from statistics import fmean, stdev

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.comparison import LAST
from cpnorm.lab.report.document import Column, Grid, mean_sd, number, words
from cpnorm.lab.report.records import Records, Run, that_learned
from cpnorm.lab.report.statistics import Difference, Summary, summarize, welch
from cpnorm.lab.report.tally import NOT_MEASURED, Claim, corrected, difference_cells, difference_columns, tally

WINDOWS = ((-3 * LAST, -2 * LAST), (-2 * LAST, -LAST), (-LAST, None))  # epochs, from the end


def still_rises(records: Records) -> Claim:
    """Compare the first and the last third of each run's last 60 epochs, in rows with a constant learning rate."""
    lines: list[tuple[str, list[Run]]] = []
    for row in paper.rows():
        if not row.same_as and not row.truncation and not row.config.early_stopping:
            runs = [run for run in that_learned(records.finished(row.key)) if len(run.curve) >= 3 * LAST]
            lines += [(row.key, runs)] if runs else []
    changes = corrected([_change(runs) for _, runs in lines])
    counts = tally(changes)
    answer, explanation = NOT_MEASURED, ""
    if counts.total:
        answer = counts.answer(good=counts.above, bad=counts.below)
        explanation = (
            f"From the first to the last {LAST} of them it rises significantly in {counts.above} of {counts.total} "
            f"rows and falls in {counts.below}; the test is Student's, of the differences within runs. Where it rises, "
            f"larger steps might have reached more. {_last_epochs(lines)}The paper does not ask this."
        )
    grid = Grid(
        f"Mean accuracy of {LAST} epochs at a time, counted from the end",
        [
            Column("row", words=True),
            Column("n"),
            *(Column(f"{-first} to {1 - (last or 0)}", "epochs before the end, %") for first, last in WINDOWS),
            *difference_columns("last − first"),
        ],
        [
            [
                words(key),
                number(len(runs), 0),
                *(mean_sd(_level(runs, *window)) for window in WINDOWS),
                *difference_cells(change),
            ]
            for (key, runs), change in zip(lines, changes, strict=True)
        ],
    )
    question = f"Does accuracy still rise in the last {-WINDOWS[0][0]} epochs?"
    return Claim("late-epochs", question, "", answer, explanation, grid if lines else None)


def _level(runs: list[Run], first: int, last: int | None) -> Summary | None:
    return summarize(fmean(run.curve[first:last]) for run in runs)


def _change(runs: list[Run]) -> Difference | None:
    """Test the rise from the first to the last window: Welch's test against a constant zero is Student's."""
    first, *_, last = WINDOWS
    change = summarize(fmean(run.curve[slice(*last)]) - fmean(run.curve[slice(*first)]) for run in runs)
    return welch(change, Summary(change.n, 0.0, 0.0, None)) if change else None


def _last_epochs(lines: list[tuple[str, list[Run]]]) -> str:
    """Return where last epochs lie among the epochs before them: a low mean would be a matter of bad luck."""
    windows = [(run.curve[-1], run.curve[-LAST - 1 : -1]) for _, runs in lines for run in runs]
    places = summarize((last - fmean(before)) / stdev(before) for last, before in windows if stdev(before))
    if places is None or places.sd is None:
        return ""
    return (
        f"A last epoch lies {places.mean:+.2f} ± {places.sd / places.n**0.5:.2f} standard deviations from the mean of "
        f"the {LAST} before it ({places.n} runs; mean and its standard error). "
    ).replace("-", "−")
