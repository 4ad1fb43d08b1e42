"""The benchmark of compressed networks: methods against dense algebra, budgets kept, records and resumption."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import compression_accuracy
import compression_figure
import compression_networks
import compressors
import small_layers
from cpnorm.lab.data.images import STATISTICS
from cpnorm.lab.training.networks import cifar_resnet
from official_files import make, write_cifar10

ROOT = Path(__file__).parent.parent
PEERS = {"tucker2": "tensorly", "cp-als": "tensorly", "tensorly-torch": "tltorch", "torch-pruning": "torch_pruning"}


def available(method: str) -> bool:
    return method not in PEERS or importlib.util.find_spec(PEERS[method]) is not None


def batches(count: int = 64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return [(images, torch.randint(10, (count,), generator=generator))]


@pytest.fixture
def network() -> nn.Module:
    """A narrow ResNet-8 whose batch-norm layers have seen images."""
    torch.manual_seed(0)
    model = cifar_resnet(8, width=0.5)
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(batches()[0][0])
    return model.eval()


@pytest.mark.parametrize("method", list(compressors.METHODS))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_method_keeps_to_its_budget_and_leaves_the_network_alone(method: str, network: nn.Module) -> None:
    if not available(method):
        pytest.skip(f"needs {PEERS[method]}")
    before = copy.deepcopy(network.state_dict())
    budget = small_layers.parameters(network) // 2
    small = compressors.METHODS[method](network, budget, batches())
    assert 0.8 * budget < small_layers.parameters(small) <= budget
    assert small(batches()[0][0]).shape == (64, 10)
    after = network.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("layer", [nn.Conv2d(5, 7, 3, 2, 1), nn.Conv2d(4, 6, 1, 2, bias=False), nn.Linear(12, 5)])
def test_all_singular_values_give_the_layer_back(layer: nn.Module) -> None:
    x = torch.randn(2, 12) if isinstance(layer, nn.Linear) else torch.randn(2, layer.in_channels, 9, 9)
    u, s, v = torch.linalg.svd(layer.weight.detach().flatten(1), full_matrices=False)
    torch.testing.assert_close(small_layers.two_layers(layer, u, s[:, None] * v)(x), layer(x), rtol=1e-4, atol=1e-5)


def test_a_convolution_in_cp_form_is_four_plain_ones() -> None:
    layer = nn.Conv2d(4, 6, (3, 5), (1, 2), (1, 2))
    factors = [torch.randn(size, 3) for size in layer.weight.shape]
    with torch.no_grad():
        layer.weight.copy_(torch.einsum("or,ir,hr,wr->oihw", *factors))
    x = torch.randn(2, 4, 10, 11)
    torch.testing.assert_close(small_layers.separable(layer, *factors)(x), layer(x), rtol=1e-4, atol=1e-4)


def test_whitening_is_best_on_the_data() -> None:
    """No other projection of the same rank has a smaller error in the outputs; the plain SVD's is larger."""
    torch.manual_seed(0)
    layer = nn.Linear(20, 12)
    model = nn.Sequential(layer)
    x = torch.randn(500, 20) * torch.logspace(-2, 1, 20)
    errors = {}
    for name in ("svd", "whitened-svd"):
        small = compressors.METHODS[name](model, 5 * 32 + 12, [(x, torch.zeros(500))])
        assert small[0][0].out_features <= 5
        errors[name] = (small(x) - model(x)).square().sum().item()
    rank = 5
    y = (x @ layer.weight.mT).detach()
    best = torch.linalg.svdvals(y)[rank:].square().sum().item()
    assert errors["whitened-svd"] == pytest.approx(best, rel=1e-3) or errors["whitened-svd"] > best
    assert errors["whitened-svd"] < 0.9 * errors["svd"]


def test_the_smallest_loss_that_fits_the_budget_is_found() -> None:
    energies = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert [small_layers.rank_for(energies, lost) for lost in (0.0, 0.1, 0.3, 0.31, 0.9, 1.0)] == [4, 3, 2, 2, 1, 1]
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with pytest.raises(ValueError, match="one term a layer is more than 3 parameters"):
        compressors.svd(model, 3, [])


