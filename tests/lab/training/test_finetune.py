"""The fine-tuning loop: the pieces against formulas, and small networks that get better."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.training.evaluation import accuracy, calibration_batches, prepared
from cpnorm.lab.training.finetune import Recipe, finetune


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load("digits")


@pytest.fixture(scope="module")
def dense(digits: ImageSet) -> nn.Module:
    model = network()
    finetune(model, digits, Recipe(epochs=6, batch_size=64, lr=1e-2, augment="none"))
    return model


@pytest.mark.parametrize("form", ["canonical", "plain"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_cut_network_gets_better_and_stays_what_it_is(
    dense: nn.Module, digits: ImageSet, form: str, optimizer: str
) -> None:
    model = cpnorm.canonical_norm(copy.deepcopy(dense))
    cpnorm.truncate(model, rate=0.8)
    if form == "plain":  # of a network in training mode: its batch norms stay
        model = cpnorm.factorize(model.train(), torch.zeros(1, 1, 28, 28), goal="parameters")
    before, shapes = accuracy(model, digits), [p.shape for p in model.parameters()]
    settings = {"sgd": 0.05, "adamw": 3e-3}
    recipe = Recipe(epochs=3, batch_size=64, lr=settings[optimizer], optimizer=optimizer, augment="none")  # type: ignore[arg-type]
    seen: list[dict[str, float]] = []
    history = finetune(model, digits, recipe, teacher=dense, test_every=2, on_epoch=seen.append)
    assert history == seen
    assert ["test_accuracy" in line for line in history] == [False, True, True]
    assert history[-1]["test_accuracy"] == accuracy(model, digits) > before + 10
    assert history[-1]["loss"] < history[0]["loss"]
    assert [p.shape for p in model.parameters()] == shapes
    assert not model.training
    for layer in cpnorm.canonical_layers(model).values():
        for factor in layer.factors:
            torch.testing.assert_close(factor.norm(dim=0), torch.ones(layer.rank))


def test_the_same_seed_gives_the_same_network_and_leaves_the_random_state_alone(digits: ImageSet) -> None:
    state = torch.get_rng_state()
    models = []
    for seed in (1, 1, 2):
        models.append(network())
        before = torch.get_rng_state()
        finetune(models[-1], digits, Recipe(epochs=0.3, batch_size=64, augment="crop", seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_pure_distillation_follows_the_teacher_and_not_the_labels(dense: nn.Module, digits: ImageSet) -> None:
    """With wrong labels the labels' loss leads away, and the teacher's does not."""
    wrong = dataclasses.replace(digits, train_labels=(digits.train_labels + 1) % 10)
    found = {}
    for share in (0.0, 1.0):
        model = copy.deepcopy(dense)
        finetune(
            model, wrong, Recipe(epochs=2, batch_size=64, lr=5e-3, distillation=share, augment="none"), teacher=dense
        )
        found[share] = accuracy(model, digits)
    assert found[0.0] < 30
    assert found[1.0] > accuracy(dense, digits) - 3


def test_without_averaging_the_last_weights_stay(digits: ImageSet) -> None:
    plain, averaged = network(), network()
    settings = Recipe(epochs=1, lr=0.05, batch_size=64, optimizer="sgd", augment="none", averaging=0.0)
    finetune(plain, digits, settings)
    finetune(averaged, digits, dataclasses.replace(settings, averaging=0.5))
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), averaged.parameters(), strict=True))
    by_hand = network().to(memory_format=torch.channels_last)  # as there: other sums of rounding errors grow
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in by_hand.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in by_hand.parameters() if p.ndim == 1]},
        ],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(settings.seed))
    batches = len(order) // 64
    by_hand.train()
    for step in range(batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step / batches)
        chosen = order[step * 64 : step * 64 + 64]
        loss = nn.functional.cross_entropy(
            by_hand(prepared(digits.train_images[chosen], digits)), digits.train_labels[chosen]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for found, expected in zip(plain.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_learning_rates() -> None:
    recipe = Recipe(epochs=11, lr=0.4, warmup=1)
    assert recipe.learning_rate(0) < 0.001
    assert recipe.learning_rate(0.5) == pytest.approx(0.2, rel=0.01)
    assert recipe.learning_rate(1) == pytest.approx(0.4)
    assert recipe.learning_rate(6) == pytest.approx(0.2)
    assert recipe.learning_rate(11) == pytest.approx(0)


def test_calibration_images_are_augmented_as_in_training(digits: ImageSet) -> None:
    first, again, other = (calibration_batches(digits, 60, batch=32, seed=seed) for seed in (0, 0, 1))
    assert [len(y) for _, y in first] == [32, 28]
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], other[0][0])
    assert torch.equal(first[1][1], digits.train_labels[32:60])
    clean = calibration_batches(digits, 60, mode="none")[0][0]
    assert torch.equal(clean, prepared(digits.train_images[:60], digits))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": 0}, "lr > 0, got 0"),
        ({"distillation": 1.5}, "<= distillation <= 1, got 1.5"),
        ({"epochs": -1}, "epochs"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Recipe(**settings)  # type: ignore[arg-type]


def test_failures_are_named(digits: ImageSet) -> None:
    with pytest.raises(ValueError, match="expected a batch_size <= 1442"):
        finetune(network(), digits, Recipe(batch_size=2000))
    with pytest.raises(FloatingPointError, match="use a smaller lr"):
        finetune(network(), digits, Recipe(epochs=1, batch_size=64, lr=1e30, optimizer="sgd", warmup=0, augment="none"))


@pytest.mark.gpu
def test_a_captured_step_trains_as_well(digits: ImageSet) -> None:
    model = cpnorm.canonical_norm(network()).cuda()
    history = finetune(model, digits, Recipe(epochs=6, batch_size=64, lr=1e-2, augment="none", precision="bf16"))
    assert history[-1]["test_accuracy"] > 85
    assert {layer.path for layer in cpnorm.canonical_layers(model).values()} == {"auto"}
