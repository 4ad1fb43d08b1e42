"""Choose the sizes of one program of a fused block's kernel."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

ALIGNMENT = 16  # terms that tensor cores take at once
H200_SHARED = 227 * 1024  # bytes of memory that a program's threads share
FEW_PIXELS = 4096  # too few for large tiles
WARPGROUP_TILE = 64  # a Hopper GPU multiplies tiles of this many pixels or more by groups of warps


class Blocks(NamedTuple):
    """The sizes of one program of the kernel, and its resources."""

    pixels: int
    channels: int  # at once
    each: int  # channels of one program, a multiple of ``channels``; all of them if it goes on to terms
    warps: int
    stages: int


def choose_blocks(
    pixels: int, channels: int, terms: int, following: int, pool: bool, itemsize: int, shared: int
) -> Blocks:
    """Return the sizes that were fastest on an H200 for layers of 16 to 128 terms, or smaller ones if memory is short.

    Few pixels need small tiles, so that all of the GPU has work, and large chunks, since few turns overlap. Many pixels
    need tiles as large as registers hold, since every tile reads all of the weights.
    """
    corners = 4 if pool else 1
    held = terms * corners  # numbers for each pixel
    if pixels <= FEW_PIXELS:
        tile, chunk, warps = 16, 64 if pool else 128, 8 if terms >= 128 else 4
    elif pool:
        tile, chunk, warps = (64, 64, 4) if held <= 256 else (64, 128, 8) if held <= 512 else (16, 64, 8)
    else:
        tile, chunk, warps = (64, 64, 4) if terms <= 64 else (128, 32, 8) if terms <= 128 else (32, 64, 8)
    if itemsize > 2:
        tile, chunk = max(16, tile // 2), chunk // 2
    # Large tiles that go on to terms take two turns even where one would do: without a loop, ptxas 12.8, which comes
    # with triton 3.6, generates code that reads an uninitialised register.
    turns = 2 if following and tile >= WARPGROUP_TILE else 1
    chunk = min(chunk, max(16, next_power_of_2(channels) // turns))
    while chunk > 16 and (terms + following) * chunk * itemsize > 2**16:
        chunk //= 2
    stages = min(3, max(2, 3 * 2**15 // ((terms + following) * chunk * itemsize)))
    while shared_bytes(tile, chunk, stages, terms, following, corners, itemsize) > shared:
        if stages > 1:
            stages -= 1
        elif max(tile, chunk) > 16:
            tile, chunk = (tile // 2, chunk) if tile >= chunk else (tile, chunk // 2)
        else:
            break
    # A program that does not go on to terms may leave channels to others, but each of them reads the tile again.
    each = chunk if pixels <= FEW_PIXELS else -(-channels // chunk) * chunk
    return Blocks(tile, chunk, each, warps, stages)


def shared_bytes(tile: int, chunk: int, stages: int, terms: int, following: int, corners: int, itemsize: int) -> int:
    """Return the bytes the compiler uses: weights of the chunks in flight, tiles of terms, and the output tile."""
    stored = 0 if following else tile * chunk
    return (stages * (terms + following) * chunk + corners * tile * terms + stored) * itemsize


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of memory that the threads of a program share; an H200's where there is no GPU."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", H200_SHARED))


def next_power_of_2(n: int) -> int:
    """Round up to a power of two."""
    return 1 << (n - 1).bit_length()


def aligned(size: int) -> int:
    """Round up to a multiple of what tensor cores take."""
    return -(-size // ALIGNMENT) * ALIGNMENT
