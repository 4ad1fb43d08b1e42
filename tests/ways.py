"""How tests run what kernels and torch both can do: each way, and on which device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

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


def patch_once_a_launch() -> None:
    """Make triton's interpreter prepare its language once a launch and module, not for every call within a kernel.

    Version 3.9 looks through all of ``triton.language`` each time a kernel calls a function: a third of its time.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()  # the modules of the functions that this launch has called, by their globals

    def once(function: Any) -> Any:
        if id(function.__globals__) in prepared:
            return None
        prepared.add(id(function.__globals__))
        return prepare(function)

    def launched(self: Any, *arguments: Any, **keywords: Any) -> None:
        prepared.clear()  # what the launch before it prepared was undone at its end
        launch(self, *arguments, **keywords)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched


@pytest.fixture
def full_precision() -> Iterator[None]:
    """No TF32, neither by torch nor by kernels."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
