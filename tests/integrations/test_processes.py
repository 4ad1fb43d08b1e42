"""Two processes under torchrun, with DDP and with sharded parameters, end where one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integrations.callbacks_in_processes import with_lightning, with_transformers
from integrations.cut_in_processes import cut_and_trained, share
from integrations.small import has_unit_columns, largest_difference, network, trained


def run_in_two_processes(script: str, folder: Path) -> None:
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path, folder]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    run_in_two_processes("train_in_processes.py", tmp_path)

    whole = trained().state_dict()
    assert largest_difference(network().state_dict(), whole) > 0.1  # so that what follows says something
    assert largest_difference(trained(renormalize=False).state_dict(), whole) > 1e-2
    for kind, state in torch.load(tmp_path / "states.pt").items():
        assert largest_difference(state, whole) < 1e-5, kind
        model = network()
        model.load_state_dict(state)
        assert has_unit_columns(model), kind


def test_two_processes_that_truncate_end_where_one_does(tmp_path: Path) -> None:
    run_in_two_processes("cut_in_processes.py", tmp_path)
    whole = cut_and_trained(lambda model: model, share()).state_dict()
    half = cut_and_trained(lambda model: model, share(0, 2)).state_dict()
    assert any(half[key].shape != whole[key].shape or (half[key] - whole[key]).norm() > 0.1 for key in whole)
    for rank in range(2):
        for kind, state in torch.load(tmp_path / f"{rank}.pt").items():
            assert largest_difference(state, whole) < 1e-4, (rank, kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the frameworks
def test_callbacks_truncate_in_two_processes_as_in_one(tmp_path: Path) -> None:
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    run_in_two_processes("callbacks_in_processes.py", tmp_path)
    wholes = {"lightning": with_lightning(tmp_path), "transformers": with_transformers(tmp_path)}
    for kind, whole in wholes.items():
        assert whole["3.lambdas"].shape != network().state_dict()["3.lambdas"].shape
        for rank in range(2):
            assert largest_difference(torch.load(tmp_path / f"{rank}.pt")[kind], whole) < 1e-4, (rank, kind)
