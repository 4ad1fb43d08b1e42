"""Claim: training in canonical form costs hardly more than plain training, and less than any other way to do it.

1. CPU, batch 128: a step at the paper's ranks takes at most 1.2 times a plain one.
2. H200, bf16, compiled and captured, batch 64 and 128: at most 1.3 times a plain one.
3. H200: at most 1.5 times the memory of a plain step, captured or eager.
4. H200: the steps of a row of the paper, 8 seeds of 150 epochs at batch 64, take at most 8 minutes at 8 at once.
5. No other way to keep a network in canonical form takes less time.

AlexNet-like network on random images of CIFAR-10's size. Peers: plain, torch's weight_norm, the canonical form with W
always rebuilt, tensorly-torch (factorised and reconstructed), and W rebuilt with TensorLy calls in a hook before the
forward pass, as the reference does it. Methods take turns; the median of the rounds, smallest and largest beside it.

    python benchmarks/training_step.py                      # CPU, batch 128
    python benchmarks/training_step.py --device cuda        # batch 64 and 128, eager too, 1 to 8 runs at once
    python benchmarks/training_step.py --device cuda --captured --methods plain canonical    # 1: about a minute
    python benchmarks/training_step.py --reference PATH     # and the authors' own code, from a checkout of it
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cpnorm
import peers
import timing
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.models import alexnet
from cpnorm.lab.training.trainer import Options, Trainer

OURS: dict[str, dict[str, Any]] = {
    "plain": {"norm": "none"},
    "weight norm": {"norm": "weight"},
    "canonical": {"norm": "cp", "init": "kaiming_normal"},
    "canonical, always rebuilt": {"norm": "cp", "init": "kaiming_normal"},
}
PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tensorly-torch, reconstructed": lambda model: peers.tensorly_torch(model, peers.RANKS, "reconstructed"),
    "tensorly-torch, factorised": lambda model: peers.tensorly_torch(model, peers.RANKS, "factorized"),
    "TensorLy in a hook": lambda model: peers.tensorly_in_a_hook(model, peers.RANKS),
}
TIMES_OF_PLAIN = {"cpu": 1.2, "cuda": 1.3}
STEPS_OF_A_ROW = 8 * 150 * 782  # seeds, epochs, batches of 64 in CIFAR-10's 50,000 images


def random_images(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    names = tuple("0123456789")
    return ImageSet("random", images, labels, images[:100], labels[:100], (125.0,) * 3, (63.0,) * 3, names)


def trainer(method: str, batch: int, data: ImageSet, device: str, *, compile: bool = True, seed: int = 0) -> Trainer:
    """Return a run of this method before its first step; others' models run through the same loop."""
    torch.manual_seed(seed)
    model = PEERS[method](alexnet()) if method in PEERS else None
    settings = OURS.get(method, {"norm": "none"})
    config = Config(batch_size=batch, seed=seed, lambdas="ones", epochs=1000, **settings)
    made = Trainer(config, data, Options(device=device, compile=compile), model=model)
    if method.endswith("rebuilt"):
        for layer in cpnorm.canonical_layers(made.model).values():
            layer.path = "rebuild"
    if device == "cuda":
        torch.cuda.synchronize()  # the step has a stream of its own
    return made


def steps(made: list[Trainer], count: int) -> None:
    """Take so many steps of each, in turns."""
    for t in made:
        with t.step.stream():
            t.step.begin_epoch(0)
    for batch in range(count):
        for t in made:
            with t.step.stream():
                t.step(batch)


# --- what a GPU can tell besides -------------------------------------------------------------------------------------


def kernels(made: Trainer, show: int) -> dict[str, Any]:
    """Return how many kernels one step starts, and the microseconds they are busy."""
    rows = timing.kernels(partial(steps, [made], 1), calls=1)
    for key, calls, spent in rows[:show]:
        print(f"      {spent:8.1f} us {calls:4g} x {key[:110]}")
    return {"kernels": sum(r[1] for r in rows), "busy µs": sum(r[2] for r in rows)}


