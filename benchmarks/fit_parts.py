"""Claim: each part of the fit to data brings a cut network nearer to the dense one.

Published ResNet-20 cut to a third of its parameters and ResNet-56 to a fifth, without training, on several draws of
1,024 augmented training images. Each row takes one part away, or takes other settings: the corrections of sums with a
residual stream and of rectifiers, the spread that batch norms restore, the number of steps, and the samples of large
layers. What counts is the divergence from the dense network's outputs on the last 3,000 training images, which no fit
has seen; the test set is not read. Differences are paired by draw.

    cpnorm data get cifar10 && cpnorm data get resnet20-cifar10 && cpnorm data get resnet56-cifar10
    python benchmarks/fit_parts.py --threads 1
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import cpnorm
import timing
from compression_networks import divergence
from cpnorm.compress.fitting import layer_target, moments, sequence
from cpnorm.compress.fitting.successors import Event, Successors, successors
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.training.evaluation import accuracy, calibration_batches
from cpnorm.lab.training.networks import load_pretrained

SHARES = {"resnet20": 1 / 3, "resnet56": 1 / 5}
IMAGES, HELD_OUT = 1024, 3000


def without(
    sums: bool, rectifiers: bool
) -> Callable[[list[Event], Collection[nn.Module]], dict[nn.Module, Successors]]:
    """Return a search for what follows layers that leaves out sums or rectifiers."""

    def found(events: list[Event], layers: Collection[nn.Module]) -> dict[nn.Module, Successors]:
        every = successors(events, layers)
        if sums:
            every = {y: each if each.stream is None else Successors(each.norm) for y, each in every.items()}
        return {y: dataclasses.replace(each, rectified=each.rectified and not rectifiers) for y, each in every.items()}

    return found


def steps(factor: float) -> list[Any]:
    fit = sequence.fit

    def other(problem: Any, rank: int, candidates: Any, init: Any = None, *, steps: int = 150) -> Any:
        return fit(problem, rank, candidates, init, steps=int(factor * steps))

    return [mock.patch.object(sequence, "fit", other)]


def no_spread(target: layer_target.Target, weight: torch.Tensor) -> torch.Tensor:
    return torch.ones(weight.shape[0] * weight.shape[1], dtype=torch.float64, device=weight.device)


def variants(name: str) -> dict[str, list[Any]]:
    """Return the patches of each variant; settings are compared on the smaller network alone."""
    spread = mock.patch.object(layer_target.Target, "spread", no_spread)

    def follows(sums: bool, rectifiers: bool) -> Any:
        return mock.patch.object(sequence, "successors", without(sums, rectifiers))

    parts = {
        "as it is": [],
        "without rectifiers": [follows(False, True)],
        "without sums": [follows(True, False)],
        "without spread": [spread],
        "without all three": [follows(True, True), spread],
    }
    settings = {
        "half the steps": steps(0.5),
        "twice the steps": steps(2.0),
        "a third of the samples": [
            mock.patch.object(moments, "LEAST_SAMPLES", moments.LEAST_SAMPLES // 3),
            mock.patch.object(moments, "SAMPLES_PER_ENTRY", moments.SAMPLES_PER_ENTRY // 3),
        ],
    }
    return parts | (settings if name == "resnet20" else {})


@contextmanager
def patched(patches: list[Any]) -> Iterator[None]:
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def cut(network: nn.Module, data: ImageSet, share: float, draw: int) -> dict[str, Any]:
    """Cut a copy on one draw of images and measure it on the held-out ones."""
    first = draw * IMAGES
    images, labels = data.train_images[first : first + IMAGES], data.train_labels[first : first + IMAGES]
    drawn = dataclasses.replace(data, train_images=images, train_labels=labels)
    batches = calibration_batches(drawn, IMAGES, seed=draw)
    model, started = cpnorm.canonical_norm(copy.deepcopy(network)), time.process_time()
    cpnorm.truncate(model, params=share, data=batches)
    seconds = time.process_time() - started
    return {
        "divergence": divergence(model, network, data),
        "held-out accuracy": accuracy(model, data),
        "seconds": seconds,
    }


def main() -> None:
    parser = timing.parser(__doc__, rounds=1)
    parser.add_argument("--networks", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--draws", type=int, default=3, help="of calibration images")
    parser.add_argument("--data-dir", help="folder of the data")
    parser.add_argument("--weights", help="folder of the published weights as safetensors; else among the data")
    args = timing.start(parser)
    tables: dict[str, list[dict[str, Any]]] = {}
    claims = []
    for name in args.networks:
        published = f"{name}-cifar10"
        file = None if args.weights is None else f"{args.weights}/{published}.safetensors"
        network, about = load_pretrained(published, args.data_dir, file=file), pretrained.NETWORKS[published]
        data = load("cifar10", args.data_dir)
        held_out = {"test_images": data.train_images[-HELD_OUT:], "test_labels": data.train_labels[-HELD_OUT:]}
        data = dataclasses.replace(data, mean=about.mean, std=about.std, **held_out)
        found: dict[str, list[Mapping[str, Any]]] = {}
        for draw in range(args.draws):
            for variant, patches in variants(name).items():
                with patched(patches):
                    found.setdefault(variant, []).append(cut(network, data, SHARES[name], draw))
                print(json.dumps({"network": name, "variant": variant, "draw": draw, **found[variant][-1]}), flush=True)
        rows = [row(variant, runs, found["as it is"]) for variant, runs in found.items()]
        tables[f"{name}, {100 * SHARES[name]:.0f} % of the parameters, {args.draws} draws"] = rows
        claims += [
            timing.at_least(f"{name}: divergence {each['fit']}, in that of the whole fit", each["÷ as it is"], 1)
            for each in rows[1:5]
        ]
    timing.write("fit_parts", args.device, title="Parts of the fit to data", claims=claims, tables=tables)


def row(variant: str, runs: list[Mapping[str, Any]], whole: list[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [one["divergence"] / other["divergence"] for one, other in zip(runs, whole, strict=True)]
    return {
        "fit": variant,
        "divergence": timing.spread(run["divergence"] for run in runs),
        "÷ as it is": timing.spread(ratios),
        "held-out accuracy, %": statistics.fmean(run["held-out accuracy"] for run in runs),
        "processor seconds": timing.spread(run["seconds"] for run in runs),
    }


if __name__ == "__main__":
    main()
