"""Accelerate needs nothing special: hook the optimizer, then prepare both, as for any model.

    python examples/train_with_accelerate.py          # or: accelerate launch examples/train_with_accelerate.py

Trains a canonical network on scikit-learn's digits for a few epochs, and, in one process, truncates it on the way.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cpnorm


def main(epochs: int = 4) -> float:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10))
    model = cpnorm.canonical_norm(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    cpnorm.renormalize_after(optimizer, model)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    data = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=32, shuffle=True)
    runner, prepared, data = accelerator.prepare(model, optimizer, data)
    for epoch in range(epochs):
        for images, labels in data:
            with accelerator.accumulate(runner):
                accelerator.backward(nn.functional.cross_entropy(runner(images), labels))
                prepared.step()
                prepared.zero_grad()
        if epoch == 1 and accelerator.num_processes == 1:  # DDP keeps the shapes it was built with
            report = cpnorm.truncate(model, params=15_000, optimizer=optimizer)
            accelerator.print(report)
    with torch.no_grad():
        accuracy = (model(x[1200:].to(accelerator.device)).argmax(1).cpu() == y[1200:]).float().mean().item()
    accelerator.print(f"{100 * accuracy:.1f} % of the test images right")
    return accuracy


if __name__ == "__main__":
    main()
