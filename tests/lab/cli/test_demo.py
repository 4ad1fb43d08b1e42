"""The demo: the table and the page tell what the runs have found; a second call finds everything done."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from cpnorm.lab.cli import demo
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.runs import RunFolder
from training_runs import few_digits


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story, told in a few seconds."""
    monkeypatch.setattr(demo, "load", lambda name: few_digits(96, 40))
    ranks = {"features.0": 6, "features.2": 20, "classifier.1": 8, "classifier.4": 8}
    monkeypatch.setattr(demo, "BASE", demo.BASE.replace(epochs=2, rank=ranks))
    monkeypatch.setattr(demo, "FINE_TUNING_EPOCHS", 1)
    monkeypatch.setattr(demo, "ROUNDS", 3)


class Page(HTMLParser):
    """What a browser would fetch, and the cells of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.cells: list[str] = []
        self.names: list[str] = []
        self.inside = ""
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = tag if tag in ("td", "th") else ""
        found = dict(attrs)
        address = found.get("src") or found.get("xlink:href") or found.get("href")
        if address and not address.startswith(("data:", "#")):
            self.fetched.append(address)

    def handle_data(self, data: str) -> None:
        if self.inside:
            (self.cells if self.inside == "td" else self.names).append(data)
            self.inside = ""


@pytest.mark.usefixtures("small")
def test_the_whole_story(tmp_path: Path) -> None:
    said = io.StringIO()
    story = demo.run_demo(tmp_path, 0, Console(file=said))
    assert story is not None
    names = [network.name for network in story.networks]
    assert names == ["plain", "weight-normalised", "canonical", *(f"canonical, {rate} % cut" for rate in (25, 50, 75))]
    for network in story.networks:
        record = RunFolder(network.folder).record()
        assert record is not None
        assert (network.accuracy, network.parameters) == (record["test_accuracy_last"], record["parameters"])
        assert network.milliseconds > 0
        assert f"{network.name}: {network.accuracy} %" in said.getvalue()  # without a terminal, a line each
    sizes = [network.parameters for network in story.networks[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert all((network.accuracy_cut is None) == (number < 3) for number, network in enumerate(story.networks))

    text = story.page.read_text()
    page = Page(text)
    assert page.fetched == []  # everything is in the page
    assert page.tags.count("svg") == 4  # accuracy against parameters, curves, lambdas, images
    shown = [name.replace("\xa0", " ") for name in page.names]
    assert [name for name in shown if name in names] == names
    assert f"{story.networks[-1].parameters:,}" in page.cells
    assert "prefers-color-scheme" in text
    json.dumps(story.to_json())

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(before) == 6
    again = demo.run_demo(tmp_path, 0, Console(file=said), silent=True)
    assert again is not None
    assert [network.accuracy for network in again.networks] == [network.accuracy for network in story.networks]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}


@pytest.mark.usefixtures("small")
def test_a_stop_is_taken_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(demo, "Stop", lambda: Stop(deadline=0.0))
    assert demo.run_demo(tmp_path, 0, Console(file=said, width=200)) is None
    assert "stopped: the time limit was reached; the same command resumes it" in said.getvalue()
    assert not (tmp_path / "index.html").exists()


@pytest.mark.slow
def test_the_real_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cpnorm", "demo", "--out", str(tmp_path), "--json"]
    env = {**os.environ, "CPNORM_COMMIT": "x"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout)
    assert min(network["accuracy"] for network in story["networks"]) > 95
    assert story["networks"][-1]["parameters"] < 0.3 * story["networks"][0]["parameters"]
