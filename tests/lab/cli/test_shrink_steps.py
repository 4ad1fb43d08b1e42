"""What ``cpnorm shrink`` says while it works: steps, how far they have come, and how long they will still take."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

from cpnorm.lab.cli import shrink, shrink_steps
from cpnorm.lab.cli.shrink_steps import Steps, remaining


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shrink_steps, "time", made)
    return made


def plain(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_step_and_now_and_then_within_one(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Steps(console, silent=False) as tell:
        tell.say("64 windows to calibrate with")
        for done in range(41):
            tell(f"cutting: layer {done}", done, 40)
            clock.now += 1
        tell("done", 1, 1)
        tell.prefix = "also to 50 %: "
        tell("cutting: layer 0", 0, 40)
    assert plain(console).splitlines() == [
        "64 windows to calibrate with",
        "     0 s  cutting",
        "    15 s  cutting, 15 of 40, 25 s left",
        "    30 s  cutting, 30 of 40, 10 s left",
        "    41 s  also to 50 %: cutting",
    ]


def test_nothing_is_said_if_silent() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Steps(console, silent=True) as tell:
        tell.say("64 windows to calibrate with")
        tell("cutting", 0, 40)
    assert plain(console) == ""


def test_the_bar_fits_into_80_columns(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Steps(console, silent=False) as tell:
        tell.prefix = "also to 50 %: "
        for done in (0, 120):
            tell("cutting: model.layers.17.self_attn.q_proj.stacked", done, 210)
            clock.now += 60
    lines = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", line) for line in plain(console).replace("\r", "\n").splitlines()]
    (last,) = {line.strip() for line in lines if "120/210" in line}
    assert len(last) <= 80
    assert last.startswith("also to 50 %…")
    assert "q_proj.stacked" in last
    assert last.endswith("45 s left")


@pytest.mark.parametrize(
    ("seconds", "done", "total", "said"),
    [(2.0, 1, 2, ""), (10.0, 0, 5, ""), (10.0, 5, 5, ""), (60.0, 1, 4, "3 min left"), (30.0, 30, 60, "30 s left")],
)
def test_the_time_that_is_left(seconds: float, done: int, total: int, said: str) -> None:
    assert remaining(seconds, done, total) == said


def test_examples_continue_as_without_kept_keys_and_values() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=100, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.randint(100, (6,))
    tokens = prompt[None]
    with torch.no_grad():
        for _ in range(shrink.CONTINUED):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert shrink._continue(model, prompt).tolist() == tokens[0, 6:].tolist()
