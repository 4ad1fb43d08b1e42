"""The queue: every missing run once, in order, whoever else works on the folder, and whatever stops it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import cpnorm
from cpnorm.lab.data.digests import WrongDataError
from cpnorm.lab.data.images import load
from cpnorm.lab.paper import beyond, rank_tables, reproduce
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.jobs import Job, Results, base_of, missing_jobs, networks_to_retrain
from cpnorm.lab.paper.progress import expected_seconds, shown_accuracies
from cpnorm.lab.paper.protocols import WORDS, Protocol
from cpnorm.lab.paper.reproduce import Request
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.run_networks import trained_network
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.trainer import Options
from cpnorm.lab.training.truncation import Truncation
from official_files import WRITERS, make
from tiny_queue import write_data

TINY = Config(
    model="lenet",
    data="idx",
    rank=dict.fromkeys(paper.paper_ranks("lenet"), 2),
    init="kaiming_normal",
    optimizer="adam",
    epochs=1,
    batch_size=256,
    modes=True,
)
BASE = Row("tiny/base", "base", TINY, None)
CUT = Row(
    "tiny/cut",
    "cut",
    TINY,
    None,
    starts_from="tiny/base",
    truncation=Truncation(rate=0.5),
    tuning={"optimizer": "sgd", "lr": 0.001, "epochs": 1},
    start="same",
)


def protocol(*rows: Row, **options: Any) -> Protocol:
    return Protocol("tiny", {"tiny": Table("tiny", "Tiny", rows=rows)}, **options)


PROTOCOL = protocol(BASE, CUT)


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A few digits, for this process and those it starts."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPNORM_DATA", str(folder))
        yield


def store_of(folder: Path, rows: Protocol = PROTOCOL) -> Results:
    return Results(folder / "results", rows)


def job(row: Row, seed: int, **options: Any) -> Job:
    return Job(row, seed, **({"protocol": PROTOCOL} | options))


def run(folder: Path, seeds: int = 2, **options: Any) -> list[Job]:
    how = {key: options.pop(key) for key in ("wait", "observers", "announce") if key in options}
    given = {"work": folder / "work", "protocol": PROTOCOL} | options
    request = Request(["tiny"], range(seeds), folder / "results", **given)
    return reproduce.reproduce(request, **({"announce": lambda _: None} | how))


def test_everything_missing_is_run_once(tmp_path: Path) -> None:
    assert run(tmp_path) == []
    lines = [json.loads(text) for text in (tmp_path / "results/tiny.jsonl").read_text().splitlines()]
    assert [(line["row"], line["seed"]) for line in lines] == [
        ("tiny/base", 0),
        ("tiny/base", 1),
        ("tiny/cut", 0),
        ("tiny/cut", 1),
    ]
    base, cut = lines[0], lines[2]
    assert base["parameters"] > cut["parameters"]
    assert base["truncation_settings"] is None
    assert cut["truncation_settings"] == {"rate": 0.5, "start": "same", "networks": 1}
    assert base["protocol"] == "tiny"
    assert base["parallel_runs"] == 2
    assert len(base["curve"]["test_accuracy"]) == 1
    assert base["test_accuracy_last"] == base["curve"]["test_accuracy"][-1]
    assert base["environment"]["torch"]
    assert base["config"] == TINY.replace(seed=0).to_json()
    assert sum(base["histograms"]["features.2"]["after"]) == 2
    assert base["explorer"]["accuracy"][0] == pytest.approx(base["test_accuracy_last"], abs=0.6)
    assert len(base["layers"]["features.0"]["lambdas"]) == 1
    before = (tmp_path / "results/tiny.jsonl").read_bytes()
    assert run(tmp_path) == []
    assert (tmp_path / "results/tiny.jsonl").read_bytes() == before


def test_a_time_limit_leaves_the_rest_and_the_next_call_goes_on(tmp_path: Path) -> None:
    assert len(run(tmp_path, time_limit=0.0)) == 4
    assert run(tmp_path) == []


def test_networks_that_are_not_at_hand_are_trained_again(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "results/tiny.jsonl"
    bases = path.read_text().splitlines()[:2]
    path.write_text("\n".join(bases) + "\n")
    said: list[str] = []
    assert run(tmp_path, work=tmp_path / "elsewhere", announce=said.append) == []
    assert said[0] == "tiny/base: seeds 0 (network only), 1 (network only)"
    assert len(path.read_text().splitlines()) == 4


def test_a_chain_of_cuts_is_made_again_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = protocol(BASE, CUT, dataclasses.replace(CUT, key="tiny/again", starts_from=CUT.key))
    assert run(tmp_path, seeds=1, protocol=chain) == []
    path = tmp_path / "results/tiny.jsonl"
    lines = path.read_text().splitlines()
    weights = [json.loads(line)["parameters"] for line in lines]
    assert weights == sorted(weights, reverse=True)
    path.write_text("\n".join(lines[:2]) + "\n")
    said: list[str] = []
    assert run(tmp_path, seeds=1, protocol=chain, work=tmp_path / "elsewhere", announce=said.append) == []
    assert [text for text in said if "%" not in text] == [
        "tiny/base: seeds 0 (network only)",
        "tiny/cut: seeds 0 (network only)",
        "tiny/again: seeds 0",
    ]
    assert json.loads(path.read_text().splitlines()[2])["parameters"] == weights[2]


def test_a_cut_that_was_begun_goes_on_whatever_network_is_the_best_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = protocol(BASE, dataclasses.replace(CUT, start="best"))
    assert run(tmp_path, seeds=1, protocol=best) == []
    path = tmp_path / "results/tiny.jsonl"
    base, cut = map(json.loads, path.read_text().splitlines())
    path.write_text(
        json.dumps(base) + "\n" + json.dumps(base | {"seed": 1, "test_accuracy_last": 99.0}) + "\n"
    )  # a better one
    folder = tmp_path / "work/tiny/cut/0"
    for name in ("record.json", "model.safetensors"):  # as if it had been stopped
        (folder / name).unlink()
    shutil.rmtree(tmp_path / "work/tiny/base")  # no longer needed
    assert run(tmp_path, seeds=1, protocol=best) == []
    again = json.loads(path.read_text().splitlines()[-1])
    assert (again["test_accuracy_last"], again["truncation_result"]["network"]) == (
        cut["test_accuracy_last"],
        cut["truncation_result"]["network"],
    )


def test_a_network_that_was_removed_is_trained_again(tmp_path: Path) -> None:
    run(tmp_path, seeds=1)
    path = tmp_path / "results/tiny.jsonl"
    base, cut = path.read_text().splitlines()
    path.write_text(base + "\n")
    shutil.rmtree(tmp_path / "work/tiny/cut")
    (tmp_path / "work/tiny/base/0/model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has lost its model\.safetensors: delete the folder and train it again"):
        trained_network(RunFolder(tmp_path / "work/tiny/base/0"))
    assert run(tmp_path, seeds=1) == []
    again = json.loads(path.read_text().splitlines()[-1])
    assert (again["test_accuracy_last"], again["truncation_result"]["network"]) == (
        json.loads(cut)["test_accuracy_last"],
        json.loads(cut)["truncation_result"]["network"],
    )


def test_a_failing_row_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(reproduce, "start", broken)
    with pytest.raises(RunError, match="tiny/cut failed; 1 runs are missing"):
        run(tmp_path, seeds=1)
    left = missing_jobs(["tiny"], [0], store_of(tmp_path))
    assert [str(job) for job in left] == ["tiny/cut, seed 0"]


def test_rows_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown rows: mnist/nosuch; there are mnist/none-sgd, "):
        missing_jobs(["mnist/nosuch"], [0], Results(tmp_path))


def test_a_run_that_diverges_is_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("tiny/wild", "wild", TINY.replace(optimizer="sgd", lr=3e38, batch_size=8), None)
    assert run(tmp_path, seeds=1, protocol=protocol(row)) == []
    line = json.loads((tmp_path / "results/tiny.jsonl").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert line["curve"]["loss"] == [None]
    assert line["diverged"].startswith("the loss was")
    assert "explorer" not in line


def test_the_best_network_is_one_that_did_not_diverge(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for seed, final, diverged in ((0, None, "the loss was nan in epoch 1"), (1, 88.0, None), (2, 89.0, None)):
        store.append(
            {"table": "tiny", "row": BASE.key, "seed": seed, "test_accuracy_last": final, "diverged": diverged}
        )
    best = dataclasses.replace(CUT, start="best")
    assert base_of(job(best, 0), store.done()) == Job(BASE, 2, retrain_only=True)
    assert base_of(job(CUT, 1), store.done()) == Job(BASE, 1, retrain_only=True)
    assert base_of(job(BASE, 0), store.done()) is None


def test_a_claimed_job_is_left_to_its_owner(tmp_path: Path) -> None:
    with store_of(tmp_path).claim(job(BASE, 0)) as ours:
        assert ours
        left = run(tmp_path, seeds=1)
    assert Job(BASE, 0) in left


def test_cuts_wait_for_the_networks_they_start_from(tmp_path: Path) -> None:
    with store_of(tmp_path).claim(job(BASE, 0)):
        assert [str(job) for job in run(tmp_path)] == ["tiny/base, seed 0", "tiny/cut, seed 0"]
    assert run(tmp_path) == []


def test_a_network_that_another_process_trains_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, seeds=1)
    path = tmp_path / "results/tiny.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    waited: list[float] = []
    with ExitStack() as other:
        other.enter_context(store_of(tmp_path).claim(job(BASE, 0, retrain_only=True)))
        monkeypatch.setattr(time, "sleep", lambda seconds: (waited.append(seconds), other.close()))
        left = run(tmp_path, seeds=1, work=tmp_path / "elsewhere")
    assert (left, len(waited)) == ([], 1)


def test_a_process_that_waits_takes_over_what_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as other:
        other.enter_context(store_of(tmp_path).claim(job(BASE, 0)))
        monkeypatch.setattr(time, "sleep", lambda _: other.close())
        assert run(tmp_path, seeds=1, wait=True) == []


SCRIPT = """
    import sys
    from pathlib import Path
    sys.path[:0] = {here!r}
    from test_reproduce import run
    folder = Path(sys.argv[1])
    run(folder, work=folder / sys.argv[2], parallel_runs=1)
