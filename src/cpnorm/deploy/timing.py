"""Time candidates against each other in short, interleaved rounds, so that a busy machine slows all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

NOISE = 1.05  # times within this factor count as equal
LEAST_ROUNDS, CALM_ROUNDS = 3, 5
LEAST_SECONDS, ENOUGH_SECONDS = 0.03, 0.5  # of one comparison: short runs take many rounds, which costs little
HOPELESS = 2.0  # a run at more than this multiple of the fastest is timed no further


def fastest(
    runs: Mapping[Key, Callable[[], object]],
    device: torch.device,
    *,
    cuda_graph: bool = False,
    enough_seconds: float = ENOUGH_SECONDS,
    drop_slow: bool = True,
) -> dict[Key, float]:
    """Return the seconds of each run, fastest first: its best round, since a busy machine only ever adds time.

    Rounds end when no run has found a faster time for a while, which is soon on a quiet machine, or when enough time is
    spent.

    Args:
        runs: functions without arguments, by name.
        device: where they run.
        cuda_graph: capture each as a CUDA graph, so that the kernels are timed and not their launches.
        enough_seconds: spend no more than this on the rounds.
        drop_slow: leave slow runs after two rounds, so that their times are rough.
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
        runs = _as_cuda_graphs(runs)
    best = dict.fromkeys(runs, float("inf"))
    alive, rounds, calm, spent = list(runs), 0, 0, 0.0
    while rounds < LEAST_ROUNDS or ((len(alive) > 1 or not drop_slow) and spent < enough_seconds):
        if calm >= CALM_ROUNDS and spent >= LEAST_SECONDS:
            break
        rounds, calm = rounds + 1, calm + 1
        for key in alive:
            taken = seconds(runs[key])
            spent += taken
            if taken < 0.97 * best[key]:
                calm = 0
            best[key] = min(best[key], taken)
        if rounds > 1 and drop_slow:
            alive = [key for key in alive if best[key] <= HOPELESS * min(best.values())]
    return dict(sorted(best.items(), key=lambda item: item[1]))


def _as_cuda_graphs(runs: Mapping[Key, Callable[[], object]]) -> dict[Key, Callable[[], object]]:
    """Capture each run, all in one pool of memory: only one of them replays at a time, and no output is read.

    ``torch.cuda.graph`` would hand all cached memory back to the driver before each capture, which takes longer than
    the capture of a layer.
    """
    graphs: dict[Key, Callable[[], object]] = {}
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        for key, run in runs.items():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                run()
            finally:
                graph.capture_end()
            graphs[key] = graph.replay
    return graphs


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: cuBLAS keeps some memory for each stream that it has run on."""
    return torch.cuda.Stream(device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
