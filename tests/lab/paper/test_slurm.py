"""The array script for SLURM, run by bash with SLURM's variables: shares, time limits, a killed task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpnorm.lab.paper.jobs import Job
from tiny_queue import LONG, PREPARE, assert_everything_once, epochs_saved, holder, write_data

SCRIPT = Path(__file__).parents[3] / "examples/slurm/reproduce.sh"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with data, a ``cpnorm`` that knows the tiny table only, a ``scontrol`` that writes down its calls."""
    write_data(tmp_path / "data")
    for name, code in {
        "cpnorm": f"#!{sys.executable}\n{PREPARE}\nfrom cpnorm.lab.cli import main\nsys.exit(main.main())\n",
        "scontrol": '#!/bin/sh\necho "$@" >> "$CPNORM_FOLDER/scontrol"\n',
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        path.chmod(0o755)
    return tmp_path


def start(cluster: Path, task: int, seconds: float = 600, **variables: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "CPNORM_FOLDER": str(cluster),
        "CPNORM_DATA": str(cluster / "data"),
        "CPNORM_SPARE_SECONDS": "0",
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_JOB_END_TIME": str(round(time.time() + seconds)),
        **variables,
    }
    words = ["tiny", "--seeds", "2", "--parallel-runs", "1", "--checkpoint-every", "0.1"]
    return subprocess.Popen(["bash", str(SCRIPT), *words], env=environment)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to find the worker of a run")
def test_tasks_share_the_runs_and_take_over_those_of_a_killed_one(cluster: Path) -> None:
    first = start(cluster, 0)
    run = Job(LONG, 0).folder(cluster / "work")
    deadline = time.monotonic() + 600
    while not (saved := epochs_saved(run)):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = start(cluster, 1)
    os.kill(holder(run / ".lock"), signal.SIGKILL)
    assert first.wait(timeout=600) == 128 + signal.SIGKILL
    third = start(cluster, 2)
    assert [task.wait(timeout=600) for task in (second, third)] == [0, 0]
    assert_everything_once(cluster / "results")
    assert run.metrics()[: len(saved)] == saved
    assert not (cluster / "scontrol").exists()


@pytest.mark.slow
def test_a_task_out_of_time_is_queued_again_but_not_for_ever(cluster: Path) -> None:
    tasks = [start(cluster, 0, seconds=1), start(cluster, 1, seconds=1, SLURM_RESTART_COUNT="50")]
    assert [task.wait(timeout=600) for task in tasks] == [75, 75]
    assert (cluster / "scontrol").read_text() == "requeue 77_0\n"
