"""Claim: decompositions as good as TensorLy's in a fraction of the time, and fast enough never to be waited for.

For random weights of the AlexNet-like network's shapes, in single precision:
1. exact: cp_exact of all layers in under 1 s on 2 cores, and in less time than torch.linalg.svd needs for the slices.
2. power: at 10 restarts x 10 iterations cp_power is at least 8 times as fast as tensorly's CPPower (20 times on a GPU),
   its fit no more than 0.01 below.
3. layers: cp_power of all layers at the paper's ranks in under 60 s on 2 cores, under 5 s on an H200.
4. als: a sweep of cp_als takes no longer than one of tensorly's parafac; its terms cancel less than 10 times at a fit
   above 0.99, those of the plain method (ridge=0) more.
5. rank: estimate_rank of all layers in under 5 minutes on 2 cores.

A ratio is the median of --rounds rounds in which the competitors take turns; claims 3 and 5 are timed once. TensorLy is
needed by claims 2 and 4 alone. Its time is linear in the rank: --rank 571 is the paper's and takes two minutes more.

    python benchmarks/decompose.py [--device cuda] [--rounds 3] [--rank 144] [--only power layers ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import timing
from cpnorm import cp_als, cp_exact, cp_power, estimate_rank
from cpnorm.lab.paper.tables import ALEXNET_RANKS

ALEXNET = {(layer.size[1], layer.size[0], *layer.size[2:]): layer.rank for layer in ALEXNET_RANKS}
CONV = (192, 64, 3, 3)
Found = tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]  # claims, tables


def exact(args: argparse.Namespace) -> Found:
    weights = {shape: torch.randn(shape, device=args.device) for shape in ALEXNET}

    def svd() -> None:
        for weight in weights.values():
            torch.linalg.svd(weight if weight.ndim == 2 else weight.permute(2, 3, 0, 1), full_matrices=False)

    runs = {"cp_exact": lambda: [cp_exact(weight) for weight in weights.values()], "torch.linalg.svd": svd}
    seconds = timing.interleaved(runs, args.rounds)
    error = max(1 - cp_exact(weight).fit(weight) for weight in weights.values())
    claims = [
        timing.at_most("cp_exact, all layers", timing.spread(seconds["cp_exact"]), 1, "s"),
        timing.at_most("cp_exact against the SVDs", timing.ratio(seconds, "cp_exact", "torch.linalg.svd"), 1),
        timing.at_most("cp_exact, largest relative error of a layer", error, 1e-5, ""),
    ]
    rows = [{"method": name, "seconds": timing.spread(taken)} for name, taken in seconds.items()]
    return claims, {"all layers, exact": rows}


def power(args: argparse.Namespace) -> Found:
    import tensorly
    from tensorly.decomposition import CPPower

    tensorly.set_backend("pytorch")
    weight = torch.randn(CONV, device=args.device)
    fits: dict[str, float] = {}

    def ours() -> None:
        fits["cp_power"] = cp_power(weight, args.rank, restarts=10, iterations=10).fit(weight)

    def peer() -> None:
        found = CPPower(args.rank, n_repeat=10, n_iteration=10).fit_transform(weight)
        fits["tensorly's CPPower"] = 1 - ((tensorly.cp_to_tensor(found) - weight).norm() / weight.norm()).item()

    seconds = timing.interleaved({"cp_power": ours, "tensorly's CPPower": peer}, args.rounds, warmup=0)
    faster = timing.ratio(seconds, "tensorly's CPPower", "cp_power")
    below = fits["tensorly's CPPower"] - fits["cp_power"]
    claims = [
        timing.at_least("cp_power against CPPower, times as fast", faster, 20 if args.device == "cuda" else 8),
        timing.at_most("cp_power's fit, below CPPower's", below, 0.01, ""),
    ]
    rows = [{"method": name, "seconds": timing.spread(taken), "fit": fits[name]} for name, taken in seconds.items()]
    return claims, {f"{_times(CONV)} at rank {args.rank}, 10 restarts × 10 iterations": rows}


def layers(args: argparse.Namespace) -> Found:
    cp_power(torch.randn(8, 8, 3, device=args.device), 8)  # loads what a first call loads
    rows = []
    for shape, rank in ALEXNET.items():
        weight = torch.randn(shape, device=args.device)
        seconds = _once(partial(cp_power, weight, rank))
        rows.append({"layer": _times(shape), "rank": rank, "seconds": seconds})
    total = sum(row["seconds"] for row in rows)
    bound = 5 if args.device == "cuda" else 60
    return [timing.at_most("cp_power, all layers at the paper's ranks", total, bound, "s")], {"cp_power": rows}


def als(args: argparse.Namespace) -> Found:
    import tensorly
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    rows, claims = [], []
    for shape, rank in {CONV: ALEXNET[CONV], (64, 32, 3, 3): 270}.items():
        weight = torch.randn(shape, device=args.device)
        start = cp_als(weight, rank, sweeps=1)

        def ours(sweeps: int, w=weight, s=start) -> None:
            cp_als(w, s.rank, init=s, sweeps=sweeps, tolerance=0)

        def peer(sweeps: int, w=weight, s=start) -> None:
            parafac(w, s.rank, init=s.to_tensorly(), n_iter_max=sweeps, tol=1e-15)  # with tol=0 it measures no error

        # The difference of several sweeps and one leaves out what either does before and after.
        runs: dict[str, Callable[[], None]] = {
            "ours": partial(ours, 6),
            "ours once": partial(ours, 1),
            "tensorly": partial(peer, 6),
            "tensorly once": partial(peer, 1),
        }
        seconds = timing.interleaved(runs, args.rounds, warmup=0)
        per_sweep = {
            name: [(many - one) / 5 for many, one in zip(seconds[name], seconds[f"{name} once"], strict=True)]
            for name in ("ours", "tensorly")
        }
        fitted = {"ridge": cp_als(weight, rank), "plain": cp_als(weight, rank, ridge=0)}
        rows.append(
            {
                "layer": _times(shape),
                "rank": rank,
                "ms per sweep": timing.milliseconds(per_sweep["ours"]),
                "tensorly's": timing.milliseconds(per_sweep["tensorly"]),
                "fit": fitted["ridge"].fit(weight),
                "cancellation": fitted["ridge"].cancellation(),
                "without ridge": fitted["plain"].cancellation(),
            }
        )
        against = timing.ratio(per_sweep, "ours", "tensorly")
        claims += [
            timing.at_most(f"a sweep of cp_als against parafac's, {_times(shape)}", against, 1),
            timing.at_least(f"cp_als, fit at rank {rank}", rows[-1]["fit"], 0.99, ""),
            timing.at_most("cp_als, how often its terms cancel", rows[-1]["cancellation"], 10, "×"),
        ]
    return claims, {"alternating least squares": rows}


def rank(args: argparse.Namespace) -> Found:
    rows: list[dict[str, Any]] = []
    for shape, published in ALEXNET.items():
        weight, found = torch.randn(shape, device=args.device), {}

        def estimate(w=weight, f=found) -> None:
            f["rank"] = estimate_rank(w).rank

        seconds = _once(estimate)
        rows.append({"layer": _times(shape), "rank": found["rank"], "published": published, "seconds": seconds})
        print(f"  {rows[-1]}", flush=True)
    total = sum(row["seconds"] for row in rows)
    return [timing.at_most("estimate_rank, all layers", total / 60, 5, "min")], {"estimate_rank to a fit of 0.99": rows}


def _once(run: Callable[[], Any]) -> float:
    return timing.interleaved({"": run}, rounds=1, warmup=0)[""][0]


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def main() -> None:
    parts = {"exact": exact, "power": power, "layers": layers, "als": als, "rank": rank}
    parser = timing.parser(__doc__, rounds=3)
    parser.add_argument("--rank", type=int, default=144, help="of the comparison with CPPower")
    parser.add_argument("--only", nargs="*", choices=list(parts), help="all of them; on a GPU without rank")
    args = timing.start(parser)
    claims, tables, left_out = [], {}, {}
    for name in args.only or [part for part in parts if (part, args.device) != ("rank", "cuda")]:
        started = time.perf_counter()
        try:
            new_claims, new_tables = parts[name](args)
        except ImportError as error:
            left_out[f"the comparison {name!r}"] = f"{error.name} is not installed"
            continue
        claims += new_claims
        tables |= new_tables
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    timing.write("decompose", args.device, title="Decompositions", claims=claims, tables=tables, left_out=left_out)


if __name__ == "__main__":
    main()
