"""Lightning: a callback that renormalises after every step, logs sigma and lambda, and truncates on a schedule."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.hooks import RemovableHandle

from cpnorm import GradualTruncation, renormalize_after
from cpnorm.integrations import scalars, take_ranks, whole_or_replicas
from cpnorm.nn.training import holds_terms


class CanonicalCallback(Callback):
    """Train a LightningModule with canonical layers: ``Trainer(callbacks=[CanonicalCallback()])``.

    With ``steps=3, every=2`` and a budget of ``GradualTruncation`` it truncates after epochs 2, 4 and 6. Under DDP all
    processes truncate in the same way, on the data of all processes.
    """

    def __init__(self, *, steps: int | None = None, every: int = 1, **budget: Any) -> None:
        self.steps, self.every, self.budget = steps, every, budget
        self.gradual: GradualTruncation | None = None
        self.resumed: dict[str, Any] = {}
        self.loading: RemovableHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.loading is not None:  # set by an earlier fit or stage
            self.loading.remove()
        self.loading = pl_module.register_load_state_dict_pre_hook(take_ranks)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ours = [optimizer for optimizer in trainer.optimizers if holds_terms(optimizer, pl_module)]
        self.handles = [renormalize_after(optimizer, pl_module) for optimizer in ours or trainer.optimizers[:1]]
        if self.steps is not None:
            model = whole_or_replicas(pl_module, trainer.model, trainer.world_size)
            self.gradual = GradualTruncation(model, trainer.optimizers, steps=self.steps, **self.budget)
            self.gradual.load_state_dict(self.resumed or self.gradual.state_dict())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Build all weights together: Lightning calls ``training_step`` itself, and so no hook of the module."""
        if trainer.model is pl_module:  # a wrapper such as DDP calls the module
            with trainer.precision_plugin.train_step_context():
                self.handles[0].weights()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.gradual is not None and (trainer.current_epoch + 1) % self.every == 0:
            self.gradual.step()
        # The numbers are equal in all processes; without sync_dist Lightning would warn.
        pl_module.log_dict(scalars(pl_module), sync_dist=trainer.world_size > 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self.handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        return self.gradual.state_dict() if self.gradual is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict
