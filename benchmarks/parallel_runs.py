"""Claim: runs of a row that share a GPU, in one process or in several, need less of its time than one after the other.

What: milliseconds of the GPU per training step, epoch by epoch, tests included: the time of an epoch divided by its
steps and by the number of runs. On what: a row of the paper with its own settings, random weights. How often: each
arrangement trains the same epochs once after a warm-up; the arrangements take turns inside one call. With several
processes, start NVIDIA's MPS daemon first (``nvidia-cuda-mps-control -d``): without it processes take turns on the GPU.

    python benchmarks/parallel_runs.py --arrangements 1 4 8 12 6+6 4+4+4 --out FILE
    python benchmarks/parallel_runs.py --smoke                                  # on a CPU, in seconds
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import timing
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper.protocols import find_protocol
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.runs import environment
from cpnorm.lab.training.trainer import Options, Trainer

PATIENCE = 90.0  # seconds that processes wait for each other


def main() -> None:
    """Measure the arrangements asked for and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="cifar10/cp-sgd")
    parser.add_argument("--protocol", default="code")
    parser.add_argument("--arrangements", nargs="+", default=["1", "4", "8", "12", "6+6", "4+4+4"])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a small network on the CPU")
    args = parser.parse_args()
    arrangements = ["1", "2", "1+1"] if args.smoke else args.arrangements
    plan = [[int(count) for count in text.split("+")] for text in arrangements]
    workers = max(map(len, plan))
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.Queue()
    setting = (plan, args.row, args.protocol, args.epochs, args.smoke)
    children = [context.Process(target=work, args=(index, *setting, barrier, answers)) for index in range(workers)]
    for child in children:
        child.start()
    started = time.perf_counter()
    settings = {name: os.environ.get(f"CUDA_{name}") for name in ("MPS_PIPE_DIRECTORY", "DEVICE_MAX_CONNECTIONS")}
    about = {"row": args.row, "protocol": args.protocol, **settings, "environment": environment()}
    for _ in range(len(plan) + 1):
        line = about | answers.get(timeout=2 * PATIENCE) | {"since_start": round(time.perf_counter() - started, 1)}
        print(json.dumps({key: value for key, value in line.items() if key != "environment"}), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    for child in children:
        child.join(PATIENCE)
    sys.exit(max(child.exitcode or 0 for child in children))


def work(
    index: int, plan: list[list[int]], row: str, protocol: str, epochs: int, smoke: bool, barrier: Any, answers: Any
) -> None:
    """Take part in the arrangements as process ``index``; the first process reports."""
    config, data = _settings(row, protocol, smoke)
    most = max(counts[index] for counts in plan if len(counts) > index)
    options = Options(device="cpu" if smoke else None)
    trainers: list[Trainer] = []
    for seed in range(most):
        trainer = Trainer(config.replace(seed=seed), data, options)
        data = trainer.whole_data
        trainers.append(trainer)
    runs = [trainer.run() for trainer in trainers]
    began = time.perf_counter()
    _train(trainers, runs, 1)  # compiles, captures
    if index == 0:
        steps = trainers[0].batches
        ready = {"warm_up_s": round(time.perf_counter() - began, 1), "step_mode": trainers[0].step.mode}
        answers.put({"arrangement": "warm-up", "steps_per_epoch": steps} | ready | _one_step(trainers[0]))
    for counts in plan:
        barrier.wait(PATIENCE)
        started = time.perf_counter()
        if len(counts) > index:
            _train(trainers[: counts[index]], runs[: counts[index]], epochs)
        barrier.wait(PATIENCE)
        seconds = time.perf_counter() - started
        if index == 0:
            per_step = 1000 * seconds / (epochs * steps * sum(counts))
            name = "+".join(map(str, counts))
            answers.put({"arrangement": name, "seconds": round(seconds, 3), "ms_per_step": round(per_step, 4)})


def _settings(row: str, protocol: str, smoke: bool) -> tuple[Config, ImageSet]:
    """Return a row's settings with random weights, which need no decomposition, and its data."""
    config = find_protocol(protocol).row(row).config.replace(epochs=1000, keep_best=False)
    if config.norm == "cp":
        config = config.replace(init="kaiming_normal", lambdas="ones", linear_init="same", linear_lambdas="same")
    if smoke:
        config = config.replace(model="lenet", width=0.25, rank=4, data="digits", batch_size=256, augment="none")
    return config, load(config.data)


def _train(trainers: list[Trainer], runs: list[Iterator[bool]], epochs: int) -> None:
    """Take the steps of the runs in turn, as a sweep does, until each has finished its epochs."""
    left = dict.fromkeys(range(len(runs)), epochs)
    while any(left.values()):
        for index in [index for index, missing in left.items() if missing]:
            with trainers[index].step.stream():
                left[index] -= bool(next(runs[index]))
    timing.synchronize()


def _one_step(trainer: Trainer) -> dict[str, Any]:
    """Return the time the host needs to launch a step, and kernels and their summed time on the GPU."""
    if trainer.device.type != "cuda":
        return {}
    count = 20
    with trainer.step.stream():
        trainer.step.begin_epoch(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            trainer.step(0)
        host = 1000 * (time.perf_counter() - started) / count
        torch.cuda.synchronize()
        alone = 1000 * (time.perf_counter() - started) / count
    found = {"host_ms": round(host, 4), "alone_ms": round(alone, 4)}
    try:
        with trainer.step.stream():
            kernels = timing.kernels(lambda: trainer.step(0), calls=4)
        busy = sum(microseconds for _, _, microseconds in kernels) / 1000
        found |= {"kernels": sum(count for _, count, _ in kernels), "kernel_ms": round(busy, 4)}
    except Exception as error:  # a profiler is not always allowed
        found["profiler"] = f"{type(error).__name__}: {error}"[:200]
    with trainer.step.stream():
        trainer.step.begin_epoch(trainer.epoch)
    return found


if __name__ == "__main__":
    main()
