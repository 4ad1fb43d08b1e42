"""Inference of the AlexNet-like network, all layers truncated, against the dense network and tensorly-torch.

Claims, on a CPU with 2 threads, for rates from 0 to 99 % of the paper's ranks:
1. cpnorm.factorize is never slower than the dense network by more than 5 %, at batch 1 and 128.
2. At 95 % it is at least 4 times as fast at batch 1, and 5 times at batch 128.
3. It is at least twice as fast as tensorly-torch's factorised layers at the same ranks.

Weights are random, which changes nothing about speed. For each batch size and rate the competitors take --rounds turns,
of 16 calls at batch 1 and of one at 128; a ratio is the median over the turns. "dense" is the network as torch builds
it,
"dense, tuned" the same with channels last and ReLUs in place, which factorize does too: what that alone brings. Threads
are best bound to cores: on a busy machine two of them may share one otherwise.

    OMP_PROC_BIND=true python benchmarks/inference.py [--rates 0 50 95] [--rounds 40]
    python benchmarks/inference.py --device cuda --batch 1 1024 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timing
from cpnorm import canonical_norm, fold
from cpnorm.factorize import choose_forms
from cpnorm.lab.models import alexnet
from cpnorm.plain import plain_copy

RANKS = {
    "features.0": 36,
    "features.3": 571,
    "features.6": 1626,
    "features.8": 1948,
    "features.10": 1644,
    "classifier.1": 1024,
    "classifier.4": 512,
    "classifier.6": 10,
}
SLACK, AT_95, PEER = 1.05, {1: 4.0, 128: 5.0}, 2.0


def truncated(rate: int) -> dict[str, int]:
    """The paper drops this share of the terms of each layer, in whole numbers."""
    return {name: max(1, rank - rank * rate // 100) for name, rank in RANKS.items()}


def tensorly_torch(model: nn.Module, ranks: dict[str, int]) -> nn.Module | None:
    """The same network in tensorly-torch's layers, contracted through their factors; None where it is not installed.

    Its linear layers contract from left to right, which asks for 112 GB at batch 128: two plain maps stand in for them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tltorch import FactorizedConv
    except ImportError:
        return None
    twin = copy.deepcopy(model)
    for name, rank in ranks.items():
        layer, (parent, _, child) = twin.get_submodule(name), name.rpartition(".")
        if isinstance(layer, nn.Linear):
            thin = nn.Linear(layer.in_features, rank, bias=False)
            peer = nn.Sequential(thin, nn.Linear(rank, layer.out_features))
        else:
            options = {"factorization": "cp", "implementation": "factorized", "rank": rank}
            peer = FactorizedConv.from_conv(layer, decompose_weights=False, **options)
        twin.get_submodule(parent).register_module(child, peer)
    weight = next(model.parameters())
    return twin.to(weight.device, weight.dtype)


def undisturbed(batch: int, rate: int, args: argparse.Namespace) -> dict[str, Any]:
    """A measurement, again while other processes take part in it and there is patience left."""
    while True:
        while args.patience > 0 and cpu_of_others(lambda: time.sleep(3))[1] > 0.03:
            args.patience -= 3
        start = time.perf_counter()
        row, others = cpu_of_others(lambda: measure(batch, rate, args))
        if others <= 0.03 or args.patience <= 0:
            return row | {"cpu_of_other_processes": others}
        args.patience -= time.perf_counter() - start