def test_weights_in_several_files_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_networks, "SHARD", 3000)
    model = cifar_resnet(8, width=0.25)
    compression_networks.write_shards(model, tmp_path / "net")
    assert len(list(tmp_path.iterdir())) > 2
    found, expected = compression_networks.read_shards(tmp_path / "net"), model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_command_writes_records_once_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar10(tmp_path, make("cifar10"))
    assert STATISTICS["cifar10"]
    out = tmp_path / "records.jsonl"
    words = ["x", "vgg16", "--smoke", "--data-dir", str(tmp_path), "--out", str(out), "--work", str(tmp_path / "work")]
    words += ["--methods", "cpnorm", "svd", "--finetune", "0.5", "--control", "--threads", "1"]
    words += ["--teacher", "vgg16", "vgg16"]  # itself, of this smoke test
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):  # the second time there is nothing left to do
        compression_accuracy.main()
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(records) == 6
    assert {(r["method"], "finetuning" in r) for r in records} == {
        (method, tuned) for method in ("dense", "cpnorm", "svd") for tuned in (False, True)
    }
    for record in records:
        assert record["parameters"] <= record["share"] * record["dense_parameters"] + 1
        assert {"commit", "machine", "command", "accuracy", "flops", "test_images"} <= record.keys()
    assert "| vgg16 cifar10 | 50 % | svd |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["x", "--plot", str(out), "--figure", str(tmp_path / "figure.png")])
    compression_accuracy.main()
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_of_two_records_of_one_measurement_the_later_counts(tmp_path: Path) -> None:
    base = {"benchmark": "compression_accuracy", "network": "n", "data": "d", "network_seed": 0, "method": "svd"}
    base |= {"share": 0.5, "dense_accuracy": 90.0, "parameters": 5, "dense_parameters": 10}
    tuned = {**base, "accuracy": 88.0, "seed": 1, "finetuning": {"label": "default"}}
    lines = [{**base, "accuracy": 10.0}, {**base, "accuracy": 20.0}, tuned, {**tuned, "seed": 2, "accuracy": 89.0}]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"benchmark": "another"}])))
    records = compression_figure.read([path])
    assert [record["accuracy"] for record in records] == [20.0, 88.0, 89.0]
    (row,) = compression_figure.table(records)[2:]
    assert "| 20.00 |" in row
    assert "88.50 ± 0.71 (2)" in row
    page = compression_figure.with_figures(
        "a\n<!-- figures -->\nold\n<!-- /figures -->\nb\n",
        [{**record, "machine": {"gpu": None, "cpu": "abacus"}, "commit": "abc"} for record in records],
        "f.png",
    )
    before, _, rest = page.partition("](f.png)\n\n")
    assert before.startswith("a\n<!-- figures -->\n![")
    assert rest.startswith("**n, d**: abacus, commit abc\n\n| network |")
    assert rest.endswith(" |\n<!-- /figures -->\nb\n")


def test_cuts_by_more_images_are_measurements_of_their_own(tmp_path: Path) -> None:
    base = {"benchmark": "compression_accuracy", "network": "n", "data": "d", "network_seed": 0, "method": "svd"}
    base |= {"share": 0.5, "dense_accuracy": 90.0, "accuracy": 10.0}
    records = [base, {**base, "calibration_images": 1024, "accuracy": 20.0}]
    records += [{**base, "calibration_images": 8192, "accuracy": 30.0}]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    rows = compression_figure.table(compression_figure.read([path]))[2:]
    assert [row.split(" | ")[2:4] for row in rows] == [["svd", "20.00"], ["svd, 8,192 images", "30.00"]]


def test_a_network_without_cuts_is_not_drawn(tmp_path: Path) -> None:
    base = {"data": "d", "share": 0.5, "dense_accuracy": 90.0, "accuracy": 90.0}
    base |= {"parameters": 10, "dense_parameters": 10, "flops": 10, "dense_flops": 10}
    cut = [{**base, "network": "n", "method": "dense"}, {**base, "network": "n", "method": "svd", "parameters": 5}]
    for name, records in (("one.png", cut), ("two.png", [*cut, {**base, "network": "m", "method": "dense"}])):
        compression_figure.draw(records, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_the_guides_figures_are_those_of_the_records() -> None:
    page = ROOT / "docs" / "cuts.md"
    records = compression_figure.read(sorted((ROOT / "results" / "networks").glob("*.jsonl")))
    if not records:
        pytest.skip("there are no records yet")
    assert page.read_text() == compression_figure.with_figures(
        page.read_text(), records, "assets/compression_accuracy.png"
    ), "run: python benchmarks/compression_accuracy.py --plot results/networks/*.jsonl --page docs/cuts.md"
