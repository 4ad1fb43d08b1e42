"""Claim: a residual network at a tenth of its parameters runs at least twice as fast, by the clock, as the dense one.

ResNet-18 for 224 x 224 images (or another network of timm or pytorchcv) and for 32 x 32 images (cpnorm.lab's), in
canonical form at --share of its parameters, in the forms that cpnorm.factorize picks. Ranks are the same share of the
exact rank in every layer, as the paper cuts ("uniform"), and those of cpnorm.ranks_for_budget, which leaves early
layers, with most of the FLOPs and few parameters, nearly whole ("budget"):
1. CPU, 2 threads, batch 1 and 32: at least 2.5 times as fast as dense.
2. GPU, bfloat16, batch 128, both as CUDA graphs: at least twice as fast as dense.
3. Choosing the forms takes at most 5 seconds on a GPU.

Weights are random, which changes nothing about speed. "dense" is the network as its library builds it, "dense, tuned"
the same with batch norms folded and channels last, which factorize does too. Competitors take turns, and a ratio is the
median over the turns. On a GPU "factorize" may use cpnorm's kernels (kernels=True); "plain forms" runs without cpnorm.

    export OMP_PROC_BIND=true MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
    python benchmarks/any_network_inference.py [--sizes 224 32] [--share 0.1] [--batch 1 32]
    python benchmarks/any_network_inference.py --device cuda            # as CUDA graphs and eager, batch 128 and 1

On a busy machine "--threads 1 --processor-time" counts the seconds that the process was running. There is one file of
results for each size of images, written after each row; --time-limit ends the command after the row in which it is
reached.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import itertools
import math
import time
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

import timing
from cpnorm import canonical_norm, choose_forms, fold, ranks_for_budget, summary
from cpnorm.lab.training.models import build as build_for_small_images

TARGETS = {"cpu": 2.5, "cuda": 2.0}
LONGEST_CHOICE = 5.0  # seconds, on a GPU
SMALLEST = 64  # images of fewer pixels have a stem that does not shrink them
TURN_SECONDS = {"cpu": 0.3, "cuda": 0.04}


def built(name: str, size: int) -> nn.Module:
    """Return the network from timm, or from pytorchcv where timm is not installed; for small images cpnorm.lab's."""
    if size < SMALLEST:
        return build_for_small_images(name, 3, 10, size).eval()
    if importlib.util.find_spec("timm"):
        return importlib.import_module("timm").create_model(name).eval()
    return importlib.import_module("pytorchcv.model_provider").get_model(name).eval()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ranks_of(model: nn.Module, kind: str, share: float) -> dict[str, int]:
    """Return ranks with which the canonical model has this share of the parameters."""
    limit = round(share * parameters(model))
    if kind == "budget":
        return ranks_for_budget(model, params=limit)
    described = summary(canonical_norm(copy.deepcopy(model), 1, "kaiming_normal"))
    others = parameters(model) - sum(math.prod(layer.shape) for layer in described.layers)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        ranks = {layer.name: max(1, round(middle * layer.exact_rank)) for layer in described.layers}
        size = others + sum(1 + ranks[layer.name] * (1 + sum(layer.shape)) for layer in described.layers)
        low, high = (middle, high) if size <= limit else (low, middle)
    return {layer.name: max(1, round(low * layer.exact_rank)) for layer in described.layers}