"""


def start(folder: Path, work: str) -> subprocess.Popen:
    code = textwrap.dedent(SCRIPT.format(here=[str(Path(__file__).parent), str(Path(__file__).parents[2])]))
    return subprocess.Popen([sys.executable, "-c", code, str(folder), work], env={**os.environ, "OMP_NUM_THREADS": "1"})


def finished(folder: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, (folder / "results/tiny.jsonl").read_text().splitlines())
    return [(line["row"], line["seed"]) for line in lines]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    processes = [start(tmp_path, work) for work in ("one", "two")]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    done = finished(tmp_path)
    assert sorted(done) == sorted(set(done))
    assert {("tiny/base", 0), ("tiny/base", 1)} <= set(done)


def test_a_killed_queue_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "work")
    deadline = time.monotonic() + 600
    while not (tmp_path / "results/tiny.jsonl").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=600)
    assert run(tmp_path) == []
    done = finished(tmp_path)
    assert len(done) == len(set(done)) == 4


def test_the_papers_queue(tmp_path: Path) -> None:
    jobs = missing_jobs([], range(8), Results(tmp_path))
    rows = {job.row.key for job in jobs}
    assert len(rows) == 34
    assert jobs[0].row.key == "cifar10/none-sgd"
    assert all(job.row.same_as is None for job in jobs)
    assert all(expected_seconds(job) > 0 for job in jobs)


def test_single_rows_and_unknown_tables(tmp_path: Path) -> None:
    jobs = missing_jobs(["cifar10/cp-sgd"], [0, 1], Results(tmp_path))
    assert [str(job) for job in jobs] == ["cifar10/cp-sgd, seed 0", "cifar10/cp-sgd, seed 1"]
    with pytest.raises(ValueError, match="unknown tables: cifar; there are cifar10"):
        WORDS.find_tables(["cifar"])
    assert set(WORDS.tables) >= {"beyond-cifar10", "alexnet-ranks"}


def test_our_rows_name_every_layer_and_start_from_rows_that_exist() -> None:
    for table in beyond.TABLES:
        for row in table.rows:
            if row.starts_from:
                assert WORDS.row(row.starts_from).config == row.config
            elif row.config.norm == "cp" and row.config.rank != "paper":
                assert set(row.config.rank) == set(paper.paper_ranks(row.config.model))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar10.jsonl").write_text('{"row": "a", "seed": 0}\n{"row": \n')
    with pytest.raises(ValueError, match=r"cifar10.jsonl, line 2"):
        Results(tmp_path).lines()
    (tmp_path / "cifar10.jsonl").write_text('{"foo": 1}\n')
    with pytest.raises(ValueError, match=r"cifar10.jsonl: expected the row and seed of a run in every line, got .*foo"):
        Results(tmp_path).done()


def test_ranks_are_missing_until_they_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def estimated(weight: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(rank=len(weight), curve=[(1, 0.5)])

    monkeypatch.setattr(cpnorm, "estimate_rank", estimated)
    results, keys = tmp_path / "results", ["lenet-ranks"]
    missing = rank_tables.missing_ranks(keys, Results(results))
    assert not results.exists()  # looking changes nothing
    assert [layer.layer for layer in missing["lenet-ranks", 0]] == list(paper.paper_ranks("lenet"))
    assert set(rank_tables.missing_ranks([], Results(results))) == {("alexnet-ranks", 0), ("lenet-ranks", 0)}
    rank_tables.estimate_ranks(keys, results, stop=Stop(reason="enough"), announce=lambda _: None)
    assert rank_tables.missing_ranks(keys, Results(results)) == missing
    stop = Stop()

    def ask(_: str) -> None:
        stop.reason = "enough"

    rank_tables.estimate_ranks(keys, results, stop=stop, announce=ask)  # asked after the first layer
    assert len(Results(results).lines()) == 1
    rank_tables.estimate_ranks(keys, results, announce=lambda _: None)
    assert rank_tables.missing_ranks(keys, Results(results)) == {}
    assert [line["row"] for line in Results(results).lines()] == [
        f"lenet-ranks/{y.layer}" for y in missing["lenet-ranks", 0]
    ]


def test_a_finished_run_whose_line_is_missing_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, or out of disk space, between the end of a run and its line."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Results, "append", fail)
        with pytest.raises(RunError):
            run(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("model.safetensors")}
    assert kept
    assert run(tmp_path) == []
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    lines = [json.loads(text) for text in (tmp_path / "results/tiny.jsonl").read_text().splitlines()]
    assert [(line["row"], line["seed"]) for line in lines[:1]] == [("tiny/base", 0)]
    assert "explorer" in lines[0]  # what the report draws is kept, too
    assert lines[0]["parallel_runs"] == 2


def test_a_network_that_another_process_has_trained_meanwhile_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    network = tmp_path / "work/tiny/base/0/model.safetensors"
    before = network.stat().st_mtime_ns
    store, said = store_of(tmp_path), []
    mine = reproduce.run_group(
        [job(BASE, 0, retrain_only=True)],
        store,
        tmp_path / "work",
        load("digits"),
        Options(device="cpu"),
        (),
        Stop(),
        said.append,
    )
    assert (mine, said) == (1, [])
    assert network.stat().st_mtime_ns == before


def test_a_cut_asked_for_by_itself_starts_from_the_best_of_all_seeds(tmp_path: Path) -> None:
    jobs = missing_jobs(["compress-cifar10/50"], range(3), Results(tmp_path))
    assert [str(job) for job in jobs[:3]] == [f"cifar10/cp-sgd, seed {seed}" for seed in range(3)]
    assert [str(job) for job in jobs[3:]] == [f"compress-cifar10/50, seed {seed}" for seed in range(3)]


def test_networks_to_be_trained_again_are_known_beforehand(tmp_path: Path) -> None:
    run(tmp_path, seeds=1)
    store = store_of(tmp_path)
    left = missing_jobs(["tiny"], range(1), store)
    assert left == []
    cut = [job(CUT, 0)]
    assert networks_to_retrain(cut, store.done(), tmp_path / "work") == []
    assert [str(job) for job in networks_to_retrain(cut, store.done(), tmp_path / "elsewhere")] == ["tiny/base, seed 0"]


def test_a_seed_that_is_no_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"table": "tiny", "row": "tiny/base", "seed": [1]}\n')
    with pytest.raises(ValueError, match=r"odd.jsonl: expected the row and seed of a run"):
        Results(tmp_path).done()


def test_other_data_than_the_official_ones_are_refused(tmp_path: Path) -> None:
    wrong = protocol(dataclasses.replace(BASE, config=TINY.replace(data="mnist")))
    WRITERS["mnist"](tmp_path, make("mnist"))
    with pytest.raises(WrongDataError, match=r"the mnist data in .* are not the official ones"):
        run(tmp_path, protocol=wrong, options=Options(data_dir=tmp_path))
    assert not (tmp_path / "results/tiny.jsonl").exists()


def test_the_test_accuracy_of_a_trial_is_not_shown() -> None:
    tested = {
        "test_accuracy_last": 83.1,
        "test_accuracy_best": 83.5,
        "curve": {"validation_accuracy": [80.0, 84.0, 83.0]},
    }
    assert shown_accuracies(tested | {"config": {"validation": 5000}}) == (83.0, 84.0, " held out")
    for config in ({}, {"validation": 0}, {"validation": 5000, "early_stopping": 8}):  # the last one ends a run
        assert shown_accuracies(tested | {"config": config}) == (83.1, 83.5, "")
