"""A Lightning callback: unit vectors after every optimizer step, curves of sigma and lambda, truncation on schedule."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cpnorm.convert import renormalize_after
from cpnorm.gradual import GradualTruncation
from cpnorm.integrations import scalars


class CanonicalCallback(Callback):
    """``Trainer(callbacks=[CanonicalCallback()])`` for a module with canonical layers.

    With ``steps`` and a budget (``params=200_000``, ``rate=0.75``, ... and any other option of ``GradualTruncation``)
    the model is truncated in that many steps, one at the end of each epoch, or of every so many; the optimizer goes on.
    """

    def __init__(self, *, steps: int | None = None, every: int = 1, **budget: Any) -> None:
        self.steps, self.every, self.budget = steps, every, budget
        self.gradual: GradualTruncation | None = None
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on the optimizers exist."""
        self.handles = [renormalize_after(optimizer, pl_module) for optimizer in trainer.optimizers]
        if self.steps is not None:
            self.gradual = GradualTruncation(pl_module, trainer.optimizers[0], steps=self.steps, **self.budget)
            if self.state:
                self.gradual.load_state_dict(self.state)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Truncate if it is time, and log."""
        if self.gradual is not None and (trainer.current_epoch + 1) % self.every == 0:
            self.gradual.step()
        pl_module.log_dict(scalars(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizer may go on without us."""
        for handle in self.handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """How far the truncation is."""
        return self.gradual.state_dict() if self.gradual is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there when the training starts."""
        self.state = state_dict
