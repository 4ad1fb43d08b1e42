"""Benchmarks: the page is what the records say, peers compute what they should, and starting up loads nothing idle."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import peers
import scaling
import table
import timing
import training_step
from cpnorm import canonical_layers, canonical_norm
from laws import close

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RANKS = {"0": 5, "2": 4}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(54, 7))


def image() -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


# --- records and page ---------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_records() -> None:
    assert table.PAGE.read_text() == table.page(), "run python benchmarks/table.py"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_was_run_where_and_with_what(path: Path) -> None:
    record = json.loads(path.read_text())
    script = re.match(r"python benchmarks/(\w+)\.py", record["command"])
    assert script
    device = "cuda" if "--device cuda" in record["command"] else "cpu"
    assert re.fullmatch(rf"{script[1]}_{device}(_[\w-]+)?", path.stem)
    assert {"python", "torch", "cpnorm"} <= set(record["machine"]["versions"])
    assert record["machine"]["gpu" if device == "cuda" else "cpu"]
    assert record["claims"]
    for claim in record["claims"]:
        sign, bound = claim["target"][0], float(re.findall(r"[\d.e+-]+", claim["target"])[0])
        median = claim["measured"]["median"]
        assert claim["measured"]["min"] <= median <= claim["measured"]["max"]
        assert claim["met"] is (median <= bound if sign == "≤" else median >= bound)
    for plot in record["plots"]:
        assert (ROOT / "docs" / "assets" / plot).stat().st_size < 200_000


def test_every_benchmark_opens_with_its_claim_and_is_run_by_make() -> None:
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed
    assert sorted(listed[1].split()) == sorted(table.SCRIPTS)
    for name in table.SCRIPTS:
        doc = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text()))
        assert doc
        assert doc.startswith("Claim: ")
        assert f"python benchmarks/{name}.py" in doc


def test_claims_and_ratios() -> None:
    seconds = {"slow": [2.0, 6.0, 9.0], "fast": [1.0, 2.0, 1.0]}
    assert timing.ratio(seconds, "slow", "fast") == {"median": 3.0, "min": 2.0, "max": 9.0}
    assert timing.milliseconds([0.5, 0.1, 0.3], calls=100) == pytest.approx({"median": 3.0, "min": 1.0, "max": 5.0})
    claim = timing.at_most("slow against fast", timing.ratio(seconds, "slow", "fast"), 3)
    assert (claim["target"], claim["met"]) == ("≤ 3×", True)
    assert not timing.at_most("", 3.1, 3)["met"]
    assert not timing.at_least("", 2.9, 3, "s")["met"]
    assert timing.at_least("", 3.0, 3, "s")["target"] == "≥ 3 s"
    order: list[str] = []
    timing.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warmup=1)
    assert "".join(order) == "ab" + "ab" + "ba"


# --- peers --------------------------------------------------------------------------------------------------------


@needs("tensorly")
def test_tensorly_in_a_hook_computes_what_a_canonical_network_computes() -> None:
    ours = canonical_norm(network(), RANKS, "kaiming_normal")
    hooked = peers.tensorly_in_a_hook(network(), RANKS)
    with torch.no_grad():
        for name, layer in canonical_layers(ours).items():
            layer.lambdas[0] *= -1
            layer.factors[1] *= 3  # vectors need not be of length one
            hooked.get_submodule(name).load_state_dict(layer.state_dict())
    close(hooked(image()), ours(image()), 1e-5)
    hooked(image()).sum().backward()
    assert all(parameter.grad is not None for parameter in hooked.parameters())


@needs("tltorch")
@pytest.mark.filterwarnings("ignore")
def test_tensorly_torch_has_the_same_terms_either_way() -> None:
    dense = network()
    one, other = (peers.tensorly_torch(dense, RANKS, way) for way in ("factorized", "reconstructed"))
    assert sum(p.numel() for p in one[0].parameters()) == 5 * (6 + 3 + 3 + 3 + 1) + 6
    assert sum(p.numel() for p in other[2].parameters()) == 4 * (7 + 54 + 1) + 7
    other[0].load_state_dict(one[0].state_dict())
    close(other[0](image()), one[0](image()), 1e-5)
    assert one(image()).shape == other(image()).shape == dense(image()).shape


def test_a_peer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorly", None)
    built, missing = peers.installed(
        {"dense": network, "hook": lambda: peers.tensorly_in_a_hook(network(), RANKS)},
    )
    assert list(built) == ["dense"]
    assert missing == {"hook": "tensorly is not installed"}


def test_the_authors_code_comes_from_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a checkout of canonical-cnn with a file cp_norm\.py in it, got"):
        peers.authors_code(network(), RANKS, tmp_path)
    (tmp_path / "deep").mkdir()
    code = tmp_path / "deep" / "cp_norm.py"
    code.write_text("")
    with pytest.raises(ValueError, match=r"expected a function cp_norm in .*cp_norm\.py"):
        peers.authors_code(network(), RANKS, tmp_path)
    code.write_text(
        "def cp_norm(module, rank=None, name='weight', max_iter=100, inference=False):\n"
        "    module.seen = rank, inference\n"
        "    return module\n"
    )
    made = peers.authors_code(network(), RANKS, tmp_path)
    assert [made.get_submodule(name).seen for name in RANKS] == [(5, True), (4, True)]


# --- the scripts' own parts ---------------------------------------------------------------------------------------


def test_a_point_of_the_sweep() -> None:
    row = scaling.measure(1 / 4, 2, 1 / 8, "cpu", rounds=1)
    assert {f"{name}, ms" for name in ("plain", "planned", "rebuilt", "factors")} <= set(row)
    assert row["modelled"]["planned"] <= min(row["modelled"]["rebuilt"], row["modelled"]["factors"])


def test_every_method_takes_the_same_steps() -> None:
    data = training_step.random_images(8)
    for method in ("plain", "canonical, always rebuilt"):
        made = training_step.trainer(method, 4, data, "cpu")
        before = [p.detach().clone() for p in made.model.parameters()]
        training_step.steps([made], 1)
        assert any(not torch.equal(p, old) for p, old in zip(made.model.parameters(), before, strict=True))
    assert {layer.path for layer in canonical_layers(made.model).values()} == {"rebuild"}


# --- starting up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "idle"),
    [
        ("import cpnorm", "cpnorm.lab tensorly scipy sklearn matplotlib typer rich onnx onnxruntime triton"),
        (
            "import cpnorm.lab.cli.main as cli; assert cli.main(['--help']) == 0",
            "cpnorm.lab.training.trainer cpnorm.lab.data tensorly scipy sklearn matplotlib onnx triton torch._dynamo",
        ),
    ],
    ids=["import", "help"],
)
def test_starting_up_loads_nothing_idle(code: str, idle: str) -> None:
    """Neither the import nor the help loads what only some commands need; how long they take is a benchmark."""
    script = f"{code}\nimport sys\nprint('loaded:', [m for m in {idle.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_commands_are_recorded_without_the_folders_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit_parts.py", "--weights", "/home/me/weights", "--out", "results/a b.json"])
    assert timing.command("fit_parts") == "python benchmarks/fit_parts.py --weights weights --out 'results/a b.json'"
