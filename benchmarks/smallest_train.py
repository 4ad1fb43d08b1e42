"""Train small networks in a given time: trials on held-out training images, then the rows that they choose.

``python benchmarks/smallest_train.py --out FOLDER --time-limit 240`` leaves the records and the networks of seed 0 in
FOLDER/records.tar.gz after each stage. How many epochs fit into the time is reckoned from the speed of the trials; the
records have the settings that were used. All runs share one process, since a GPU may admit only one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tarfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.paper import records, reproduce
from cpnorm.lab.paper.protocols import Protocol
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training import steps
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import read_lines
from cpnorm.lab.training.run_networks import blank
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options

IMAGES = {"mnist": 60_000, "cifar10": 50_000}
SETTLED = 2  # epochs of a trial that its speed is not read from: kernels are chosen and graphs recorded in them
SAFE = 0.85  # of the time that a row is planned for: a run that does not end leaves no record
START_SECONDS = 1.0  # of a run, for the same
KEPT = ("config.json", "data.json", "record.json", "model.safetensors")


class Session:
    """The stages of one call: a clock, a folder of records, a folder of networks."""

    def __init__(self, out: Path, seconds: float, smoke: bool) -> None:
        self.out, self.smoke, self.failed = out, smoke, False
        self.end = time.monotonic() + seconds
        self.results, self.work = out / "results", out / "work"
        self.rates: dict[str, float] = {}  # by model: work of ``effort`` per second
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        line = f"[{self.left:6.1f} s left] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as log:
            log.write(line + "\n")

    def run(self, rows: Sequence[Row], seeds: int, parallel_runs: int) -> None:
        """Run rows of one data set side by side, and pack what is finished."""
        if self.left < 5:
            return
        rows = [dataclasses.replace(row, config=self._small(row.config)) for row in rows]
        tables = {
            row.table: Table(row.table, "", "", rows=tuple(r for r in rows if r.table == row.table)) for row in rows
        }
        try:
            request = reproduce.Request(
                [row.key for row in rows],
                range(1 if self.smoke else seeds),
                self.results,
                self.work,
                Protocol("words", tables),
                Options(checkpoint_every=1e9),
                parallel_runs,
                max(self.left - 3, 1),
            )
            reproduce.reproduce(request, announce=self.say)
        except Exception as error:  # the next stage may still work
            self.failed = True
            self.say(f"failed: {type(error).__name__}: {error} (caused by {error.__cause__!r})")
        self.pack()

    def _small(self, config: Config) -> Config:
        few = {"epochs": 1, "batch_size": 25, "validation": min(config.validation, 50)}
        return config.replace(**few) if self.smoke else config

    def trials(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Run trials and return the last held-out accuracy and loss of each; take the speed of each kind of network."""
        rows = [pilot(key) for key in keys]
        self.run(rows, 1, len(rows))
        found: dict[str, dict[str, Any]] = {}
        work: dict[str, float] = {}
        for row in rows:
            path = self.work / row.key / "0/metrics.jsonl"
            lines = [line for _, line in read_lines(path)] if path.exists() else []
            if not lines:
                continue
            key = row.key.partition("/")[2]
            found[key] = {
                name: lines[-1][name] for name in ("validation_loss", "validation_accuracy", "train_accuracy")
            }
            settled = [line["seconds"] for line in lines[SETTLED:]] or [lines[-1]["seconds"]]
            images = IMAGES[row.config.data] - row.config.validation
            speed = images * effort(row.config) / statistics.median(settled)
            work[row.config.model + row.config.data] = work.get(row.config.model + row.config.data, 0.0) + speed
            self.say(f"{key}: {found[key]}, epoch {statistics.median(settled):.2f} s")
        if len({row.config.model for row in rows}) == 1:  # runs of two kinds share the device in unknown parts
            self.rates |= work
        else:
            self.rates |= dict.fromkeys(work, sum(work.values()))
        return found

    def fitted(self, row: Row, seeds: int, seconds: float, most: int) -> Row:
        """Return the row with as many epochs as fit into the seconds, or into what is left."""
        seconds = SAFE * (min(seconds, self.left - 6) - START_SECONDS * seeds)
        rate = self.rates.get(row.config.model + row.config.data)
        if rate is None:
            return row
        epochs = int(seconds * rate / (seeds * IMAGES[row.config.data] * effort(row.config)))
        epochs = max(3, min(most, epochs))
        self.say(f"{row.key}: {epochs} epochs")
        return dataclasses.replace(row, config=row.config.replace(epochs=epochs))

    def pack(self) -> None:
        """Write the records and the networks of seed 0 into one file."""
        temporary = self.out / "records.part"
        with tarfile.open(temporary, "w:gz") as archive:
            for path in (*sorted(self.results.glob("*.jsonl")), self.out / "log.txt"):
                if path.exists():
                    archive.add(path, path.name)
            for folder in sorted(self.work.glob("records-*/*/0")):
                if "pilot" not in str(folder) and (folder / "record.json").exists():
                    for name in KEPT:
                        archive.add(folder / name, f"networks/{folder.relative_to(self.work)}/{name}")
        temporary.replace(self.out / "records.tar.gz")


