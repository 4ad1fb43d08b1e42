"""A table that takes seconds in place of the paper's, for this process and for those it starts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from cpnorm.lab.data.images import load
from cpnorm.lab.paper import protocols
from cpnorm.lab.paper.protocols import Protocol
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.truncation import Truncation
from official_files import WRITERS

TINY = Config(
    model="lenet", data="idx", rank=2, init="kaiming_normal", optimizer="adam", epochs=8, batch_size=64, modes=True
)
TUNING = {"optimizer": "sgd", "lr": 0.001, "epochs": 1}
LONG = Row("tiny/long", "long", TINY, None)
CUT = Row("tiny/cut", "cut", TINY, None, starts_from=LONG.key, truncation=Truncation(rate=0.5), tuning=TUNING)
TABLE = Table("tiny", "Tiny", rows=(LONG, CUT))
TINY_PROTOCOL = Protocol("words", {"tiny": TABLE})

# At the start of a process that is to know no other table:
PREPARE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import tiny_queue; tiny_queue.use()"


def write_data(folder: Path) -> None:
    """A few digits in MNIST's files: no epoch takes long."""
    digits = load("digits")
    images, labels = digits.train_images.numpy(), digits.train_labels.numpy()
    WRITERS["idx"](folder, ((images[:128], labels[:128]), (images[128:160], labels[128:160])))


def use() -> None:
    """The tiny table is all there is."""
    protocols.PROTOCOLS["words"] = TINY_PROTOCOL


def records(results: Path) -> list[dict]:
    """The lines of all that was run."""
    return [json.loads(line) for line in (results / "tiny.jsonl").read_text().splitlines()]


def epochs_saved(run: RunFolder) -> list[dict]:
    """Those in the checkpoint, with the seconds each took, which no second training would repeat."""
    state = run.load_checkpoint(torch.device("cpu"))
    return state["history"] if state else []


def holder(lock: Path) -> int:
    """The process that has a lock file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # of another user's process, or one that has just ended
            if link.readlink() == lock:
                return int(link.parts[2])
    raise LookupError(f"no process holds {lock}")


def assert_everything_once(results: Path, seeds: int = 2) -> None:
    """Nothing lost, nothing twice, every run of full length."""
    lines = records(results)
    done = [(line["row"], line["seed"], line["epochs"]) for line in lines]
    assert sorted(done) == sorted(
        [(CUT.key, s, 1) for s in range(seeds)] + [(LONG.key, s, TINY.epochs) for s in range(seeds)]
    )
