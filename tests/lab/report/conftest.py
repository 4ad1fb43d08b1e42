"""Results as real runs would leave them, and as an attacker would."""

import json

import pytest

import synthetic_results
from cpnorm.lab.paper import tables as paper
from report_cases import HOSTILE


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return synthetic_results.write(tmp_path_factory.mktemp("synthetic") / "results", seeds=3)


@pytest.fixture(autouse=True)
def _no_data(monkeypatch, tmp_path):
    """Data sets of this machine must not get into the page."""
    monkeypatch.delenv("CPNORM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))


@pytest.fixture
def hostile(tmp_path):
    """Every string of a record that gets into a report, as an attack."""
    config = paper.CIFAR10
    lines = [
        synthetic_results.run("x", seed, 88.0, 1000, config, synthetic_results.random.Random(0)) for seed in (0, 1)
    ]
    for line in lines:
        line |= {
            "table": f"beyond-{HOSTILE}",
            "row": f"beyond-x/{HOSTILE}",
            "environment": {"gpu": HOSTILE, "commit": HOSTILE},
        }
        layers = {HOSTILE: {"rank": 4, "lambdas": [3, 2, 1, 1], "term_weights": 10, "flops_per_term": 5}}
        line["explorer"] = {"rates": [0.0, 0.5], "accuracy": [88.0, 80.0], "layers": layers}
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    below = synthetic_results.run("cifar10/none-sgd", 0, 80.0, 10, config, synthetic_results.random.Random(0))
    (folder / "b.jsonl").write_text(json.dumps(below))
    (folder / "explanations.json").write_text(json.dumps({"cifar10/none-sgd": HOSTILE}))
    return folder
