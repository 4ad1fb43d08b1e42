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

from cpnorm.compress.fitting.memory import ProcessMemory
from cpnorm.compress.fitting.successors import EventLog
from cpnorm.nn.running import evaluating, run, uncompiled


@dataclass(eq=False)
class Call:
    """A call of a module that waits for its result."""

    job: int
    module: nn.Module
    number: int  # of earlier calls of the module in this job
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
    jobs_at: Callable[[nn.Module], int] | None = None,
) -> None:
    """Run the model in eval mode on the inputs of each job; ``visit`` computes the outputs of the modules in ``stops``.

    When every job waits at one of these modules, ``visit`` is called with the module at which most of them wait and
    with their calls, and has to set the result of each call. One job runs at a time, in its own thread. The log of a
    job, if there is one, notes what it does between these modules, and the modules themselves.

    With ``jobs_at`` only as many jobs run as it returns for the module at which they wait. Others follow later, one
    after the other: ``visit`` is called for each of them alone until it has caught up.
    """
    threads = _Threads(model, jobs, logs)
    visits: Counter[nn.Module] = Counter()
    memory = ProcessMemory()
    with evaluating(model), uncompiled(), _Patched(stops, threads.stop):
        try:
            while threads.waiting or threads.started < len(jobs):
                module = threads.fullest_stop()
                while threads.started < len(jobs) and not (
                    module and jobs_at and len(threads.waiting) >= jobs_at(module)
                ):
                    late = threads.start()
                    while late and late.number < visits[late.module]:
                        visit(late.module, [late])
                        late = threads.go_on([late])
                    memory.give_back()
                    module = threads.fullest_stop()
                if module:
                    calls = sorted((c for c in threads.waiting if c.module is module), key=lambda call: call.job)
                    visit(module, calls)
                    visits[module] += 1
                    threads.go_on(calls)
                    memory.give_back()
        finally:
            threads.cancel()


class _Threads:
    """One thread for each job, of which one runs at a time, until it waits at a stop or ends.

    Attributes:
        started: the number of jobs that have been started.
        waiting: the calls at which jobs wait.
    """

    def __init__(self, model: nn.Module, jobs: Sequence[Any], logs: Sequence[EventLog] | None) -> None:
        self.model, self.jobs, self.logs = model, jobs, logs
        self.started = 0
        self.waiting: list[Call] = []
        self._threads: list[threading.Thread] = []
        self._arrived: queue.SimpleQueue[Call | BaseException | None] = queue.SimpleQueue()
        self._local = threading.local()

    def stop(self, module: nn.Module) -> Callable[..., Any]:
        """Return a forward method that waits for a result."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            job, calls = self._local.job, self._local.calls
            call = Call(job, module, calls[module], args, kwargs)
            calls[module] += 1
            self._arrived.put(call)
            call.released.wait()
            if call.cancelled:
                raise _CancelledError
            if self.logs is not None:
                self.logs[job].note(module, (*args, *kwargs.values()), call.result)
            return call.result

        return forward

    def fullest_stop(self) -> nn.Module | None:
        """Return the module at which most jobs wait; None if none waits."""
        counts = Counter(call.module for call in self.waiting)
        return counts.most_common(1)[0][0] if counts else None

    def start(self) -> Call | None:
        """Start the next job; return the call at which it waits, or None if it has ended."""
        self._threads.append(threading.Thread(target=self._work, args=(self.started,), daemon=True))
        self._threads[-1].start()
        self.started += 1
        return self._until_it_waits()

    def go_on(self, calls: Sequence[Call]) -> Call | None:
        """Hand out results; return the call at which the last of these jobs waits next, or None if it has ended."""
        last = None
        for call in calls:
            self.waiting.remove(call)
            call.released.set()
            last = self._until_it_waits()
        return last

    def cancel(self) -> None:
        """End all jobs that still run."""
        while any(thread.is_alive() for thread in self._threads):
            for call in self.waiting:
                call.cancelled = True
                call.released.set()
            try:
                event = self._arrived.get(timeout=0.01)
            except queue.Empty:
                continue
            self.waiting = [event] if isinstance(event, Call) else []

    def _until_it_waits(self) -> Call | None:
        event = self._arrived.get()
        if isinstance(event, BaseException):
            raise event
        if event is not None:
            self.waiting.append(event)
        return event

    def _work(self, job: int) -> None:
        self._local.job, self._local.calls = job, Counter()
        try:
            log = self.logs[job] if self.logs is not None else nullcontext()
            with torch.inference_mode(False), torch.no_grad(), log:
                run(self.model, self.jobs[job])
            self._arrived.put(None)
        except BaseException as error:
            self._arrived.put(error)


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
