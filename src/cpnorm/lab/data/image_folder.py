"""Images of one's own: a folder with one folder for each class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpnorm.lab.data.official import Split

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
TEST_FOLDERS = ("test", "val", "valid", "validation")
HELD_OUT = 5  # where no folder is for testing, every so many-th image of a class is


def class_folders(folder: Path) -> list[Path]:
    """Return the folders of the classes in alphabetical order; none if the folder has no folders.

    Raise if a class has no images, or if these are one level further down: labels would be those of something else.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of images, of one folder per class, or a list file")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    empty = [path.name for path in classes if next(_found_below(path), None) is None]
    if empty:
        raise ValueError(f"{folder}: expected images in the folder of every class, got none in {', '.join(empty)}")
    if classes and not any(path.suffix.lower() in IMAGES for each in classes for path in each.iterdir()):
        names = ", ".join(path.name for path in classes[:3])
        raise ValueError(f"{folder}: expected folders of classes, got folders of folders: did you mean one of {names}?")
    return classes


def images_below(folder: Path) -> list[Path]:
    """Return the paths of all images in a folder and its folders, in alphabetical order."""
    return sorted(_found_below(folder))


def _found_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)


def read_image_folder(folder: Path) -> tuple[Split, Split, tuple[str, ...]]:
    """Read images of one size for training and testing, and the names of their classes.

    The folder has ``train`` and ``test`` (or ``val``) with one folder for each class, or only the folders of the
    classes, of each of which every fifth image is for testing.
    """
    test = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if test is not None and (folder / "train").is_dir():
        train = _by_class(folder / "train")
        held, names = _by_class(test), tuple(train)
        if unknown := sorted(held.keys() - train.keys()):
            raise ValueError(f"{test}: expected the classes of {folder / 'train'}, got {', '.join(unknown)}")
    else:
        found = _by_class(folder)
        names = tuple(found)
        train = {name: [path for n, path in enumerate(paths, 1) if n % HELD_OUT] for name, paths in found.items()}
        held = {name: paths[HELD_OUT - 1 :: HELD_OUT] for name, paths in found.items()}
        if not any(held.values()):
            raise ValueError(f"{folder}: expected {HELD_OUT} images in a class, every fifth being for testing")
    splits = [[(path, names.index(name)) for name, paths in part.items() for path in paths] for part in (train, held)]
    pixels = _pixels([path for split in splits for path, _ in split])
    labels = np.array([label for split in splits for _, label in split], np.int64)
    cut = len(splits[0])
    return (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:]), names


def _by_class(folder: Path) -> dict[str, list[Path]]:
    found = {path.name: images_below(path) for path in class_folders(folder)}
    if not found:
        raise ValueError(f"{folder}: expected one folder of images for each class, got no folders")
    return found


def _pixels(paths: list[Path]) -> NDArray[np.uint8]:  # -> (N, C, H, W)
    """Return images of one size: three colours, or one channel if all of them are grey."""
    images = [_array(path) for path in paths]
    for path, image in zip(paths, images, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            sizes = ["{1} x {0}".format(*each.shape) for each in (image, images[0])]
            raise ValueError(f"{path} has {sizes[0]} pixels and {paths[0]} {sizes[1]}: resize all images to one size")
    channels = max(image.shape[2] for image in images)
    return np.stack([np.broadcast_to(image, (*image.shape[:2], channels)).transpose(2, 0, 1) for image in images])


def _array(path: Path) -> NDArray[np.uint8]:  # -> (H, W, 1 or 3)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = np.asarray(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path}: not an image that Pillow reads ({error})") from error
    return image.reshape(*image.shape[:2], -1)
