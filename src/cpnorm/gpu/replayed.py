"""Run a program over fixed buffers as a CUDA graph: one launch, whatever it consists of."""

from __future__ import annotations

from collections.abc import Callable

import torch

EAGER_CALLS = 2  # before a program is recorded as a CUDA graph: libraries choose their kernels meanwhile


class Replayed:
    """A program over fixed buffers: run as written at first, then recorded as a CUDA graph and replayed."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._calls, self._on_gpu = run, 0, torch.cuda.is_available()
        self._graph: torch.cuda.CUDAGraph | None = None
        self.captured = False  # in a graph of somebody else's, which will go on using these buffers by their addresses

    def __call__(self) -> None:
        """Run the program on the current stream."""
        self._calls += 1
        capturing = self._on_gpu and torch.cuda.is_current_stream_capturing()
        self.captured = self.captured or capturing
        if self._graph is None or capturing:
            self._run()
        else:
            self._graph.replay()

    def record(self) -> None:
        """Record the program once it has run often enough; the recording itself computes nothing."""
        if self._graph is not None or self._calls < EAGER_CALLS or not self._on_gpu:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
        except RuntimeError:  # something on this GPU cannot be recorded: it runs as written
            self._calls = -(2**62)
            return
        self._graph = graph
