"""transformers: a callback for the Trainer, and linear layers in the place of GPT-2's Conv1D."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.pytorch_utils import Conv1D

from cpnorm import GradualTruncation, NetworkWeights
from cpnorm.integrations import scalars, take_ranks, whole_or_replicas


class CanonicalCallback(TrainerCallback):
    """Train a model with canonical layers: ``trainer.add_callback(CanonicalCallback(trainer))``.

    The callback renormalises after every optimizer step and logs sigma and lambda after every epoch. With ``steps`` and
    a budget (``params=200_000``, ``rate=0.75``, ...) it also takes one step of ``GradualTruncation`` after every epoch.
    Under DDP all processes truncate alike, on the data of all.
    """

    def __init__(self, trainer: Trainer, *, steps: int | None = None, **budget: Any) -> None:
        self.trainer, self.steps, self.budget = trainer, steps, budget
        self.gradual: GradualTruncation | None = None
        self.weights: NetworkWeights | None = None
        trainer.model.register_load_state_dict_pre_hook(take_ranks)

    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        self.weights = NetworkWeights(model)
        if self.steps is not None:
            whole = whole_or_replicas(model, self.trainer.model_wrapped, self.trainer.args.world_size)
            self.gradual = GradualTruncation(whole, optimizer, steps=self.steps, **self.budget)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.weights is not None:
            self.weights.renormalize()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.weights is not None:
            self.weights.remove()

    def on_epoch_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if self.gradual is not None:
            self.gradual.step()
        self.trainer.log(scalars(model))


def linears_for_conv1d(model: nn.Module) -> nn.Module:
    """Replace every Conv1D of a GPT-2 by an ``nn.Linear`` that computes the same, and return the model."""
    for name, conv in list(model.named_modules()):
        if isinstance(conv, Conv1D):
            linear = nn.Linear(conv.nx, conv.nf, device="meta")
            weight = conv.weight.detach().mT.contiguous()
            linear.weight, linear.bias = nn.Parameter(weight, conv.weight.requires_grad), conv.bias
            model.set_submodule(name, linear)
    return model
