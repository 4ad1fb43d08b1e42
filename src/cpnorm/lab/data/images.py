"""Data sets as uint8 tensors on the training device, where normalisation, crops and flips are done in batches."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import platformdirs
import torch
from torch import Tensor
from torch.nn import functional as F

from cpnorm.lab.data.digests import digest
from cpnorm.lab.data.image_folder import read_image_folder
from cpnorm.lab.data.official import LAYOUTS, Layout, Split

NAMES = ("digits", *LAYOUTS, "images")

CLASSES = {
    **dict.fromkeys(("digits", "mnist", "svhn", "idx"), tuple("0123456789")),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
STATISTICS = {  # mean and standard deviation per channel, in pixel values from 0 to 255
    "digits": ((77.8,), (82.8,)),
    "mnist": ((0.1307 * 255,), (0.3081 * 255,)),
    "cifar10": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "svhn": ((111.6, 113.2, 120.6), (50.5, 51.3, 50.2)),
    "idx": ((127.5,), (127.5,)),  # whatever the images are: from -1 to 1
}
PADDING = 4  # pixels around an image before it is cropped to its old size
SHIFT = 2  # the same for "shift"

CUTOUT = 8  # pixels: the side of the square that is blackened

TURN, ZOOM = 10.0, 0.1  # for "affine": the largest rotation in degrees, and change of size

Augmentation = Literal["none", "shift", "affine", "crop", "crop-flip", "crop-cutout", "crop-flip-cutout"]


class DataNotFoundError(FileNotFoundError):
    """Raised where no folder has a data set; the message says which files were looked for and how to get them."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A whole data set in memory, on one device; mean and std are in pixel values.

    >>> digits = load("digits")
    >>> tuple(digits.train_images.shape), tuple(digits.test_images.shape)
    ((1442, 1, 28, 28), (355, 1, 28, 28))
    """

    name: str
    train_images: Tensor  # (N, C, H, W) uint8
    train_labels: Tensor  # (N,) int64
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]  # (C,)
    std: tuple[float, ...]
    classes: tuple[str, ...]
    sha256: str = ""  # of the content, see digests.digest; "" where it was not computed
    folder: Path | None = None  # that it was read from

    def to(self, device: torch.device | str) -> ImageSet:
        """Return the same set on another device."""
        return dataclasses.replace(
            self,
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )

    def split_validation(self, count: int, seed: int = 0) -> tuple[ImageSet, Tensor, Tensor]:
        """Hold out ``count`` training images, every class in proportion; return the rest, these images and labels."""
        labels = self.train_labels.cpu()
        if not 0 <= count < len(labels):
            raise ValueError(f"expected 0 to {len(labels) - 1} validation images of {self.name}, got {count}")
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        grouped = shuffled[labels[shuffled].argsort(stable=True)]  # by class, in random order within each
        sizes = labels.bincount()
        place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[grouped]]
        share = (place + 0.5) / sizes[labels[grouped]]  # the k-th image of a class stands at (k + 1/2) / size of it
        order = grouped[share.argsort(stable=True)].to(self.train_labels.device)
        held, kept = order[:count], order[count:].sort().values  # without validation images the old order stays
        rest = dataclasses.replace(self, train_images=self.train_images[kept], train_labels=self.train_labels[kept])
        return rest, self.train_images[held], self.train_labels[held]


# Where the sets lie ---------------------------------------------------------------------------------------------------


def load(name: str, data_dir: str | Path | None = None) -> ImageSet:
    """Return a data set by name from the first folder that has it: ``data_dir``, ``$CPNORM_DATA``, the user's cache.

    ``"idx"`` is any set in MNIST's format, such as Fashion-MNIST: four idx files in the folder itself or in ``raw``.
    ``"images"`` is a folder of images, ``data_dir`` itself: see ``image_folder.read_image_folder``.
    """
    folder, classes = None, CLASSES.get(name, ())
    if name == "digits":
        train, test = embedded_digits()
    elif name == "images":
        folder = _image_folder(data_dir)
        train, test, classes = read_image_folder(folder)
    else:
        folder, layout = find(name, data_dir)
        train, test = layout.read(folder)
    known = (torch.from_numpy(train[0]), torch.from_numpy(train[1]))
    held = (torch.from_numpy(test[0]), torch.from_numpy(test[1]))
    return ImageSet(name, *known, *held, *statistics(name, known[0].shape[1]), classes, digest(known, held), folder)


def statistics(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of a data set; images of any kind go from -1 to 1."""
    return STATISTICS.get(name) or ((127.5,) * channels, (127.5,) * channels)


def _image_folder(data_dir: str | Path | None) -> Path:
    given = data_dir or os.environ.get("CPNORM_DATA")
    if not given or not Path(given).expanduser().is_dir():
        hint = "--data-dir names a folder with one folder of images for each class"
        raise DataNotFoundError(f"images: expected a folder, got {given or 'none'}; {hint}")
    return Path(given).expanduser()