def pilot(key: str) -> Row:
    """Return the trial of this name."""
    (row,) = (row for row in records.PILOT_ROWS if row.key == f"records-pilot/{key}")
    return row


def effort(config: Config) -> float:
    """Return what a training step costs per image, up to a factor: numbers that layers put out, and multiplications."""
    network = build_model(config.replace(norm="none", seed=0), blank(config.data), torch.device("cpu")).eval()
    total = 0.0

    def count(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        total += output.numel() * (1 + layer.weight[0].numel() / 600)  # type: ignore[operator,index]

    handles = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        network(torch.zeros(1, *blank(config.data).test_images.shape[1:]))
    for handle in handles:
        handle.remove()
    return total


def final(key: str, trial: str, **changes: Any) -> Row:
    """Return the row of the winner of the trials, on all training images."""
    row = pilot(trial)
    return dataclasses.replace(row, key=key, config=row.config.replace(validation=0, **changes))


def best(found: dict[str, dict[str, Any]], keys: Sequence[str], otherwise: str) -> str:
    """Return the trial with the smallest held-out loss among these."""
    there = {key: found[key]["validation_loss"] for key in keys if key in found}
    return min(there, key=lambda key: there[key]) if there else otherwise


def known(key: str) -> Row:
    """Return a row of the tables."""
    return next(row for table in records.TABLES for row in table.rows if row.key == key)


def like(control: str, row: Row) -> Row:
    """Return the dense control with the recipe and the epochs of a row."""
    dense = known(control).config
    kept = {name: getattr(dense, name) for name in ("norm", "width", "design", "rank", "modes", "lambdas", "skip")}
    return dataclasses.replace(known(control), config=row.config.replace(**kept))


def mnist(session: Session, seconds: float) -> None:
    """Train the networks for MNIST and their controls."""
    lenet, small = ("8k-shift", "8k-none"), ("5k-shift", "5k-fast")
    start = session.left
    found = session.trials([*lenet, *small])
    rest = (seconds - (start - session.left)) / 3
    row = session.fitted(final("records-mnist/5k", best(found, small, "5k-shift")), 8, rest, 60)
    session.run([row], 8, 8)
    other = session.fitted(final("records-mnist/lenet-8k", best(found, lenet, "8k-shift")), 8, rest, 60)
    session.run([other], 8, 8)
    session.run([like("records-mnist/5k-dense", row), like("records-mnist/lenet-8k-dense", other)], 4, 8)


def alexnet(session: Session, seconds: float) -> None:
    """Train the paper's network with 70 k parameters."""
    keys = ("70k-even-cutout", "70k-convolutions-cutout")
    found = session.trials(keys)
    row = session.fitted(final("records-cifar10/alexnet-70k", best(found, keys, keys[0])), 3, seconds, 150)
    session.run([row], 3, 3)


def cifar10(session: Session) -> None:
    """Train the network of 25 k parameters for CIFAR-10 and its control in the time that is left."""
    keys = ("25k-rounds-fast", "25k-rounds-faster")
    found = session.trials(keys)
    row = session.fitted(final("records-cifar10/25k", best(found, keys, keys[0])), 5, session.left, 150)
    session.run([row], 4, 4)
    session.run([like("records-cifar10/25k-dense", row)], 4, 4)


def main() -> int:
    """Run the stages in order of value until the time is over; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=240, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="try every stage on a few images")
    options = parser.parse_args()
    steps.COMPILE_FROM_STEPS = steps.COMPILE_PREBUILT_FROM_STEPS = 10**9  # compiling takes longer than it saves here
    reproduce.collect_figure_data = lambda trainer: {}  # type: ignore[attr-defined]  # takes seconds a run
    session = Session(options.out, options.time_limit, options.smoke)
    if options.smoke:
        _few_images()
    reproduce.load = cache(reproduce.load)  # type: ignore[attr-defined]  # every stage asks for the same sets
    limit = options.time_limit
    mnist(session, 0.25 * limit)
    alexnet(session, 0.38 * limit)
    cifar10(session)
    session.say(json.dumps({"rates": session.rates}))
    return int(session.failed)


def _few_images() -> None:
    """Let the stages load few images of each set."""
    whole = reproduce.load

    def few(name: str, data_dir: Any = None) -> ImageSet:
        data = whole(name, data_dir)
        parts = {"train_images": 100, "train_labels": 100, "test_images": 50, "test_labels": 50}
        return dataclasses.replace(data, **{part: getattr(data, part)[:count] for part, count in parts.items()})

    reproduce.load = few  # type: ignore[attr-defined]
    reproduce.require_official = lambda data: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
