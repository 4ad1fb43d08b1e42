"""Claim: cost grows with rank, batch and width as the planner models it, whose choice is within 10 % of the best path.

Forward and backward pass of the AlexNet-like network: ranks from 1/16 to all of the exact rank, batches, and widths as
multiples of the channels, each with W rebuilt everywhere, with the factors contracted everywhere, and with what the
planner chooses for each layer; plain beside them. All take turns; median of the rounds.
The modelled cost is the planner's, in milliseconds by one factor for the whole sweep. On a GPU the passes are captured,
in bf16, so that kernels are timed and not their launches; there the peak of memory is measured too.

    python benchmarks/scaling.py [--device cuda] [--rounds 3]
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timing
from cpnorm import canonical_layers, canonical_norm
from cpnorm.lab.training.models import alexnet

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
PATHS = {"planned": "auto", "rebuilt": "rebuild", "factors": "factors"}
RANKS, WIDTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), (1 / 4, 1 / 2, 1.0)
BATCHES = {"cpu": (4, 16, 64), "cuda": (16, 64, 256, 1024)}
SHARE, WIDTH, BATCH = 1 / 4, 1.0, {"cpu": 16, "cuda": 128}  # what stays while another one changes


def one_pass(model: nn.Module, x: torch.Tensor) -> None:
    """Run a forward and a backward pass; gradients are written, not added to."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
        loss = model(x).square().mean()
    loss.backward()


def peak_megabytes(model: nn.Module, x: torch.Tensor) -> float:
    """Return the most memory that is allocated during an eager pass, parameters included."""
    one_pass(model, x)  # libraries take their workspaces the first time
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
    one_pass(model, x)
    model.zero_grad(set_to_none=True)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def modelled(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Return the planner's cost of all layers by path, in FLOPs of a matrix product."""
    totals = dict.fromkeys(PATHS, 0.0)

    def add(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        plan = layer.plan(inputs[0].shape, training=True)
        totals["rebuilt"] += plan.rebuild.total
        totals["factors"] += plan.factors.total
        totals["planned"] += min(plan.rebuild.total, plan.factors.total)

    handles = [layer.register_forward_pre_hook(add) for layer in canonical_layers(model).values()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return totals


def measure(share: float, batch: int, width: float, device: str, rounds: int) -> dict[str, Any]:
    """Return one point of the sweep."""
    x = torch.randn(batch, 3, 32, 32, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
    runs: dict[str, Callable[[], Any]] = {}
    costs: dict[str, float] = {}
    memory: dict[str, float] = {}
    for name in ("plain", *PATHS):
        model = alexnet(width=width).to(device)
        model = model if name == "plain" else canonical_norm(model, share, "kaiming_normal")
        for layer in canonical_layers(model).values():
            layer.path = PATHS[name]
        if name == "planned":
            costs = modelled(model, x)
        if x.is_cuda:
            memory[name] = peak_megabytes(model, x)
        runs[name] = timing.captured(partial(one_pass, model, x), device)
    seconds = timing.interleaved(runs, rounds)
    best = min(("rebuilt", "factors"), key=lambda name: timing.spread(seconds[name])["median"])
    row: dict[str, Any] = {"rank": share, "batch": batch, "width": width}
    row |= {f"{name}, ms": timing.milliseconds(values) for name, values in seconds.items()}
    row["planned ÷ best"] = timing.ratio(seconds, "planned", best)
    row["modelled"] = costs
    print(
        {"rank": share, "batch": batch, "width": width, "planned ÷ best": row["planned ÷ best"]["median"]}, flush=True
    )
    return row | ({"MB": memory} if memory else {})


def in_milliseconds(rows: list[dict[str, Any]]) -> None:
    """Scale the modelled costs by one factor, that which fits the sweep best."""
    pairs = [(row["modelled"][name], row[f"{name}, ms"]["median"]) for row in rows for name in ("rebuilt", "factors")]
    factor = math.exp(statistics.mean(math.log(measured / model) for model, measured in pairs))
    for row in rows:
        row["modelled"] = {name: factor * cost for name, cost in row["modelled"].items()}


def draw(device: str) -> None:
    """Draw the plots of one record, as docs/assets/scaling_<device>.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    record = json.loads((timing.RESULTS / f"scaling_{device}.json").read_text())
    with_memory = device == "cuda"
    figure, grid = plt.subplots(1 + with_memory, 3, figsize=(10, 3.4 * (1 + with_memory)), squeeze=False)
    colors = {"plain": "0.5", "planned": "C0", "rebuilt": "C1", "factors": "C2"}
    for column, axis in enumerate(("rank", "batch", "width")):
        rows = next(rows for caption, rows in record["tables"].items() if caption.startswith(f"against {axis}"))
        places = [row[axis] for row in rows]
        for name, color in colors.items():
            panel = grid[0][column]
            panel.plot(places, [row[f"{name}, ms"]["median"] for row in rows], "o-", color=color, ms=4, label=name)
            if name != "plain":
                panel.plot(places, [row["modelled"][name] for row in rows], "--", color=color, lw=1)
            if with_memory:
                grid[1][column].plot(places, [row["MB"][name] for row in rows], "o-", color=color, ms=4, label=name)
        for panel, unit in zip(grid[:, column], ("ms", "MB at the peak"), strict=False):
            panel.set(xscale="log", yscale="log", xlabel=axis, ylabel=unit)
            panel.set_xticks(places, [f"{p:g}" for p in places], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8)
    figure.suptitle("forward and backward pass; dashed: as modelled", fontsize=10)
    figure.tight_layout()
    ASSETS.mkdir(exist_ok=True)
    figure.savefig(ASSETS / f"scaling_{device}.png", dpi=80)
    plt.close(figure)


def draw_all() -> None:
    """Draw the plot of every record, cpu and cuda; without matplotlib none."""
    try:
        for path in sorted(timing.RESULTS.glob("scaling_c*.json")):
            draw(path.stem.removeprefix("scaling_"))
    except ImportError as error:
        print(f"no plots without {error.name}; elsewhere: python benchmarks/table.py")


def main() -> None:
    parser = timing.parser(__doc__, rounds=3)
    args = timing.start(parser)
    device, batch = args.device, BATCH[args.device]
    points = {
        f"against rank, as a share of the exact one: batch {batch}, width 1": [(s, batch, WIDTH) for s in RANKS],
        f"against batch: rank {SHARE:g}, width 1": [(SHARE, b, WIDTH) for b in BATCHES[device]],
        f"against width: rank {SHARE:g}, batch {batch}": [(SHARE, batch, w) for w in WIDTHS],
    }
    measured = {p: measure(*p, device, args.rounds) for p in dict.fromkeys(chain.from_iterable(points.values()))}
    in_milliseconds(list(measured.values()))
    worst = max((row["planned ÷ best"] for row in measured.values()), key=lambda spread: spread["median"])
    claims = [timing.at_most("the planner's choice against the best path, worst of the sweep", worst, 1.1)]
    tables = {caption: [measured[p] for p in listed] for caption, listed in points.items()}
    plots = {f"scaling_{device}.png": "Time of a pass against rank, batch and width; dashed: as the planner models it"}
    title = "How cost grows"
    timing.write("scaling", device, title=title, claims=claims, tables=tables, plots=plots)
    draw_all()


if __name__ == "__main__":
    main()
