"""``cpnorm train`` with a network and images of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import cpnorm
from cpnorm.lab.cli import main
from cpnorm.lab.data.images import load
from official_files import WRITERS

BUILD = """
from torch import nn

def build(channels, classes):
    return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
                         nn.Linear(72, classes))

def fails():
    raise LookupError("no such block")

def three(channels):
    return build(channels, 3)

def pair(channels, classes):
    return nn.Sequential(build(channels, classes), nn.LSTM(10, 10))

class Broken(nn.Linear):
    def forward(self, x):
        raise LookupError("no such layer")

def breaks():
    return Broken(4, 4)
"""
NETWORK = ["--model", "mine_to_train:build", "--rank", "exact", "--init", "exact"]
TRAINING = ["--optimizer", "adam", "--lr", "0.01"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine_to_train", raising=False)
    (tmp_path / "mine_to_train.py").write_text(BUILD)
    return tmp_path


def record(run: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((Path(run) / "record.json").read_text())
    return found


def test_a_folder_of_classes_from_training_to_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits = load("digits")
    for n in range(300):
        label = int(digits.train_labels[n])
        if label in (0, 1, 4):
            path = folder / "photos" / f"digit-{label}" / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.train_images[n, 0, 2:26, 2:26].numpy()).save(path)
    data = ["--data", "images", "--data-dir", "photos"]
    assert main.main(["train", *NETWORK, *TRAINING, *data, "--epochs", "40", "--batch-size", "16", "--out", "run"]) == 0
    assert record("run")["test_accuracy_last"] > 80  # of three classes
    assert main.main(["compress", "run", "--rate", "0.5", "--epochs", "1", "--lr", "0.001", "--out", "half"]) == 0
    capsys.readouterr()
    for words in (["evaluate", "half"], ["inspect", "half"], ["export", "half", "--torch", "half.pt2"]):
        assert main.main(words) == 0
    assert "(N, 1, 24, 24)" in capsys.readouterr().out
    assert torch.export.load("half.pt2").module()(torch.zeros(5, 1, 24, 24)).shape == (5, 3)
    import mine_to_train

    cut = cpnorm.load("half/model.safetensors", mine_to_train.build(1, 3))
    assert cpnorm.canonical_layers(cut)["0"].rank < 9


def test_a_set_in_the_format_of_mnist(folder: Path) -> None:
    digits = load("digits")
    images, labels = digits.train_images.numpy(), digits.train_labels.numpy()
    WRITERS["idx"](folder / "fashion", ((images[:600], labels[:600]), (images[600:700], labels[600:700])))
    words = ["train", *NETWORK, *TRAINING, "--data", "idx", "--data-dir", "fashion", "--epochs", "15", "--out", "run"]
    assert main.main(words) == 0
    assert record("run")["test_accuracy_last"] > 60


def test_errors_of_the_users_code_are_told_as_theirs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", "mine_to_train:fails", "--rank", "exact", "--init", "exact", "--data", "digits"]
    assert main.main([*words, "--out", "run"]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "mine_to_train:fails() raised LookupError: no such block" in told
    assert "mine_to_train.py, line 9" in told
    for build, complaint in (
        ("three", "expected scores of shape (2, 10), one for each class, got (2, 3)"),
        ("pair", "one for each class, got a tuple"),
        ("breaks", "on images of shape (2, 1, 28, 28) raised LookupError: no such layer"),
    ):
        words[2] = f"mine_to_train:{build}"
        assert main.main([*words, "--out", f"run-{build}"]) != 0
        assert complaint in " ".join(capsys.readouterr().err.split())
