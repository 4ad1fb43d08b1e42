"""Small networks: parameters against accuracy, beside dense networks of as many parameters and those of others.

``python benchmarks/smallest.py`` makes the tables and the figure of docs/records.md again from results/records;
``--measure`` first counts and times the committed networks on this machine, and scores them on the test set again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cpnorm
import timing
from cpnorm.lab.data.images import load, normalize
from cpnorm.lab.paper import smallest as rows
from cpnorm.lab.training.evaluation import accuracy
from cpnorm.lab.training.records import read_records
from cpnorm.lab.training.run_networks import blank, trained_network
from cpnorm.lab.training.runs import RunFolder, environment
from cpnorm.lab.training.setup import build_model

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results/records"
PAGE, FIGURE = ROOT / "docs/records.md", ROOT / "docs/assets/records.svg"
RUNS = 8  # that a goal asks for
BEGIN, END = "<!-- {} -->", "<!-- /{} -->"  # what stands between them in the page is made
Record = Mapping[str, Any]

# Networks of others: data, name, parameters, accuracy in percent, and how it was reported.
OTHERS: tuple[tuple[str, str, int, float, str], ...] = (
    ("cifar10", "cifar10-tiniest", 97_530, 94.4, "mean of five runs, [repository](https://github.com/xvel/cifar10-tiniest)"),
    ("cifar10", "118 k network", 118_258, 92.63, "public repository"),
    ("cifar10", "ResNet-20", 269_722, 91.25, "[He et al. 2016](https://arxiv.org/abs/1512.03385), table 6"),
    ("cifar10", "50 k network", 50_000, 86.3, "public repository Cifar10CNN-50K"),
    ("cifar10", "the paper, plain", 6_976_842, 87.06, "mean of eight runs"),
    ("cifar10", "the paper, canonical", 9_253_171, 88.32, "mean of eight runs, SGD"),
    ("mnist", "course networks", 7_070, 99.4, "public repositories, best epochs, mostly single runs"),
    ("mnist", "8,640 parameters", 8_640, 99.20, "public repository"),
    (
        "mnist",
        "697 parameters",
        697,
        99.0,
        "[repository](https://github.com/JoshWarn/Parameter-Efficient-MNIST), best of about 700 runs",
    ),
    ("mnist", "the paper, plain", 1_199_882, 99.21, "mean of eight runs"),
)  # fmt: skip


# --- what was trained -------------------------------------------------------------------------------------------------


def read(folder: Path = RESULTS) -> dict[str, list[Record]]:
    """Return the finished runs of each row, without the trials."""
    return finished(path for path in sorted(folder.glob("records-*.jsonl")) if path.stem != "records-pilot")


def earlier() -> dict[str, list[Record]]:
    """Return the finished runs of the paper's networks with low rank from the start, and of their controls."""
    return finished(ROOT / "results" / name for name in ("beyond-cifar10.jsonl", "beyond-mnist.jsonl"))


def finished(paths: Iterable[Path]) -> dict[str, list[Record]]:
    """Return the runs in these files that did not diverge, by row."""
    found: dict[str, list[Record]] = defaultdict(list)
    for _, record in chain.from_iterable(map(read_records, paths)):
        if not record["diverged"]:
            found[record["row"]].append(record)
    return dict(found)


def earlier_table() -> str:
    """Return a Markdown table of those runs, smallest networks first."""
    lines = ["| data | network | parameters | accuracy, % | row |", "|---|---|---:|---|---|"]
    order = sorted(earlier().items(), key=lambda item: (item[1][0]["config"]["data"], item[1][0]["parameters"]))
    for row, runs in order:
        config = runs[0]["config"]
        form = "canonical" if config["norm"] == "cp" else "dense"
        size = f"{runs[0]['parameters']:,}"
        lines.append(f"| {config['data']} | {config['model']}, {form} | {size} | {spread(runs)} | `{row}` |")
    return "\n".join(lines)


def folder_name(row: str) -> str:
    """Return the name of the folder of a row's network.

    >>> folder_name("records-mnist/5k")
    'mnist-5k'
    """
    return row.removeprefix("records-").replace("/", "-")


def spread(runs: Sequence[Record]) -> str:
    """Return mean and sample standard deviation of the last epochs, and the number of runs."""
    values = [run["test_accuracy_last"] for run in runs]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation} ({len(values)})"


