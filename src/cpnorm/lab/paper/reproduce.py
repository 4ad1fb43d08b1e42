"""Rows x seeds -> runs -> results/*.jsonl: what is missing is run, stops cleanly, and goes on where it stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import cpnorm
from cpnorm.lab.data.digests import require_official
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.figure_data import portrait
from cpnorm.lab.paper.tables import Compression, Row, Table
from cpnorm.lab.training.compression import Cut, identity, start
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import parse_object, to_json, whole_lines
from cpnorm.lab.training.records import read_records
from cpnorm.lab.training.runs import RunError, RunFolder, read_json
from cpnorm.lab.training.trainer import Observer, Options, Stop, Trainer, drive

log = logging.getLogger("cpnorm.lab")
Done = Mapping[tuple[str, int], Mapping[str, Any]]  # the lines of finished runs by row and seed

# The order in which rows are worth having.
ORDER = (
    "cifar10",
    "init-sgd",
    "init-adam",
    "compress-cifar10",
    "mnist",
    "compress-mnist",
    "tai",
    "svhn",
    "compress-svhn",
)
POLL_SECONDS = 1.0  # between two looks at what other processes are doing
# Milliseconds that a step with 64 images, and the test of an image, take on one H200 when eight runs share it.
STEP_MS = {"none": 0.29, "weight": 0.33, "cp": 0.44, "tai": 0.40}
TEST_MS = 0.003


@dataclass(frozen=True)
class Job:
    """One run: a row of a table at one seed."""

    row: Row
    seed: int
    again: bool = False  # for the sake of its network alone: its line is written already

    @property
    def config(self) -> Config:
        """Of the training, or of the fine-tuning where the row compresses."""
        return (self.row.finetuning or self.row.config).replace(seed=self.seed)

    def folder(self, work: Path) -> RunFolder:
        """Where its checkpoint and its network lie."""
        return RunFolder(work / self.row.key / str(self.seed))

    def needs(self, other: Job) -> bool:
        """Whether it starts from the other's network, or from the best of a row that the other belongs to."""
        cut = self.row.compression
        if cut is None or other.row.key != self.row.starts_from:
            return False
        return cut.start == "best" or other.seed == self.seed

    def __str__(self) -> str:
        return f"{self.row.key}, seed {self.seed}"

    def first(self, done: Done, work: Path) -> Job:
        """What has to be run for it now: itself, or first once more the run whose network it starts from."""
        base = base_of(self, done)
        begun = (self.folder(work) / "cut.json").exists()  # from a network that was the best one then
        return self if base is None or begun or base.has_network(work) else base.first(done, work)

    def has_network(self, work: Path) -> bool:
        """Whether it was run here, and what it left is still there."""
        folder = self.folder(work)
        return folder.record() is not None and (folder / "model.safetensors").exists()


def all_tables() -> dict[str, Table]:
    """The paper's, in the order of their worth, then our own."""
    tables = {table.key: table for table in paper.tables()}
    ranks = [key for key, table in tables.items() if table.ranks]
    return {key: tables[key] for key in (*ORDER, *ranks)} | {table.key: table for table in beyond.TABLES}


def all_rows() -> dict[str, Row]:
    """The rows of all tables by their keys."""
    return {row.key: row for table in all_tables().values() for row in table.rows}


def find_tables(keys: Sequence[str]) -> list[Table]:
    """By key; all of the paper's without one."""
    tables = all_tables()
    if unknown := [key for key in keys if key.partition("/")[0] not in tables]:
        raise ValueError(f"unknown tables: {', '.join(unknown)}; there are {', '.join(tables)}")
    if unknown := [key for key in keys if "/" in key and key not in all_rows()]:
        rows = [row.key for key in dict.fromkeys(k.partition("/")[0] for k in unknown) for row in tables[key].rows]
        raise ValueError(f"unknown rows: {', '.join(unknown)}; there are {', '.join(rows)}")
    ours = {table.key for table in beyond.TABLES}
    asked = dict.fromkeys(k.partition("/")[0] for k in keys) or [key for key in tables if key not in ours]
    return [tables[key] for key in asked]


# --- the results folder ----------------------------------------------------------------------------------------------


