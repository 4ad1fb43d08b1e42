"""The two protocols: what the code protocol changes, where its cuts start, and that its settings can be run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import cpnorm
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper import protocols, reproduce
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.jobs import Job, Results, base_of, missing_jobs
from cpnorm.lab.paper.protocols import CODE, WORDS, Protocol
from cpnorm.lab.paper.rank_tables import authors_rank, missing_ranks
from cpnorm.lab.paper.reproduce import Request
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.run_networks import trained_network
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options, Trainer
from cpnorm.lab.training.truncation import Truncation

CPU = Options(device="cpu")
SMALL = Config(model="lenet", data="digits", optimizer="adam", lr=0.003, epochs=1, batch_size=32)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    whole = load("digits")
    changed = {f"{s}_{k}": getattr(whole, f"{s}_{k}")[:64] for s in ("train", "test") for k in ("images", "labels")}
    return dataclasses.replace(whole, **changed, sha256="")


# --- data -------------------------------------------------------------------------------------------------------------


def test_both_protocols_have_every_row_of_the_paper_with_its_numbers() -> None:
    published = {row.key: row.published for row in paper.rows()}
    for protocol in (WORDS, CODE):
        found = {row.key: row.published for row in protocol.rows().values() if row.published}
        assert found == published


def test_every_changed_setting_has_evidence() -> None:
    for row in CODE.rows().values():
        assert row.evidence, row.key
    fitted = [row.key for row in CODE.rows().values() if row.config.momentum and not row.truncation and row.published]
    assert [key for key in fitted if "fitted" in CODE.row(key).evidence] == [
        "cifar10/none-sgd",
        "cifar10/weight-sgd",
        "cifar10/cp-sgd",
    ]


def test_records_are_shared_by_rows_of_the_same_settings_only() -> None:
    shared = [row for row in CODE.rows().values() if row.recorded_as]
    assert len(shared) == 9
    for row in shared:
        assert all(WORDS.row(key).config == row.config and not WORDS.row(key).truncation for key in row.recorded_as)


def test_the_code_protocol_never_renormalises() -> None:
    for row in CODE.rows().values():
        if row.config.norm == "cp":
            assert not row.config.renormalize, row.key


def test_cuts_start_from_kept_networks_of_the_right_row() -> None:
    for row in CODE.rows().values():
        if row.truncation:
            source = CODE.row(row.starts_from or "")
            assert source.config == row.config
            assert row.start_networks == 3
            assert source.config.keep_best == (row.truncation.start_epoch == "best_test")
            assert not row.finetuning.keep_best
    mnist = CODE.row("compress-mnist/25")
    assert mnist.truncation.start_epoch == "last"
    assert mnist.finetuning.trainable == "sigma-bias"
    cut = CODE.row("compress-cifar10/25")
    assert (cut.config.momentum, cut.finetuning.momentum, cut.finetuning.batch_size) == (0.6, 0.0, 128)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(ValueError, match="expected a protocol among words, code, got 'text'"):
        protocols.find_protocol("text")


# --- the queue --------------------------------------------------------------------------------------------------------


def test_records_of_the_same_settings_count(tmp_path: Path) -> None:
    line = {"table": "checks", "row": "checks/none-sgd-momentum", "seed": 1, "final": 87.0, "diverged": None}
    (tmp_path / "checks.jsonl").write_text(json.dumps(line) + "\n")
    left = missing_jobs(["cifar10/none-sgd"], range(3), Results(tmp_path, CODE))
    assert [str(job) for job in left] == ["cifar10/none-sgd, seed 0", "cifar10/none-sgd, seed 2"]
    assert len(missing_jobs(["cifar10/none-sgd"], range(3), Results(tmp_path, WORDS))) == 3


def test_cuts_ask_for_three_networks_whatever_the_seeds(tmp_path: Path) -> None:
    jobs = missing_jobs(["compress-svhn/50"], range(6), Results(tmp_path, CODE))
    assert [str(job) for job in jobs[:3]] == [f"svhn/cp-sgd, seed {seed}" for seed in range(3)]
    assert [job.row.key for job in jobs[3:]] == ["compress-svhn/50"] * 6
    assert jobs[3].needs(jobs[2])
    assert jobs[3].needs(Job(CODE.row("svhn/cp-sgd"), 3, protocol=CODE))  # if it is run anyway: it may be the best


def test_seeds_are_dealt_out_to_the_best_networks(tmp_path: Path) -> None:
    store = Results(tmp_path, CODE)
    for seed, best in enumerate((94.0, 95.0, 94.5, 93.0)):
        line = {"table": "svhn", "row": "svhn/cp-sgd", "seed": seed, "diverged": None}
        store.append({**line, "test_accuracy_last": 90.0 - seed, "test_accuracy_best": best})
    assert (tmp_path / "code/svhn.jsonl").exists()
    cut = CODE.row("compress-svhn/50")
    bases = [base_of(Job(cut, seed, protocol=CODE), store.done()) for seed in range(6)]
    assert [base.seed for base in bases] == [1, 2, 0, 1, 2, 0]


def test_a_cut_from_the_best_epoch(tmp_path: Path) -> None:
    ranks = dict.fromkeys(paper.paper_ranks("lenet"), 2)
    config = SMALL.replace(init="kaiming_normal", rank=ranks, epochs=3, lr=0.02, keep_best=True, renormalize=False)
    base = Row("tiny/base", "base", config, None)
    cut = Row(
        "tiny/cut",
        "cut",
        config,
        None,
        starts_from=base.key,
        truncation=Truncation(rate=0.0, start_epoch="best_test"),
        tuning={"epochs": 0, "trainable": "sigma-bias"},
        start_networks=2,
    )
    tiny = Protocol("tiny", {"tiny": Table("tiny", "", rows=(base, cut))}, folder="tiny")
    left = reproduce.reproduce(Request(["tiny"], range(2), tmp_path, tmp_path / "work", tiny, CPU))
    assert left == []
    lines = Results(tmp_path, tiny).lines()
    by_seed = {line["seed"]: line for line in lines if line["row"] == base.key}
    for line in lines:
        if line["row"] == cut.key:
            source = by_seed[line["truncation_result"]["start_seed"]]
            assert line["protocol"] == "tiny"
            assert line["truncation_result"]["accuracy_before"] == source["test_accuracy_best"]
            assert line["test_accuracy_last"] == pytest.approx(source["test_accuracy_best"], abs=1e-3)
            assert line["truncation_settings"] == {
                "rate": 0.0,
                "start_epoch": "best_test",
                "start": "best",
                "networks": 2,
            }
    folder = Job(base, 0, protocol=tiny).folder(tmp_path / "work")
    metadata = cpnorm.read_metadata(folder / "best.safetensors")
    assert metadata["chosen"] == "best epoch on test data"
    assert metadata["epoch"] == by_seed[0]["best_epoch"]
    assert trained_network(folder, file="best.safetensors")


# --- the settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("init", "spread"), [("kaiming_normal", 2.0), ("kaiming_uniform", 2.0)])
def test_kaiming_is_for_convolutions_only_and_keeps_its_lengths(init: str, spread: float, digits: ImageSet) -> None:
    ranks = {"features.0": 9, "features.2": 200, "classifier.1": 8, "classifier.4": 10}
    config = SMALL.replace(
        rank=ranks,
        init=init,
        lambdas="ones",
        linear_init="power",
        linear_lambdas="decomposition",
        vector_lengths="kaiming",
        renormalize=False,
    )
    drawn = cpnorm.canonical_layers(build_model(config, digits, torch.device("cpu")))
    for factor in drawn["features.2"].factors:  # variance 2 / R: |a|^2 is about 2 d / R
        mean = factor.square().mean().item()
        assert mean == pytest.approx(spread / 200, rel=0.25)
    assert torch.equal(drawn["features.2"].lambdas, torch.ones(200))
    power = config.replace(init="power", lambdas="decomposition", linear_init="same", vector_lengths="unit")
    plain = cpnorm.canonical_layers(build_model(power.replace(linear_lambdas="same"), digits, torch.device("cpu")))
    linear = drawn["classifier.4"]
    torch.testing.assert_close(linear.weight, plain["classifier.4"].weight, rtol=0, atol=1e-4)
    assert linear.lambdas.std() > 0
    again = cpnorm.canonical_layers(build_model(config, digits, torch.device("cpu")))
    assert all(torch.equal(again[n].factors[0], layer.factors[0]) for n, layer in drawn.items())


def test_lengths_need_vectors_that_are_drawn() -> None:
    with pytest.raises(ValueError, match="vector_lengths='kaiming' needs a Kaiming init, got init='power'"):
        SMALL.replace(init="power", vector_lengths="kaiming")


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam"])
def test_sigma_and_biases_alone_are_trained(optimizer: str, digits: ImageSet) -> None:
    config = SMALL.replace(
        init="kaiming_normal", rank=4, trainable="sigma-bias", renormalize=False, optimizer=optimizer, lr=0.01
    )
    trainer = Trainer(config, digits, CPU)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for _ in trainer.run():
        pass
    for name, value in trainer.model.state_dict().items():
        moves = name.endswith(("sigma", "bias"))
        assert torch.equal(value, before[name]) == (not moves), name
    assert trainer.parameters == sum(value.numel() for value in before.values())


def test_building_a_network_leaves_the_random_state_alone(digits: ImageSet) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(SMALL.replace(norm="none"), digits, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def test_flags_of_torch_are_restored(digits: ImageSet) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    trainer = Trainer(SMALL.replace(norm="none", precision="tf32"), digits, CPU)
    trainer.evaluate(digits.test_images, digits.test_labels)
    after = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert after == before


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_the_authors_rank_is_the_first_that_fits_or_the_fourth_failure() -> None:
    fits: dict[int, float] = {}

    def their_log(rank: int) -> float:  # of the second layer of the AlexNet-like network
        fits[rank] = 0.984 * rank / 551 if rank <= 551 else math.nan
        return fits[rank]

    assert authors_rank(torch.zeros(1), their_log).rank == 571
    assert len(fits) < 20
    assert authors_rank(torch.zeros(1), lambda rank: min(rank / 36, 0.998)).rank == 36
    assert authors_rank(torch.zeros(1), lambda rank: math.nan if rank in (31, 36) else rank / 41).rank == 41


def test_authors_ranks_of_a_small_network(tmp_path: Path) -> None:
    weight = torch.nn.Conv2d(1, 32, 3).weight.detach()  # the first layer of the LeNet-like network: published 11
    found = authors_rank(weight)
    assert found.rank == 11
    assert [rank for rank, _ in found.curve] == [6, 11]
    assert set(missing_ranks(["lenet-ranks"], Results(tmp_path, CODE))) == {("lenet-ranks", seed) for seed in range(3)}
