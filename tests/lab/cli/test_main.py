"""The command line in real processes: the round trip, kills and resumes, errors in one sentence, JSON, help."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cpnorm.lab.cli import main, options, training_commands
from cpnorm.lab.cli.watch import Watch
from cpnorm.lab.data.images import ImageSet, load, normalize
from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.run_networks import trained_network
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.trainer import Options, Trainer
from official_files import write_mnist

RANKS = {"features.0": 6, "features.2": 12, "classifier.1": 8, "classifier.4": 6}
SETTINGS = ["--model", "lenet", "--data", "mnist", "--device", "cpu", "--init", "kaiming_normal", "--batch-size", "32"]
SETTINGS += ["--rank", json.dumps(RANKS), "--optimizer", "adam", "--lr", ".003", "--epochs", "5", "--validation", "20"]


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSet]:
    """A few digits in MNIST's files, for this process and those it starts: no epoch takes long."""
    folder, digits = tmp_path_factory.mktemp("data"), load("digits")
    splits = (
        (digits.train_images[:148].numpy(), digits.train_labels[:148].numpy()),
        (digits.test_images[:50].numpy(), digits.test_labels[:50].numpy()),
    )
    write_mnist(folder, splits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPNORM_DATA", str(folder))
        patch.setenv("CPNORM_COMMIT", "of the tests")
        yield load("mnist")


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cpnorm", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
    process = start(*words)
    out, err = process.communicate()
    assert process.returncode == code, (out, err)
    return out, err


def lines(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder(folder).metrics()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    out, err = run("train", *SETTINGS, "--out", folder, "--tensorboard")
    assert out.startswith(f"{folder}: ")
    assert out.count("\n") == 1
    epochs = [line for line in err.splitlines() if line.startswith("epoch")]
    assert 1 <= len(epochs) <= 5  # without a terminal a line an epoch, or fewer
    assert "are not the official ones" in " ".join(err.split())
    assert "images/s" in err
    return folder


# --- the round trip ---------------------------------------------------------------------------------------------------


def test_train_evaluate_inspect(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunFolder(trained).record()
    assert record is not None
    assert record["config"]["rank"] == RANKS
    assert list((trained / "tensorboard").glob("events*"))
    out, err = run("evaluate", trained, "--device", "cpu", "--json")
    assert json.loads(out)["test_accuracy"] == pytest.approx(record["test_accuracy_last"], abs=1e-3)
    assert json.loads(out)["parameters"] == record["parameters"]
    assert json.loads(out)["same_data"]
    assert err == ""
    assert main.main(["inspect", str(trained), "--json", "--plots", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {layer["name"]: layer["rank"] for layer in found["summary"]["layers"]} == RANKS
    assert all(Path(picture).stat().st_size > 1000 for picture in found["pictures"])


def test_evaluate_remembers_the_data_and_notices_others(
    trained: Path, images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no word on where the data are, those of the training are used; elsewhere there may be others."""
    assert (RunFolder(trained).record() or {})["data_sha256"] == RunFolder(trained).data()["sha256"] == images.sha256
    monkeypatch.delenv("CPNORM_DATA")
    assert main.main(["evaluate", str(trained), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_data"]
    other = 255 - images.train_images.numpy(), images.train_labels.numpy()
    write_mnist(tmp_path, (other, other))
    for words in ([], ["--json"]):
        assert main.main(["evaluate", str(trained), "--device", "cpu", "--data-dir", str(tmp_path), *words]) == 0
    shown = capsys.readouterr()
    assert f"the mnist data in {tmp_path} are not those of the run" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["same_data"] is False


def test_a_run_does_not_go_on_with_other_data(images: ImageSet, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.keep_data(images)
    folder.keep_data(images)
    with pytest.raises(RunError, match=r"cannot be resumed: the mnist data in .* are not those of the run"):
        folder.keep_data(dataclasses.replace(images, sha256="0" * 64))


def test_a_finished_run_is_only_shown(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "metrics.jsonl").stat().st_mtime_ns
    assert main.main(["train", *SETTINGS, "--out", str(trained), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["curve"] == (RunFolder(trained).record() or {})["curve"]
    assert shown.err == ""
    assert (trained / "metrics.jsonl").stat().st_mtime_ns == before
    assert main.main(["train", *SETTINGS, "--lr", "1", "--out", str(trained)]) == 1
    assert "lr: 0.003 there, 1.0 now" in capsys.readouterr().err.replace("\n", " ")


def test_compress_and_export(
    trained: Path, tmp_path: Path, images: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    out, err = run("compress", trained, "--rate", ".5", "--epochs", "1", "--device", "cpu", "--out", small, "--json")
    record = json.loads(out)  # and nothing else
    assert err == ""
    assert record["epochs"] == 1
    assert record["config"]["lr"] == 0.003  # of the run it came from
    assert record["parameters"] < 0.55 * (RunFolder(trained).record() or {})["parameters"]

    program, onnx = tmp_path / "digits.pt2", tmp_path / "digits.onnx"
    out, _ = run("export", small, "--torch", program, "--onnx", onnx, "--factorize", "--json")
    assert json.loads(out)["files"] == [str(onnx), str(program)]
    x = normalize(images.test_images, images.mean, images.std)
    expected = trained_network(RunFolder(small)).eval()(x)
    assert torch.allclose(torch.export.load(program).module()(x), expected, atol=1e-4)
    session = pytest.importorskip("onnxruntime").InferenceSession(onnx)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(outputs), expected, atol=1e-4)
    assert expected.std() > 0.01  # or the comparisons say nothing

    assert main.main(["export", str(small), "--onnx", str(onnx), "--goal", "parameters", "--json"]) == 0
    few = json.loads(capsys.readouterr().out)
    assert main.main(["export", str(small), "--onnx", str(onnx)]) == 0
    dense = capsys.readouterr().out
    assert few["parameters"] < 1.2 * few["parameters_of_run"]
    assert f"the run has {record['parameters']:,} parameters: --goal parameters keeps the layers small" in dense


# --- stops and kills --------------------------------------------------------------------------------------------------


def wait_for_an_epoch(folder: Path, process: subprocess.Popen[str]) -> None:
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_sigterm_saves_and_the_same_command_goes_on(trained: Path, tmp_path: Path) -> None:
    command = ("train", *SETTINGS, "--out", tmp_path)
    process = start(*command)
    wait_for_an_epoch(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 75, err
    assert "SIGTERM was received" in err
    assert "the same command resumes it" in err
    assert (tmp_path / "checkpoint.pt").exists()
    assert main.main(list(map(str, command))) == 0
    assert lines(tmp_path) == lines(trained)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_killed_run_goes_on_to_the_bit(trained: Path, tmp_path: Path) -> None:
    command = ("train", *SETTINGS, "--out", tmp_path, "--checkpoint-every", "0")
    process = start(*command)
    wait_for_an_epoch(tmp_path, process)
    process.kill()
    process.communicate()
    assert (tmp_path / "checkpoint.pt").exists()
    assert not (tmp_path / "record.json").exists()
    run(*command)
    assert lines(tmp_path) == lines(trained)
    one, other = (trained_network(RunFolder(folder)).state_dict() for folder in (trained, tmp_path))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_the_time_limit_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *SETTINGS, "--epochs", "1", "--out", str(tmp_path)]
    assert main.main([*command, "--time-limit", "0.001s", "--json"]) == 75
    assert json.loads(capsys.readouterr().out)["stopped"] == "the time limit was reached"
    assert main.main([*command, "--time-limit", "1h", "--json"]) == 0
    assert "stopped" not in json.loads(capsys.readouterr().out)


def test_divergence_has_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["--optimizer", "sgd", "--lr", "1e9", "--norm", "none", "--epochs", "2", "--out", str(tmp_path), "--json"]
    assert main.main(["train", *SETTINGS, *wild]) == 3
    record = json.loads(capsys.readouterr().out, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert "in epoch 1" in record["diverged"]


# --- errors and help --------------------------------------------------------------------------------------------------

ERRORS = {
    "no run": (["evaluate", "nowhere"], 1, "nowhere is not the folder of a run: there is no such folder"),
    "no data": (["train", "--data", "svhn", "--out", "run", "--data-dir", "nowhere"], 1, "cpnorm data get svhn"),
    "no such data": (["data", "get", "imagenet"], 1, "expected a data set among digits, mnist"),
    "no server": (["data", "get", "mnist", "--data-dir", "data", "--address", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    "no device": (["train", *SETTINGS, "--data", "digits", "--device", "abacus", "--out", "run"], 1, "such as cpu"),
    "no seed": (["train", "--seed", str(2**70)], 2, "expected seed < 2**63, got"),
    "no pause": (["train", *SETTINGS, "--data", "digits", "--checkpoint-every", "nan", "--out", "run"], 1, "got nan"),
    "no ranks of Tai's": (
        ["train", "--model", "lenet", "--data", "digits", "--norm", "tai", "--out", "run"],
        1,
        "the paper has no ranks of Tai et al.'s form for lenet",
    ),
    "one file for two": (["export", "run", "--onnx", "x", "--torch", "x"], 1, "expected two files, got x for both"),
    "no command": (["fly"], 2, "No such command 'fly'"),
    "no option": (["train", "--wings", "2"], 2, "No such option"),
    "no number": (["train", "--lr", "fast"], 2, "--lr"),
    "no choice": (["train", "--norm", "l2"], 2, "--norm"),
    "no rank": (["train", "--rank", "high"], 2, "expected a rank such as 64, 0.25, exact, paper"),
    "no time": (["train", "--time-limit", "soon", "--out", "run"], 2, "expected a time such as 90s, 9m or 1h30m"),
    "no epochs": (["train", "--epochs", "-1"], 2, "expected epochs >= 0, got -1"),
    "no row": (
        ["train", "--preset", "cifar10/none"],
        2,
        "no row is named 'cifar10/none': did you mean cifar10/none-sgd",
    ),
    "no training": (["train", "--preset", "compress-cifar10/25"], 2, "compresses the runs of cifar10/cp-sgd"),
    "ours": (["train", "--preset", "beyond-compress/50"], 2, "compresses the runs of beyond-batch/adam-64"),
    "no file": (["export", "run"], 2, "expected --onnx FILE or --torch FILE"),
    "no patience": (["train", "--early-stopping", "-2"], 2, "expected early_stopping >= 0, got -2"),
    "no smoothing": (["train", "--label-smoothing", "2"], 2, "expected label_smoothing <= 1, got 2"),
    "no images": (["compress", "run", "--images", "-5"], 2, "--images"),
    "no such row": (["reproduce", "cifar10/nosuch"], 1, "unknown rows: cifar10/nosuch; there are cifar10/none-sgd"),
    "no seeds": (["reproduce", "--seeds", "0"], 2, "--seeds"),
    "none at once": (["reproduce", "--parallel-runs", "0"], 2, "--parallel-runs"),
    "no goal": (["export", "run", "--onnx", "x", "--goal", "fame"], 2, "expected --goal time or parameters, got fame"),
    "nothing official": (["data", "check", "idx"], 1, "there is no official one to compare it with"),
    "no argument": (["inspect"], 2, "Missing argument 'RUN'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_every_error_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, code, text = ERRORS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CPNORM_DATA", raising=False)
    assert main.main(words) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("cpnorm: ")
    assert said.err.count("\n") == 1
    assert text in said.err


def test_no_traceback_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    _, err = run("evaluate", tmp_path, code=1)
    assert "Traceback" not in err
    assert err.count("\n") == 1
    _, err = run("evaluate", tmp_path, "--debug", code=1)
    assert "Traceback" in err


def test_an_unexpected_error_is_a_one_line_message() -> None:
    assert main.sentence(RuntimeError("out\nof memory")) == "RuntimeError: out of memory (--debug shows where)"
    assert main.sentence(ModuleNotFoundError("no", name="matplotlib.figure")).endswith("pip install 'cpnorm[lab]'")
    assert main.sentence(ModuleNotFoundError("no", name="tensorboard")).endswith("pip install 'cpnorm[tensorboard]'")
    assert main.sentence(PermissionError(13, "Permission denied", "x.json")) == "x.json: Permission denied"


def test_without_the_packages_of_the_command_line() -> None:
    program = "import sys; sys.modules['typer'] = None; from cpnorm.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "cpnorm: the command line needs typer: pip install 'cpnorm[lab]'\n"


def test_help_and_completion_do_without_torch() -> None:
    # The package itself imports torch; here it is only a place to import from, so that the rest shows what it needs.
    program = """
import os, sys, types
package = types.ModuleType("cpnorm")
package.__path__ = [sys.argv.pop(1)]
sys.modules["cpnorm"] = package
from cpnorm.lab.cli import main, training_commands
for words in (["--help"], ["train", "--help"], ["data", "--help"], ["--version"], []):
    assert main.main(words) == 0
assert not {"torch", "numpy", "sklearn", "matplotlib"} & set(sys.modules), sorted(sys.modules)
os.environ |= {"_CPNORM_COMPLETE": "complete_bash", "COMP_WORDS": "cpnorm train --norm ", "COMP_CWORD": "3"}
main.main([])
"""
    place = str(Path(main.__file__).parents[2])
    command = [sys.executable, "-c", program, place]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "Exit codes: 0 done" in done.stdout
    assert done.stdout.split()[-4:] == ["none", "weight", "cp", "tai"]


# --- options ----------------------------------------------------------------------------------------------------------


def test_every_setting_is_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields <= set(training_commands.train.__signature__.parameters)  # type: ignore[attr-defined]


def test_presets_and_what_is_said_beside_them() -> None:
    config = training_commands.preset_config("cifar10/cp-sgd")
    assert config == paper.row("cifar10/cp-sgd").config
    assert training_commands.preset_config("beyond-mnist/low-rank-12k") == beyond.MNIST_ROWS[1].config
    said = {"lr": 0.5, "rank": "0.25", "skip": ["features.0"], "epochs": None, "renormalize": False}
    changed = options.changed(config, said)
    assert changed == config.replace(lr=0.5, rank=0.25, skip=("features.0",), renormalize=False)


def test_json_of_the_data_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CPNORM_DATA", raising=False)
    assert main.main(["data", "where", "--json", "--data-dir", str(tmp_path / "x")]) == 0
    places = json.loads(capsys.readouterr().out)
    assert places["searched"] == [str(tmp_path / "x"), str(tmp_path / "cpnorm")]
    assert places["found"] == {"digits": "scikit-learn", "mnist": None, "cifar10": None, "svhn": None}
    assert main.main(["data", "check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "digits", "folder": None, "genuine": True}]
    assert main.main(["data", "get", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "digits", "files": []}


def test_the_line_a_terminal_redraws(images: ImageSet) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=160)
    config = Config(model="lenet", data="mnist", norm="none", epochs=2, batch_size=32, validation=20)
    with Watch(console) as watch:
        watch.preparing("features.2", 1, 4)
        watch._live.refresh()  # type: ignore[union-attr]
        trainer = Trainer(config, images, Options(device="cpu"))
        watch.follow(trainer)
        for _ in trainer.run():
            watch._live.refresh()  # type: ignore[union-attr]
    text = drawn.getvalue()
    assert "canonical form of features.2 (2 of 4)" in text
    for part in ("epoch 2/2", "loss ", "validation ", "test ", "images/s", "0:00 left"):
        assert part in text
    assert f"{trainer.history[0]['loss']:.4f}" in text
    for width, there, gone in (
        (80, ("epoch 2/2", "validation", "test", "left"), "images/s"),
        (44, ("epoch 2/2", "test"), "train"),
        (24, ("epoch 2/2",), "loss"),
    ):
        narrow = Console(file=io.StringIO(), width=width)
        watch = Watch(narrow)
        watch.follow(trainer)
        narrow.print(watch)
        (line,) = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert len(line) <= width
        assert all(part in line for part in there)
        assert gone not in line


def test_a_warning_is_a_one_line_message(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def warn(*_: object, **__: object) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("0 of 4 layers\ngain [b]", stacklevel=1)
        return 0

    monkeypatch.setattr(main, "app", warn)
    assert main.main(["demo"]) == 0
    assert capfd.readouterr().err == "cpnorm: warning: 0 of 4 layers gain [b]\n"
