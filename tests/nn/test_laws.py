"""The nine laws of tests/laws.py, over every layer kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cpnorm
import laws
from laws import CASES, Case

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_exact_init(case: Case, dtype: torch.dtype, relative: float) -> None:
    laws.law_exact_init(case, dtype, relative)


@pytest.mark.filterwarnings("ignore:0 of 1 layers:UserWarning")  # of factorize: layers as small as these gain nothing
@every_case
@pytest.mark.parametrize(
    "law",
    [
        laws.law_paths_agree,
        laws.law_renormalize,
        laws.law_training_keeps_units,
        laws.law_truncate,
        laws.law_fold,
        laws.law_factorize,
        laws.law_module_behaviour,
        laws.law_seeded,
    ],
    ids=lambda law: law.__name__.removeprefix("law_"),
)
def test_law(law: Callable[[Case], None], case: Case) -> None:
    law(case)


@every_case
def test_save_and_load(case: Case, tmp_path: Path) -> None:
    laws.law_save_and_load(case, tmp_path)


def test_fresh_process(tmp_path: Path) -> None:
    laws.law_fresh_process(tmp_path)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(case: Case, dtype: torch.dtype) -> None:
    laws.law_half_precision(case, dtype)


@pytest.mark.parametrize("path", ["auto", *(pytest.param(path, marks=pytest.mark.slow) for path in laws.PATHS)])
def test_compiled(path: str) -> None:
    laws.law_compiled(path)


def test_law_9_fails_for_an_init_that_ignores_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = cpnorm.nn.initial._draw
    for seed in (None, 0):
        generator = None if seed is None else torch.Generator()
        monkeypatch.setattr(
            "cpnorm.nn.initial._draw",
            lambda law, shape, _, used=generator: draw(law, shape, used and used.manual_seed(0)),
        )
        with pytest.raises(AssertionError, match="kaiming_normal"):
            laws.law_seeded(CASES[0])
