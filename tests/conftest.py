"""What every test starts from: one thread, fixed seeds, repeatable examples, and skips that say why."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from ways import HAS_TRITON, INTERPRETED, patch_once_a_launch

if INTERPRETED and HAS_TRITON:
    patch_once_a_launch()

# One thread each, here and in the processes that tests start: on small tensors more only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=1000)  # HYPOTHESIS_PROFILE=explore looks for new cases
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need what this machine does not have are skipped, with the reason."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_data = pytest.mark.skip(reason="needs the official data files: set CPNORM_DATA to their folder")
    for item in items:  # by marker: "gpu" and "data" are also names of folders, which are keywords too
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("data") and not os.environ.get("CPNORM_DATA"):
            item.add_marker(no_data)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through a million objects again in every test."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped in a line for each reason, not for each place."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """The same seed, and none of the settings that a training before it has left to the process."""
    torch.manual_seed(0)
    searches, precision = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = searches, tf32
    torch.set_float32_matmul_precision(precision)
