"""Decide how many batches may run at once, so that their feature maps fit into memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

ALIVE_BYTES = 4 * 2**30  # of feature maps that all inputs together may keep alive; with more, fewer inputs run
GROWTH_BYTES = 2**28  # of the process, after which memory that is free is given back
MAPS_ALIVE = 6  # about so many times the input of a layer is alive at once, old and new


def batches_at(model: nn.Module, input_bytes: Mapping[str, int], device: torch.device) -> dict[nn.Module, int]:
    """Return how many batches may run when a layer is reached: its feature maps and all later ones have to fit.

    ``input_bytes`` are those of the input of each layer for one batch, in the order of the first calls.
    """
    room, found, largest = _room(device), {}, 1
    for name in reversed(list(input_bytes)):
        largest = max(largest, input_bytes[name])
        found[model.get_submodule(name)] = max(1, int(room / (MAPS_ALIVE * largest)))
    return found


class ProcessMemory:
    """Keep the process from growing by memory that is free: glibc holds on to most of what many threads have left."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        self._before = self._resident()

    def give_back(self) -> None:
        """Give free memory back to the system if the process has grown much since the last time."""
        if self._trim and self._resident() > self._before + GROWTH_BYTES:
            self._trim(0)
            self._before = self._resident()

    def _resident(self) -> int:
        if not self._trim:
            return 0
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _room(device: torch.device) -> float:
    """Return the bytes that feature maps may take; on a GPU with more free memory, half of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else 0
    return max(ALIVE_BYTES, free)
