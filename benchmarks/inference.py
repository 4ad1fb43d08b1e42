"""Claim: a truncated network runs faster than the dense one by most of what its FLOPs promise, and is never slower.

AlexNet-like network, all layers truncated by 0 to 99 % from the paper's ranks, in the forms cpnorm.factorize picks:
1. It is never slower than the dense network by more than 5 %.
2. CPU, 2 threads, at 95 %: at least 4 times as fast as dense at batch 1, and 5 times at batch 128.
3. It is at least twice as fast as tensorly-torch's factorised layers at the same ranks.
4. At 95 % the speed-up is at least 60 % of the factor by which FLOPs went down.

Weights are random, which changes nothing about speed. For each batch size and rate the competitors take --rounds turns
of as many calls as the fastest takes a tenth of a second for (on a GPU 40 ms), so that what the one before left in the
caches does not matter; a ratio is the median over the turns. "dense" is the network as torch builds it, "dense, tuned"
the same with channels last and cheap ReLUs, which factorize does too: what that alone brings. Threads are best bound to
cores: on a busy machine two of them may share one otherwise. And glibc is best told to keep freed memory: otherwise
every large activation is taken from the system anew, page by page, which costs all competitors the same milliseconds
and so the small networks the larger share. On a GPU all are timed twice, with forms chosen for each: eager, and
captured as graphs, where starting a kernel costs next to nothing; at 95 % also compiled and captured. There "factorize"
may use cpnorm's kernels (``kernels=True``); "plain forms" is what it picks without, which runs without cpnorm.

    export OMP_PROC_BIND=true MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
    python benchmarks/inference.py [--rates 0 50 95]        # or make bench, which sets these
    python benchmarks/inference.py --device cuda            # batch 1 and 1024, bf16
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from typing import Any

import torch
from torch import nn

import peers
import timing
from cpnorm import Factorization, canonical_norm, choose_forms, fold
from cpnorm.lab.training.models import alexnet

PEER = "tensorly-torch"
AT_95 = {1: 4.0, 128: 5.0}  # on a CPU
TURN_SECONDS = {"cpu": 0.1, "cuda": 0.04}  # kernels of a GPU take the same time again and again


def truncated(rate: int) -> dict[str, int]:
    """Return the ranks that are left where every layer loses this percentage of its terms, as the paper cuts."""
    return {name: max(1, rank - rank * rate // 100) for name, rank in peers.RANKS.items()}


def measure(batch: int, rate: int, args: argparse.Namespace, left_out: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return a row for each way to run the networks: eager, on a GPU captured, and at 95 % compiled and captured."""
    ranks, dtype = truncated(rate), getattr(torch, args.dtype)
    canonical = canonical_norm(alexnet(), ranks, "kaiming_normal").to(args.device, dtype).eval()
    x = torch.randn(batch, 3, 32, 32, device=args.device, dtype=dtype)
    dense = fold(copy.deepcopy(canonical))
    tuned = choose_forms(canonical, x, measure=False, forms=dict.fromkeys(ranks, "dense")).apply(canonical)
    others, missing = peers.installed({PEER: lambda: peers.tensorly_torch(dense, ranks, "factorized").eval()})
    left_out |= missing
    rows = {}
    for way in args.ways:
        compiled = way == "compiled"
        if not compiled:  # which takes the forms of captured networks
            start = time.perf_counter()
            plain = choice = choose_forms(canonical, x, cuda_graph=way == "captured")
            if args.device == "cuda":
                choice = plain.with_kernels(canonical, x, cuda_graph=way == "captured")
            print(f"\nbatch {batch}, {rate} %, {way}: forms chosen in {time.perf_counter() - start:.1f} s\n{choice}")
        networks = {"dense": dense, "dense, tuned": tuned, "factorize": choice.apply(canonical)}
        if args.device == "cuda":
            networks["plain forms"] = plain.apply(canonical)
        if compiled:  # tensorly-torch's layers cannot be: the compiler stumbles over their strides
            torch._dynamo.reset()
            for name, network in networks.items():
                if name != "factorize" or choice.fused_up_to is None:  # kernels are compiled already
                    networks[name] = torch.compile(network, dynamic=False)
        if not compiled or rate == 95:  # compiling takes its time
            rows[way] = compare(networks | ({} if compiled else others), x, f"{rate} %", choice, way, args)
    return rows


