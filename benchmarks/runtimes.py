"""Claim: factorised networks run wherever dense ones run, with torch's outputs, and keep their accuracy in int8.

ResNet-56 and ResNet-20 for CIFAR-10 (published weights), dense and cut by ``cpnorm.shrink`` to 50 and 33 % of their
parameters without training, in every runtime: the largest difference from torch's outputs, the size of the file,
milliseconds per image at batch 1 and 32, and accuracy on the official test images. Times are compared with the dense
network in the same runtime, in turns; the threads are --threads in every runtime. Int8 is calibrated on 256 training
images. A runtime that is not installed, or fails, is left out with its error.
1. Runtimes in float32 differ from torch by at most 0.1 % of the largest output.
2. Static int8 costs networks cut to 50 % at most one point of accuracy more than it costs dense ones.

    pip install onnx onnxscript onnxruntime openvino nncf executorch torchao
    python benchmarks/runtimes.py --data-dir DATA --work FOLDER [--networks resnet56] [--runtimes openvino]
    python benchmarks/runtimes.py --work FOLDER --record [NAME]   # a record, and the tables of docs/guides/deploy.md

``FOLDER`` keeps the cut networks and one line for each network and runtime: what is there is not measured again. The
guide has the tables of all records.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
import timing
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.training.evaluation import calibration_batches, prepared
from cpnorm.lab.training.networks import load_pretrained
from runtime_backends import LARGEST_BATCH, RUNTIMES, Run

SHARES = (0.5, 0.33)
NETWORKS = {"resnet56": "resnet56-cifar10", "resnet20": "resnet20-cifar10"}
CALIBRATION, INT8_CALIBRATION, COMPARED = 1024, 256, 64  # images
BATCHES = (1, LARGEST_BATCH)
TURN_SECONDS = 0.15
PACKAGES = ("onnx", "onnxruntime", "openvino", "nncf", "executorch", "torchao")
PAGE = timing.RESULTS.parent.parent / "docs" / "guides" / "deploy.md"
BEGIN, END = "<!-- made by benchmarks/runtimes.py -->", "<!-- end of what it made -->"


# --- networks and images ------------------------------------------------------------------------------------------


def images_of(network: str, data_dir: Path | None) -> tuple[ImageSet, Tensor]:
    """Return the data set, normalised as the network was trained, and images to calibrate int8 with."""
    about, data = pretrained.NETWORKS[NETWORKS[network]], load("cifar10", data_dir)
    data = dataclasses.replace(data, mean=about.mean, std=about.std)
    return data, prepared(data.train_images[:INT8_CALIBRATION], data)


def models_of(network: str, data: ImageSet, work: Path, data_dir: Path | None) -> dict[str, nn.Module]:
    """Return the dense network and those cut from it, which are kept in the folder ``work``."""
    dense = load_pretrained(NETWORKS[network], data_dir).eval()
    found: dict[str, nn.Module] = {"dense": dense}
    for share in SHARES:
        file = work / f"{network}-{share}.pt"
        if not file.exists():
            batches = calibration_batches(data, CALIBRATION, mode="crop-flip")
            small = cpnorm.shrink(dense, batches, parameters=share, samples=CALIBRATION)
            print(small.report, flush=True)
            torch.save(small.model, file)
        found[f"{100 * share:g} %"] = torch.load(file, weights_only=False).eval()
    return found


# --- measuring ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    network: str, key: str, models: Mapping[str, nn.Module], images: tuple[ImageSet, Tensor], args: Any
) -> list[Any]:
    """Return a row for each network in one runtime."""
    data, calibration = images
    x, labels = prepared(data.test_images[: args.images], data), data.test_labels[: args.images]
    runs, rows = {}, []
    for name, model in models.items():
        path = args.work / f"{network}-{name.removesuffix(' %')}"
        runs[name], size = RUNTIMES[key].make(model, calibration, path)
        wanted = model(x[:COMPARED])
        logits = in_batches(runs[name], x)
        row = {"parameters left": name, "file, kB": size / 1e3}
        row["largest difference, %"] = 100 * float((logits[:COMPARED] - wanted).abs().max() / wanted.abs().max())
        row["accuracy, %"] = 100 * float((logits.argmax(1) == labels).float().mean())
        rows.append(row | {"test images": len(x)})
        print(key, rows[-1], flush=True)
    for batch in BATCHES:
        once = {name: lambda run=run, batch=batch: run(x[:batch]) for name, run in runs.items()}
        seconds = timing.in_turns(once, args.rounds, TURN_SECONDS)
        for row in rows:
            name = row["parameters left"]
            row[f"batch {batch}, ms an image"] = timing.milliseconds(seconds[name], batch)
            row[f"batch {batch}, times as fast"] = timing.ratio(seconds, "dense", name)
    return rows


def in_batches(run: Run, x: Tensor) -> Tensor:
    """Return the outputs for all images, in batches of one size: the last one is filled up."""
    padded = torch.cat([x, x[: -len(x) % LARGEST_BATCH]])
    return torch.cat([run(rows) for rows in padded.split(LARGEST_BATCH)])[: len(x)]


def one_line(error: BaseException) -> str:
    """Return an error as one short sentence."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --- record and page ----------------------------------------------------------------------------------------------