def cpu_of_others(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the share of the machine that other processes used meanwhile."""

    def busy() -> float:
        if not Path("/proc/stat").exists():
            return 0.0
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")

    start, before, own = time.perf_counter(), busy(), time.process_time()
    result = run()
    others = busy() - before - (time.process_time() - own)
    return result, max(0.0, others) / (time.perf_counter() - start) / (os.cpu_count() or 1)


def measure(batch: int, rate: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    ranks = truncated(rate)
    canonical = canonical_norm(alexnet(), ranks, "kaiming_normal").to(args.device, args.dtype).eval()
    x = torch.randn(batch, 3, 32, 32, device=args.device, dtype=args.dtype)
    start = time.perf_counter()
    choice = choose_forms(canonical, x)
    chosen_in = time.perf_counter() - start
    dense = fold(copy.deepcopy(canonical))
    networks = {
        "dense": dense,
        "dense, tuned": plain_copy(canonical, dict.fromkeys(ranks, "dense"), channels_last=True, in_place=True),
        "factorize": choice.apply(canonical),
    }
    if (peer := tensorly_torch(dense, ranks)) is not None:
        networks["tensorly-torch"] = peer.eval()
    calls = max(1, 16 // batch)
    runs = {name: lambda network=network: [network(x) for _ in range(calls)] for name, network in networks.items()}
    with torch.inference_mode():
        seconds = timing.interleaved(runs, args.rounds, warmup=2)
    ratios = {f"times_faster_than_{name}": timing.ratio(seconds, name, "factorize") for name in runs}
    dense_cost, chosen_cost = choice.total("dense"), choice.total("chosen")
    print(f"\nbatch {batch}, {rate} %: forms chosen in {chosen_in:.1f} s\n{choice}")
    row = {
        "batch": batch,
        "rate": rate,
        "milliseconds": {name: 1e3 / calls * timing.spread(values)["median"] for name, values in seconds.items()},
        **ratios,
        "times_fewer_flops": dense_cost.flops / chosen_cost.flops,
        "times_fewer_weights": dense_cost.weights / chosen_cost.weights,
        "forms": {name: layer.form for name, layer in choice.layers.items()},
        "channels_last": choice.channels_last,
        "chosen_in_seconds": chosen_in,
    }
    print(table([row]), flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "batch  rate      dense     tuned  factorize  tl-torch     speed-up   over tl-torch  fewer FLOPs  fewer weights"
    ]
    for row in rows:
        ms = row["milliseconds"]
        over_peer = row.get("times_faster_than_tensorly-torch", {"median": float("nan")})["median"]
        lines.append(
            f"{row['batch']:5d} {row['rate']:4d}% {ms['dense']:8.2f}ms {ms['dense, tuned']:7.2f}ms"
            f" {ms['factorize']:8.2f}ms {ms.get('tensorly-torch', float('nan')):7.2f}ms"
            f" {row['times_faster_than_dense']['median']:11.2f}x {over_peer:13.2f}x"
            f" {row['times_fewer_flops']:11.1f}x {row['times_fewer_weights']:12.1f}x"
        )
    return "\n".join(lines)


def claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    over_dense = {(row["batch"], row["rate"]): row["times_faster_than_dense"]["median"] for row in rows}
    over_peer = [
        row["times_faster_than_tensorly-torch"]["median"] for row in rows if "tensorly-torch" in row["milliseconds"]
    ]
    return {
        "never slower than dense by more than 5 %": all(ratio >= 1 / SLACK for ratio in over_dense.values()),
        **{
            f"at 95 % at least {least} times as fast at batch {batch}": over_dense[batch, 95] >= least
            for batch, least in AT_95.items()
            if (batch, 95) in over_dense
        },
        "at least twice as fast as tensorly-torch": bool(over_peer) and min(over_peer) >= PEER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 25, 50, 75, 90, 95, 99])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each competitor")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait and repeat for a quiet machine (Linux)"
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind, args.dtype = args.dtype, getattr(torch, args.dtype)
    rows = [undisturbed(batch, rate, args) for batch in args.batch for rate in args.rates]
    met = claims(rows)
    print(f"\n{table(rows)}\n")
    for claim, true in met.items():
        print(f"{'met    ' if true else 'NOT MET'} {claim}")
    if not args.dry:
        name = "inference" if (args.device, kind) == ("cpu", "float32") else f"inference-{args.device}-{kind}"
        print(timing.write(name, {"rows": rows, "claims": met}))


if __name__ == "__main__":
    main()
