"""Claim: the planner's choice between rebuilding W and going through the factors costs at most 10 % more than the best.

Everywhere in the sweep; the worst case counts, and beside it how many keep within the 10 %.

Layers of the AlexNet-like network x rank (1/16 to all of the exact rank) x batch x training or inference. Both paths
are timed in turns; the regret is the time of the chosen path over that of the faster one. `--fit` looks for the four
constants of the model (FLOPs per byte, per call, price of depthwise FLOPs, least terms of a product) with the least
mean log regret over the sweep. On a GPU the passes are captured, in bf16 and channels last, as the lab trains.

    python benchmarks/plan.py [--device cuda] [--fit]
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import cpnorm
import timing
from cpnorm.nn import planner

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3-64, 34x34": (nn.Conv2d(3, 64, 3, padding=2), (3, 32, 32)),
    "64-192, 17x17": (nn.Conv2d(64, 192, 3, padding=1), (64, 17, 17)),
    "192-384, 8x8": (nn.Conv2d(192, 384, 3, padding=1), (192, 8, 8)),
    "256-256, 8x8": (nn.Conv2d(256, 256, 3, padding=1), (256, 8, 8)),
    "4096-1024": (nn.Linear(4096, 1024), (4096,)),
    "1024-512": (nn.Linear(1024, 512), (1024,)),
}
PATHS = ("rebuild", "factors")
LEAST_SECONDS = 0.002  # of one turn
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


def measure(layer: cpnorm.CPLayer, x: torch.Tensor, training: bool, rounds: int) -> dict[str, list[float]]:
    def run(path: str) -> None:
        layer.path = path
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            if not training:
                with torch.no_grad():
                    layer(x)
                return
            layer.zero_grad(set_to_none=True)
            x.grad = None
            y = layer(x)
        y.backward(torch.ones_like(y))

    device = "cuda" if x.is_cuda else "cpu"
    runs = {path: timing.captured(partial(run, path), device) for path in PATHS}
    return timing.in_turns(runs, rounds, LEAST_SECONDS)


def regret(row: dict[str, Any]) -> timing.Spread:
    """Return the chosen path's time over that of the better one, round by round; 1 if it is that one."""
    seconds = row["seconds"]
    best = min(PATHS, key=lambda path: timing.spread(seconds[path])["median"])
    return timing.ratio(seconds, row["chosen"], best)


def best_constants(rows: list[dict[str, Any]], device: str) -> tuple[float, ...]:
    """Return FLOPs per byte and per call, the price of depthwise FLOPs, least terms of a product, mean log regret."""
    candidates = []
    bytes_, calls = (4, 8, 16, 32, 48, 60, 80, 120, 240), (0, 1e7, 2e7, 5e7, 1e8, 1e9, 3e9)
    penalties, terms = (1, 2, 4, 8, 32, 128, 400, 800, 1600), (1, 8, 16, 32, 64, 128)
    for per_byte, per_call, penalty, least in product(bytes_, calls, penalties, terms):
        planner.FLOPS_PER_BYTE[device], planner.FLOPS_PER_CALL[device] = per_byte, per_call
        planner.DEPTHWISE_PENALTY[device], planner.LEAST_TERMS[device] = penalty, least
        total = 0.0
        for row in rows:
            plan = planner.plan(row["layer"], row["input"], row["rank"], training=row["training"], device=device)
            medians = {path: timing.spread(row["seconds"][path])["median"] for path in PATHS}
            total += math.log(medians[plan.path] / min(medians.values()))
        candidates.append((total / len(rows), per_byte, per_call, penalty, least))
    total, *constants = min(candidates)
    return *constants, total


def main() -> None:
    parser = timing.parser(__doc__, rounds=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 128])
    parser.add_argument("--fit", action="store_true")
    args = timing.start(parser)
    rows: list[dict[str, Any]] = []
    for (name, (plain, shape)), batch, share in product(LAYERS.items(), args.batches, SHARES):
        x = torch.randn(batch, *shape, device=args.device)
        x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.ndim == 4 else x
        fresh: Any = type(plain)(*(plain.weight.shape[1], plain.weight.shape[0]), *_rest(plain)).to(args.device)
        rank = max(1, round(share * math.prod(plain.weight.shape) / max(plain.weight.shape)))
        layer = cpnorm.canonical_norm(fresh, rank, "kaiming_normal")
        for training in (False, True):
            seconds = measure(layer, x.clone().requires_grad_(training), training, args.rounds)
            chosen = layer.plan(x.shape, training=training).path
            row = {"name": name, "batch": batch, "rank": rank, "training": training, "chosen": chosen}
            rows.append(row | {"seconds": seconds, "layer": plain, "input": tuple(x.shape)})
            ms = {path: timing.milliseconds(seconds[path])["median"] for path in PATHS}
            print(f"{name:14} batch {batch:4} rank {rank:5} {'train' if training else 'infer'} "
                  f"rebuild {ms['rebuild']:8.2f} ms  factors {ms['factors']:8.2f} ms  "
                  f"-> {chosen:8} regret {regret(rows[-1])['median']:.2f}", flush=True)  # fmt: skip
    regrets = [regret(row) for row in rows]
    within = sum(r["median"] <= 1.1 for r in regrets) / len(regrets)
    worst = max(regrets, key=lambda regret: regret["median"])
    claims = [
        timing.at_most("the planner's choice against the best path, worst case", worst, 1.1),
        timing.at_least("cases within 10 % of the best path", 100 * within, 100, "%"),
    ]
    table = [
        {
            "layer": row["name"],
            "batch": row["batch"],
            "rank": row["rank"],
            "pass": "training" if row["training"] else "inference",
            "chosen": row["chosen"],
            **{f"{path}, ms": timing.milliseconds(row["seconds"][path]) for path in PATHS},
            "times the best": regret(row),
        }
        for row in rows
    ]
    title = "The planner, layer by layer"
    farthest = sorted(table, key=lambda row: -row["times the best"]["median"])
    tables = {"the ten cases farthest from the best": farthest[:10]}
    timing.write("plan", args.device, title=title, claims=claims, tables=tables)
    if args.fit:
        per_byte, per_call, penalty, least, mean = best_constants(rows, args.device)
        print(
            f"best constants: {per_byte:g} FLOPs per byte, {per_call:g} per call, {penalty:g} for depthwise, "
            f"{least:g} terms at least; mean log regret {mean:.3f}"
        )


def _rest(plain: nn.Module) -> tuple[Any, ...]:
    return (3, 1, plain.padding) if isinstance(plain, nn.Conv2d) else ()


if __name__ == "__main__":
    main()
