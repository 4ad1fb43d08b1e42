"""How tests run what kernels and torch both can do: each way, and on which device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs triton: make test-kernels")
KERNEL = pytest.param("kernel", marks=NEEDS_TRITON if INTERPRETED else pytest.mark.gpu)
WAYS = [KERNEL] if INTERPRETED else ["torch", KERNEL]


def device(way: str) -> str:
    """Where the tensors of a way lie."""
    return "cuda" if way == "kernel" and not INTERPRETED else "cpu"


@pytest.fixture
def full_precision() -> Iterator[None]:
    """No TF32, neither by torch nor by kernels."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
