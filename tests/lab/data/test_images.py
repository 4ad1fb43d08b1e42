"""Data sets as a user meets them: lookup, content, splits, and the augmentation against one image at a time."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpnorm.lab.data import images
from cpnorm.lab.data.digests import WrongDataError, describe_change, describe_difference, is_official, require_official
from cpnorm.lab.data.images import DataNotFoundError, ImageSet, augment, load, normalize
from official_files import WRITERS, make, trust_any_content


@pytest.fixture(autouse=True)
def nothing_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No test finds the data of this machine, except those that are about them."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.delenv("CPNORM_DATA", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Lookup ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the cache lies elsewhere there")
def test_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"argument": 1, "variable": 2, "cache/cpnorm": 3}
    for place, seed in places.items():
        WRITERS["mnist"](tmp_path / place, make("mnist", seed))
    monkeypatch.setenv("CPNORM_DATA", str(tmp_path / "variable"))
    given_argument = load("mnist", tmp_path / "argument")
    given_variable = load("mnist")
    monkeypatch.delenv("CPNORM_DATA")
    given_nothing = load("mnist", tmp_path / "empty")  # falls through to the cache
    for found, seed in zip((given_argument, given_variable, given_nothing), places.values(), strict=True):
        np.testing.assert_array_equal(found.train_images.numpy(), make("mnist", seed)[0][0])


@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn"])
def test_missing_set_says_what_where_and_how(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert isinstance(caught.value, DataNotFoundError)
    assert "\n" not in message
    assert f"{name} was not found in {tmp_path} or {tmp_path / 'cache' / 'cpnorm'}" in message
    assert f"cpnorm data get {name} --data-dir {tmp_path}" in message
    for layout in images.LAYOUTS[name]:
        assert all(file in message for file in layout.files)


def test_unknown_set() -> None:
    with pytest.raises(ValueError, match=r"a data set among digits, .*svhn, idx, images, got 'imagenet'"):
        load("imagenet")


def test_files_in_the_folder_itself(tmp_path: Path) -> None:
    """A folder with nothing but the four files is what people have who unpacked them by hand."""
    WRITERS["idx"](tmp_path, make("mnist"))
    for name in ("mnist", "idx"):
        found = load(name, tmp_path)
        assert (found.name, found.folder) == (name, tmp_path)
        np.testing.assert_array_equal(found.test_images.numpy(), make("mnist")[1][0])
    with pytest.raises(DataNotFoundError, match="--data-dir names the folder of the four files"):
        load("idx", tmp_path / "elsewhere")


# Content --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in images.NAMES if name != "images"])
def test_what_every_set_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_any_content(monkeypatch)
    if name in WRITERS:
        WRITERS[name](tmp_path, make(name))
    images = load(name, tmp_path)
    for pixels, labels in ((images.train_images, images.train_labels), (images.test_images, images.test_labels)):
        assert pixels.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert pixels.shape[:1] == labels.shape
        assert pixels.is_contiguous()
        assert pixels.shape[1] == len(images.mean) == len(images.std)
        assert labels.unique().tolist() == list(range(len(images.classes)))


def test_the_digest_tells_the_official_content_from_another(tmp_path: Path) -> None:
    WRITERS["mnist"](tmp_path, make("mnist"))
    assert not is_official(load("mnist", tmp_path))
    assert is_official(load("digits"))


def test_other_data_in_the_place_of_official_ones(tmp_path: Path) -> None:
    WRITERS["mnist"](tmp_path, make("mnist"))
    data = load("mnist", tmp_path)
    with pytest.raises(WrongDataError, match=f"the mnist data in {tmp_path} are not the official ones: .*06b0d1f1"):
        require_official(data)
    assert describe_difference(data.to("cpu").split_validation(2)[0])  # a part of it is as wrong as the whole
    require_official(load("digits"))
    require_official(load("idx", tmp_path / "MNIST"))  # under no official name: whatever it is
    require_official(dataclasses.replace(data, sha256=""))  # made in memory


def test_data_are_compared_with_those_of_a_run(tmp_path: Path) -> None:
    first, second = (tmp_path / "1", tmp_path / "2")
    for seed, folder in enumerate((first, second)):
        WRITERS["idx"](folder, make("idx", seed))
    old, new = load("idx", first), load("idx", second)
    assert describe_change(old, old.sha256) is None
    assert describe_change(old, None) is None
    assert f"the idx data in {second} are not those of the run" in (describe_change(new, old.sha256) or "")


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn"])
def test_official_content(name: str) -> None:
    try:
        data = load(name)
    except DataNotFoundError as error:
        pytest.skip(str(error))
    assert is_official(data)


def test_digits_are_the_small_ones_scaled_up() -> None:
    from sklearn.datasets import load_digits

    images = load("digits")
    assert len(images.train_labels) + len(images.test_labels) == 1797
    small = torch.nn.functional.avg_pool2d(images.test_images.float(), 4)  # 7 x 7
    original = torch.from_numpy(load_digits().images).float()[:, None]
    coarse = torch.nn.functional.interpolate(original, 7, mode="bilinear", antialias=True)
    nearest = torch.cdist(small.flatten(1), coarse.flatten(1) * 255 / 16).argmin(1)
    assert (torch.from_numpy(load_digits().target)[nearest] == images.test_labels).all()
    assert images.train_images.float().mean().item() == pytest.approx(images.mean[0], abs=0.1)
    assert images.train_images.float().std().item() == pytest.approx(images.std[0], abs=0.1)


# Splits ---------------------------------------------------------------------------------------------------------------


def numbered(counts: list[int]) -> ImageSet:
    """Images whose first pixels are their own number, in classes of these sizes."""
    total = sum(counts)
    images = torch.zeros(total, 1, 1, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(total) % 256, torch.arange(total) // 256
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])[torch.randperm(total)]
    classes = tuple(map(str, range(len(counts))))
    return ImageSet("numbered", images, labels, images[:1], labels[:1], (0.0,), (1.0,), classes)


def numbers(images: Tensor) -> list[int]:
    return (images[:, 0, 0, 0].long() + 256 * images[:, 0, 0, 1].long()).tolist()


@given(counts=st.lists(st.integers(1, 90), min_size=1, max_size=5), share=st.floats(0, 0.99), seed=st.integers(0, 9))
def test_split_validation(counts: list[int], share: float, seed: int) -> None:
    images = numbered(counts)
    held_count = int(share * sum(counts))
    rest, held_images, held_labels = images.split_validation(held_count, seed)
    kept, held = numbers(rest.train_images), numbers(held_images)
    assert len(held) == held_count
    assert sorted(kept + held) == list(range(sum(counts)))
    assert kept == sorted(kept)  # the old order
    assert images.train_labels[held].tolist() == held_labels.tolist()
    assert images.train_labels[kept].tolist() == rest.train_labels.tolist()
    for found, size in zip(held_labels.bincount(minlength=len(counts)).tolist(), counts, strict=True):
        assert abs(found - held_count * size / sum(counts)) <= 1 + len(counts) / 2
    again = images.split_validation(held_count, seed)[1]
    assert numbers(again) == held


def test_split_validation_depends_on_the_seed_and_refuses_too_many() -> None:
    images = numbered([40, 60])
    assert numbers(images.split_validation(50, 0)[1]) != numbers(images.split_validation(50, 1)[1])
    for count in (-1, 100):
        with pytest.raises(ValueError, match=f"expected 0 to 99 validation images of numbered, got {count}"):
            images.split_validation(count)


# Normalisation and augmentation ---------------------------------------------------------------------------------------


COLOUR = torch.randint(0, 256, (6, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalize(dtype: torch.dtype) -> None:
    mean, std = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
    expected = torch.stack([(COLOUR[:, c].double() - mean[c]) / std[c] for c in range(3)], 1)
    found = normalize(COLOUR, mean, std, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def crops(image: Tensor, flip: bool, pad: int = 4) -> dict[bytes, tuple[int, int, bool]]:
    """Everything the augmentation may make of one image, pixel by pixel: the oracle."""
    _, height, width = image.shape
    made = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            crop = torch.zeros_like(image)
            for i in range(height):
                for j in range(width):
                    if 0 <= i + top - pad < height and 0 <= j + left - pad < width:
                        crop[:, i, j] = image[:, i + top - pad, j + left - pad]
            made[crop.numpy().tobytes()] = top, left, False
            if flip:
                made[crop.flip(-1).numpy().tobytes()] = top, left, True
    return made


@pytest.mark.parametrize("mode", ["crop", "crop-flip", "shift"])
def test_augment_against_one_image_at_a_time(mode: Any) -> None:
    image = torch.randint(1, 256, (2, 6, 7), dtype=torch.uint8)
    possible = crops(image, flip=mode == "crop-flip", pad=2 if mode == "shift" else 4)
    batch = augment(image.expand(4000, -1, -1, -1), mode, torch.Generator().manual_seed(1))
    assert batch.dtype == torch.uint8
    choices = [possible[made.numpy().tobytes()] for made in batch]  # a KeyError here is an impossible crop
    assert set(choices) == set(possible.values())  # all are reached, and so each is about as likely
    counts = np.unique(np.array(choices), axis=0, return_counts=True)[1]
    expected = len(choices) / len(possible)
    assert np.abs(counts - expected).max() < 6 * expected**0.5


def test_every_image_is_cropped_on_its_own() -> None:
    images = torch.randint(1, 256, (5, 3, 6, 7), dtype=torch.uint8)
    for image, made in zip(images, augment(images, "crop-flip"), strict=True):
        assert made.numpy().tobytes() in crops(image, flip=True)


def test_augment_is_seeded() -> None:
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    first, again, other = (augment(images, "crop-flip", torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    first = augment(images, "crop-flip")
    torch.manual_seed(5)
    assert torch.equal(first, augment(images, "crop-flip"))
    assert augment(images, "none") is images


def test_cutout_blackens_one_square_that_may_hang_over_the_edge() -> None:
    white = torch.full((500, 1, 16, 16), 255, dtype=torch.uint8)
    cropped, cut = (augment(white, mode, torch.Generator().manual_seed(1)) for mode in ("crop", "crop-cutout"))
    holes = (cropped != cut)[:, 0]
    assert torch.equal(cut[~holes[:, None]], cropped[~holes[:, None]])
    for hole, image in zip(holes, cropped[:, 0], strict=True):
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        if len(rows):  # else the whole square lies where the crop is black already
            box = slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)
            assert len(rows) <= 8
            assert len(columns) <= 8
            assert torch.equal(hole[box], image[box] > 0)
    assert 0.12 < holes.float().mean() < (7 / 16) ** 2  # 7: the mean side of a square within 16 pixels
    assert holes.sum((1, 2)).max() == 64


def test_affine_turns_moves_and_scales_by_chance() -> None:
    """The moments of a bright disc tell where it is, how large, and whether the image was turned around its middle."""
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    away = 8.0  # of the disc from the middle, to the right
    disc = ((rows - 13.5) ** 2 + (columns - 13.5 - away) ** 2 < 9).to(torch.uint8) * 255
    made = augment(disc.expand(2000, 1, 28, 28), "affine", torch.Generator().manual_seed(1))[:, 0]
    mass = made.sum((1, 2))
    down, right = ((made * place).sum((1, 2)) / mass - 13.5 for place in (rows, columns))
    assert made.min() >= 0
    assert 250 < made.max() < 255.01
    assert abs(right.mean() - away) < 0.15
    assert abs(down.mean()) < 0.15
    furthest = 2 + away * 1.1 * math.sin(math.radians(10))  # down: by the shift and by the turn together
    assert 0.8 * furthest < down.abs().max() < 1.15 * furthest
    whole = mass / (disc.sum() * 1.0)
    assert 0.75 < whole.quantile(0.01) < 0.9  # (1 / 1.1)² of the area
    assert 1.1 < whole.quantile(0.99) < 1.35  # (1 / 0.9)²
    same = augment(disc.expand(8, 1, 28, 28), "affine", torch.Generator().manual_seed(1))
    assert torch.equal(same, augment(disc.expand(8, 1, 28, 28), "affine", torch.Generator().manual_seed(1)))


def test_augment_refuses_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"expected augmentation to be one of none, shift, .*, got 'rotate'"):
        augment(COLOUR, "rotate")  # type: ignore[arg-type]


def test_augment_and_normalize_trace_as_one_graph() -> None:
    images = torch.randint(1, 256, (5, 3, 6, 7), dtype=torch.uint8)

    def prepare(images: Tensor) -> tuple[Tensor, Tensor]:
        cropped = augment(images, "crop-flip")
        return cropped, normalize(cropped, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))

    cropped, normal = torch.compile(prepare, backend="aot_eager", fullgraph=True)(images)
    for image, made in zip(images, cropped, strict=True):
        assert made.numpy().tobytes() in crops(image, flip=True)
    torch.testing.assert_close(normal, normalize(cropped, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch 2.11's own compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_augment_and_normalize_in_a_cuda_graph(compiled: bool) -> None:
    images = torch.randint(1, 256, (64, 3, 8, 8), dtype=torch.uint8, device="cuda")

    def prepare() -> tuple[Tensor, Tensor]:
        cropped = augment(images, "crop-flip")
        return cropped, normalize(cropped, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), torch.bfloat16)

    step = torch.compile(prepare, fullgraph=True) if compiled else prepare
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cropped, normal = step()
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(cropped.cpu())
        for image, made in zip(images.cpu(), seen[-1], strict=True):
            assert made.numpy().tobytes() in crops(image, flip=True)
        torch.testing.assert_close(normal, normalize(cropped, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), torch.bfloat16))
    assert not torch.equal(*seen)  # a replay draws anew
