"""Folders of images of one's own: which images, classes and sizes are read, and what is said of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cpnorm.lab.data.images import DataNotFoundError, load


def paint(path: Path, value: int, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 2 * value, 0)).save(path)


def test_every_fifth_image_of_a_class_is_for_testing(tmp_path: Path) -> None:
    for n in range(10):
        paint(tmp_path / "dog" / f"{n}.png", n)
        paint(tmp_path / "cat" / f"{n}.png", 100 + n)
    (tmp_path / ".hidden").mkdir()
    data = load("images", tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.train_images.shape == (16, 1, 8, 8)
    values = data.train_images[:, 0, 0, 0]
    assert values.tolist() == [100, 101, 102, 103, 105, 106, 107, 108, 0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(data.train_labels, (values < 50).long())
    assert data.test_images[:, 0, 0, 0].tolist() == [104, 109, 4, 9]
    assert data.test_labels.tolist() == [0, 0, 1, 1]
    assert (data.mean, data.std, data.folder) == ((127.5,), (127.5,), tmp_path)


def test_folders_for_training_and_testing_and_colours(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a" / "0.png", 7, mode="RGB")
    paint(tmp_path / "train" / "b" / "1.png", 9)
    paint(tmp_path / "val" / "b" / "2.png", 11)
    data = load("images", tmp_path)
    np.testing.assert_array_equal(data.train_images[:, :, 3, 5].numpy(), [[7, 14, 0], [9, 9, 9]])
    assert data.test_images[:, :, 0, 0].tolist() == [[11, 11, 11]]
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([0, 1], [1])
    assert data.mean == (127.5, 127.5, 127.5)
    paint(tmp_path / "val" / "c" / "3.png", 1)
    with pytest.raises(ValueError, match=r"val: expected the classes of .*train, got c"):
        load("images", tmp_path)


def test_what_is_no_folder_of_classes(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="--data-dir names a folder with one folder of images for each class"):
        load("images", tmp_path / "absent")
    with pytest.raises(ValueError, match="expected one folder of images for each class, got no folders"):
        load("images", tmp_path)
    paint(tmp_path / "photos" / "cat" / "0.png", 1)
    with pytest.raises(ValueError, match="got folders of folders: did you mean one of photos"):
        load("images", tmp_path)
    with pytest.raises(ValueError, match="expected 5 images in a class"):
        load("images", tmp_path / "photos")
    (tmp_path / "photos" / "dog").mkdir()
    with pytest.raises(ValueError, match="in the folder of every class, got none in dog"):
        load("images", tmp_path / "photos")
    for n in range(5):
        paint(tmp_path / "photos" / "dog" / f"{n}.png", n, (8, 8 + n // 4))
    with pytest.raises(ValueError, match=r"4\.png has 8 x 9 pixels and .*0\.png 8 x 8: resize"):
        load("images", tmp_path / "photos")
    (tmp_path / "photos" / "dog" / "4.png").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"4\.png: not an image that Pillow reads"):
        load("images", tmp_path / "photos")
