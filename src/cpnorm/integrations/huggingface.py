"""transformers: a callback for the Trainer, and a function that replaces GPT-2's Conv1D by linear layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from cpnorm import GradualTruncation, NetworkWeights
from cpnorm.integrations import scalars, take_ranks, whole_or_replicas
from cpnorm.nn.coverage import linears_for_conv1d

__all__ = ["CanonicalCallback", "linears_for_conv1d"]


class CanonicalCallback(TrainerCallback):
    """Train a model with canonical layers: ``trainer.add_callback(CanonicalCallback(trainer))``.

    The callback renormalises after every optimizer step and logs sigma and lambda after every epoch. With ``steps`` and
    a budget (``params=200_000``, ``rate=0.75``, ...) it also takes one step of ``GradualTruncation`` after every epoch.
    Under DDP all processes truncate in the same way, on the data of all processes.
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
