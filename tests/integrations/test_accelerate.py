"""The Accelerate example, as it stands: vectors stay unit vectors through accumulation, truncation goes through."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import cpnorm
from integrations.small import batches, largest_difference, network, sgd, trained

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'cpnorm[accelerate]'")


def test_it_trains_as_a_plain_loop_does() -> None:
    model = network()
    optimizer = sgd(model)
    cpnorm.renormalize_after(optimizer, model)
    accelerator = accelerate.Accelerator(cpu=True)
    runner, prepared = accelerator.prepare(model, optimizer)
    for x, y in batches():
        prepared.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(runner(x), y))
        prepared.step()
    assert largest_difference(model.state_dict(), trained().state_dict()) < 1e-6


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_with_accelerate.py"))
    assert example["main"]() > 0.8
    assert "15000" in capsys.readouterr().out.replace(",", "")
