"""The runs of a protocol's tables as jobs: which are missing, in which order, and the folder of their records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.paper.tables import Row
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import parse_object, to_json, whole_lines
from cpnorm.lab.training.records import read_records
from cpnorm.lab.training.runs import RunFolder

Done = Mapping[tuple[str, int], dict[str, Any]]  # records by row and seed


@dataclass(frozen=True)
class Job:
    """One run: a row of a table at one seed."""

    row: Row
    seed: int
    retrain_only: bool = False  # its line is written already: it is run for the sake of its network alone
    protocol: Protocol = field(default=WORDS, compare=False, repr=False)

    @property
    def config(self) -> Config:
        """The settings of the training, or of the fine-tuning where the row truncates."""
        return (self.row.finetuning or self.row.config).replace(seed=self.seed)

    def folder(self, work: Path) -> RunFolder:
        """Return the folder of its checkpoint and its network."""
        return RunFolder(self.protocol.below(work) / self.row.key / str(self.seed))

    def needs(self, other: Job) -> bool:
        """Return True if it starts from the other's network, or may do so once all networks are known."""
        if self.row.truncation is None or other.row.key != self.row.starts_from:
            return False
        return self.row.start != "same" or other.seed == self.seed

    def row_seeds(self, *asked: int) -> Iterable[int]:
        """Return the seeds of the row it starts from that have to be there, where ``asked`` are run anyway."""
        row = self.row
        if row.start == "same":
            return (self.seed,)
        return range(row.start_networks) if row.start_networks > 1 else asked

    def __str__(self) -> str:
        return f"{self.row.key}, seed {self.seed}"

    def first(self, done: Done, work: Path) -> Job:
        """Return what has to be run now: the job itself, or the retraining of the network it starts from."""
        base = base_of(self, done)
        begun = (self.folder(work) / "cut.json").exists()  # its network is truncated and stored already
        return self if base is None or begun or base.has_network(work) else base.first(done, work)

    def has_network(self, work: Path) -> bool:
        """Return True if its networks are in the work folder."""
        folder = self.folder(work)
        files = ["model.safetensors", *(["best.safetensors"] if self.config.keep_best else [])]
        return folder.record() is not None and all((folder / file).exists() for file in files)


def base_of(job: Job, done: Done) -> Job | None:
    """Return the run whose network a row starts from, None for other rows; the network itself may be missing.

    The best networks are those of the highest test accuracy, of the best epoch where the row starts from that.
    """
    row, cut = job.row, job.row.truncation
    if cut is None:
        return None
    assert row.starts_from is not None
    source, seed = job.protocol.row(row.starts_from), job.seed
    if row.start == "best":
        key = "test_accuracy_best" if cut.start_epoch == "best_test" else "test_accuracy_last"
        lines = {s: line for (name, s), line in done.items() if name == source.key and not line["diverged"]}
        ranked = sorted(lines, key=lambda s: (-lines[s][key], s))[: row.start_networks]
        seed = ranked[job.seed % len(ranked)] if ranked else 0
    return Job(source, seed, retrain_only=(source.key, seed) in done, protocol=job.protocol)


# --- the results folder ----------------------------------------------------------------------------------------------


class Results:
    """The finished runs of a folder, one line of JSON each; several processes may work on it at once."""

    def __init__(self, folder: Path, protocol: Protocol = WORDS) -> None:
        self.base, self.protocol = folder, protocol
        self.folder = protocol.below(folder)

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines with the present names of their entries; a broken line raises an error that names it."""
        return _lines(self.folder)

    def done(self) -> Done:
        """Return the lines by row and seed, with those of other rows that have the very settings of a row."""
        found = {(line["row"], line["seed"]): line for line in self.lines()}
        if self.folder != self.base:
            owners = {other: row.key for row in self.protocol.rows().values() for other in row.recorded_as}
            for line in _lines(self.base):
                if line["row"] in owners:
                    found.setdefault((owners[line["row"]], line["seed"]), line)
        return found

    def append(self, line: dict[str, Any]) -> None:
        """Append a line as a whole and only once, also while other processes write."""
        path = self.folder / f"{line['table']}.jsonl"
        with FileLock(self._claims() / f"{path.name}.lock"), path.open("a+b", buffering=0) as file:
            file.seek(0)
            content = file.read()
            there = [parse_object(text) for text in whole_lines(content) if text.strip()]
            if (line["row"], line["seed"]) in {(old["row"], old["seed"]) for old in there}:
                return
            kept = b"\n".join(whole_lines(content))
            ended = kept + b"\n" if kept else b""
            if content != ended:  # the last line has no end, or half a line follows it
                file.truncate(len(kept))
                file.write(ended[len(kept) :])
            rest = (to_json(line) + "\n").encode()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(len(ended))  # leave no part of a line that does not fit on the disk
                raise

    @contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Yield whether this process may run the job; others may not until the block or this process ends."""
        retrain = "--retrain" if job.retrain_only else ""
        lock = FileLock(self._claims() / f"{job.row.key.replace('/', '--')}--{job.seed}{retrain}")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            yield job.retrain_only or (job.row.key, job.seed) not in self.done()

    def _claims(self) -> Path:
        """Return the folder of the locks, which lie beside what they protect: opening a lock truncates its file."""
        claims = self.folder / ".claims"
        claims.mkdir(parents=True, exist_ok=True)
        return claims


def _lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for _, line in read_records(path):
            if not isinstance(line.get("row"), str) or not isinstance(line.get("seed"), int):
                raise ValueError(f"{path}: expected the row and seed of a run in every line, got {str(line)[:60]}")
            found.append(line)
    return found


# --- what is missing -------------------------------------------------------------------------------------------------


def wanted_rows(keys: Sequence[str], protocol: Protocol = WORDS) -> list[Row]:
    """Return the rows of these tables, or only those rows that are named themselves."""
    rows = [row for table in protocol.find_tables(keys) for row in table.rows]
    if any("/" in key for key in keys):
        rows = [row for row in rows if row.key in keys or row.table in keys]
    return rows


def missing_jobs(keys: Sequence[str], seeds: Iterable[int], results: Results) -> list[Job]:
    """Return the runs that are missing, in the order to run them; a row that copies another is run as that one."""
    done, protocol, seeds = results.done(), results.protocol, list(seeds)
    known = protocol.rows()
    jobs: dict[tuple[str, int], Job] = {}

    def add(key: str, wanted: Iterable[int]) -> None:
        for seed in wanted:
            if (key, seed) not in done and (key, seed) not in jobs:
                job = Job(known[key], seed, protocol=protocol)
                if job.row.starts_from is not None:
                    add(job.row.starts_from, job.row_seeds(*seeds))
                jobs[key, seed] = job

    for key in dict.fromkeys(row.same_as or row.key for row in wanted_rows(keys, protocol)):
        add(key, seeds)
    return list(jobs.values())


def networks_to_retrain(jobs: Sequence[Job], done: Done, work: Path) -> list[Job]:
    """Return the runs whose lines are written, but whose networks these jobs start from and are not in ``work``."""
    found: list[Job] = []
    for job in jobs:
        first = job.first(done, work)
        if first.retrain_only and first not in found:
            found.append(first)
    return found
