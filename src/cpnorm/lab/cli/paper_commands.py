"""Commands that reproduce the paper and report the results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpnorm.lab.cli.options import Checkpoints, DataDir, Device, Json, TimeLimit, flag, parse_seconds
from cpnorm.lab.cli.run_command import DONE, STOPPED, announce_warnings, messages, print_json
from cpnorm.lab.cli.watch import duration
from cpnorm.lab.paper import protocols

if TYPE_CHECKING:
    from cpnorm.lab.paper.jobs import Job
    from cpnorm.lab.paper.tables import LayerRank


def reproduce(
    tables: Annotated[list[str] | None, typer.Argument(help="tables or rows; default: all of the paper's")] = None,
    protocol: Annotated[
        str, typer.Option(help="settings: words (the text of the paper) or code (the authors' code and logs)")
    ] = "words",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each row, with the seeds 0, 1, …")] = 8,
    results: Annotated[Path, typer.Option(help="folder of the records")] = Path("results"),
    work: Annotated[Path, typer.Option(help="folder of checkpoints and networks")] = Path("work"),
    parallel_runs: Annotated[
        int, typer.Option("--parallel-runs", "--at-once", min=1, help="runs that share the device")
    ] = 8,
    engine: Annotated[str, typer.Option(help="local, or ray: the cluster of $RAY_ADDRESS, or this machine")] = "local",
    wait: Annotated[
        bool, flag("--wait", help="wait for other processes, and take over the runs of those that die")
    ] = False,
    checkpoint_every: Checkpoints = 60.0,
    time_limit: TimeLimit = None,
    data_dir: DataDir = None,
    device: Device = None,
    dry_run: Annotated[bool, flag("--dry-run", help="list what is missing, run nothing")] = False,
    as_json: Json = False,
) -> int:
    """Run what is missing of the paper's tables; it can be stopped and resumed, and processes can share the work."""
    from cpnorm.lab.paper import jobs, progress, rank_tables
    from cpnorm.lab.paper import reproduce as lab
    from cpnorm.lab.training.driver import Stop
    from cpnorm.lab.training.trainer import Options

    if engine not in ("local", "ray"):
        raise typer.BadParameter(f"expected --engine local or ray, got {engine}")
    try:
        chosen = protocols.find_protocol(protocol)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console, keys = messages(), tables or []
    announce_warnings(console)
    limit = parse_seconds(time_limit) if time_limit else None
    options = Options(device, checkpoint_every=checkpoint_every, data_dir=data_dir)
    request = lab.Request(keys, range(seeds), results, work, chosen, options, parallel_runs, limit)
    store = request.store()

    def announce(text: str) -> None:
        if not as_json:
            console.print(text, markup=False, soft_wrap=True)

    if dry_run:
        left = request.missing()
    else:
        stop = Stop(None if limit is None else time.monotonic() + limit)
        if engine == "ray":
            from cpnorm.lab.paper.ray_engine import reproduce_on_ray

            left = reproduce_on_ray(request, announce=announce)
        else:
            left = lab.reproduce(request, wait=wait, announce=announce)
        for text in progress.row_summaries(keys, store):
            announce(text)
        if not left:  # ranks need no GPU, whose time may be limited
            rank_tables.estimate_ranks(keys, results, protocol=chosen, stop=stop, announce=announce)
    ranks = rank_tables.missing_ranks(keys, store)
    layers = [(f"{table}/{layer.layer}", seed) for (table, seed), missing in ranks.items() for layer in missing]
    if as_json:
        runs = [{"row": job.row.key, "seed": job.seed} for job in left]
        print_json({"missing": runs + [{"row": row, "seed": seed} for row, seed in layers]})
    else:
        _tell_missing(left, jobs.networks_to_retrain(left, store.done(), work), ranks, work, in_detail=dry_run)
    return STOPPED if (left or layers) and not dry_run else DONE


def _tell_missing(
    left: Sequence[Job],
    retrain: Sequence[Job],
    ranks: Mapping[tuple[str, int], Sequence[LayerRank]],
    work: Path,
    *,
    in_detail: bool,
) -> None:
    """Print how many runs and ranks are missing, with the time they take; in detail, also which."""
    from cpnorm.lab.paper import progress

    if in_detail:
        for row, seed_names, seconds in progress.missing_rows(left):
            typer.echo(f"{row}: {seed_names}, about {duration(seconds)}")
        for row, seed_names, seconds in progress.missing_rows(retrain):
            typer.echo(f"{row}: {seed_names} again, about {duration(seconds)}: the network is not in {work}")
        for (table, seed), missing in ranks.items():
            typer.echo(f"{table}: ranks of {', '.join(layer.layer for layer in missing)}, seed {seed}")
    work_left = duration(sum(progress.expected_seconds(job) for job in (*left, *retrain)))
    typer.echo(f"{len(left)} runs are missing, about {work_left} on one H200" if left else "no run is missing")
    if count := sum(map(len, ranks.values())):
        typer.echo(f"the ranks of {count} layers are missing, which take minutes each on a CPU")


def report(
    results: Annotated[Path, typer.Argument(help="folder of the records")] = Path("results"),
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="folder for the first figure as files, light and dark")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write all results beside the paper's: one self-contained page, and README.md with figures in their folder."""
    from cpnorm.lab.report import build, write_lead, write_markdown, write_page

    document = build(results, data_dir)
    typer.echo(str(write_page(document, out)))
    typer.echo(str(write_markdown(document, results / "README.md")))
    for path in write_lead(document, figures) if figures else ():
        typer.echo(str(path))
