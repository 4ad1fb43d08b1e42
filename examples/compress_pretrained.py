"""Compress a network that somebody has trained: decompose, truncate with calibration data, fine-tune, export.

    python examples/compress_pretrained.py [--shares 0.5 0.1] [--seeds 1] [--out FOLDER]

The network is a small ResNet with batch normalisation, trained here first, on scikit-learn's digits (1,797 real images
of 8 x 8 pixels): put your own in its place. Prints a Markdown table. About a minute for one seed and one share.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm

WEIGHTS, CUT, TUNED, TORCH, ONNX, FILE = "weights", "after the cut", "fine-tuned", "torch", "onnxruntime", "file"


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    blocks = Block(32, 64, 1), Block(64, 128, 2), Block(128, 256, 2)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> None:
    """Any loop will do; for a canonical model one line is added."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    if cpnorm.canonical_layers(model):
        cpnorm.renormalize_after(optimizer, model)
    steps = epochs * -(-len(y) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            shifted = torch.roll(x[chosen], torch.randint(-1, 2, (2,)).tolist(), (2, 3))
            F.cross_entropy(model(shifted), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def compress(dense: nn.Module, share: float, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> tuple[Any, ...]:
    """The whole path; returns the small plain model and the accuracies on the way."""
    model = cpnorm.canonical_norm(copy.deepcopy(dense))  # exact: it computes what it did
    assert accuracy(model, x_test, y_test) == accuracy(dense, x_test, y_test)
    budget = int(share * count(dense))
    calibration = [(x[:400], y[:400])]
    cpnorm.truncate(model, params=budget, criterion="gram", refit="outputs", data=calibration)
    cut = accuracy(model, x_test, y_test)
    train(model, x, y, epochs=4, lr=1e-3)
    small = cpnorm.factorize(model, x_test[:1])  # plain torch layers, the fastest forms for one image
    return model, small, cut


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def seconds(run: Callable[[], Any], base: Callable[[], Any], turns: int = 30, calls: int = 20) -> float:
    """How long it takes against the base, which takes turns with it: the median of the ratios."""
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


def in_onnxruntime(model: nn.Module, image: Tensor, path: Path) -> Callable[[], Any]:
    import onnxruntime

    cpnorm.export_onnx(model, image, path, dynamic_batch=False)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: image.numpy()}
    return lambda: session.run(None, feed)


def story(seed: int, shares: list[float], folder: Path) -> dict[str, dict[str, float]]:
    """A row for the dense network and one for each share of its weights."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    image = x_test[:1]
    dense = network()
    train(dense, x, y, epochs=8, lr=3e-3)
    longer = copy.deepcopy(dense)
    train(longer, x, y, epochs=4, lr=1e-3)  # what fine-tuning alone brings
    base, base_onnx = in_torch(dense, image), in_onnxruntime(dense, image, folder / "dense.onnx")
    rows = {
        "dense": {
            WEIGHTS: count(dense),
            CUT: accuracy(dense, x_test, y_test),
            TUNED: accuracy(longer, x_test, y_test),
            TORCH: 1.0,
            ONNX: 1.0,
            FILE: (folder / "dense.onnx").stat().st_size / 1e3,
        }
    }
    for share in shares:
        model, small, cut = compress(dense, share, x, y, x_test, y_test)
        path = folder / f"small-{100 * share:g}.onnx"
        cpnorm.save(model, path.with_suffix(".safetensors"))
        rows[f"{100 * share:g} %"] = {
            WEIGHTS: count(model),
            CUT: cut,
            TUNED: accuracy(small, x_test, y_test),
            ONNX: seconds(in_onnxruntime(small, image, path), base_onnx),
            TORCH: seconds(in_torch(small, image), base),
            FILE: path.stat().st_size / 1e3,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep the files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        stories = [story(seed, arguments.shares, folder) for seed in range(arguments.seeds)]

    print("| | weights | accuracy after the cut | fine-tuned | time, torch | time, onnxruntime | ONNX file |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in stories[0]:
        mean = {key: statistics.mean(each[name][key] for each in stories) for key in stories[0][name]}
        accuracies = f"{mean[CUT]:.1f} % | {mean[TUNED]:.1f} %"
        print(f"| {name} | {mean[WEIGHTS]:,.0f} | {accuracies} | {mean[TORCH]:.2f} | {mean[ONNX]:.2f} "
              f"| {mean[FILE]:,.0f} kB |")  # fmt: skip


if __name__ == "__main__":
    main()
