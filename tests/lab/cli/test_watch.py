"""Progress without a terminal, options without values in the help, and networks of the user's own."""

from __future__ import annotations

import io
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cpnorm.lab.cli import main, training_commands, watch
from cpnorm.lab.cli.watch import Watch
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import drive
from cpnorm.lab.training.runs import RunFolder


def trainer(**changes: Any) -> SimpleNamespace:
    data = SimpleNamespace(train_labels=range(640))
    found = {"epoch": 0, "batch": 3, "batches": 10, "history": [], "finished": False, "data": data}
    return SimpleNamespace(config=Config(epochs=2), **(found | changes))


def test_a_long_epoch_shows_life_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    seen = Watch(Console(file=text, width=200))
    seen.follow(trainer())
    seen.working()
    assert text.getvalue() == ""  # it has just begun
    monkeypatch.setattr(watch, "QUIET", -1.0)
    seen.working()
    assert text.getvalue().startswith("epoch 1/2  step 3 of 10  ")
    assert "left" in text.getvalue()
    silent = Watch(Console(file=text), silent=True)
    silent.follow(trainer())
    before = text.getvalue()
    silent.working()
    assert text.getvalue() == before


def test_observers_are_called_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpnorm.lab.training.driver.LIFE_SIGN_EVERY", -1.0)
    from cpnorm.lab.data.images import load
    from cpnorm.lab.training.trainer import Options, Trainer

    calls: list[str] = []

    class Observer:
        def __call__(self, trainer: Trainer, line: dict[str, Any]) -> None:
            calls.append("epoch")

        def working(self) -> None:
            calls.append("step")

    config = Config(model="lenet", data="digits", norm="none", epochs=1, batch_size=512, width=0.1)
    drive([(Trainer(config, load("digits"), Options(device="cpu")), None)], observers=[Observer()])
    assert calls.count("epoch") == 1
    assert calls.count("step") >= 2


def test_flags_show_no_type_in_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command in ("train", "evaluate", "reproduce", "compress", "export"):
        assert main.main([command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        flags = [line for line in lines if "--json" in line or "--renormalize" in line or "--dry-run" in line]
        assert flags
        assert not [line for line in flags if "bool" in line.lower()]


def test_an_unknown_preset_names_rows_like_it_or_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "--preset", "checks/cp-sgd-moment"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "did you mean checks/cp-sgd-momentum" in told
    assert "beyond-cifar10" not in told
    assert main.main(["train", "--preset", "list"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    for row in ("cifar10/cp-sgd", "beyond-cifar10/low-rank-140k", "checks/cp-sgd-momentum"):
        assert row in told
    assert training_commands.preset_config("cifar10/cp-sgd", "code").batch_size == 128
    assert main.main(["train", "--preset", "cifar10/cp-sgd", "--protocol", "deed"]) == 2
    assert "expected a protocol among words, code, got 'deed'" in capsys.readouterr().err


def test_a_failed_start_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--data", "cifar10", "--data-dir", str(tmp_path / "nothing"), "--device", "cpu", "--out"]
    assert main.main([*words, str(tmp_path / "runs" / "deep" / "run")]) == 1
    assert "was not found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    assert main.main([*words, str(tmp_path / "kept" / "run")]) == 1
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def test_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            from torch import nn

            def network(classes, channels):
                convolution = nn.Conv2d(channels, 4, 3, stride=4)
                return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(196, classes))

            def number():
                return 3
        """)
    )
    monkeypatch.chdir(tmp_path)
    words = ["train", "--data", "digits", "--epochs", "1", "--device", "cpu", "--optimizer", "adam", "--out", "run"]
    assert main.main([*words, "--model", "mine:network", "--rank", "exact", "--init", "exact", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["model"] == "mine:network"
    assert record["parameters"] > 0
    assert main.main(["evaluate", "run", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == pytest.approx(record["test_accuracy_last"], abs=1e-3)
    assert RunFolder("run").config().model == "mine:network"
    for model, message in {
        "mine:network": "the paper has no ranks for mine:network: give --rank exact",
        "mine:number": "expected mine:number to return a torch.nn.Module, got int",
        "nosuch:network": "there is no module nosuch here or among the installed packages",
        "nosuch": "expected model to be one of alexnet, lenet",
    }.items():
        assert main.main([*words[:-1], "other", "--model", model]) in (1, 2)
        assert message in " ".join(capsys.readouterr().err.split())
        assert not Path("other").exists()
