"""Matrix products without a graph, by the library that is faster on this processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEAST_WORK = 2**20  # multiplications, from which oneDNN's preparations pay
LEAST_COLUMNS = 128  # of the right matrix, from which it pays to copy a transposed left one


@cache
def one_dnn_is_faster() -> bool:
    """Return True on AMD's processors with AVX-512, which torch's BLAS library, Intel's, uses on Intel's only.

    oneDNN uses it everywhere, and takes less than half the time there; on Intel's processors both take the same.
    """
    info = Path("/proc/cpuinfo")
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available() and info.exists()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # what torch's compiler calls, not a public name
        return False
    with info.open() as file:
        return "AuthenticAMD" in file.read(1000) and torch.backends.cpu.get_cpu_capability() == "AVX512"


@torch.no_grad()
def product(left: Tensor, right: Tensor) -> Tensor:  # (M, K), (K, N) -> (M, N)
    """Return left @ right without a graph."""
    if _is_worthwhile(left, right) and one_dnn_is_faster():
        made: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")
        return made
    return left @ right


def _is_worthwhile(left: Tensor, right: Tensor) -> bool:
    return (
        left.device.type == right.device.type == "cpu"
        and left.dtype == right.dtype == torch.float32
        and len(left) * right.numel() >= LEAST_WORK
        and (left.is_contiguous() or right.shape[1] >= LEAST_COLUMNS)
        and bool(torch.backends.mkldnn.enabled)
    )
