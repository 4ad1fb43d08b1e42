"""Recognise data sets by their content, so that no run trains or is measured on other data than it says."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpnorm.lab.data.images import ImageSet

OFFICIAL = {  # SHA-256 as `digest` computes it
    "digits": "270629c761cdfa7e8a0321fd5bd4b859cfb061228d28b39869042f8b07f28250",
    "mnist": "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    "cifar10": "80387ddb9a0edf3fc4a964ee3770296169bb26a651050df20035579673099660",
    "svhn": "4b22c697c68bcc68514f10e898db9bcf210a4220b2bdc86db8a51b2aa2e898a2",
}


class WrongDataError(ValueError):
    """Raised where a data set is not the one that is needed; the message says which it should be."""


def digest(*splits: tuple[Tensor, Tensor]) -> str:
    """Return the SHA-256 of pixels (N, H, W, C) and labels as bytes, of the training set and then of the test set."""
    found = hashlib.sha256()
    for pixels, labels in splits:  # (N, C, H, W) uint8, (N,) int64
        found.update(pixels.permute(0, 2, 3, 1).contiguous().numpy().data)
        found.update(labels.to(torch.uint8).numpy().data)
    return found.hexdigest()


def is_official(data: ImageSet) -> bool:
    """Return True if every pixel and label is that of the official set of this name."""
    return data.sha256 == OFFICIAL.get(data.name)


def describe_difference(data: ImageSet) -> str | None:
    """Return how a data set differs from the official one of its name; None if it is that one.

    A set without an official version, or made in memory without a digest, differs from nothing.
    """
    official = OFFICIAL.get(data.name)
    if official is None or data.sha256 in ("", official):
        return None
    return (
        f"the {data.name} data in {data.folder or 'memory'} are not the official ones: expected sha256 "
        f"{official[:16]}…, got {data.sha256[:16]}…; `cpnorm data check {data.name}` compares them, and `--data idx` "
        "reads another data set in MNIST's format"
    )


def require_official(data: ImageSet) -> None:
    """Raise a WrongDataError unless a data set is the official one of its name."""
    if difference := describe_difference(data):
        raise WrongDataError(difference)


def describe_change(data: ImageSet, recorded: str | None) -> str | None:
    """Return how a data set differs from the one whose digest was recorded with a run; None if it does not."""
    if not recorded or not data.sha256 or data.sha256 == recorded:
        return None
    return (
        f"the {data.name} data in {data.folder or 'memory'} are not those of the run: "
        f"expected sha256 {recorded[:16]}…, got {data.sha256[:16]}…"
    )
