"""The benchmark of other runtimes: its page is made of its record, and its parts compute what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import runtimes
import timing
from runtime_backends import LARGEST_BATCH, RUNTIMES

RECORDS = sorted(timing.RESULTS.glob("runtimes_*.json"))


def test_the_guide_has_the_tables_of_the_records() -> None:
    page = runtimes.PAGE.read_text()
    made = page.partition(runtimes.BEGIN)[2].partition(runtimes.END)[0].strip()
    assert made == runtimes.sections(), "run python benchmarks/runtimes.py --work FOLDER --record"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_runtime_of_a_record_has_the_dense_network_to_compare_with(record: Path) -> None:
    for rows in json.loads(record.read_text())["tables"].values():
        for network in {row["network"] for row in rows}:
            shares = [row["parameters left"] for row in rows if row["network"] == network]
            assert shares == ["dense", "50 %", "33 %"]


def test_outputs_of_incomplete_batches() -> None:
    x, sizes = torch.randn(LARGEST_BATCH + 3, 2), []

    def run(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return 2 * rows

    assert torch.equal(runtimes.in_batches(run, x), 2 * x)
    assert sizes == [LARGEST_BATCH, LARGEST_BATCH]


@pytest.mark.parametrize("key", ["eager", "onnxruntime", "onnxruntime-int8"])
def test_runtimes_compute_what_torch_computes(key: str, tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)).eval()
    x = torch.randn(LARGEST_BATCH, 3, 32, 32)
    run, size = RUNTIMES[key].make(model, x, tmp_path / "network")
    with torch.no_grad():
        error = (run(x) - model(x)).abs().max() / model(x).abs().max()
    assert error < (0.05 if RUNTIMES[key].int8 else 1e-4)
    assert 1000 < size < 20_000


def test_errors_become_one_sentence() -> None:
    assert runtimes.one_line(RuntimeError("\n  no kernel\nmore")) == "RuntimeError: no kernel"
