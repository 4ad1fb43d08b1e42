"""Small residual networks: what rounds share, what a canonical one costs, and that the lab builds and trains them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.lab.data.images import load
from cpnorm.lab.paper.smallest import thin_ranks
from cpnorm.lab.training import models
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.small_networks import SmallResNet, Widen
from cpnorm.lab.training.trainer import Options, Trainer

DESIGN = {"widths": [6, 10], "depths": [1, 2], "rounds": [1, 3], "kernels": [3, 5]}


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_parameters_of_a_canonical_network_are_those_of_the_formula() -> None:
    network = SmallResNet(1, 10, **DESIGN)
    ranks = thin_ranks(DESIGN, [4, 7], stem=3)
    cpnorm.canonical_norm(network, ranks, "kaiming_normal", skip="linear")
    stem = 3 * (6 + 1 + 3 + 3 + 1) + 1 + 2 * 6
    first = 2 * (4 * (6 + 6 + 3 + 3 + 1) + 1) + 4 * 6
    second = 2 * (2 * (7 * (10 + 10 + 5 + 5 + 1) + 1) + 3 * 4 * 10)  # three rounds, each with two normalisations
    assert parameters(network) == stem + first + second + 10 * 10 + 10


def test_a_block_of_several_rounds_is_the_same_block_applied_again() -> None:
    torch.manual_seed(0)
    thrice = SmallResNet(3, 4, widths=[5], depths=[1], rounds=3).eval()
    once = SmallResNet(3, 4, widths=[5], depths=[1]).eval()
    once.load_state_dict({k: v for k, v in thrice.state_dict().items() if ".1." not in k and ".2." not in k})
    x = torch.randn(2, 3, 8, 8)
    after_stem = thrice.activation(thrice.bn(thrice.stem(x)))
    block = once.stages[0]
    torch.testing.assert_close(thrice.stages(after_stem), block(block(block(after_stem))))


def test_the_transition_keeps_the_largest_of_four_pixels() -> None:
    x = torch.randn(2, 3, 4, 4)
    y = Widen(3, 5)(x)
    assert y.shape == (2, 5, 2, 2)
    torch.testing.assert_close(y[:, :3, 0, 1], x[:, :, :2, 2:].amax((2, 3)))
    assert not y[:, 3:].any()


@pytest.mark.parametrize(
    ("design", "said"),
    [({"activation": "tanh"}, "relu, silu"), ({"depths": [1]}, "depths for 3 stages"), ({"rounds": 0}, "rounds")],
)
def test_wrong_designs_are_named(design: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SmallResNet(**design)  # type: ignore[arg-type]


def test_networks_without_a_design_refuse_one() -> None:
    with pytest.raises(ValueError, match="design: lenet takes no further arguments, got widths"):
        models.build("lenet", 1, 10, 28, design={"widths": [3]})
    with pytest.raises(ValueError, match="design"):
        Config(design=[1])  # type: ignore[arg-type]


def test_a_design_survives_the_settings_file() -> None:
    config = Config(model="small_resnet", design=DESIGN, rank=thin_ranks(DESIGN, [4, 7], stem=3), skip=("linear",))
    assert Config.from_json(config.to_json()) == config


def test_the_lab_trains_a_thin_network() -> None:
    data = load("digits")
    data = dataclasses.replace(data, train_images=data.train_images[:640], train_labels=data.train_labels[:640])
    design = {"widths": [8, 12], "depths": [1, 1], "rounds": [1, 2]}
    config = Config(
        model="small_resnet", design=design, rank=thin_ranks(design, [4, 6], stem=4), skip=("linear",), data="digits",
        norm="cp", init="kaiming_normal", optimizer="adam", lr=0.01, epochs=4, batch_size=32,
    )  # fmt: skip
    trainer = Trainer(config, data, Options("cpu", compile=False))
    assert trainer.parameters == parameters(build_model(config, data, torch.device("cpu")))
    for _ in trainer.run():
        pass
    assert trainer.history[-1]["loss"] < 0.8 * trainer.history[0]["loss"]


def test_a_gate_multiplies_each_channel_by_a_number_of_the_image() -> None:
    torch.manual_seed(0)
    block = SmallResNet(3, 4, widths=[5], depths=[1], gated=True).eval().stages[0][0]
    x = torch.randn(2, 5, 8, 8)
    y = block.bn2[0](block.conv2(block.bn1[0](block.conv1(x)).relu()))
    gates = torch.sigmoid(y.mean((2, 3)) @ block.gate.weight.T)
    torch.testing.assert_close(block(x), (x + y * gates.view(2, 5, 1, 1)).relu())