def find(name: str, data_dir: str | Path | None = None) -> tuple[Path, Layout]:
    """Return the folder that has the files of a data set, and their layout in it."""
    if name not in LAYOUTS:
        raise ValueError(f"expected a data set among {', '.join(NAMES)}, got {name!r}")
    folders = data_folders(data_dir)
    for folder in folders:
        for layout in LAYOUTS[name]:
            if layout.found_in(folder):
                return folder, layout
    files = " or ".join(", ".join(layout.files) for layout in LAYOUTS[name])
    hint = f"get it with: cpnorm data get {name} --data-dir {folders[0]}"
    if name == "idx":
        hint = "--data-dir names the folder of the four files of a data set in MNIST's format"
    raise DataNotFoundError(
        f"{name} was not found in {' or '.join(map(str, folders))}; looked for {files} (plain or .gz); {hint}"
    )


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return the folders in which data are looked up, in order; downloads go to the first."""
    given = [data_dir, os.environ.get("CPNORM_DATA")]
    return [Path(folder).expanduser() for folder in given if folder] + [platformdirs.user_cache_path("cpnorm", False)]


# Sets that need no official files -------------------------------------------------------------------------------------


def embedded_digits() -> tuple[Split, Split]:
    """Return scikit-learn's 1797 digits, scaled from 8 x 8 to 28 x 28; every fifth image of a class is for testing."""
    from sklearn.datasets import load_digits

    small, labels = load_digits(return_X_y=True)  # (N, 64) from 0 to 16
    images = F.interpolate(torch.from_numpy(small).view(-1, 1, 8, 8), size=28, mode="bilinear")
    # The sums are multiples of 255/3136: the nudge rounds halves upwards on every machine, whatever its last bits.
    pixels = (images * (255 / 16) + 1e-6).round().to(torch.uint8).numpy()
    labels = labels.astype(np.int64)
    place = np.array([np.count_nonzero(labels[:i] == label) for i, label in enumerate(labels)])  # within its class
    test = place % 5 == 4
    return (pixels[~test], labels[~test]), (pixels[test], labels[test])


# On the device, in batch ----------------------------------------------------------------------------------------------


def normalize(
    images: Tensor,  # (N, C, H, W) uint8
    mean: Sequence[float],  # (C,)
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (images - mean) / std per channel, computed in float32, as ``dtype``."""

    def per_channel(values: Sequence[float]) -> Tensor:  # (C, 1, 1)
        # Filled on the device: a copy from the host would synchronise, which a CUDA graph does not allow.
        return torch.stack([torch.full((1, 1), value, dtype=torch.float32, device=images.device) for value in values])

    return ((images - per_channel(mean)) / per_channel(std)).to(dtype)


def augment(images: Tensor, mode: Augmentation, generator: torch.Generator | None = None) -> Tensor:  # (N, C, H, W)
    """Augment each image: a random crop of it with 4 black pixels around, then a mirror image by chance, then a hole.

    The mode names what is done: "crop", "crop-flip", "crop-cutout", "crop-flip-cutout", or "none"; "shift" is a crop
    with 2 black pixels around. The hole is a black square of 8 x 8 pixels whose centre lies anywhere in the image.
    "affine" turns the image by up to 10 degrees, changes its size by up to 10 % and moves it by up to 2 pixels; its
    pixels are floats.

    A few kernels that do not depend on the values, so that they can be compiled and recorded in a CUDA graph.
    """
    if mode not in get_args(Augmentation):
        raise ValueError(f"expected augmentation to be one of {', '.join(get_args(Augmentation))}, got {mode!r}")
    if mode == "none":
        return images
    if mode == "affine":
        return _affine(images, generator)
    count, channels, height, width = images.shape
    device = images.device
    padding = SHIFT if mode == "shift" else PADDING
    corner = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    rows = corner[0] + torch.arange(height, device=device)  # (N, H)
    columns = torch.arange(width, device=device)
    if "flip" in mode:
        mirrored = torch.randint(2, (count, 1), generator=generator, device=device, dtype=torch.bool)
        columns = torch.where(mirrored, width - 1 - columns, columns)
    columns = corner[1] + columns  # (N, W)
    padded = F.pad(images, (padding,) * 4).flatten(2)
    place = (rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]).flatten(1)  # of every pixel, in padded
    cropped = padded.gather(2, place[:, None].expand(-1, channels, -1)).view(images.shape)
    if "cutout" not in mode:
        return cropped
    inside = []  # (N, H), (N, W)
    for size in (height, width):
        centre = torch.randint(size, (count, 1), generator=generator, device=device)
        offset = torch.arange(size, device=device) - centre + CUTOUT // 2
        inside.append((offset >= 0) & (offset < CUTOUT))
    return cropped.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


def _affine(images: Tensor, generator: torch.Generator | None) -> Tensor:  # (N, C, H, W) uint8 -> float
    count, _, height, width = images.shape
    turn, zoom, down, right = 2 * torch.rand(4, count, generator=generator, device=images.device) - 1
    angle, size = turn * math.radians(TURN), 1 + zoom * ZOOM
    cosine, sine = size * angle.cos(), size * angle.sin()
    # From a place in the new image to one in the old, both from -1 to 1.
    places = torch.stack([cosine, -sine, right * 2 * SHIFT / width, sine, cosine, down * 2 * SHIFT / height], 1)
    grid = F.affine_grid(places.view(count, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, align_corners=False)
