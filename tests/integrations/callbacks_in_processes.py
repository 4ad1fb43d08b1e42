"""Run by torchrun: the callbacks of Lightning and of transformers truncate while two processes train under DDP."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, SequentialSampler

sys.path.append(str(Path(__file__).parent))
from small import BATCH, Classifier, batches, examples, network, sgd

EPOCHS = 3
BUDGET: dict[str, Any] = {"steps": 2, "params": 900, "criterion": "gram", "refit": "none"}


def share(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Return what one process sees: of each batch the examples that transformers' Trainer gives it."""
    size = BATCH // world
    return [(x[rank * size :][:size], y[rank * size :][:size]) for x, y in batches()]


def with_lightning(folder: Path, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    import lightning.pytorch as lightning

    from cpnorm.integrations.lightning import CanonicalCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:  # which the truncation calls
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data, module = share(rank, world), Module()
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp" if world > 1 else "auto", devices=world, max_epochs=EPOCHS, logger=False,
        callbacks=[CanonicalCallback(**BUDGET, data=data)], default_root_dir=folder, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None))
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def with_transformers(folder: Path, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    import transformers

    from cpnorm.integrations.huggingface import CanonicalCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    model = Classifier()
    settings = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // world, num_train_epochs=EPOCHS, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = InOrder(model, settings, train_dataset=examples(), optimizers=(optimizer, constant))
    trainer.remove_callback(transformers.PrinterCallback)
    inputs = [{"x": x, "labels": y} for x, y in share(rank, world)]
    trainer.add_callback(CanonicalCallback(trainer, **BUDGET, data=inputs))
    trainer.train()
    return {name: value.clone() for name, value in model.net.state_dict().items()}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # those of the frameworks
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    states = {"lightning": with_lightning(folder, *place), "transformers": with_transformers(folder, *place)}
    torch.save(states, folder / f"{place[0]}.pt")
    distributed.barrier()  # no process may take the connections down while another still uses them


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # gloo's threads now and then abort the interpreter's end
