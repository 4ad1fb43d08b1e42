"""Training small networks in a given time: trials choose, epochs fit, and every stage leaves its records."""

from __future__ import annotations

import dataclasses
import tarfile
from pathlib import Path

import pytest

import smallest_train
from cpnorm.lab.data.images import load
from cpnorm.lab.paper import reproduce


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> smallest_train.Session:
    """A session on embedded digits in the place of MNIST."""
    digits = load("digits")
    parts = {"train_images": 100, "train_labels": 100, "test_images": 50, "test_labels": 50}
    few = dataclasses.replace(digits, name="mnist", **{part: getattr(digits, part)[:n] for part, n in parts.items()})
    monkeypatch.setattr(reproduce, "load", lambda name, data_dir=None: few)
    monkeypatch.setattr(reproduce, "require_official", lambda data: None)
    monkeypatch.setattr(reproduce, "collect_figure_data", lambda trainer: {})
    return smallest_train.Session(tmp_path, 60, smoke=True)


def test_the_trial_with_the_smallest_held_out_loss_wins(session: smallest_train.Session) -> None:
    found = session.trials(["5k-shift", "8k-none"])
    assert set(found) == {"5k-shift", "8k-none"}
    keys = sorted(found, key=lambda key: found[key]["validation_loss"])
    assert smallest_train.best(found, ["8k-none", "5k-shift"], "x") == keys[0]
    assert smallest_train.best({}, keys, "x") == "x"
    row = smallest_train.final("records-mnist/5k", "5k-fast")
    assert (row.config.validation, row.config.lr) == (0, 0.01)
    session.run([row], 1, 1)
    with tarfile.open(session.out / "records.tar.gz") as archive:
        names = archive.getnames()
    assert {"records-mnist.jsonl", "records-pilot.jsonl"} <= set(names)
    assert "networks/records-mnist/5k/0/model.safetensors" in names
    assert "log.txt" in names
    assert not any("pilot/" in name for name in names)
    assert not session.failed


def test_epochs_are_those_that_fit(session: smallest_train.Session) -> None:
    row = smallest_train.final("records-mnist/5k", "5k-shift")
    each = 60_000 * smallest_train.effort(row.config)
    session.rates["small_resnetmnist"] = each  # one epoch a second
    planned = session.fitted(row, 2, 22, most=100).config.epochs
    assert planned == int(smallest_train.SAFE * 20 / 2)
    assert session.fitted(row, 2, 22, most=5).config.epochs == 5


def test_a_control_has_the_recipe_of_its_row() -> None:
    row = smallest_train.final("records-mnist/5k", "5k-fast", epochs=7)
    control = smallest_train.like("records-mnist/5k-dense", row)
    assert (control.config.lr, control.config.epochs, control.config.norm) == (0.01, 7, "none")
    assert control.config.design["widths"] != row.config.design["widths"]
