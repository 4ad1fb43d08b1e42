"""The queue on a Ray cluster: some seeds of a row are a task, and a task whose worker dies is resumed elsewhere.

Checkpoints, claims and records lie in folders that every node sees; Ray transports only the names of what to run.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpnorm.lab.paper.jobs import Job
from cpnorm.lab.paper.reproduce import Request, reproduce
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.runs import RunError

log = logging.getLogger("cpnorm.lab")


def reproduce_on_ray(request: Request, *, announce: Callable[[str], None] = log.info) -> list[Job]:
    """Run what is missing on the cluster of ``RAY_ADDRESS``, or on this machine; return what is left."""
    import ray

    if not ray.is_initialized():
        ray.init()
    options = request.options
    if options.data_dir is not None:
        options = replace(options, data_dir=Path(options.data_dir).absolute())
    results, work = request.results.absolute(), request.work.absolute()
    request = replace(request, results=results, work=work, options=options)
    gpus = int("GPU" in ray.cluster_resources() and options.device != "cpu")
    # Any number of retries: the claim of a dead worker ends with it, and its runs resume from their checkpoints.
    task = ray.remote(num_gpus=gpus, max_retries=-1)(run_share)
    until = None if request.time_limit is None else time.time() + request.time_limit
    begun: dict[Any, list[Job]] = {}  # by Ray's reference to the outcome
    for share in shares(request.missing(), request.parallel_runs):
        first = [ref for ref, others in begun.items() if any(job.needs(other) for job in share for other in others)]
        begun[task.remote(request, share[0].row.key, [job.seed for job in share], until, *first)] = share
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
        left = len(request.missing())
        raise RunError(f"{', '.join(dict.fromkeys(failed))} failed; {left} runs are missing")
    return request.missing()


def shares(jobs: Sequence[Job], parallel_runs: int) -> list[list[Job]]:
    """Return groups of jobs of one row that share a device, in the order to run them."""
    rows: dict[str, list[Job]] = {}
    for job in jobs:
        rows.setdefault(job.row.key, []).append(job)
    return [group[i : i + parallel_runs] for group in rows.values() for i in range(0, len(group), parallel_runs)]


def run_share(request: Request, row: str, seeds: list[int], until: float | None, *first: object) -> list[str]:
    """Run some seeds of a row on a worker, once the tasks ``first`` are done; return the announcements."""
    said: list[str] = []
    limit = None if until is None else until - time.time()
    share = replace(request, keys=[row], seeds=seeds, parallel_runs=len(seeds), time_limit=limit)
    reproduce(share, wait=True, announce=said.append)
    return said
