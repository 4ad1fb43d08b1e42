"""Claim: the planner's choice between rebuilding W and going through the factors costs at most 10 % more than the best.

Layers of the AlexNet-like network x rank (1/16 to all of the exact rank) x batch x training or inference. Both paths
are timed in turns; the regret is the time of the chosen path over that of the faster one. `--fit` looks for the two
constants of the model (FLOPs per byte, price of depthwise FLOPs) with the least mean log regret over the sweep.

    python benchmarks/plan.py [--device cuda] [--fit]
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any

import torch
from torch import nn

import cpnorm
from cpnorm import contract
from timing import interleaved, spread, write

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3-64, 34x34": (nn.Conv2d(3, 64, 3, padding=2), (3, 32, 32)),
    "64-192, 17x17": (nn.Conv2d(64, 192, 3, padding=1), (64, 17, 17)),
    "192-384, 8x8": (nn.Conv2d(192, 384, 3, padding=1), (192, 8, 8)),
    "256-256, 8x8": (nn.Conv2d(256, 256, 3, padding=1), (256, 8, 8)),
    "4096-1024": (nn.Linear(4096, 1024), (4096,)),
    "1024-512": (nn.Linear(1024, 512), (1024,)),
}
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


def measure(layer: cpnorm.CPLayer, x: torch.Tensor, training: bool, rounds: int) -> dict[str, float]:
    def run(path: str) -> None:
        layer.path = path
        if training:
            layer(x).sum().backward()
        else:
            with torch.no_grad():
                layer(x)

    seconds = interleaved({path: lambda path=path: run(path) for path in ("rebuild", "factors")}, rounds)
    return {path: spread(values)["median"] for path, values in seconds.items()}


def regret(row: dict[str, Any]) -> float:
    return row[row["chosen"]] / min(row["rebuild"], row["factors"])


def best_constants(rows: list[dict[str, Any]], device: str) -> tuple[float, float, float]:
    """FLOPs per byte, price of depthwise FLOPs, mean log regret."""
    candidates = []
    for per_byte, penalty in product((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128, 400, 800, 1600)):
        contract.FLOPS_PER_BYTE[device], contract.DEPTHWISE_PENALTY[device] = per_byte, penalty
        total = 0.0
        for row in rows:
            plan = contract.plan(row["layer"], row["input"], row["rank"], training=row["training"], device=device)
            total += math.log(row[plan.path] / min(row["rebuild"], row["factors"]))
        candidates.append((total / len(rows), per_byte, penalty))
    total, per_byte, penalty = min(candidates)
    return per_byte, penalty, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 128])
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for (name, (plain, shape)), batch, share in product(LAYERS.items(), args.batches, SHARES):
        x = torch.randn(batch, *shape, device=args.device)
        fresh: Any = type(plain)(*(plain.weight.shape[1], plain.weight.shape[0]), *_rest(plain)).to(args.device)
        rank = max(1, round(share * math.prod(plain.weight.shape) / max(plain.weight.shape)))
        layer = cpnorm.canonical_norm(fresh, rank, "kaiming_normal")
        for training in (False, True):
            seconds = measure(layer, x.clone().requires_grad_(training), training, args.rounds)
            chosen = layer.plan(x.shape, training=training).path
            row = {"name": name, "batch": batch, "rank": rank, "training": training, "chosen": chosen, **seconds}
            rows.append(row | {"layer": plain, "input": tuple(x.shape)})
            print(f"{name:14} batch {batch:4} rank {rank:5} {'train' if training else 'infer'} "
                  f"rebuild {1e3 * seconds['rebuild']:8.2f} ms  factors {1e3 * seconds['factors']:8.2f} ms  "
                  f"-> {chosen:8} regret {regret(row):.2f}", flush=True)  # fmt: skip
    regrets = [regret(row) for row in rows]
    within = sum(r <= 1.1 for r in regrets) / len(regrets)
    print(f"within 10 % of the best in {within:.0%} of {len(rows)} cases; worst {max(regrets):.2f}")
    kept = [{k: v for k, v in row.items() if k not in ("layer", "input")} for row in rows]
    write(f"plan_{args.device}", {"cases": kept, "within_10_percent": within, "worst": max(regrets)})
    if args.fit:
        per_byte, penalty, mean = best_constants(rows, args.device)
        print(f"best constants: {per_byte:g} FLOPs per byte, {penalty:g} for depthwise; mean log regret {mean:.3f}")


def _rest(plain: nn.Module) -> tuple[Any, ...]:
    return (3, 1, plain.padding) if isinstance(plain, nn.Conv2d) else ()


if __name__ == "__main__":
    main()