def compare(
    networks: dict[str, nn.Module],
    x: torch.Tensor,
    dropped: str,
    choice: Factorization,
    way: str,
    args: argparse.Namespace,
) -> dict[str, Any]:
    with torch.inference_mode():
        once = {
            name: timing.captured(partial(network, x), "cpu" if way == "eager" else args.device)
            for name, network in networks.items()
        }
        seconds = timing.in_turns(once, args.rounds, TURN_SECONDS[args.device])
    speed_up = timing.ratio(seconds, "dense", "factorize")
    fewer = choice.total("dense").flops / choice.total("chosen").flops
    row = {
        "dropped": dropped,
        **{f"{name}, ms": timing.milliseconds(values) for name, values in seconds.items()},
        "times as fast as dense": speed_up,
        **({f"as {PEER}": timing.ratio(seconds, PEER, "factorize")} if PEER in networks else {}),
        "times fewer FLOPs": fewer,
        "promise kept, %": 100 * speed_up["median"] / fewer,
        "times fewer weights": choice.total("dense").parameters / choice.total("chosen").parameters,
        "layers dense": sum(layer.form == "dense" for layer in choice.layers.values()),
    }
    medians = {key: value["median"] if isinstance(value, dict) else value for key, value in row.items()}
    print(way, {key: round(value, 2) for key, value in medians.items() if key != "dropped"}, flush=True)
    return row


def claims(batch: int, rows: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """Return what the rows of one batch size say about the claims above; of all rates the worst counts."""
    where = f"batch {batch}" if way == "CPU" else f"{way}, batch {batch}"

    def worst(column: str) -> dict[str, Any]:
        return min(rows, key=lambda row: row[column]["median"])

    slowest = worst("times as fast as dense")
    times = slowest["times as fast as dense"]
    inverse = {"median": 1 / times["median"], "min": 1 / times["max"], "max": 1 / times["min"]}
    text = f"factorize against dense, {where}, slowest of all rates ({slowest['dropped']})"
    found = [timing.at_most(text, inverse, 1.05)]
    for row in rows:
        if row["dropped"] == "95 %":
            text = f"factorize, times as fast as dense, {where}, 95 % dropped"
            if way == "CPU" and batch in AT_95:
                found.append(timing.at_least(text, row["times as fast as dense"], AT_95[batch]))
            text = f"share of the FLOPs' promise kept, {where}, 95 % dropped"
            found.append(timing.at_least(text, row["promise kept, %"], 60, "%"))
    if f"as {PEER}" in rows[0]:
        closest = worst(f"as {PEER}")
        text = f"factorize, times as fast as {PEER}, {where}, closest of all rates ({closest['dropped']})"
        found.append(timing.at_least(text, closest[f"as {PEER}"], 2))
    return found


def main() -> None:
    parser = timing.parser(__doc__, rounds=9)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32, on a GPU bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", help="1 and 128, on a GPU 1 and 1024")
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 25, 50, 75, 90, 95, 99])
    args = timing.start(parser)
    gpu = args.device == "cuda"
    args.ways = ("eager", "captured", "compiled") if gpu else ("CPU",)
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    found, tables, left_out = [], {}, {}
    for batch in args.batch or ((1, 1024) if gpu else (1, 128)):
        rows = [measure(batch, rate, args, left_out) for rate in args.rates]
        for way in args.ways:
            listed = [row[way] for row in rows if way in row]
            if not listed:
                continue
            tables[f"batch {batch}, {args.dtype}{', ' + way if gpu else ''}"] = listed
            found += claims(batch, listed, way)
    title = "Inference of truncated networks, AlexNet-like"
    timing.write("inference", args.device, title=title, claims=found, tables=tables, left_out=left_out)


if __name__ == "__main__":
    main()
