"""A flipped bit in any file of a run folder is noticed, or changes nothing that is read from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cpnorm
from cpnorm.lab.training.driver import Stop, run_to_end
from cpnorm.lab.training.models import lenet
from cpnorm.lab.training.runs import RunError, RunFolder, read_json
from cpnorm.lab.training.trainer import Trainer
from trust.workers import CONFIG, OFTEN, compress_digits, digits

FLIPS = 25  # of each file, at random places


def known_data() -> Any:
    return replace(digits(), sha256="0123456789abcdef" * 4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    run_to_end(folder, CONFIG, lambda: Trainer(CONFIG, known_data(), OFTEN))
    return folder


@pytest.fixture(scope="module")
def truncated(finished: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("truncated") / "run")
    compress_digits(finished.path, folder.path, known_data())
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder, stop = RunFolder(tmp_path_factory.mktemp("interrupted") / "run"), Stop()

    def ask(*_: Any) -> None:
        stop.reason = "enough"

    run_to_end(folder, CONFIG, lambda: Trainer(CONFIG, known_data(), OFTEN), observers=[ask], stop=stop)
    assert folder.has_checkpoint()
    return folder


def flipped(path: Path) -> Iterator[int]:
    """Flip one bit after the other in the file itself, and put each back."""
    content, draw = path.read_bytes(), random.Random(path.name)
    for place in sorted(draw.sample(range(8 * len(content)), min(FLIPS, 8 * len(content)))):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        yield place
    path.write_bytes(content)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):  # a key that is not read does no harm
        return all(key in other and same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def network(folder: RunFolder, name: str) -> dict[str, Tensor]:
    return cpnorm.load(folder / name, lenet(channels=1, classes=10)).state_dict()


def expect_noticed_or_harmless(path: Path, read: Callable[[], Any], *, at_least: float) -> None:
    expected, errors = read(), []
    for place in flipped(path):
        try:
            found = read()
        except (RunError, ValueError) as error:
            errors.append(str(error))
        else:
            assert same(expected, found), f"bit {place} of {path.name}"
    assert all(str(path.parent) in error and len(error) < 600 for error in errors), errors
    assert len(errors) >= at_least * min(FLIPS, 8 * path.stat().st_size), path.name
    assert same(expected, read())


@pytest.mark.parametrize("kind", ["finished", "truncated"])
def test_a_finished_run(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    names = {path.name for path in folder.path.iterdir()} - {".lock", "start.safetensors", "model.safetensors"}
    assert names >= {"record.json", "config.json", "environment.json", "data.json", "metrics.jsonl"}
    for name in sorted(names):
        expect_noticed_or_harmless(
            folder / name,
            lambda: (folder.record(), folder.config(), folder.metrics(), folder.data()),
            at_least=0.95,
        )
    for name in ("start.safetensors", "model.safetensors"):
        if (folder / name).exists():
            expect_noticed_or_harmless(folder / name, lambda name=name: network(folder, name), at_least=0.95)


def test_a_run_that_is_to_be_resumed(interrupted: RunFolder) -> None:
    def read() -> Any:
        with interrupted.claimed(CONFIG):  # which compares the settings
            interrupted.keep_data(known_data())
            return interrupted.load_checkpoint(torch.device("cpu")), interrupted.data()["sha256"]

    for name, share in {"checkpoint.pt": 0.5, "config.json": 0.5, "data.json": 0.3}.items():
        expect_noticed_or_harmless(interrupted / name, read, at_least=share)


def test_what_a_truncation_found_before_its_training(truncated: RunFolder) -> None:
    expect_noticed_or_harmless(truncated / "cut.json", lambda: read_json(truncated / "cut.json"), at_least=0.9)


def test_the_network_of_a_user(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = cpnorm.canonical_norm(torch.nn.Linear(4, 3))
    cpnorm.save(model, path)
    expect_noticed_or_harmless(path, lambda: cpnorm.load(path, torch.nn.Linear(4, 3)).state_dict(), at_least=0.9)
