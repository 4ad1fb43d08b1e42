"""Run what is missing of the tables of a protocol, and append each finished run to results/*.jsonl."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpnorm
from cpnorm.lab.data.digests import require_official
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper.figure_data import collect_figure_data
from cpnorm.lab.paper.jobs import Job, Results, base_of, missing_jobs
from cpnorm.lab.paper.progress import shown_accuracies
from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.training.compression import identity, start
from cpnorm.lab.training.driver import Observer, Stop, drive
from cpnorm.lab.training.runs import RunError, RunFolder, read_json
from cpnorm.lab.training.trainer import Options, Trainer

log = logging.getLogger("cpnorm.lab")

POLL_SECONDS = 1.0  # between two looks at what other processes are doing


@dataclass(frozen=True)
class Request:
    """What to run, where its files are, and how.

    Args:
        keys: tables or rows; without any, all of the paper's tables.
        seeds: the seeds of each row.
        results: folder of the records; each finished run is appended at once.
        work: folder of checkpoints and networks.
        protocol: the settings of the rows.
        options: device, checkpoints, data.
        parallel_runs: runs on the same data that share the device.
        time_limit: seconds after which runs are saved and stopped.
    """

    keys: Sequence[str]
    seeds: Sequence[int]
    results: Path
    work: Path
    protocol: Protocol = WORDS
    options: Options = field(default_factory=Options)
    parallel_runs: int = 8
    time_limit: float | None = None

    def store(self) -> Results:
        """Return the folder of the records."""
        return Results(self.results, self.protocol)

    def missing(self) -> list[Job]:
        """Return the runs that are missing, in the order to run them."""
        return missing_jobs(self.keys, self.seeds, self.store())


# --- running ---------------------------------------------------------------------------------------------------------


def reproduce(
    request: Request,
    *,
    wait: bool = False,
    observers: Sequence[Observer] = (),
    announce: Callable[[str], None] = log.info,
) -> list[Job]:
    """Run what is missing and return what is left.

    Args:
        request: what to run.
        wait: stay while other processes hold runs, to take over those of a process that dies. For a network that
            another process is training it always stays.
        observers: called after each epoch.
        announce: called with a line of text for each event.
    """
    store, work, options = request.store(), request.work, request.options
    stop = Stop(None if request.time_limit is None else time.monotonic() + request.time_limit)
    failed: list[Job] = []
    failures: dict[str, Exception] = {}  # by row
    mixed = True  # until a group fails; then row by row, so that a bad row does not stop the others
    elsewhere: list[Job] = []
    data: dict[str, ImageSet] = {}
    while not stop:
        missing = request.missing()
        done = store.done()
        ready = [job.first(done, work) for job in missing if not any(map(job.needs, missing))]
        ready = [job for i, job in enumerate(ready) if job not in failed and job not in ready[:i]]
        open_jobs = [job for job in ready if job not in elsewhere]
        if not open_jobs:
            if not any(wait or job.retrain_only for job in ready):
                break
            elsewhere.clear()
            time.sleep(POLL_SECONDS)
            continue
        first = open_jobs[0]
        name = first.config.data
        same_data = [job for job in open_jobs if job.row is first.row or (mixed and job.config.data == name)]
        group = same_data[: request.parallel_runs]
        if name not in data:
            data[name] = load(name, options.data_dir)
            require_official(data[name])
        try:
            if not run_group(group, store, work, data[name], options, observers, stop, announce):
                elsewhere.extend(group)
        except Exception as error:
            rows = list(dict.fromkeys(job.row.key for job in group))
            log.error("%s failed: %s: %s", ", ".join(rows), type(error).__name__, error)
            if len(rows) > 1:
                mixed = False
            else:
                failed.extend(group)
                failures[rows[0]] = error
    if stop:
        announce(f"stopped: {stop.reason}")
    elif failures:
        left = len(request.missing())
        raise RunError(f"{', '.join(failures)} failed; {left} runs are missing") from next(iter(failures.values()))
    return request.missing()


def run_group(
    group: Sequence[Job],
    store: Results,
    work: Path,
    data: ImageSet,
    options: Options,
    observers: Sequence[Observer],
    stop: Stop,
    announce: Callable[[str], None],
) -> int:
    """Run these side by side and write a line for each that ends; return how many this process could claim."""
    with ExitStack() as stack:
        stack.enter_context(stop.listening())  # also while networks are built
        mine = [job for job in group if stack.enter_context(store.claim(job))]
        claimed = len(mine)
        mine = [job for job in mine if not (job.retrain_only and job.has_network(work))]  # another process was faster
        for key in dict.fromkeys(job.row.key for job in mine):
            seeds = ", ".join(f"{job.seed}{' (network only)' * job.retrain_only}" for job in mine if job.row.key == key)
            announce(f"{key}: seeds {seeds}")
        runs: list[tuple[Job, Trainer, RunFolder]] = []
        done = store.done()
        for job in mine:
            if stop:
                break
            folder, base, cut = job.folder(work), base_of(job, done), job.row.truncation
            if job.retrain_only and not job.has_network(work):
                (folder / "record.json").unlink(missing_ok=True)  # its network was removed
            if base and cut:
                source = base.folder(work)
                begun = (folder / "cut.json").exists()
                known = read_json(folder / "cut.json") if begun else identity(source, cut)
                stack.enter_context(folder.claimed(job.config, {"network": known["network"], **cut.to_json()}))
            else:
                stack.enter_context(folder.claimed(job.config))
            if (record := folder.record()) is not None:  # a process died before it had written the line
                write(job, record, store, announce)
                continue
            if base and cut:
                trainer: Trainer = start(source, folder, cut, job.config, data, options)
            else:
                trainer = Trainer(job.config, data, options, resumes=folder.has_checkpoint())
            data = trainer.whole_data  # on the device, once for all
            runs.append((job, trainer, folder))
        jobs = {id(trainer): (job, folder) for job, trainer, folder in runs}

        def more(trainer: Trainer) -> dict[str, Any]:
            job, _ = jobs[id(trainer)]
            drawn = job.seed == 0 and not trainer.diverged and cpnorm.canonical_layers(trainer.model)
            return {"parallel_runs": len(runs), **(collect_figure_data(trainer) if drawn else {})}

        def finished(trainer: Trainer) -> None:
            job, folder = jobs[id(trainer)]
            record = folder.record()
            assert record is not None
            write(job, record, store, announce)

        pairs = [(trainer, folder) for _, trainer, folder in runs]
        drive(pairs, observers=observers, stop=stop, finished=finished, more=more)
    return claimed


def write(job: Job, record: dict[str, Any], store: Results, announce: Callable[[str], None]) -> None:
    """Append the line of a finished run to the results, unless it is there already."""
    row = job.row
    if not job.retrain_only:
        line: dict[str, Any] = {"table": row.table, "row": row.key, "seed": job.seed, "protocol": job.protocol.name}
        settings = row.truncation and row.truncation.to_json() | {"start": row.start, "networks": row.start_networks}
        store.append({**line, "parallel_runs": 1, "truncation_settings": settings, **record})
    last, best, of = shown_accuracies(record)
    announce(f"{job}: {last} %{of} (best {best} %), {record['parameters']:,} parameters, {record['seconds']:.0f} s")
