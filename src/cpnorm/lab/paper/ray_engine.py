"""The queue on a Ray cluster: some seeds of a row are a task, and a task whose worker dies is resumed elsewhere.

Checkpoints, claims and records lie in folders that every node sees; Ray transports only the names of what to run.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cpnorm.lab.paper import reproduce
from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.paper.reproduce import Job, Results, missing_jobs
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.runs import RunError
from cpnorm.lab.training.trainer import Options

log = logging.getLogger("cpnorm.lab")


def reproduce_on_ray(
    keys: Sequence[str],
    *,
    seeds: Iterable[int],
    results: Path,
    work: Path,
    protocol: Protocol = WORDS,
    options: Options | None = None,
    parallel_runs: int = 8,
    time_limit: float | None = None,
    announce: Callable[[str], None] = log.info,
) -> list[Job]:
    """Run what is missing on the cluster of ``RAY_ADDRESS``, or on this machine; return what is left."""
    import ray

    if not ray.is_initialized():
        ray.init()
    options, seeds, results, work = options or Options(), list(seeds), results.absolute(), work.absolute()
    if options.data_dir is not None:
        options = dataclasses.replace(options, data_dir=Path(options.data_dir).absolute())
    gpus = int("GPU" in ray.cluster_resources() and options.device != "cpu")
    # Any number of retries: the claim of a dead worker ends with it, and its runs resume from their checkpoints.
    task = ray.remote(num_gpus=gpus, max_retries=-1)(run_share)
    until = None if time_limit is None else time.time() + time_limit
    begun: dict[Any, list[Job]] = {}  # by Ray's reference to the outcome
    for share in shares(missing_jobs(keys, seeds, Results(results, protocol)), parallel_runs):
        first = [ref for ref, others in begun.items() if any(job.needs(other) for job in share for other in others)]
        begun[
            task.remote(share[0].row.key, [job.seed for job in share], results, work, protocol, options, until, *first)
        ] = share
    pending, told, stop = list(begun), False, Stop()
    failed: list[str] = []
    with stop.listening(), redirect_stdout(sys.stderr):  # where Ray's messages belong: results go to standard output
        while pending:
            done, pending = ray.wait(pending, timeout=1)
            for ref in done:
                try:
                    for text in ray.get(ref):
                        announce(text)
                except ray.exceptions.RayError as error:
                    if not stop:  # a task that was cancelled before it began raises, too
                        log.error("%s failed: %s", begun[ref][0].row.key, error)
                        failed.append(begun[ref][0].row.key)
            if stop and not told:
                announce(f"stopping: {stop.reason}")
                for ref in pending:
                    ray.cancel(ref)  # a run in progress sees an interrupt, and saves
                told = True
    if failed and not stop:
        left = len(missing_jobs(keys, seeds, Results(results, protocol)))
        raise RunError(f"{', '.join(dict.fromkeys(failed))} failed; {left} runs are missing")
    return missing_jobs(keys, seeds, Results(results, protocol))


def shares(jobs: Sequence[Job], parallel_runs: int) -> list[list[Job]]:
    """Return groups of jobs of one row that share a device, in the order to run them."""
    rows: dict[str, list[Job]] = {}
    for job in jobs:
        rows.setdefault(job.row.key, []).append(job)
    return [group[i : i + parallel_runs] for group in rows.values() for i in range(0, len(group), parallel_runs)]


def run_share(
    row: str,
    seeds: list[int],
    results: Path,
    work: Path,
    protocol: Protocol,
    options: Options,
    until: float | None,
    *first: object,
) -> list[str]:
    """Run some seeds of a row on a worker, once the tasks ``first`` are done; return the announcements."""
    said: list[str] = []
    reproduce.reproduce(
        [row],
        seeds=seeds,
        results=results,
        work=work,
        protocol=protocol,
        options=options,
        parallel_runs=len(seeds),
        time_limit=None if until is None else until - time.time(),
        wait=True,
        announce=said.append,
    )
    return said