def mean(runs: Sequence[Record]) -> float:
    """Return the mean accuracy of the last epochs."""
    return statistics.fmean(run["test_accuracy_last"] for run in runs)


# --- what it costs ----------------------------------------------------------------------------------------------------


def measure(folder: Path = RESULTS, data_dir: Path | None = None) -> dict[str, Any]:
    """Return parameters, FLOPs and milliseconds of every row with a goal, and the test accuracy of committed networks.

    What a network costs does not depend on its training: rows without a committed network are measured as drawn.
    """
    torch.set_num_threads(1)
    found = {}
    known = {row.key: row.config for table in rows.TABLES for row in table.rows}
    for key in dict.fromkeys(key for goal in rows.GOALS for key in (goal.row, goal.control)):
        config, run = known[key], RunFolder(folder / "networks" / folder_name(key))
        trained = (run / "model.safetensors").exists()
        network = trained_network(run) if trained else build_model(config, blank(config.data), torch.device("cpu"))
        blank_set = blank(config.data)
        cost = costs(network.eval(), normalize(blank_set.test_images, blank_set.mean, blank_set.std))
        if trained:
            data = load(config.data, data_dir)
            cost["file_bytes"] = (run / "model.safetensors").stat().st_size
            cost["test_accuracy"] = round(accuracy(network, data), 2)
        found[folder_name(key)] = cost
        print(key, cost, flush=True)
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"environment": environment(), "load_average": load_average, "networks": found}


