"""A real cluster of two workers: one is killed in the middle of a run, and everything is there in the end, once."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpnorm.lab.cli import main
from cpnorm.lab.paper import ray_engine
from cpnorm.lab.paper.jobs import Job
from cpnorm.lab.paper.tables import Row
from cpnorm.lab.training.truncation import Truncation
from tiny_queue import CUT, LONG, PREPARE, TABLE, assert_everything_once, epochs_saved, holder, write_data

DRIVER = f"""
def prepare():
    {PREPARE}

prepare()
import ray, sys
from cpnorm.lab.cli import main
ray.init(num_cpus=2, include_dashboard=False, runtime_env={{"worker_process_setup_hook": prepare}})
sys.exit(main.main(sys.argv[1:]))
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """``cpnorm reproduce tiny --engine ray``."""
    command = [
        sys.executable,
        "-c",
        DRIVER,
        "reproduce",
        "tiny",
        "--engine",
        "ray",
        "--seeds",
        "2",
        "--parallel-runs",
        "1",
    ]
    command += ["--results", str(folder / "results"), "--work", str(folder / "work"), "--checkpoint-every", "0.1"]
    write_data(folder / "data")
    command += ["--data-dir", str(folder / "data")]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(
        [*command, *words], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray: pip install 'cpnorm[ray]'")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to find the worker of a run")
def test_a_killed_workers_run_is_picked_up_from_its_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path)
    run = Job(LONG, 0).folder(tmp_path / "work")
    deadline = time.monotonic() + 600
    while not (saved := epochs_saved(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(holder(run / ".lock"), signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, "no run is missing\n"), err
    assert_everything_once(tmp_path / "results")
    assert run.metrics()[: len(saved)] == saved


def test_an_engine_that_is_not_there_is_an_error_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["reproduce", "mnist", "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert main.main([*words, "--engine", "ray"]) == 1
    assert "this needs ray, which is not installed: pip install 'cpnorm[ray]'" in capfd.readouterr().err
    assert main.main([*words, "--engine", "dask"]) == 2
    assert "expected --engine local or ray, got dask" in capfd.readouterr().err


def test_shares_are_of_one_row_and_wait_for_what_they_start_from() -> None:
    jobs = [Job(row, seed) for row in TABLE.rows for seed in range(3)]
    assert [[str(job) for job in share] for share in ray_engine.shares(jobs, parallel_runs=2)] == [
        ["tiny/long, seed 0", "tiny/long, seed 1"],
        ["tiny/long, seed 2"],
        ["tiny/cut, seed 0", "tiny/cut, seed 1"],
        ["tiny/cut, seed 2"],
    ]
    assert Job(CUT, 0).needs(Job(LONG, 2))  # which may be the best
    same = Row("tiny/same", "", LONG.config, None, starts_from=LONG.key, truncation=Truncation(rate=0.5), start="same")
    assert Job(same, 1).needs(Job(LONG, 1))
    assert not Job(same, 1).needs(Job(LONG, 2))
    assert not Job(LONG, 1).needs(Job(LONG, 1))