def megabytes(method: str, batch: int, data: ImageSet, compile: bool) -> float:
    """Return the memory that a run needs for its steps, besides the images.

    Eager: the most that is allocated during one. Captured: what the graph and the parameters hold on to between them,
    since a replayed graph allocates nothing.
    """
    gc.collect()
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    made = trainer(method, batch, data, "cuda", compile=compile)
    steps([made], 5)
    torch.cuda.synchronize()
    if compile:
        gc.collect()
        torch.cuda.empty_cache()
        return (torch.cuda.memory_reserved() - reserved) / 2**20
    torch.cuda.reset_peak_memory_stats()
    steps([made], 1)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - allocated) / 2**20


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--kernels", type=int, default=0, help="print this many of the costliest kernels")
    parser.add_argument("--at-once", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="*")
    parser.add_argument("--captured", action="store_true", help="on a GPU: the captured step alone, without memory")
    parser.add_argument(
        "--methods", nargs="*", help="only these; a canonical one is compared with plain if it is there"
    )
    parser.add_argument("--reference", type=Path, metavar="PATH", help="a checkout of the authors' canonical-cnn")
    args = timing.start(parser)
    gpu = args.device == "cuda"
    if args.reference:
        PEERS["the authors' code"] = lambda model: peers.authors_code(model, peers.RANKS, args.reference)
    data = random_images(12_800).to(args.device)
    methods = args.methods or [*OURS, *PEERS]
    if unknown := set(methods) - {*OURS, *PEERS}:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}; there are {', '.join([*OURS, *PEERS])}")
    _, left_out = peers.installed({name: partial(PEERS[name], alexnet()) for name in methods if name in PEERS})
    methods = [name for name in methods if name not in left_out]

    claims: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    for batch in args.batches or ((64, 128) if gpu else (128,)):
        for compile in (True, False) if gpu and not args.captured else (gpu,):
            where = f"{('compiled, captured' if compile else 'eager') if gpu else 'CPU'}, batch {batch}"
            # The reference's hook is no graph that could be compiled: it runs as its authors run it.
            there = [name for name in methods if not (compile and name in PEERS)]
            made = {name: trainer(name, batch, data, args.device, compile=compile) for name in there}
            rows, seconds = compare(made, 100 if compile else 10 if gpu else 1, args)
            del made
            if gpu and not args.captured:
                for row in rows:
                    if row["method"] in ("plain", "canonical"):
                        row["MB"] = megabytes(row["method"], batch, data, compile)
            tables[where] = rows
            if {"plain", "canonical"} <= seconds.keys():
                bound = TIMES_OF_PLAIN[args.device] if compile or not gpu else None
                claims += claims_of(where, rows, seconds, bound)
        if gpu and args.at_once and not args.captured:
            shared = share_the_gpu(batch, data, args.at_once)
            tables[f"several runs at once, compiled, captured, batch {batch}"] = shared
            if batch == 64 and 8 in args.at_once:
                each = next(row["ms"] for row in shared if (row["method"], row["at once"]) == ("canonical", 8))
                minutes = {key: value * STEPS_OF_A_ROW / 60_000 for key, value in each.items()}
                text = "the steps of 8 seeds, 150 epochs at batch 64, canonical, 8 at once"
                claims.append(timing.at_most(text, minutes, 8, "min"))
    title = "Training step, AlexNet-like network at the paper's ranks"
    settings = f"{args.device}_captured" if args.captured else args.device
    timing.write("training_step", settings, title=title, claims=claims, tables=tables, left_out=left_out)


def claims_of(
    where: str, rows: list[dict[str, Any]], seconds: dict[str, list[float]], bound: float | None
) -> list[dict[str, Any]]:
    """Return what the rows of one batch size say about the claims above; without a bound, not of the time alone."""
    found = []
    if bound is not None:
        ratio = timing.ratio(seconds, "canonical", "plain")
        found.append(timing.at_most(f"a canonical training step against a plain one, {where}", ratio, bound))
    for name in (name for name in seconds if name in PEERS):
        ratio = timing.ratio(seconds, "canonical", name)
        found.append(timing.at_most(f"the same against {name}, {where}", ratio, 1))
    memory = {row["method"]: row["MB"] for row in rows if "MB" in row}
    if memory:
        ratio_of_memory = memory["canonical"] / memory["plain"]
        found.append(timing.at_most(f"its memory against a plain one's, {where}", ratio_of_memory, 1.5))
    return found


def compare(
    made: dict[str, Trainer], count: int, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Return a row for each method, and its seconds by round."""
    for t in made.values():
        steps([t], 20 if args.device == "cuda" else 1)
    seconds = timing.interleaved({name: partial(steps, [t], count) for name, t in made.items()}, args.rounds, warmup=0)
    of_plain = {name: timing.ratio(seconds, name, "plain") for name in made} if "plain" in made else {}
    rows = []
    for name, t in made.items():
        row = {"method": name, "ms": timing.milliseconds(seconds[name], count)}
        row |= {"times plain": of_plain[name]} if of_plain else {}
        if args.device == "cuda":
            row |= {"step": t.step.mode} | kernels(t, args.kernels)
        rows.append(row)
        print(f"{name:32} {row['ms']['median']:9.3f} ms  {of_plain.get(name, {}).get('median', 1):6.2f} times plain")
    return rows, seconds


def share_the_gpu(batch: int, data: ImageSet, at_once: list[int]) -> list[dict[str, Any]]:
    """Return the milliseconds per step of each run, where several take turns on one GPU."""
    rows = []
    for together in at_once:
        for name in ("plain", "canonical"):
            group = [trainer(name, batch, data, "cuda", seed=seed) for seed in range(together)]
            steps(group, 20)
            seconds = timing.interleaved({name: partial(steps, group, 100)}, 3)
            rows.append({"method": name, "at once": together, "ms": timing.milliseconds(seconds[name], 100 * together)})
            print(f"{name:32} {rows[-1]['ms']['median']:9.3f} ms each, {together} at once")
    return rows


if __name__ == "__main__":
    main()
