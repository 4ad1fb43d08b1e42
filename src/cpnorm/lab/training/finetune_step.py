"""The steps of a fine-tuning: batches, loss, optimizers and averaged weights.

On a GPU a step is replayed as a CUDA graph. The weights of canonical layers are built before the network runs, as dense
ones, and their terms are trained by ``cpnorm``'s kernels after its backward pass: the network itself then computes what
a plain one does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
from cpnorm.lab.data.images import ImageSet, augment
from cpnorm.lab.training.evaluation import calibration_batches, prepared

if TYPE_CHECKING:
    from cpnorm.lab.training.finetune import Recipe

EAGER_STEPS = 3  # before a step is captured: libraries have chosen their kernels, and optimizers have their state


class FinetuneStep:
    """The state of one fine-tuning: the network in training, its teacher, optimizers and averaged weights."""

    def __init__(self, model: nn.Module, data: ImageSet, recipe: Recipe, teacher: nn.Module | None) -> None:
        self.model, self.data, self.recipe = model, data, recipe
        device = data.train_labels.device
        self.on_gpu = device.type == "cuda"
        self.teacher = None if teacher is None else self._teacher(teacher, device)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.layers = list(cpnorm.canonical_layers(model).values())
        self.averaged = copy.deepcopy(model)
        self._averages, self._current = _state(self.averaged), _state(model)
        self.optimizers = _optimizers(model, recipe, self.on_gpu)
        self.fused = self._fused() if recipe.rebuild and recipe.optimizer == "adamw" else None
        self.order = torch.zeros(len(data.train_labels), dtype=torch.long, device=device)
        self.offsets = torch.arange(recipe.batch_size, device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.taken = 0
        model.train()

    def _teacher(self, teacher: nn.Module, device: torch.device) -> nn.Module:
        """Return a copy of the teacher whose weights have the type that autocast would give them at every step."""
        teacher = copy.deepcopy(teacher).to(device).eval().requires_grad_(False)
        if self.on_gpu and self.recipe.precision == "bf16":
            for module in teacher.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.to(torch.bfloat16)
        return teacher

    def _fused(self) -> cpnorm.FusedTrainStep | None:
        """Return what builds all weights at once and trains their terms by kernels; None where there are no kernels."""
        modules = [module for module in self.model.modules() if isinstance(module, cpnorm.CPLayer)]
        layers = [layer for layer in self.layers if cpnorm.FusedTrainStep.supports(layer)]
        if not layers or len(modules) > len(self.layers):  # tied layers have more than one gradient
            return None
        cpnorm.renormalize(self.model)
        dtype = torch.bfloat16 if self.recipe.precision == "bf16" else torch.float32
        return cpnorm.FusedTrainStep(layers, self.optimizers[0], dtype)

    def begin_epoch(self, order: Tensor) -> None:
        """Set the order of the images."""
        self.order.copy_(order)
        self.cursor.zero_()
        self.loss.zero_()

    def take(self, lr: float) -> None:
        """Take one step: eagerly on the CPU, and as a graph on a GPU once a few eager steps have been taken."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["scale"])
            else:
                group["lr"] = lr * group["scale"]
        self.taken += 1
        if self.stream is None:
            self._step()
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
            if self.taken == EAGER_STEPS:
                self._zero_grad()  # so that the graph writes gradients instead of adding them
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self._step()

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _step(self) -> None:
        recipe, data = self.recipe, self.data
        index = self.order[self.cursor + self.offsets]
        x = prepared(augment(data.train_images[index], recipe.augment), data)
        self._zero_grad()
        if self.fused:
            self.fused.build()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            logits = self.model(x).float()
        loss = self._loss(x, logits, data.train_labels[index])
        loss.backward()
        if self.fused:
            self.fused.step()
        for optimizer in self.optimizers:
            optimizer.step()
        if len(self.layers) > (len(self.fused.layers) if self.fused else 0):
            cpnorm.renormalize(self.model)
        self.cursor += recipe.batch_size
        self.loss += loss.detach()

    def _loss(self, x: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        recipe = self.recipe
        loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        if self.teacher is None or not recipe.distillation:
            return loss
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            wanted = self.teacher(x).float()
        t, share = recipe.temperature, recipe.distillation
        soft = F.kl_div(
            F.log_softmax(logits / t, 1), F.log_softmax(wanted / t, 1), reduction="batchmean", log_target=True
        )
        return (1 - share) * loss + share * t**2 * soft

    @torch.no_grad()
    def average(self, step: int, total: int) -> None:
        """Move the averaged weights towards the network's; the window grows until it is as long as asked for."""
        window = min(1 + step / 4, max(1.0, self.recipe.averaging * total))
        torch._foreach_lerp_(self._averages, self._current, 1 / window)

    def mean_loss(self, steps: int) -> float:
        """Return the mean loss of the epoch's steps."""
        return float(self.loss) / steps

    @torch.no_grad()
    def finish(self) -> None:
        """Put the averaged weights into the network, with batch-norm statistics that are their own."""
        self.close()
        for parameter, average in zip(self.model.parameters(), self.averaged.parameters(), strict=True):
            parameter.copy_(average)
        if self.layers:
            cpnorm.renormalize(self.model)
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules()):
            images = calibration_batches(self.data, self.recipe.statistics, batch=512, mode=self.recipe.augment)
            cpnorm.reestimate_batch_norm(self.model, images)
        self.model.eval()

    def close(self) -> None:
        """Let the layers build their own weights again."""
        if self.fused:
            self.fused.release()


def _state(model: nn.Module) -> list[Tensor]:
    """Return what is averaged: parameters and floating-point buffers."""
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def _optimizers(model: nn.Module, recipe: Recipe, on_gpu: bool) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the canonical terms and of all else.

    Terms have unit vectors and do not decay; neither do other vectors (biases, batch norm).
    """
    terms = {p for layer in cpnorm.canonical_layers(model).values() for p in layer.canonical_parameters()}
    scaled: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 1.0}]
    if recipe.optimizer == "adamw" and terms:
        scaled = cpnorm.equal_angles(model, 1.0)
    device = next(model.parameters()).device
    found: list[torch.optim.Optimizer] = []
    for of_terms in (True, False):
        groups: list[dict[str, Any]] = []
        for group, decays in ((group, decays) for group in scaled for decays in (True, False)):
            decay = recipe.weight_decay if decays and not of_terms else 0.0
            chosen = [p for p in group["params"] if (p in terms) == of_terms and (p.ndim > 1) == decays]
            lr = recipe.lr * group["lr"]
            rate = torch.tensor(lr, device=device) if on_gpu else lr
            if chosen:
                groups.append({"params": chosen, "scale": group["lr"], "lr": rate, "weight_decay": decay})
        if not groups:
            continue
        if recipe.optimizer == "sgd":
            momentum = {"momentum": recipe.momentum, "nesterov": recipe.momentum > 0}
            found.append(torch.optim.SGD(groups, **momentum, fused=on_gpu or None))  # type: ignore[arg-type]
        else:
            found.append(torch.optim.AdamW(groups, fused=on_gpu or None, capturable=on_gpu))
    return found
