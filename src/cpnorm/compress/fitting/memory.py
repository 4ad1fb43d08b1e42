"""Decide how many batches may run at once, so that their feature maps fit into memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

ALIVE_BYTES = 4 * 2**30  # of feature maps that all inputs together may keep alive; with more, fewer inputs run
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


def _room(device: torch.device) -> float:
    """Return the bytes that feature maps may take; on a GPU with more free memory, half of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else 0
    return max(ALIVE_BYTES, free)
