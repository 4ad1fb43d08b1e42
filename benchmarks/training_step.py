"""Claim: a training step in canonical form at the paper's ranks costs at most 1.25x a plain one on a CPU at batch 128
(never more than always rebuilding W), and about 1.3x on an H200, where runs that share the GPU cost less each.

AlexNet-like network on random images of CIFAR-10's size; methods take turns within one run; median of the rounds.

    python benchmarks/training_step.py                      # CPU, batch 128
    python benchmarks/training_step.py --device cuda        # compiled, captured, batch 64 and 128, 1 to 8 runs at once
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import cpnorm
from cpnorm.lab.config import Config
from cpnorm.lab.data import ImageSet
from cpnorm.lab.train import Options, Trainer
from timing import interleaved, spread, write


def random_images(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    names = tuple("0123456789")
    return ImageSet("random", images, labels, images[:100], labels[:100], (125.0,) * 3, (63.0,) * 3, names)


METHODS: dict[str, dict[str, Any]] = {
    "plain": {"norm": "none"},
    "weight norm": {"norm": "weight"},
    "canonical": {"norm": "cp", "init": "kaiming_normal"},
    "canonical, always rebuilt": {"norm": "cp", "init": "kaiming_normal"},
}


def trainer(method: str, batch: int, data: ImageSet, device: str, seed: int = 0) -> Trainer:
    config = Config(batch_size=batch, seed=seed, lambdas="ones", epochs=1000, **METHODS[method])
    made = Trainer(config, data, Options(device=device))
    if method.endswith("rebuilt"):
        for layer in cpnorm.canonical_layers(made.model).values():
            layer.path = "rebuild"
    made.step.begin_epoch(0)
    return made


def steps(made: list[Trainer], count: int) -> float:
    """Seconds for ``count`` steps of each, taken in turns."""
    for t in made:
        t.step.begin_epoch(0)
    if made[0].device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for batch in range(count):
        for t in made:
            with t.step.stream():
                t.step(batch)
    if made[0].device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def kernels(made: Trainer) -> tuple[int, float, list[tuple[str, int, float]]]:
    """Number of kernels of one step, microseconds they are busy, and the costliest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steps([made], 1)
    rows = [(e.key, e.count, e.device_time_total) for e in profiled.key_averages() if e.device_time_total > 0]
    rows.sort(key=lambda row: -row[2])
    return sum(r[1] for r in rows), sum(r[2] for r in rows), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", type=int, default=0, help="print this many of the costliest kernels")
    parser.add_argument("--at-once", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="*")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    gpu = args.device == "cuda"
    data = random_images(12_800).to(args.device)
    results: list[dict[str, Any]] = []
    for batch in args.batches or ((64, 128) if gpu else (128,)):
        trainers = {name: trainer(name, batch, data, args.device) for name in args.methods}
        for made in trainers.values():
            steps([made], 3 if not gpu else 20)
        count = 100 if gpu else 1
        seconds = interleaved({n: partial(steps, [made], count) for n, made in trainers.items()}, args.repeats, 0)
        medians = {name: 1000 * spread(values)["median"] / count for name, values in seconds.items()}
        for name, values in seconds.items():
            ratios = [one / plain for one, plain in zip(values, seconds["plain"], strict=True)]
            row = {"batch": batch, "method": name, "ms": medians[name], "ratio": spread(ratios)["median"]}
            row |= {"lowest": min(ratios), "highest": max(ratios), "step": trainers[name].step.kind}
            if gpu:
                launched, busy, top = kernels(trainers[name])
                row |= {"kernels": launched, "busy_us": busy}
                for key, calls, spent in top[: args.kernels]:
                    print(f"      {spent:8.1f} us {calls:4d} x {key[:110]}")
            results.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        for together in args.at_once if gpu else ():
            for name in ("plain", "canonical"):
                group = [trainer(name, batch, data, args.device, seed) for seed in range(together)]
                steps(group, 20)
                each = min(1000 * steps(group, 100) / (100 * together) for _ in range(3))
                row = {
                    "batch": batch,
                    "method": name,
                    "at_once": together,
                    "ms": each,
                    "ratio": each / medians["plain"],
                }
                results.append(row)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                del group
    write("training_step_" + args.device, {"steps": results})


if __name__ == "__main__":
    main()
