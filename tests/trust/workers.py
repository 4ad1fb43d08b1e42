"""What the processes do that the fault tests kill, starve or send away; a fork server with torch ready starts them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cpnorm.lab.data.download import download
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper import reproduce
from cpnorm.lab.paper.protocols import Protocol
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.compression import compress
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import run_to_end
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.trainer import Options, Trainer
from cpnorm.lab.training.truncation import Truncation

CONFIG = Config(
    model="lenet", data="digits", init="kaiming_normal", rank=2, optimizer="adam", lr=0.003, epochs=2, batch_size=16
)
TUNING = {"optimizer": "sgd", "lr": 0.003, "epochs": 1}
BASE = Row("tiny/base", "base", CONFIG.replace(epochs=1), None)
CUT = Row("tiny/cut", "cut", BASE.config, None, starts_from=BASE.key, truncation=Truncation(rate=0.5), tuning=TUNING)
PROTOCOL = Protocol("tiny", {"tiny": Table("tiny", "Tiny", rows=(BASE, CUT))})
OFTEN = Options(device="cpu", checkpoint_every=0.0)  # after every step


@cache
def digits() -> ImageSet:
    """Few enough that a run takes seconds."""
    whole = load("digits")
    train, test = (whole.train_images[:64], whole.train_labels[:64]), (whole.test_images[:32], whole.test_labels[:32])
    return ImageSet("digits", *train, *test, whole.mean, whole.std, whole.classes)


def train(folder: Path) -> None:
    """As the command line does it: begun, gone on with, or found finished."""
    run_to_end(RunFolder(folder / "run"), CONFIG, lambda: Trainer(CONFIG, digits(), OFTEN))


def steady(folder: Path) -> None:
    """With torch's deterministic algorithms only, where it has them."""
    torch.use_deterministic_algorithms(True)
    train(folder)


def cut(folder: Path) -> None:
    """Of a run that is there already."""
    compress_digits(folder / "source", folder / "run")


def compress_digits(source: Path, out: Path, data: ImageSet | None = None) -> None:
    """Truncate a run and train it on."""
    cut = Truncation(rate=0.5, refit="lambdas")
    compress(source, cut, CONFIG, out=out, data=data or digits(), options=OFTEN)


def queue(folder: Path) -> None:
    """Two seeds of a training and of a compression of it."""
    reproduce.load = lambda *_: digits()
    request = reproduce.Request(
        ["tiny"], range(2), folder / "results", folder / "work", PROTOCOL, OFTEN, parallel_runs=1
    )
    reproduce.reproduce(request)


def fetch(folder: Path) -> None:
    """What ``folder/address`` names."""
    url, size, md5 = (folder / "address").read_text().split()
    download(url, folder / "data" / "file.bin", int(size), md5, lambda *_: None)


JOBS: dict[str, Callable[[Path], None]] = {"train": train, "steady": steady, "cut": cut, "queue": queue, "fetch": fetch}


def die_at(moment: int) -> None:
    """Die by SIGKILL just before the so-manieth time that this process touches a file to change it."""
    left = moment

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.truncate", "os.chmod") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if changes:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@dataclass(frozen=True)
class Hardship:
    """What a process has to cope with."""

    moment: int | None = None  # where it dies: see ``die_at``
    largest_file: int | None = None  # in bytes
    user: int | None = None  # who it is, instead of root


def work(job: str, folder: Path, hardship: Hardship, words: Any) -> None:
    """Do the job, and send its last words."""
    digits()  # while it still may read everything
    if hardship.moment is not None:
        die_at(hardship.moment)
    if hardship.largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hardship.largest_file, hardship.largest_file))
    if hardship.user is not None:
        os.setuid(hardship.user)
    try:
        JOBS[job](folder)
        words.send("done")
    except Exception as error:
        words.send(f"{type(error).__name__}: {error}")


def start(job: str, folder: Path, hardship: Hardship = Hardship()) -> tuple[Any, Any]:  # noqa: B008 - it is frozen
    """The process, and where its last words will come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["cpnorm.lab.paper.reproduce", "cpnorm.lab.training.compression", "sklearn.datasets", "torch._dynamo"]
    )
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, folder, hardship, theirs))
    process.start()
    theirs.close()
    return process, ours


def last_words(process: Any, words: Any, seconds: float = 120) -> str:
    """What the process said when it was done, and "killed" if it did not come to that."""
    process.join(seconds)
    assert process.exitcode is not None, "it hangs"
    try:
        return words.recv()
    except EOFError:
        return "killed"
