"""A real Lightning Trainer with the callback ends where a plain loop does, logs, and truncates on schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cpnorm
from cpnorm.integrations import whole_or_replicas
from cpnorm.nn.weight_programs import TorchProgram
from integrations.small import STEPS, batches, has_unit_columns, largest_difference, network, sgd, trained

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'cpnorm[lightning]'")
from cpnorm.integrations.lightning import CanonicalCallback  # noqa: E402

pytestmark = [  # its own, and those of the torch it meets
    pytest.mark.filterwarnings("ignore:.*(num_workers|log_every_n_steps|isinstance).*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def fit(
    folder: Path, callback: CanonicalCallback, epochs: int = 1, ckpt_path: Path | None = None, **options: Any
) -> tuple[Module, Any]:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, callbacks=[callback], default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(batches()), batch_size=None), ckpt_path=ckpt_path)
    return module, trainer


def test_it_trains_as_a_plain_loop_does_and_logs(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, CanonicalCallback())
    assert largest_difference(module.net.state_dict(), trained().state_dict()) < 1e-6
    assert trainer.logged_metrics["sigma/net.0"] == module.net[0].sigma
    assert trainer.logged_metrics["lambda_max/net.3"] == module.net[3].lambdas.abs().max()
    assert trainer.logged_metrics["rank/net.3"] == 10
    assert not trainer.optimizers[0]._optimizer_step_post_hooks  # the callback has left


def test_all_weights_are_built_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    original = TorchProgram.build
    monkeypatch.setattr(TorchProgram, "build", lambda program: builds.append(1) or original(program))
    fit(tmp_path, CanonicalCallback(), epochs=2)
    assert len(builds) == 2 * STEPS


def test_it_truncates_on_schedule(tmp_path: Path) -> None:
    callback = CanonicalCallback(steps=2, every=2, params=700)
    module, _ = fit(tmp_path, callback, epochs=5)
    assert sum(p.numel() for p in module.parameters()) <= 700 < sum(p.numel() for p in network().parameters())
    assert callback.gradual is not None
    assert callback.gradual.done
    assert has_unit_columns(module)
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_it_goes_on_from_a_checkpoint_of_a_truncated_model(tmp_path: Path) -> None:
    def callback() -> CanonicalCallback:
        return CanonicalCallback(steps=2, every=2, params=700)

    whole, _ = fit(tmp_path, callback(), epochs=5)
    _, trainer = fit(tmp_path, callback(), epochs=3)
    trainer.save_checkpoint(tmp_path / "half way.ckpt")
    again, _ = fit(tmp_path, callback(), epochs=5, ckpt_path=tmp_path / "half way.ckpt")
    assert sum(p.numel() for p in again.parameters()) <= 700
    assert largest_difference(again.state_dict(), whole.state_dict()) < 1e-6


def test_steps_are_those_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cpnorm.NetworkWeights, "renormalize", lambda weights: calls.append(1))
    fit(tmp_path, CanonicalCallback(), accumulate_grad_batches=2)
    assert len(calls) == STEPS // 2


def test_other_wrappers_than_ddp_are_named() -> None:
    model = network()
    assert whole_or_replicas(model, model, 1) is model
    with pytest.raises(ValueError, match=r"expected a DistributedDataParallel .* while 2 processes train, got a Data"):
        whole_or_replicas(model, nn.DataParallel(model), 2)


def test_a_checkpoint_from_before_a_truncation_is_loaded(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, CanonicalCallback(steps=2, every=2, params=700), epochs=1)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    callback = CanonicalCallback(steps=2, every=1, params=700)
    module, trainer = fit(tmp_path, callback, epochs=2)
    assert module.net[3].rank < 10
    module.load_state_dict(torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"])
    assert largest_difference(module.state_dict(), saved) == 0


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = cpnorm.canonical_norm(nn.Linear(10, 10))
        self.plain = nn.Linear(10, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        loss = nn.functional.cross_entropy(self.plain(self.head(self.net(batch[0]))), batch[1])
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [sgd(self.plain), sgd(self.net), sgd(self.head)]


def test_several_optimizers(tmp_path: Path) -> None:
    callback = CanonicalCallback(steps=1, rate=0.5)
    module = TwoOptimizers()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, callbacks=[callback], default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(batches()), batch_size=None))
    assert (module.net[3].rank, module.head.rank) == (5, 5)
    assert has_unit_columns(module)
