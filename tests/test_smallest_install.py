"""Networks that were trained, and runs that were stopped, join the committed ones."""

from __future__ import annotations

import json
from pathlib import Path

import smallest_install
from cpnorm.lab.paper import smallest as rows
from cpnorm.lab.training.driver import Stop, drive
from cpnorm.lab.training.run_networks import trained_network
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.trainer import Options, Trainer
from training_runs import few_digits

ROWS = {row.key: row for table in rows.TABLES for row in table.rows}


def train(folder: Path, row: str, epochs: int) -> None:
    """Train a row for two epochs on a few embedded digits."""
    few = few_digits(100, 50, name="mnist")
    config = ROWS[row].config.replace(epochs=epochs, warmup=0, batch_size=50)
    run, stop = RunFolder(folder / row / "0"), Stop()

    def enough(trainer: Trainer, line: dict[str, int]) -> None:
        stop.reason = "tested" if line["epoch"] == 2 else ""

    with run.claimed(config):
        drive([(Trainer(config, few, Options(device="cpu")), run)], observers=[enough], stop=stop)


def test_networks_and_stopped_runs_are_added(tmp_path: Path) -> None:
    work, results = tmp_path / "work", tmp_path / "results"
    results.mkdir()
    train(work, "records-mnist/4k", epochs=1)
    train(work, "records-mnist/5k", epochs=4)
    told = ["records-mnist/4k: network of seed 0", "records-mnist/5k, seed 0: stopped after epoch 2"]
    assert smallest_install.install(work, results) == told
    assert smallest_install.install(work, results) == told  # once more adds nothing twice
    assert [path.name for path in (results / "networks").iterdir()] == ["mnist-4k"]
    record = RunFolder(results / "networks/mnist-4k").record()
    assert record is not None
    network = trained_network(RunFolder(results / "networks/mnist-4k"))
    assert sum(p.numel() for p in network.parameters()) == record["parameters"]
    (stopped,) = json.loads((results / "stopped.json").read_text())
    assert stopped["parameters"] <= 5000
    assert len(stopped["curve"]["test_accuracy"]) == stopped["epochs"] == 2
