"""Criteria and refits of cpnorm.truncate at equal weights, on one trained network, before and after fine-tuning.

    python examples/compare_truncation.py [--seeds 3] [--share 0.1]

Trains a small canonical network on scikit-learn's digits (1,797 real images of 8 x 8 pixels), truncates copies of it to
the same share of its weights, and prints test accuracies as a Markdown table. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm

WAYS: dict[str, dict[str, Any]] = {
    "the paper: a rate per layer, λ": {},
    "λ": {"criterion": "lambda"},
    "λ at the outputs": {"criterion": "lambda", "data": True},
    "Gram": {"criterion": "gram"},
    "Gram at the outputs": {"criterion": "gram", "data": True},
    "Taylor": {"criterion": "taylor", "data": True},
}
REFITS = ("none", "lambdas", "als", "outputs")


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    handle = cpnorm.renormalize_after(optimizer, model)
    for _ in range(epochs):
        for chosen in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1)
    arguments = parser.parse_args()

    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    whole = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        x, y, x_test, y_test = digits(seed)

        def accuracy(model: nn.Module, x: Tensor = x_test, y: Tensor = y_test) -> float:
            with torch.no_grad():
                return 100 * (model(x).argmax(1) == y).float().mean().item()

        trained = cpnorm.canonical_norm(network(), init="power", generator=torch.Generator().manual_seed(seed))
        train(trained, x, y, epochs=8, lr=2e-3)
        whole.append(accuracy(trained))
        weights = sum(p.numel() for p in trained.parameters())
        data = [(x[:400], y[:400])]
        for way, options in WAYS.items():
            budget: dict[str, Any] = (
                {"params": int(arguments.share * weights)} if options else {"rate": 1 - arguments.share}
            )
            for refit in REFITS:
                model = copy.deepcopy(trained)
                batches = data if options.get("data") or refit == "outputs" else None
                cpnorm.truncate(model, **budget, **{**options, "data": batches, "refit": refit})
                before = accuracy(model)
                torch.manual_seed(seed)
                train(model, x, y, epochs=2, lr=1e-3)
                found.setdefault((way, refit), []).append((before, accuracy(model)))

    print(f"{weights:,} weights: {sum(whole) / len(whole):.1f} % of the test images right.")
    print(f"At {100 * arguments.share:g} % of these weights, at once → after two epochs of fine-tuning:\n")
    print(f"| criterion | {' | '.join(f'refit {refit}' for refit in REFITS)} |")
    print("|---|" + "---|" * len(REFITS))
    for way in WAYS:
        means = [torch.tensor(found[way, refit]).mean(0).tolist() for refit in REFITS]
        print(f"| {way} | {' | '.join(f'{before:.1f} → {after:.1f}' for before, after in means)} |")


if __name__ == "__main__":
    main()