def measure(size: int, batch: int, way: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row of one batch size, run eagerly or as CUDA graphs."""
    torch.manual_seed(0)
    plain, dtype, as_graph = built(args.network, size), getattr(torch, args.dtype), way == "CUDA graph"
    ranks = ranks_of(plain, kind, args.share)
    canonical = canonical_norm(copy.deepcopy(plain), ranks, "kaiming_normal").to(args.device, dtype).eval()
    x = torch.randn(batch, 3, size, size, device=args.device, dtype=dtype)
    dense = fold(copy.deepcopy(canonical))
    tuned = choose_forms(canonical, x, measure=False, forms=dict.fromkeys(ranks, "dense")).apply(canonical)

    start = time.perf_counter()
    choice = choose_forms(canonical, x, cuda_graph=as_graph)
    chosen_in = time.perf_counter() - start
    networks = {"dense": dense, "dense, tuned": tuned, "factorize": choice.apply(canonical)}
    print(f"\n{way}, {size} x {size}, batch {batch}, ranks {kind}: forms chosen in {chosen_in:.1f} s", flush=True)
    if args.device == "cuda":
        start = time.perf_counter()
        choice = choice.with_kernels(canonical, x, cuda_graph=as_graph)
        kernels_in = time.perf_counter() - start
        networks["plain forms"], networks["factorize"] = networks["factorize"], choice.apply(canonical)
    print(choice, flush=True)

    with torch.inference_mode():
        once = {
            name: timing.captured(partial(network, x), args.device if as_graph else "cpu")
            for name, network in networks.items()
        }
        clock = time.process_time if args.processor_time else time.perf_counter
        seconds = timing.in_turns(once, args.rounds, TURN_SECONDS[args.device], clock)
    row = {
        "images": f"{size} x {size}",
        "batch": batch,
        "ranks": kind,
        **{f"{name}, ms": timing.milliseconds(values) for name, values in seconds.items()},
        "times as fast as dense": timing.ratio(seconds, "dense", "factorize"),
        "as dense, tuned": timing.ratio(seconds, "dense, tuned", "factorize"),
        "times fewer FLOPs": choice.total("dense").flops / choice.total("chosen").flops,
        "parameters, % of dense": 100 * parameters(canonical) / parameters(plain),
        "layers dense": sum(layer.form == "dense" for layer in choice.layers.values()),
        "forms chosen in, s": chosen_in,
    }
    if args.device == "cuda":
        row["kernels chosen in, s"] = kernels_in
    medians = {key: value["median"] if isinstance(value, dict) else value for key, value in row.items()}
    print(way, {key: v if isinstance(v, str) else round(v, 2) for key, v in medians.items()}, flush=True)
    return row


def claims(way: str, row: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a row says about the claims above."""
    found, gpu = [], args.device == "cuda"
    where = f"{args.network} for {row['images']} at {100 * args.share:g} % of its parameters"
    where += f", {way}, batch {row['batch']}, ranks {row['ranks']}"
    if not gpu or (way == "CUDA graph" and row["batch"] >= 128):
        text = f"factorize, times as fast as dense, {where}"
        found.append(timing.at_least(text, row["times as fast as dense"], TARGETS[args.device]))
    if gpu:
        seconds = row["forms chosen in, s"]
        found.append(timing.at_most(f"seconds to choose forms, {where}", seconds, LONGEST_CHOICE, "s"))
    return found


def main() -> None:
    parser = timing.parser(__doc__, rounds=9)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--share", type=float, default=0.1, help="of the dense network's parameters")
    parser.add_argument("--ranks", nargs="+", choices=["uniform", "budget"], default=["uniform", "budget"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 32], help="of the images")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32, on a GPU bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", help="1 and 32, on a GPU 128 and 1")
    parser.add_argument("--ways", nargs="+", choices=["CUDA graph", "eager"], default=["CUDA graph", "eager"])
    parser.add_argument("--processor-time", action="store_true", help="on a busy CPU, with --threads 1")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds")
    args = timing.start(parser)
    gpu = args.device == "cuda"
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    warnings.filterwarnings("ignore", "0 of .* layers gain")  # the tables say it
    ways, batches = args.ways if gpu else ("CPU",), args.batch or ((128, 1) if gpu else (1, 32))
    started = time.perf_counter()
    for size in args.sizes:
        found: list[dict[str, Any]] = []
        tables: dict[str, list[dict[str, Any]]] = {}
        for way, batch, kind in itertools.product(ways, batches, args.ranks):
            if time.perf_counter() - started > args.time_limit:
                print(f"left out after {args.time_limit:g} s: {way}, {size} x {size}, batch {batch}, ranks {kind}")
                continue
            row = measure(size, batch, way, kind, args)
            tables.setdefault(f"{args.network}, {args.dtype}, {way}", []).append(row)
            found += claims(way, row, args)
            title = f"Inference of residual networks, {args.network} for {size} x {size}"
            timing.write("any_network_inference", f"{args.device}_{size}", title=title, claims=found, tables=tables)


if __name__ == "__main__":
    main()