class Results:
    """The finished runs of a folder, one line of JSON each; several processes may work on it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> list[dict[str, Any]]:
        """All of them; a broken line is an error that names it, but for one that a killed process left unfinished."""
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            for _, line in read_records(path):
                if not isinstance(line.get("row"), str) or not isinstance(line.get("seed"), int):
                    raise ValueError(f"{path}: expected the row and seed of a run in every line, got {str(line)[:60]}")
                found.append(line)
        return found

    def done(self) -> Done:
        """By row and seed."""
        return {(line["row"], line["seed"]): line for line in self.lines()}

    def append(self, line: dict[str, Any]) -> None:
        """Whole and once, whatever other processes do meanwhile."""
        path = self.folder / f"{line['table']}.jsonl"
        with FileLock(self._claims() / f"{path.name}.lock"), path.open("a+b", buffering=0) as file:
            file.seek(0)
            content = file.read()
            there = [parse_object(text) for text in whole_lines(content) if text.strip()]
            if (line["row"], line["seed"]) in {(old["row"], old["seed"]) for old in there}:
                return
            kept = b"\n".join(whole_lines(content))
            ended = kept + b"\n" if kept else b""
            if content != ended:  # the last line lacks its end, or half a line follows it
                file.truncate(len(kept))
                file.write(ended[len(kept) :])
            rest = (to_json(line) + "\n").encode()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(len(ended))  # of a line that does not fit on the disk nothing is left
                raise

    @contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Whether this process may run the job; others are kept from it until the end of the block or the process."""
        again = "--again" if job.again else ""
        lock = FileLock(self._claims() / f"{job.row.key.replace('/', '--')}--{job.seed}{again}")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            yield job.again or (job.row.key, job.seed) not in self.done()

    def _claims(self) -> Path:
        """Return the folder of the locks, which lie beside what they protect: opening a lock truncates its file."""
        claims = self.folder / ".claims"
        claims.mkdir(parents=True, exist_ok=True)
        return claims


# --- what is missing -------------------------------------------------------------------------------------------------


def missing_jobs(keys: Sequence[str], seeds: Iterable[int], results: Results) -> list[Job]:
    """In the order they should be run; a row that is another table's is run there."""
    done = results.done()
    wanted = [row for table in find_tables(keys) for row in table.rows]
    single = [key for key in keys if "/" in key]
    if single:
        wanted = [row for row in wanted if row.key in single or row.table in keys]
    rows = dict.fromkeys(paper.row(row.same_as).key if row.same_as else row.key for row in wanted)
    known, seeds = all_rows(), list(seeds)
    jobs: dict[tuple[str, int], Job] = {}

    def add(key: str) -> None:
        for seed in seeds:
            if (key, seed) not in done and (key, seed) not in jobs:
                if (source := known[key].starts_from) is not None:
                    add(source)  # "the best" is that of all seeds, whichever row was asked for
                jobs[key, seed] = Job(known[key], seed)

    for key in rows:
        add(key)
    return list(jobs.values())


def networks_again(jobs: Sequence[Job], done: Done, work: Path) -> list[Job]:
    """Runs that have their lines, but whose networks these start from and which are not at hand."""
    found: list[Job] = []
    for job in jobs:
        first = job.first(done, work)
        if first.again and first not in found:
            found.append(first)
    return found