@torch.no_grad()
def costs(network: nn.Module, example: Tensor) -> dict[str, Any]:  # example: (1, C, H, W)
    """Return what one image takes, with weights rebuilt as dense ones and with the terms one after the other."""
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in network.parameters())}
    forms = {"dense": network}
    if cpnorm.canonical_layers(network):
        forms["dense"] = cpnorm.fold(copy.deepcopy(network))
        forms["factorised"] = cpnorm.factorize(copy.deepcopy(network), example, goal="parameters")
    for name, form in forms.items():
        with FlopCounterMode(display=False) as counter:
            form(example)
        found[f"flops_{name}"] = counter.get_total_flops()
        # Processor time, which other processes change less than the time on the clock.
        taken = timing.interleaved({name: partial(form, example)}, rounds=30, warmup=5, clock=time.process_time)
        found[f"ms_{name}"] = round(timing.milliseconds(taken[name])["median"], 3)
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def goal_table(runs: Mapping[str, Sequence[Record]], measured: Mapping[str, Any]) -> str:
    """Return a Markdown table of the goals, with what was reached."""
    lines = [
        "| goal | reached | parameters | row | dense, as many | MFLOP, factorised / dense | ms, factorised / dense |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for goal in rows.GOALS:
        here = runs.get(goal.row, [])
        control = runs.get(goal.control, [])
        cost = measured.get("networks", {}).get(folder_name(goal.row), {})
        reached, count = "no finished run", "–"
        if here:
            met = mean(here) >= goal.accuracy and here[0]["parameters"] <= goal.parameters
            verdict = "not met" if not met else "too few runs" if len(here) < RUNS else "**met**"
            reached, count = f"{spread(here)}: {verdict}", f"{here[0]['parameters']:,}"
        narrow = measured.get("networks", {}).get(folder_name(goal.control), {})
        dense = f"{spread(control)} at {control[0]['parameters']:,}" if control else "no finished run"
        if narrow:
            dense += f"; {narrow['flops_dense'] / 1e6:.1f} MFLOP, {narrow['ms_dense']:.2f} ms"
        flops = " / ".join(f"{cost[k] / 1e6:.1f}" for k in ("flops_factorised", "flops_dense") if k in cost) or "–"
        times = " / ".join(f"{cost[k]:.2f}" for k in ("ms_factorised", "ms_dense") if k in cost) or "–"
        lines.append(f"| {goal.name} | {reached} | {count} | `{goal.row}` | {dense} | {flops} | {times} |")
    return "\n".join(lines)


def stopped_table(runs: Mapping[str, Sequence[Record]], folder: Path = RESULTS) -> str:
    """Return a Markdown table of the runs that were stopped, beside finished canonical ones at the same epoch."""
    found: dict[str, list[Record]] = defaultdict(list)
    path = folder / "stopped.json"
    for run in json.loads(path.read_text()) if path.exists() else ():
        if run["seed"] not in {there["seed"] for there in runs.get(run["row"], ())}:
            found[run["row"]].append(run)
    lines = [
        "| row | parameters | stopped after epoch | accuracy there, % | canonical row at that epoch, % |",
        "|---|---:|---:|---|---|",
    ]
    for row, stopped in found.items():
        first = stopped[0]
        epoch, canonical = first["epochs"], runs.get(row.partition("-dense")[0], []) if "-dense" in row else []
        beside = spread(at_epoch(canonical, epoch)) if canonical else "–"
        here = f"{epoch} of {first['config']['epochs']} | {spread(at_epoch(stopped, epoch))}"
        lines.append(f"| `{row}` | {first['parameters']:,} | {here} | {beside} |")
    return "\n".join(lines)


def at_epoch(runs: Sequence[Record], epoch: int) -> list[Record]:
    """Return the runs as if this epoch were their last one."""
    return [{"test_accuracy_last": run["curve"]["test_accuracy"][epoch - 1]} for run in runs]


def others_table() -> str:
    """Return a Markdown table of the networks of others."""
    lines = ["| data | network | parameters | accuracy, % | reported as |", "|---|---|---:|---:|---|"]
    lines += [f"| {data} | {name} | {size:,} | {value:g} | {how} |" for data, name, size, value, how in OTHERS]
    return "\n".join(lines)


def pilot_table(folder: Path = RESULTS) -> str:
    """Return a Markdown table of the trials, on held-out training images."""
    lines = [
        "| trial | parameters | epochs | held-out accuracy, % | training accuracy, % |",
        "|---|---:|---:|---:|---:|",
    ]
    path = folder / "records-pilot.jsonl"
    for _, record in read_records(path) if path.exists() else ():
        curve = record["curve"]
        held_out, trained = curve["validation_accuracy"][-1], curve["train_accuracy"][-1]
        key = record["row"].partition("/")[2]
        lines.append(f"| `{key}` | {record['parameters']:,} | {record['epochs']} | {held_out:.2f} | {trained:.2f} |")
    return "\n".join(lines)


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """Return the page with each part between its two comments."""
    for name, part in parts.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        if not (begin and end):
            raise ValueError(f"expected the comments {BEGIN.format(name)} and {END.format(name)} in the page")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def draw(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw parameters against accuracy, one panel for each data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#8a8f98")
    style = {"svg.fonttype": "path", "svg.hashsalt": "cpnorm", "font.size": 9, "legend.frameon": False, **grey}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for axes, (data, title) in zip(panels, (("mnist", "MNIST"), ("cifar10", "CIFAR-10")), strict=True):
            ours = [list(found) for found in runs.values() if found[0]["config"]["data"] == data]
            for norm, colour, label in (("cp", "#d9731a", "canonical"), ("none", "#3b7dd8", "dense, same recipe")):
                here = [found for found in ours if found[0]["config"]["norm"] == norm]
                points = sorted((found[0]["parameters"], mean(found)) for found in here)
                if points:
                    axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=6, label=label)
            others = [other for other in OTHERS if other[0] == data]
            axes.plot([o[2] for o in others], [o[3] for o in others], "x", color="#8a8f98", label="others")
            for _, name, size, value, _ in others:
                axes.annotate(name, (size, value), xytext=(4, 4), textcoords="offset points", fontsize=7)
            axes.set(xscale="log", xlabel="parameters", ylabel="test accuracy, %", title=title)
            axes.legend(loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    """Make the page again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="count, time and score the committed networks first")
    parser.add_argument(
        "--data-dir", type=Path, help="folder of the data; default: $CPNORM_DATA, then the user's cache"
    )
    options = parser.parse_args()
    costs_file = RESULTS / "costs.json"
    if options.measure:
        costs_file.write_text(json.dumps(measure(data_dir=options.data_dir), indent=1) + "\n")
    measured = json.loads(costs_file.read_text()) if costs_file.exists() else {}
    runs = read()
    parts = {"goals": goal_table(runs, measured), "earlier": earlier_table()}
    parts |= {"stopped": stopped_table(runs), "others": others_table(), "trials": pilot_table()}
    PAGE.write_text(with_parts(PAGE.read_text(), parts))
    draw(earlier() | runs, FIGURE)


if __name__ == "__main__":
    main()
