"""Training of one run in a test, with the trainer as the result, and few images to train on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Observer, Stop, drive
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.setup import process
from cpnorm.lab.training.trainer import Options, Trainer


def fit(
    config: Config,
    *,
    out: str | Path | None = None,
    data: ImageSet | None = None,
    options: Options | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
) -> Trainer:
    """Train to the end, or until the stop; a folder that holds a checkpoint is resumed."""
    options = options or Options()
    data = data if data is not None else load(config.data, options.data_dir)
    folder = RunFolder(out) if out is not None else None
    with folder.claimed(config) if folder and process()[0] == 0 else nullcontext():
        trainer = Trainer(config, data, options, resumes=folder is not None and folder.has_checkpoint())
        drive([(trainer, folder)], observers=observers, stop=stop)
    return trainer


def few_digits(train: int, test: int, name: str = "digits") -> ImageSet:
    """The first embedded digits: where it does not matter what is learned."""
    whole = load("digits")
    known, held = (whole.train_images[:train], whole.train_labels[:train]), (whole.test_images, whole.test_labels)
    return ImageSet(name, *known, *(tensor[:test] for tensor in held), whole.mean, whole.std, whole.classes)
