"""Compress a network that others have trained: cut with calibration data, fine-tune, export, and measure each step.

    cpnorm data get cifar10 && cpnorm data get resnet56-cifar10
    python examples/compress_pretrained.py [--network resnet20-cifar10] [--shares 0.5 0.33] [--epochs 1] [--out FOLDER]

Prints a Markdown table. On two quiet cores ResNet-20 at one share without fine-tuning takes about two minutes; an epoch
of fine-tuning on all images is for a GPU (--device cuda), or for --train-images 5000.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.training.evaluation import accuracy, calibration_batches
from cpnorm.lab.training.finetune import Recipe, finetune
from cpnorm.lab.training.networks import load_pretrained


def images_of(network: str, args: argparse.Namespace) -> ImageSet:
    """Return the data set that a network was trained on, normalised as it was then."""
    about = pretrained.NETWORKS[network]
    data = load(about.data, args.data_dir)
    return dataclasses.replace(
        data,
        train_images=data.train_images[: args.train_images],
        train_labels=data.train_labels[: args.train_images],
        test_images=data.test_images[: args.test_images],
        test_labels=data.test_labels[: args.test_images],
        mean=about.mean,
        std=about.std,
    ).to(args.device)


def compress(dense: nn.Module, share: float, data: ImageSet, args: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """Return the canonical network at a share of the parameters, and its accuracies: cut, fine-tuned."""
    model = cpnorm.canonical_norm(copy.deepcopy(dense))  # exact: it computes what it did
    calibration = calibration_batches(data, args.calibration)
    cpnorm.truncate(model, params=int(share * count(dense)), data=calibration)
    accuracies = [accuracy(model, data)]
    if args.epochs:
        finetune(model, data, recipe(args), teacher=dense)
        accuracies.append(accuracy(model, data))
    return model, accuracies


def recipe(args: argparse.Namespace) -> Recipe:
    precision = "bf16" if args.device == "cuda" else "fp32"
    return Recipe(epochs=args.epochs, precision=precision)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def ratio(run: Callable[[], Any], base: Callable[[], Any], turns: int = 15, calls: int = 3) -> float:
    """Return how long a run takes against the base, which takes turns with it: the median of the ratios."""
    ratios = []
    for _ in range(turns):
        taken = []
        for each in (run, base):
            start = time.perf_counter()
            for _ in range(calls):
                each()
            taken.append(time.perf_counter() - start)
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


def in_torch(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with torch.inference_mode():
            return model(image)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(pretrained.NETWORKS), default="resnet56-cifar10")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5], help="of the parameters, to keep")
    parser.add_argument("--epochs", type=float, default=0, help="of fine-tuning")
    parser.add_argument("--calibration", type=int, default=1024, help="training images that the cut looks at")
    parser.add_argument("--train-images", type=int, help="fine-tune on the first of them only")
    parser.add_argument("--test-images", type=int, help="test on the first of them only")
    parser.add_argument("--data-dir", type=Path, help="else $CPNORM_DATA, then the user's cache")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="keep the files here")
    args = parser.parse_args()

    data = images_of(args.network, args)
    dense = load_pretrained(args.network, args.data_dir).to(args.device)
    image = calibration_batches(data, 1)[0][0]
    print("| | parameters | cut | fine-tuned | time, batch 1 | ONNX file |")
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| dense | {count(dense):,} | {accuracy(dense, data):.2f} % | | 1.00 | |", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for share in args.shares:
            model, accuracies = compress(dense, share, data, args)
            model, reference, example = model.cpu().eval(), copy.deepcopy(dense).cpu(), image.cpu()
            small = cpnorm.factorize(model, example)  # plain torch layers, the fastest forms for one image
            path = folder / f"{args.network}-{100 * share:g}.onnx"
            cpnorm.save(model, path.with_suffix(".safetensors"))
            cpnorm.export_onnx(small, example, path, dynamic_batch=False)
            took = ratio(in_torch(small, example), in_torch(reference, example))
            tuned = f"{accuracies[1]:.2f} %" if len(accuracies) > 1 else ""
            size = path.stat().st_size / 1e3
            print(f"| {100 * share:g} % | {count(model):,} | {accuracies[0]:.2f} % | {tuned} | {took:.2f} "
                  f"| {size:,.0f} kB |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
