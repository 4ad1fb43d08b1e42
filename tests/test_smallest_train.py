"""Training small networks in a given time: every stage leaves its records, and what is left can be continued."""

from __future__ import annotations

import dataclasses
import json
import tarfile
import time
from pathlib import Path

import pytest

import smallest_train
from cpnorm.lab.data.images import load
from cpnorm.lab.paper import reproduce
from cpnorm.lab.training.run_networks import trained_network
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.trainer import Trainer


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded digits in the place of MNIST."""
    digits = load("digits")
    parts = {"train_images": 100, "train_labels": 100, "test_images": 50, "test_labels": 50}
    few = dataclasses.replace(digits, name="mnist", **{part: getattr(digits, part)[:n] for part, n in parts.items()})
    monkeypatch.setattr(reproduce, "load", lambda name, data_dir=None: few)
    monkeypatch.setattr(reproduce, "require_official", lambda data: None)


def session(folder: Path, parallel_runs: int = 8) -> smallest_train.Session:
    options = smallest_train.Options(checkpoint_every=1e9)
    return smallest_train.Session(
        folder / "out", folder / "work", 100, parallel_runs=parallel_runs, smoke=True, options=options
    )


def records_of(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]
    return [(line["row"], line["seed"]) for line in lines]


@pytest.mark.usefixtures("embedded")
def test_what_is_finished_is_brought_back_and_a_stage_that_fails_stops_no_other(tmp_path: Path) -> None:
    training = session(tmp_path)
    for stage in ("records-mnist/4k@2", "records-mnist/unknown", "records-pilot/5k-w*,records-mnist/5k"):
        training.run(stage)
    assert training.failed
    out = tmp_path / "out"
    rows = [("records-mnist/4k", 0), ("records-mnist/5k", 0), ("records-pilot/5k-wide", 0)]
    assert records_of(out) == rows
    assert "unknown failed" in (out / "log.txt").read_text()
    assert len(list(out.iterdir())) <= 8
    with tarfile.open(out / "networks.tar.gz") as archive:
        found = {name.rsplit("/", 2)[0] for name in archive.getnames() if name.endswith("model.safetensors")}
    assert found == {"records-mnist/4k", "records-mnist/5k"}

    results = tmp_path / "results"
    results.mkdir()
    assert len(smallest_train.install(out, results)) == 3 + 2
    assert records_of(results) == rows
    run = RunFolder(results / "networks/mnist-4k")
    record = run.record()
    assert record is not None
    assert sum(p.numel() for p in trained_network(run).parameters()) == record["parameters"]
    assert smallest_train.install(out, results) == [f"records-mnist/{key}: network of seed 0" for key in ("4k", "5k")]
    assert records_of(results) == rows


@pytest.mark.usefixtures("embedded")
def test_runs_that_the_time_did_not_suffice_for_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, clock = session(tmp_path / "first", parallel_runs=1), time.monotonic
    protocol = first._protocol()
    done, cut = (
        dataclasses.replace(row, config=row.config.replace(epochs=4))
        for row in map(protocol.row, ("records-mnist/4k", "records-mnist/5k"))
    )

    def stop(trainer: Trainer, line: dict[str, int]) -> None:
        if trainer.config.rank == cut.config.rank and line["epoch"] == 2:
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 1e6)  # the limit is over

    table = dataclasses.replace(protocol.tables["records-mnist"], rows=(done, cut))
    changed = dataclasses.replace(protocol, tables={"records-mnist": table})
    monkeypatch.setattr(smallest_train.Session, "_protocol", lambda self: changed)
    monkeypatch.setattr(first, "_watch", stop)
    first.run("records-mnist")
    monkeypatch.setattr(time, "monotonic", clock)

    assert records_of(tmp_path / "first/out") == [(done.key, 0)]
    results = tmp_path / "results"
    results.mkdir()
    told = f"{cut.key}, seed 0: stopped after epoch 2"
    assert smallest_train.install(tmp_path / "first/out", results)[-1] == told
    assert smallest_train.install(tmp_path / "first/out", results)[-1] == told
    (stopped,) = json.loads((results / "stopped.json").read_text())
    assert stopped["parameters"] <= 5000
    assert len(stopped["curve"]["test_accuracy"]) == 2
    assert [path.name for path in (results / "networks").iterdir()] == ["mnist-4k"]
    second, epochs = session(tmp_path / "second"), []
    second.resume(tmp_path / "first/out")
    monkeypatch.setattr(second, "_watch", lambda trainer, line: epochs.append(line["epoch"]))
    second.run("records-mnist")
    assert epochs == [3, 4]
    assert records_of(tmp_path / "second/out") == [(done.key, 0), (cut.key, 0)]
