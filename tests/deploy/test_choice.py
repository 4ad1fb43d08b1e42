"""How candidates are timed and chosen, and what the choice prints."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cpnorm import canonical_norm, summary
from cpnorm.deploy.factorization import Factorization, choose_forms, factorize
from cpnorm.deploy.timing import fastest
from small_network import image, network


def timed_by(monkeypatch: pytest.MonkeyPatch, layer: Callable, model: Callable) -> list[set]:
    """Let these rules decide instead of the clock; return the names of the candidates of each comparison."""
    compared: list[set] = []

    def decided(runs: dict, device: torch.device, *, cuda_graph: bool = False, enough_seconds: float = 0) -> dict:
        compared.append(set(runs))
        rule = model if "unchanged" in runs else layer
        return dict(sorted(((name, rule(name)) for name in runs), key=lambda item: item[1]))

    for module in ("candidates", "factorization"):
        monkeypatch.setattr(sys.modules[f"cpnorm.deploy.{module}"], "fastest", decided)
    return compared


def forms_in(choice: Factorization) -> list[str]:
    return [layer.form for layer in choice.layers.values()]


CHOSEN = "chosen by eager"
ALL = {CHOSEN, "dense", "unchanged", f"{CHOSEN}, contiguous", "dense, contiguous"}


def test_the_fastest_form_and_layout_win(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"depthwise", "low-rank"}
    whole = {"unchanged": 9.0, "dense": 8.0, "dense, contiguous": 8.5, CHOSEN: 7.0, f"{CHOSEN}, contiguous": 6.0}
    compared = timed_by(monkeypatch, layer=lambda form: 1.0 if form in best else 1.5, model=lambda name: whole[name])
    choice = choose_forms(network(), image(64))
    assert len(compared) == 5  # four layers, and the whole
    assert compared[-1] == ALL
    assert not any(str(form).startswith("aligned") for forms in compared for form in forms)  # which are for GPUs
    assert not choice.channels_last
    assert forms_in(choice) == ["depthwise", "depthwise", "low-rank", "low-rank"]
    assert choice.seconds == {"dense": 9.0, "chosen": 6.0}
    assert choice.layers["3"].seconds["depthwise"] == 1.0
    assert "fastest of" in choice.layers["3"].reason
    whole[CHOSEN] = 5.0
    assert choose_forms(network(), image(64)).channels_last


def test_of_candidates_as_fast_up_to_noise_the_smallest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, layer=lambda form: 1.0 if form == "dense" else 1.04, model=lambda name: 1.0)
    choice = choose_forms(network(), image(64))
    assert "dense" not in forms_in(choice)
    assert choice.layers["3"].reason == "as fast as dense up to noise, and smaller"
    timed_by(monkeypatch, layer=lambda form: 1.0 if form == "dense" else 1.06, model=lambda name: 1.0)
    choice = choose_forms(network(), image(64))
    assert set(forms_in(choice)) == {"dense"}
    assert "chains timed" in choice.layers["3"].reason
    timed_by(monkeypatch, layer=lambda form: 1.0, model=lambda name: 1.0 if name == "unchanged" else 1.04)
    choice = choose_forms(network(), image(64))
    assert choice.total("chosen").parameters < choice.total("dense").parameters
    assert "as fast as dense up to noise" in str(choice)


def test_the_whole_model_must_be_faster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict.fromkeys(ALL, 4.0) | {"dense": 2.0, "unchanged": 3.0}
    timed_by(monkeypatch, layer=lambda form: 2.0 - len(form) / 20, model=lambda name: whole[name])
    choice = choose_forms(network(), image(64))
    assert set(forms_in(choice)) == {"dense"}
    assert choice.channels_last
    assert choice.layers["3"].reason == "the model as a whole is faster dense"
    assert choice.seconds == {"dense": 3.0, "chosen": 2.0}
    whole["dense"] = 5.0
    choice = choose_forms(network(), image(64))
    assert choice.seconds == {"dense": 3.0, "chosen": 3.0}  # it is never slower than the model was
    assert not choice.rewrites
    asked = choose_forms(network(), image(64), forms={"3": "split"})
    assert asked.layers["3"].form == "split"  # what was asked for is done, fast or not
    assert asked.layers["3"].reason == "asked for"


def test_a_dense_result_of_a_small_model_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, layer=lambda form: 1.0 if form == "dense" else 3.0, model=lambda name: 1.0)
    model = network()
    message = r"0 of 4 layers gain; the result is dense, .* goal='parameters' keeps it small: [0-9,]+$"
    with pytest.warns(UserWarning, match=message) as caught:
        small = factorize(model, image())
    assert "the result is dense" in str(choose_forms(model, image()))
    smallest = int(str(caught[0].message).split()[-1].replace(",", ""))
    chains = factorize(model, image(), goal="parameters")
    assert sum(p.numel() for name, p in chains.named_parameters() if name.endswith("weight")) == smallest
    assert sum(p.numel() for p in small.parameters()) > 3 * smallest
    exact = canonical_norm(nn.Sequential(nn.Linear(8, 8)))
    factorize(exact, torch.randn(2, 8))  # nothing smaller was possible: no warning


def test_at_full_rank_everything_stays_dense() -> None:
    model = canonical_norm(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 32)))
    for measure in (True, False):
        choice = choose_forms(model, torch.randn(2, 8, 4, 4), measure=measure)
        assert set(forms_in(choice)) == {"dense"}
        assert choice.total("chosen") == choice.total("dense")


def test_equal_layers_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = timed_by(monkeypatch, layer=lambda _: 1.0, model=lambda _: 1.0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 64, bias=False))
    choose_forms(canonical_norm(model, 4, "kaiming_normal"), torch.randn(8, 64))
    assert len(compared) == 3  # two kinds of layers, and the whole


def test_the_choice_prints_and_is_data() -> None:
    model = network()
    choice = choose_forms(model, image(), measure=False, forms={"9": "dense"})
    lines = str(choice).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0", "3", "7", "9", "all"]
    assert "asked for" in lines[4]
    assert "lowest modelled cost" in lines[3]
    assert "not timed" in lines[3]
    dense = choice.total("dense")
    assert f"{dense.parameters:,}" in lines[-1]
    weights = [p for name, p in choice.apply(model).named_parameters() if name.endswith("weight")]
    assert choice.total("chosen").parameters == sum(p.numel() for p in weights)
    for row, layer in zip(summary(model, image()).layers, choice.layers.values(), strict=True):
        sizes = dataclasses.asdict(row)
        dense_size = sizes.get("weights_dense", sizes.get("parameters_dense"))
        assert (layer.costs["dense"].parameters, layer.costs["dense"].flops) == (dense_size, row.flops_dense)
    assert " -> " in str(choose_forms(model, image()))


class Clock:
    """A clock that advances by given times, one for each run; the last one is repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, {}
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, name: str, *seconds: float) -> Callable[[], None]:
        def call() -> None:
            turn = self.calls[name] = self.calls.get(name, -1) + 1
            self.now += seconds[min(turn, len(seconds) - 1)]

        return call


def test_timing_ends_soon_when_it_is_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"slow": clock.run("slow", 0.01), "fast": clock.run("fast", 0.006), "slowest": clock.run("slowest", 0.02)}
    assert fastest(runs, torch.device("cpu")) == pytest.approx({"slow": 0.01, "fast": 0.006, "slowest": 0.02})
    assert clock.calls["fast"] < 10
    assert clock.calls["slowest"] == 2  # once to warm up and two rounds


def test_timing_sees_through_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    noisy = [0.03, 0.02, 0.019, 0.018, 0.017, 0.016, 0.015, 0.014, 0.004]
    result = fastest({"noisy": clock.run("noisy", *noisy), "even": clock.run("even", 0.01)}, torch.device("cpu"))
    assert result == pytest.approx({"noisy": 0.004, "even": 0.01})


def test_timing_of_slow_runs_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fastest({"one": clock.run("one", 2.0), "two": clock.run("two", 3.0)}, torch.device("cpu"))
    assert clock.calls == {"one": 3, "two": 3}
