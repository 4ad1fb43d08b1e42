"""Which of several ways to compute something is the fastest here: short, interleaved, on the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

LEAST_ROUNDS, CALM_ROUNDS = 3, 5
LEAST_SECONDS, ENOUGH_SECONDS = 0.03, 0.5  # of a fastest: short runs take many rounds, which costs little
HOPELESS = 2.0  # a runner at more than this multiple of the fastest is out


def fastest(
    runs: Mapping[Key, Callable[[], object]], device: torch.device, *, cuda_graph: bool = False
) -> dict[Key, float]:
    """Seconds of each run, the best of some rounds: a busy machine only ever adds time.

    It ends when no runner has found a faster time for some rounds, which is soon on a quiet machine, or when enough
    time is spent. Captured: as graphs, so that a GPU's kernels are timed and not what it takes to start them.
    """

    def seconds(run: Callable[[], object]) -> float:
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - start

    for run in runs.values():
        run()  # kernels are chosen and memory is taken the first time
    if cuda_graph:
        runs = {key: _as_cuda_graph(run) for key, run in runs.items()}
    best = dict.fromkeys(runs, float("inf"))
    alive, rounds, calm, spent = list(runs), 0, 0, 0.0
    while rounds < LEAST_ROUNDS or (len(alive) > 1 and spent < ENOUGH_SECONDS):
        if calm >= CALM_ROUNDS and spent >= LEAST_SECONDS:
            break
        rounds, calm = rounds + 1, calm + 1
        for key in alive:
            taken = seconds(runs[key])
            spent += taken
            if taken < 0.97 * best[key]:
                calm = 0
            best[key] = min(best[key], taken)
        if rounds > 1:
            alive = [key for key in alive if best[key] <= HOPELESS * min(best.values())]
    return best


def _as_cuda_graph(run: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