def expected_seconds(job: Job) -> float:
    """A guess from the measured cost of a step on one H200."""
    config = job.config
    images, tests = {"svhn": (73_257, 26_032), "mnist": (60_000, 10_000)}.get(config.data, (50_000, 10_000))
    steps = config.epochs * -(-images // config.batch_size)
    small = 0.6 if config.model == "lenet" else 1.0
    step = STEP_MS[config.norm] * (config.batch_size / 64) ** 0.5
    return small * (steps * step + config.epochs * tests * TEST_MS) / 1000


# --- running ---------------------------------------------------------------------------------------------------------


def reproduce(
    keys: Sequence[str],
    *,
    seeds: Iterable[int],
    results: Path,
    work: Path,
    options: Options | None = None,
    at_once: int = 8,
    time_limit: float | None = None,
    wait: bool = False,
    observers: Sequence[Observer] = (),
    announce: Callable[[str], None] = log.info,
) -> list[Job]:
    """Run what is missing, ``at_once`` runs on the same data sharing the device; returns what is left.

    With ``wait`` it stays as long as other processes hold runs, to take over those of one that dies; for a network that
    another process is training it stays anyway.
    """
    store, options, seeds = Results(results), options or Options(), list(seeds)
    stop = Stop(None if time_limit is None else time.monotonic() + time_limit)
    failed: list[Job] = []
    failures: dict[str, Exception] = {}  # by row
    mixed = True  # until a group fails: then row by row, so that a bad one costs the others nothing but time
    elsewhere: list[Job] = []
    data: dict[str, ImageSet] = {}
    while not stop:
        missing = missing_jobs(keys, seeds, store)
        done = store.done()
        ready = [job.first(done, work) for job in missing if not any(map(job.needs, missing))]
        ready = [job for i, job in enumerate(ready) if job not in failed and job not in ready[:i]]
        open_jobs = [job for job in ready if job not in elsewhere]
        if not open_jobs:
            if not any(wait or job.again for job in ready):
                break
            elsewhere.clear()
            time.sleep(POLL_SECONDS)
            continue
        first = open_jobs[0]
        name = first.config.data
        group = [job for job in open_jobs if job.row is first.row or (mixed and job.config.data == name)][:at_once]
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
        left = len(missing_jobs(keys, seeds, store))
        raise RunError(f"{', '.join(failures)} failed; {left} runs are missing") from next(iter(failures.values()))
    return missing_jobs(keys, seeds, store)


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
    """Run these side by side and write a line for each that comes to its end; returns how many were ours to run."""
    with ExitStack() as stack:
        stack.enter_context(stop.listening())  # also while networks are made
        mine = [job for job in group if stack.enter_context(store.claim(job))]
        claimed = len(mine)
        mine = [job for job in mine if not (job.again and job.has_network(work))]  # another process was faster
        for key in dict.fromkeys(job.row.key for job in mine):
            seeds = ", ".join(f"{job.seed}{' again' * job.again}" for job in mine if job.row.key == key)
            announce(f"{key}: seeds {seeds}")
        runs: list[tuple[Job, Trainer, RunFolder]] = []
        done = store.done()
        for job in mine:
            if stop:
                break
            folder, base = job.folder(work), base_of(job, done)
            if job.again and not job.has_network(work):
                (folder / "record.json").unlink(missing_ok=True)  # of a network that somebody has removed
            if base and job.row.compression:
                source, cut = base.folder(work), cut_of(job.row.compression)
                begun = (folder / "cut.json").exists()
                known = read_json(folder / "cut.json") if begun else identity(source, cut)
                stack.enter_context(folder.claimed(job.config, {"network": known["network"], **cut.to_json()}))
            else:
                stack.enter_context(folder.claimed(job.config))
            if (record := folder.record()) is not None:  # of a process that died before it had written the line
                write(job, record, store, announce)
                continue
            if base and job.row.compression:
                trainer: Trainer = start(source, folder, cut, job.config, data, options)
            else:
                trainer = Trainer(job.config, data, options, resumes=folder.has_checkpoint())
            data = trainer.whole_data  # on the device, once for all
            runs.append((job, trainer, folder))
        jobs = {id(trainer): (job, folder) for job, trainer, folder in runs}

        def more(trainer: Trainer) -> dict[str, Any]:
            job, _ = jobs[id(trainer)]
            drawn = job.seed == 0 and not trainer.diverged and cpnorm.canonical_layers(trainer.model)
            return {"at_once": len(runs), **(portrait(trainer) if drawn else {})}

        def finished(trainer: Trainer) -> None:
            job, folder = jobs[id(trainer)]
            record = folder.record()
            assert record is not None
            write(job, record, store, announce)

        pairs = [(trainer, folder) for _, trainer, folder in runs]
        drive(pairs, observers=observers, stop=stop, finished=finished, more=more)
    return claimed


def write(job: Job, record: dict[str, Any], store: Results, announce: Callable[[str], None]) -> None:
    """What is kept of a finished run in results/, unless it is there already."""
    if not job.again:
        cut = job.row.compression
        line = {"table": job.row.table, "row": job.row.key, "seed": job.seed}
        store.append({**line, "at_once": 1, "compression": asdict(cut) if cut else None, **record})
    announce(f"{job}: {record['final']} % (best {record['best']} %), {record['weights']:,} weights")


def cut_of(compression: Compression) -> Cut:
    """The row's compression in the words of ``cpnorm compress``."""
    if compression.tai_ranks is not None:
        return Cut(tai_ranks=compression.tai_ranks)
    rate = compression.rate if compression.params is None else None
    return Cut(
        rate=rate,
        params=compression.params,
        criterion=compression.criterion,
        refit=compression.refit,
        images=compression.images,
        layers=compression.layers,
    )


def base_of(job: Job, done: Done) -> Job | None:
    """The run whose network a row starts from, if it starts from one; its line is there, its network perhaps not."""
    cut = job.row.compression
    if cut is None:
        return None
    assert job.row.starts_from is not None
    source, seed = all_rows()[job.row.starts_from], job.seed
    if cut.start == "best":
        lines = {s: line for (key, s), line in done.items() if key == source.key and not line["diverged"]}
        seed = max(lines, key=lambda s: lines[s]["test_accuracy_last"]) if lines else 0
    return Job(source, seed, again=(source.key, seed) in done)
