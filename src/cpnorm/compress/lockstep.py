"""Run a model on several inputs side by side, and stop all of them at the same layers.

A layer can then be fitted to all of its inputs before any run continues. One pass over the network is enough for all
layers, whatever its architecture, and only the tensors that are alive at one layer are in memory.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cpnorm.compress.successors import EventLog
from cpnorm.nn.running import evaluating, run, uncompiled


@dataclass(eq=False)
class Call:
    """A call of a module that waits for its result."""

    job: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    released: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


class _CancelledError(Exception):
    """Raised inside a job whose run is cancelled."""


def run_in_lockstep(
    model: nn.Module,
    jobs: Sequence[Any],
    stops: Collection[nn.Module],
    visit: Callable[[nn.Module, list[Call]], None],
    logs: Sequence[EventLog] | None = None,
) -> None:
    """Run the model in eval mode on the inputs of each job; ``visit`` computes the outputs of the modules in ``stops``.

    When every job waits at one of these modules, ``visit`` is called with the module at which most of them wait and
    with their calls, and has to set the result of each call. One job runs at a time, in its own thread. The log of a
    job, if there is one, notes what it does between these modules, and the modules themselves.
    """
    arrived: queue.SimpleQueue[Call | BaseException | None] = queue.SimpleQueue()
    turn = threading.Semaphore(1)
    local = threading.local()

    def stop(module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Call(local.job, module, args, kwargs)
            arrived.put(call)
            turn.release()
            call.released.wait()
            turn.acquire()
            if call.cancelled:
                raise _CancelledError
            if logs is not None:
                logs[call.job].note(module, (*args, *kwargs.values()), call.result)
            return call.result

        return forward

    def work(job: int) -> None:
        local.job = job
        with turn:
            try:
                with torch.inference_mode(False), torch.no_grad(), logs[job] if logs is not None else nullcontext():
                    run(model, jobs[job])
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in range(len(jobs))]
    waiting: list[Call] = []
    with evaluating(model), uncompiled(), _Patched(stops, stop):
        try:
            running = len(threads)
            for thread in threads:
                thread.start()
            while running:
                event = arrived.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    running -= 1
                else:
                    waiting.append(event)
                if waiting and len(waiting) == running:
                    ((module, _),) = Counter(call.module for call in waiting).most_common(1)
                    calls = sorted((c for c in waiting if c.module is module), key=lambda call: call.job)
                    visit(module, calls)
                    waiting = [call for call in waiting if call.module is not module]
                    for call in calls:
                        call.released.set()
        finally:
            _cancel(threads, waiting, arrived)


def _cancel(
    threads: Sequence[threading.Thread], waiting: list[Call], arrived: queue.SimpleQueue[Call | BaseException | None]
) -> None:
    """End all jobs that still run."""
    while any(thread.is_alive() for thread in threads):
        for call in waiting:
            call.cancelled = True
            call.released.set()
        try:
            event = arrived.get(timeout=0.01)
        except queue.Empty:
            continue
        waiting = [event] if isinstance(event, Call) else []


class _Patched:
    """Replace the forward methods of some modules inside a block."""

    def __init__(self, modules: Collection[nn.Module], forward: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self.modules, self.forward = list(modules), forward

    def __enter__(self) -> None:
        for module in self.modules:
            module.__dict__["forward"] = self.forward(module)

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            module.__dict__.pop("forward", None)
