"""Run a program over fixed buffers as a CUDA graph: one launch, whatever it consists of."""

from __future__ import annotations

from collections.abc import Callable

import torch

EAGER_CALLS = 2  # before a program is recorded as a CUDA graph: libraries choose their kernels meanwhile


class Replayed:
    """A program over fixed buffers: run as written at first, then recorded as a CUDA graph and replayed."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._calls = run, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the program on the current stream."""
        self._calls += 1
        if self._graph is None or torch.cuda.is_current_stream_capturing():
            self._run()
        else:
            self._graph.replay()

    def record(self) -> None:
        """Record the program once it has run often enough; the recording itself computes nothing."""
        if self._graph is not None or self._calls < EAGER_CALLS or not torch.cuda.is_available():
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
