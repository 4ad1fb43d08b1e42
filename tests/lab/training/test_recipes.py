"""The recipes train the networks they name."""

import dataclasses

import pytest

from cpnorm.lab.data.images import load
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.recipes import dense_recipe
from cpnorm.lab.training.trainer import Options, Trainer


@pytest.mark.parametrize("model", ["resnet18", "vgg16"])
def test_a_recipe_trains_its_network(model):
    digits = load("digits")
    images = digits.train_images[:80].expand(-1, 3, -1, -1)
    padded = [x.new_zeros(len(x), 3, 32, 32) for x in (images, images[:20])]
    for target, source in zip(padded, (images, images[:20]), strict=True):
        target[:, :, 2:30, 2:30] = source
    data = dataclasses.replace(
        digits,
        train_images=padded[0],
        train_labels=digits.train_labels[:80],
        test_images=padded[1],
        test_labels=digits.train_labels[:20],
        mean=(77.8,) * 3,
        std=(82.8,) * 3,
    )
    config = dense_recipe(model, epochs=3).replace(width=0.125, batch_size=16, lr=0.02, augment="none")
    trainer = Trainer(config, data, Options(device="cpu"))
    for _ in trainer.run():
        pass
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    assert trainer.optimizer.defaults["nesterov"]


def test_nesterov_needs_momentum_of_sgd():
    for settings in ({"optimizer": "adam", "momentum": 0.9}, {"momentum": 0.0}):
        with pytest.raises(ValueError, match="nesterov requires optimizer='sgd' and momentum > 0"):
            Config(nesterov=True, **settings)


def test_recipes_by_data():
    assert dense_recipe("resnet18").augment == "crop-flip-cutout"
    assert dense_recipe("resnet18", "svhn").lr == dense_recipe("resnet18").lr / 2
