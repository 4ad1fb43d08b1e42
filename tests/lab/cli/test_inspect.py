"""Inspection of runs: the numbers are those of the run, and the pictures can be opened."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import cpnorm
from cpnorm.lab.cli import inspect, pictures
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.report.drawing import INK, finish
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.run_networks import blank
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options, Trainer
from training_runs import few_digits, fit

RANKS = {"features.0": 6, "features.2": 40, "classifier.1": 4, "classifier.4": 6}
CONFIG = Config(
    model="lenet",
    data="digits",
    init="kaiming_normal",
    lambdas="normal",
    rank=RANKS,
    optimizer="adam",
    lr=0.01,
    epochs=2,
    batch_size=32,
)
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return few_digits(64, 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fit(CONFIG, out=folder, data=digits, options=CPU)
    return folder


def printed(table: object) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_fit_a_terminal_and_say_what_is_there(run: Path) -> None:
    found = inspect.inspect(run)
    record = found.record
    assert record is not None
    result = printed(inspect.result_table(found))
    assert f"{record['parameters']:,}" in result
    assert f"{record['test_accuracy_last']:.2f} %" in result
    layers, lambdas = printed(inspect.layer_table(found)), printed(inspect.lambda_table(found))
    assert "…" not in layers + lambdas  # nothing was cut off
    for name, rank in RANKS.items():
        row = next(line for line in layers.splitlines() if name in line).split()
        assert int(row[2]) == rank
    epochs = [line["layers"]["features.2"]["sigma"] for line in found.metrics]
    row = next(line for line in lambdas.splitlines() if "features.2" in line)
    assert f"{epochs[0]:.3g} " in row
    assert f" {epochs[-1]:.3g}" in row


def test_json_has_the_spectrum(run: Path) -> None:
    found = inspect.inspect(run)
    layers = cpnorm.canonical_layers(found.model)
    for entry in found.to_json()["summary"]["layers"]:
        expected = layers[entry["name"]].lambdas.abs().sort(descending=True).values
        assert entry["lambdas"] == pytest.approx(expected.tolist())


def test_lambdas_before_training_are_those_it_began_with(run: Path) -> None:
    states = inspect.lambda_states(inspect.inspect(run))
    began = cpnorm.canonical_layers(build_model(CONFIG, blank("digits"), torch.device("cpu")))
    for name, layer in began.items():
        assert torch.equal(states[name]["before training"], layer.lambdas)
        assert not torch.allclose(states[name]["after training"], layer.lambdas, atol=1e-3)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_can_be_opened(run: Path, tmp_path: Path, kind: str) -> None:
    paths = inspect.draw(inspect.inspect(run), tmp_path / "new" / "folder", kind)
    assert {path.stem for path in paths} == {"accuracy", "loss", "progress", "spectrum", "histograms"}
    for path in paths:
        if kind == "png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_pictures_have_the_look_of_the_report(run: Path) -> None:
    drawn = finish(pictures.progress(RunFolder(run).metrics()), "progress", 'a "title" & more', "")
    root = ElementTree.fromstring(drawn.svg)
    assert root.get("aria-label") == 'a "title" & more'
    assert "var(--soft)" in drawn.svg
    assert not [light for light in INK.values() if light in drawn.svg]


def test_runs_without_canonical_layers_and_unfinished_ones(digits: ImageSet, tmp_path: Path) -> None:
    fit(CONFIG.replace(norm="none", epochs=1), out=tmp_path / "plain", data=digits, options=CPU)
    found = inspect.inspect(tmp_path / "plain")
    assert found.summary is None
    assert {path.stem for path in inspect.draw(found, tmp_path)} == {"accuracy", "loss"}

    stop = Stop()

    def ask_to_stop(trainer: Trainer, line: dict) -> None:
        stop.reason = "enough for now"

    fit(CONFIG, out=tmp_path / "half", data=digits, options=CPU, observers=[ask_to_stop], stop=stop)
    found = inspect.inspect(tmp_path / "half")
    assert found.record is None
    assert "so far" in printed(inspect.result_table(found))
    assert {path.stem for path in inspect.draw(found, tmp_path / "half-pictures")} == {"accuracy", "loss", "progress"}

    with RunFolder(tmp_path / "empty").claimed(CONFIG), pytest.raises(RunError, match="nothing to show yet"):
        inspect.inspect(tmp_path / "empty")


def test_bars_and_trends_of_odd_values() -> None:
    assert inspect.bars([]) == ""
    assert inspect.bars([0.0, 0.0]) == "▁▁"
    assert inspect.trend([]) == ""
    assert inspect.trend([2.0, 2.0]) == "2 ▁▁ 2"
    assert len(inspect.bars(list(range(1000)))) == 10
    nan = float("nan")  # of a run that diverged
    assert inspect.bars([nan, 1.0, 2.0]) == "▄█"
    assert inspect.bars([nan]) == ""
    assert inspect.trend([1.0, 2.0, nan]) == "1 ▁█ nan"
    assert inspect.trend([nan, nan]) == "nan  nan"


def test_a_histogram_leaves_out_what_is_no_number() -> None:
    nan = float("nan")
    assert inspect.counted(torch.tensor([nan, 1.0, 2.0, 2.0])) == inspect.counted(torch.tensor([1.0, 2.0, 2.0])) != ""
    assert inspect.counted(torch.tensor([nan, nan])) == ""
