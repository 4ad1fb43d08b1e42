"""Train rows of ``cpnorm.lab.paper.records`` within a given time, and leave whatever is finished in one folder.

``python benchmarks/smallest_train.py --out FOLDER --time-limit 540 records-mnist/5k,records-mnist/lenet-8k@8`` runs one
stage after the other. A stage is rows or tables, separated by commas, and the number of their seeds after an @ (8
without); a name may have wildcards, as "records-pilot/70k-*". ``--parallel-runs`` of its runs are trained side by side:
few of them end, and are records, while time is left for the others. A stage that fails does not stop the next one.

FOLDER has few files, which are true at any moment: ``log.txt``, a copy of the records of each table after each run that
ends, and ``networks.tar.gz`` after each stage: the networks of seed 0, and checkpoints of runs that the time did not
suffice for. ``--resume FOLDER`` continues from such a folder. ``--install FOLDER`` trains nothing: it adds the records
to results/records, the networks to results/records/networks, and the curves of runs that were stopped to
results/records/stopped.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.paper import records, reproduce
from cpnorm.lab.paper.jobs import Results, wanted_rows
from cpnorm.lab.paper.protocols import Protocol
from cpnorm.lab.paper.tables import Table
from cpnorm.lab.training import steps
from cpnorm.lab.training.jsonfiles import read_lines
from cpnorm.lab.training.run_networks import blank
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options
from smallest import RESULTS, folder_name

RESERVE = 12.0  # seconds to save what is running, and to pack
LARGEST = 15 * 2**20  # bytes of the archive
KEPT = ("config.json", "data.json", "environment.json", "metrics.jsonl", "model.safetensors", "record.json")


class Session:
    """The stages of one call: a clock, a folder that is brought back, and one for work that is not."""

    def __init__(
        self, out: Path, work: Path, seconds: float, *, parallel_runs: int = 8, smoke: bool, options: Options
    ) -> None:
        self.out, self.results, self.work = out, work / "results", work / "runs"
        self.parallel_runs, self.smoke, self.options, self.failed = parallel_runs, smoke, options, False
        self.end = time.monotonic() + seconds
        for folder in (out, self.results, self.work):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """Write a line to the log; a run that ended has just written its record, which is copied, too."""
        line = f"[{self.left:6.1f} s left] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as log:
            log.write(line + "\n")
        for path in self.results.glob("*.jsonl"):
            shutil.copy(path, self.out / path.name)

    def run(self, stage: str) -> None:
        """Run a stage such as ``records-mnist/5k@8``, and pack what is there."""
        names, _, count = stage.partition("@")
        try:
            protocol, seeds = self._protocol(), 1 if self.smoke else int(count or 8)
            keys = [key for name in names.split(",") for key in fnmatch.filter(protocol.rows(), name) or [name]]
            rows = wanted_rows(keys, protocol)
            if self.left < RESERVE:
                self.say(f"{stage}: no time is left")
                return
            self.say(f"{stage}: {len(rows)} rows, {seeds} seeds")
            request = reproduce.Request(
                [row.key for row in rows],
                range(seeds),
                self.results,
                self.work,
                protocol,
                self.options,
                parallel_runs=self.parallel_runs,
                time_limit=max(self.left - RESERVE, 1),
            )
            left = reproduce.reproduce(request, announce=self.say, observers=[self._watch])
            self.say(f"{stage}: {len(left)} runs are missing")
        except Exception as error:  # the next stage may still work
            self.failed = True
            self.say(f"{stage} failed: {type(error).__name__}: {error} (caused by {error.__cause__!r})")
        self.pack()

    def _watch(self, trainer: Any, line: dict[str, Any]) -> None:
        """Tell in the log how fast the first epochs of a run are, and how every tenth ends."""
        if trainer.config.seed == 0 and (line["epoch"] <= 2 or line["epoch"] % 10 == 0):
            told = {name: line[name] for name in ("train_accuracy", "validation_accuracy") if name in line}
            self.say(f"{trainer.parameters:,} parameters, epoch {line['epoch']}: {line['seconds']:.2f} s, {told}")

    def _protocol(self) -> Protocol:
        """Return the tables; for a smoke test with few epochs and images."""
        tables: tuple[Table, ...] = records.TABLES
        if self.smoke:
            few = {"epochs": 1, "warmup": 0, "batch_size": 25}
            tables = tuple(
                dataclasses.replace(
                    table,
                    rows=tuple(
                        dataclasses.replace(
                            row, config=row.config.replace(validation=min(row.config.validation, 50), **few)
                        )
                        for row in table.rows
                    ),
                )
                for table in tables
            )
        return Protocol("words", {table.key: table for table in tables})

    def pack(self) -> None:
        """Write the networks of seed 0, and checkpoints of unfinished runs where they fit, into one file."""
        temporary, room = self.out / "networks.part", LARGEST
        with tarfile.open(temporary, "w:gz") as archive:
            for folder in sorted(self.work.glob("records-*/*/*")):
                done = (folder / "record.json").exists()
                wanted = folder.name == "0" and "records-pilot" not in str(folder)
                names = (KEPT if wanted else ()) if done else (*KEPT, "checkpoint.pt")
                files = [folder / name for name in names if (folder / name).exists()]
                room -= sum(file.stat().st_size for file in files)
                if room < 0:
                    self.say("not all networks and checkpoints fit into the archive")
                    break
                for file in files:
                    archive.add(file, str(file.relative_to(self.work)))
        temporary.replace(self.out / "networks.tar.gz")

    def resume(self, folder: Path) -> None:
        """Begin with the records, networks and checkpoints of an earlier call."""
        for path in folder.glob("records-*.jsonl"):
            shutil.copy(path, self.results / path.name)
        unpack(folder / "networks.tar.gz", self.work)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the networks of a session."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def install(folder: Path, results: Path = RESULTS) -> list[str]:
    """Add the records and the networks that a session has brought back to the committed ones; return what was added."""
    store, added = Results(results), []
    for path in sorted(folder.glob("records-*.jsonl")):
        there = {(line["row"], line["seed"]) for line in store.lines()}
        for _, line in read_lines(path):
            if (line["row"], line["seed"]) not in there:
                store.append(line)
                added.append(f"{line['row']}, seed {line['seed']}")
    with tempfile.TemporaryDirectory() as unpacked:
        unpack(folder / "networks.tar.gz", Path(unpacked))
        for run in sorted(Path(unpacked).glob("records-*/*/0")):
            key = str(run.parent.relative_to(unpacked))
            if (run / "record.json").exists() and not key.startswith("records-pilot/"):
                RunFolder(run).record()  # raises if a file is damaged
                shutil.copytree(run, results / "networks" / folder_name(key), dirs_exist_ok=True)
                added.append(f"{key}: network of seed 0")
        runs = sorted(path.parent for path in Path(unpacked).glob("records-*/*/*/checkpoint.pt"))
        stopped = [stopped_run(run, f"{run.parent.parent.name}/{run.parent.name}") for run in runs]
    if stopped:
        path = results / "stopped.json"
        known = {(line["row"], line["seed"]): line for line in json.loads(path.read_text())} if path.exists() else {}
        known |= {(line["row"], line["seed"]): line for line in stopped}
        path.write_text("[\n" + ",\n".join(map(json.dumps, known.values())) + "\n]\n")
        added += [f"{line['row']}, seed {line['seed']}: stopped after epoch {line['epochs']}" for line in stopped]
    shutil.rmtree(results / ".claims", ignore_errors=True)
    return added


def stopped_run(folder: Path, row: str) -> dict[str, Any]:
    """Return what a run that was stopped had reached: not a record, because its last epochs are missing."""
    run = RunFolder(folder)
    config = run.config()
    network = build_model(config, blank(config.data), torch.device("cpu"))
    lines = [line for _, line in read_lines(folder / "metrics.jsonl")]
    return {
        "row": row,
        "seed": config.seed,
        "config": config.to_json(),
        "parameters": sum(p.numel() for p in network.parameters()),
        "epochs": lines[-1]["epoch"],
        "curve": {name: [line[name] for line in lines] for name in ("loss", "train_accuracy", "test_accuracy")},
        "environment": json.loads((folder / "environment.json").read_text()),
    }


def few_images() -> None:
    """Let the stages load few images of each set."""
    whole = reproduce.load

    def few(name: str, data_dir: Any = None) -> ImageSet:
        data = whole(name, data_dir)
        parts = {"train_images": 100, "train_labels": 100, "test_images": 50, "test_labels": 50}
        return dataclasses.replace(data, **{part: getattr(data, part)[:count] for part, count in parts.items()})

    reproduce.load = few  # type: ignore[attr-defined]
    reproduce.require_official = lambda data: None  # type: ignore[attr-defined]


def main(words: Sequence[str] | None = None) -> int:
    """Run the stages in their order until the time is over; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="rows or tables, separated by commas, @ and the number of seeds")
    parser.add_argument("--out", type=Path, help="folder that is to be brought back")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds")
    parser.add_argument("--parallel-runs", type=int, default=8, help="runs of a stage that share the device")
    parser.add_argument("--compile", action="store_true", help="compile the steps, which takes half a minute at first")
    parser.add_argument("--data-dir", type=Path, help="default: $CPNORM_DATA, then the user's cache")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="continue what this folder has")
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="add what this folder has to the results")
    parser.add_argument("--smoke", action="store_true", help="try every stage on a few images")
    given = parser.parse_args(words)
    if given.install:
        print("\n".join(install(given.install)))
        return 0
    if not given.out or not given.stages:
        parser.error("expected stages and --out FOLDER")
    if not given.compile:
        steps.COMPILE_FROM_STEPS = steps.COMPILE_PREBUILT_FROM_STEPS = 10**9  # may take longer than there is
    reproduce.collect_figure_data = lambda trainer: {}  # type: ignore[attr-defined]  # takes seconds a run
    if given.smoke:
        few_images()
    reproduce.load = cache(reproduce.load)  # type: ignore[attr-defined]  # every stage asks for the same sets
    with tempfile.TemporaryDirectory() as work:
        options = Options(checkpoint_every=1e9, data_dir=given.data_dir)
        session = Session(
            given.out,
            Path(work),
            given.time_limit,
            parallel_runs=given.parallel_runs,
            smoke=given.smoke,
            options=options,
        )
        if given.resume:
            session.resume(given.resume)
        for stage in given.stages:
            session.run(stage)
        session.say("the end")
    return int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
