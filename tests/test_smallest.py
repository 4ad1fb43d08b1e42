"""The committed small networks: their parameters, their size, their score, and the page made from their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cpnorm
import smallest
from cpnorm.lab.data.images import DataNotFoundError, load
from cpnorm.lab.paper import smallest as rows
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.evaluation import accuracy
from cpnorm.lab.training.run_networks import blank, trained_network
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.setup import build_model

ROOT = Path(__file__).parent.parent
NETWORKS = sorted(path for path in (ROOT / "results/records/networks").glob("*") if path.is_dir())
ROWS = {row.key: row for table in rows.TABLES for row in table.rows}


def by_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", NETWORKS, ids=by_name)
def test_a_committed_network_is_the_one_of_its_record(path: Path) -> None:
    run = RunFolder(path)
    network, record = trained_network(run), run.record()
    assert record is not None
    assert sum(p.numel() for p in network.parameters()) == record["parameters"]
    assert (run / "model.safetensors").stat().st_size < 500_000
    (key,) = (key for key in ROWS if smallest.folder_name(key) == path.name)
    assert Config.from_json(record["config"]) == ROWS[key].config.replace(seed=run.config().seed)
    lines = {line["seed"]: line for line in smallest.read()[key]}
    assert lines[run.config().seed]["test_accuracy_last"] == record["test_accuracy_last"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NETWORKS, ids=by_name)
def test_a_committed_network_scores_what_its_record_says(path: Path) -> None:
    run = RunFolder(path)
    try:
        data = load(run.config().data)
    except DataNotFoundError as error:
        pytest.skip(f"needs the official data: {error}")
    record = run.record()
    assert record is not None
    found = accuracy(trained_network(run), data)
    assert found == pytest.approx(record["test_accuracy_last"], abs=0.2)  # scored in bfloat16 there, in float32 here


@pytest.mark.parametrize("goal", rows.GOALS, ids=lambda goal: goal.row)
def test_rows_keep_to_the_parameters_of_their_goal(goal: rows.Goal) -> None:
    config = ROWS[goal.row].config
    network = build_model(config, blank(config.data), torch.device("cpu"))
    assert sum(p.numel() for p in network.parameters()) <= goal.parameters
    dense = ROWS[goal.control].config
    assert dense.norm == "none"
    same = {"norm", "width", "design", "rank", "modes", "split_modes", "lambdas", "skip"}
    kept = {k: v for k, v in config.to_json().items() if k not in same}
    assert kept == {k: v for k, v in dense.to_json().items() if k not in same}


def test_costs_of_a_canonical_network_are_counted_in_both_forms() -> None:
    config = ROWS["records-mnist/5k"].config
    network = build_model(config, blank("mnist"), torch.device("cpu")).eval()
    found = smallest.costs(network, torch.zeros(1, 1, 28, 28))
    assert found["parameters"] <= 5000
    pixels = 28 * 28
    assert found["flops_dense"] > 2 * pixels * 9 * (16 + 2 * 16 * 16)  # stem and first block alone
    assert 0 < found["flops_factorised"] < found["flops_dense"]
    assert cpnorm.canonical_layers(network)  # it is left as it was


def test_parts_of_the_page_are_replaced_between_their_comments() -> None:
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert smallest.with_parts(page, {"x": "new"}) == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match="<!-- y -->"):
        smallest.with_parts(page, {"y": ""})


def test_the_page_is_made_from_the_records(tmp_path: Path) -> None:
    line = {"table": "records-mnist", "row": "records-mnist/5k", "weights": 4969, "diverged": None}
    line["config"] = {"data": "mnist", "norm": "cp"}
    lines = [line | {"seed": seed, "test_accuracy_last": 99.4 + seed % 2 / 10} for seed in range(8)]
    (tmp_path / "records-mnist.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = smallest.read(tmp_path)
    assert "99.45 ± 0.05 (8): **met** | 4,969" in smallest.goal_table(runs, {})
    fewer = {key: found[:7] for key, found in runs.items()}
    assert "(7): too few runs" in smallest.goal_table(fewer, {})
    worse = {key: [run | {"test_accuracy_last": 99.3} for run in found] for key, found in runs.items()}
    assert "99.30 ± 0.00 (8): not met" in smallest.goal_table(worse, {})
    smallest.draw(runs, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_stopped_runs_stand_beside_the_canonical_ones_at_the_same_epoch(tmp_path: Path) -> None:
    dense = {"row": "records-mnist/5k-dense", "parameters": 4943, "epochs": 2, "config": {"epochs": 3}}
    stopped = [dense | {"seed": seed, "curve": {"test_accuracy": [9.0, 98.0 + seed]}} for seed in range(2)]
    (tmp_path / "stopped.json").write_text(json.dumps(stopped))
    canonical = {"seed": 0, "curve": {"test_accuracy": [9.5, 99.0, 99.5]}}
    runs = {"records-mnist/5k": [canonical]}
    line = "| `records-mnist/5k-dense` | 4,943 | 2 of 3 | 98.50 ± 0.71 (2) | 99.00 (1) |"
    assert smallest.stopped_table(runs, tmp_path).splitlines()[2:] == [line]
    finished = runs | {"records-mnist/5k-dense": [{"seed": 0}, {"seed": 1}]}
    assert len(smallest.stopped_table(finished, tmp_path).splitlines()) == 2


def test_stopped_runs_were_trained_with_the_settings_of_their_rows() -> None:
    for run in json.loads((ROOT / "results/records/stopped.json").read_text()):
        assert Config.from_json(run["config"]) == ROWS[run["row"]].config.replace(seed=run["seed"])
        assert len(run["curve"]["test_accuracy"]) == run["epochs"] < run["config"]["epochs"]