def read_lines(work: Path) -> list[dict[str, Any]]:
    file = work / "lines.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def record(lines: Iterable[Mapping[str, Any]]) -> tuple[list[Any], dict[str, Any], dict[str, str]]:
    """Return the claims, the tables by runtime and what was left out, of the lines of a folder."""
    claims: list[Any] = []
    tables: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for key, runtime in RUNTIMES.items():
        own = [line for line in lines if line["runtime"] == key]
        for line in own:
            if line["error"]:
                left_out[f"{runtime.title}, {line['network']}"] = line["error"]
                continue
            rows = [{"network": line["network"], **row} for row in line["rows"]]
            tables.setdefault(runtime.title, []).extend(rows)
            where = f"{runtime.title}, {line['network']}"
            if not runtime.int8:
                worst = max(row["largest difference, %"] for row in rows)
                text = f"largest difference from torch's outputs, {where}, % of the largest"
                claims.append(timing.at_most(text, worst, 0.1, "%"))
    plain = {
        (line["network"], row["parameters left"]): row["accuracy, %"]
        for line in lines
        if line["runtime"] == "eager"
        for row in line["rows"]
    }
    for key, runtime in RUNTIMES.items():
        for line in lines if runtime.int8 else ():
            if line["runtime"] != key or line["error"] or (line["network"], "dense") not in plain:
                continue
            lost = {row["parameters left"]: plain[line["network"], row["parameters left"]] - row["accuracy, %"]
                    for row in line["rows"]}  # fmt: skip
            text = f"points that int8 costs at 50 % more than dense, {runtime.title}, {line['network']}"
            claims.append(timing.at_most(text, lost["50 %"] - lost["dense"], 1.0, "points"))
    return claims, tables, left_out


def section(found: Mapping[str, Any]) -> str:
    """Return the tables of the guide, made of the record."""
    machine, lines = found["machine"], []
    for title, rows in found["tables"].items():
        lines += [f"**{title}**", ""]
        lines += [
            "| network | parameters left | file | largest difference | accuracy | ms an image, batch 1 | batch 32 |"
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        for row in rows:
            times = []
            for batch in BATCHES:
                ms, ratio = (row[f"batch {batch}, {what}"]["median"] for what in ("ms an image", "times as fast"))
                times.append(f"{ms:.2f}" if row["parameters left"] == "dense" else f"{ms:.2f} ({ratio:.2f}×)")
            cells = [row["network"], row["parameters left"], f"{row['file, kB']:,.0f} kB"]
            cells += [f"{row['largest difference, %']:.2g} %", f"{row['accuracy, %']:.2f} %", *times]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    images = sorted({row["test images"] for rows in found["tables"].values() for row in rows})
    counts = " or ".join(f"{count:,}" for count in images)
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    packages = ", ".join(f"{name} {version}" for name, version in sorted(machine["versions"].items()))
    lines += [
        "The difference is the largest from torch's outputs, as a share of the largest output. Accuracy is that on the",
        f"first {counts} test images. In brackets: how many times as fast as the dense network in the same runtime.",
        f"(`{found['command']}`; {machine['cpu']}, {threads}, load {machine['load']:g}; {packages}.)",
    ]
    if machine["load"] > machine["threads"]:
        lines[-1:] = ["The machine was busy with other work: ratios, taken in turns, say more than times.", lines[-1]]
    if found["left_out"]:
        lines += ["", "What does not work:", ""]
        lines += [f"- {name}: `{error}`" for name, error in found["left_out"].items()]
    return "\n".join(lines)


def sections() -> str:
    """Return the tables of all records, the first run's first."""
    found = [json.loads(path.read_text()) for path in timing.RESULTS.glob("runtimes_*.json")]
    return "\n\n".join(section(each) for each in sorted(found, key=lambda each: (each["date"], each["command"])))


def write_record(args: argparse.Namespace) -> None:
    lines = read_lines(args.work)
    claims, tables, left_out = record(lines)
    title = "Factorised networks in other runtimes"
    path = timing.write("runtimes", args.record, title=title, claims=claims, tables=tables, left_out=left_out)
    found = json.loads(path.read_text())
    found["command"] = lines[-1]["command"]
    found["machine"] = lines[-1]["machine"]
    found["machine"]["versions"] |= lines[-1]["versions"]
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{sections()}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = timing.parser(__doc__, rounds=7)
    parser.add_argument("--data-dir", type=Path, help="folder of CIFAR-10 and of the published weights")
    parser.add_argument("--work", type=Path, required=True, help="folder for networks, files and lines of results")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--images", type=int, default=10_000, help="the first ones of the test set")
    parser.add_argument(
        "--record", nargs="?", const="cpu", metavar="NAME", help="write a record of what is in the folder"
    )
    args = timing.start(parser)
    if args.record:
        write_record(args)
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    args.work.mkdir(parents=True, exist_ok=True)
    done = {(line["network"], line["runtime"]) for line in read_lines(args.work)}
    for network in args.networks:
        wanted = [key for key in args.runtimes if (network, key) not in done]
        if not wanted:
            continue
        images = images_of(network, args.data_dir)
        models = models_of(network, images[0], args.work, args.data_dir)
        for key in wanted:
            started, rows, error = time.perf_counter(), [], ""
            try:
                rows = measure(network, key, models, images, args)
            except Exception as raised:  # runtimes fail in their own ways
                error = one_line(raised)
                print(key, "left out:", error, flush=True)
            line = {"network": network, "runtime": key, "rows": rows, "error": error, "versions": versions()}
            line |= {"seconds": time.perf_counter() - started, "machine": timing.machine()}
            options = f"--threads {args.threads} --rounds {args.rounds} --images {args.images}"
            options += "" if args.runtimes == list(RUNTIMES) else f" --runtimes {' '.join(args.runtimes)}"
            line["command"] = f"python benchmarks/runtimes.py --data-dir DATA --work FOLDER {options}"
            with (args.work / "lines.jsonl").open("a") as file:
                file.write(json.dumps(line) + os.linesep)


if __name__ == "__main__":
    main()
