"""Train canonical layers by kernels, straight from the gradients of their weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpnorm._checks import check_type
from cpnorm.gpu.fused_launch import has_triton, kernels_supported
from cpnorm.gpu.optimizer_rules import optimizer_rule, rule_settings
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layer_form import Prebuilt, is_recorded
from cpnorm.nn.layers import CPConv2d, CPLinear

if TYPE_CHECKING:
    from cpnorm.gpu.train_step import FusedUpdate

LONGEST = 16  # rows of a convolution kernel's factors: the GPU kernels are unrolled over them
ROUNDING = 1e-3  # columns whose norm differs from 1 by less count as unit


def has_kernels(layer: CPLayer) -> bool:
    """Return True if the training kernels know this kind of layer and the memory of its parameters."""
    known = isinstance(layer, CPLinear) and len(layer.modes) == 2
    known = known or (isinstance(layer, CPConv2d) and max(layer.kernel_size) <= LONGEST)
    return known and all(
        p.dtype == torch.float32 and p.is_contiguous() and (p.ndim == 0 or p.data_ptr() % 16 == 0)
        for p in layer.canonical_parameters()
    )


def runs_through_sides(layer: CPLayer) -> bool:
    """Return True if the layer can run with two matrices in the place of its weight."""
    if isinstance(layer, CPConv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return isinstance(layer, CPLinear)


class FusedTrainStep:
    """Build the weights of canonical layers, and train their terms, in a few kernel launches for all of them.

    ``renormalize_after`` serves any training loop. Use this class instead where an optimizer step follows each backward
    pass and speed matters most, for example in a step that is captured as a CUDA graph. Kernels go from the gradients
    of the weights to trained unit vectors and the matrices of the next step, and never store the gradient of a term.
    They take the optimizer's step themselves, with its own state, so that it can be saved, loaded and continued.

    Around each forward and backward pass of the model, call ``build()`` and ``step()``. The optimizer's own step then
    trains all other parameters; those of these layers have no gradient. Nothing else may change the terms in between,
    unless ``refresh()`` is called afterwards. Terms in other memory, as after ``truncate``, and state that was loaded
    into the optimizer are noticed.

    Args:
        layers: layers that this class ``supports``. Layers that are tied to others, or called more than once in a
            forward pass, have several gradients and must be left out.
        optimizer: an SGD, RMSprop, Adam or AdamW that holds the terms of the layers, with the same settings in all
            groups but for learning rates. Schedulers may change them; in a CUDA graph, learning rates that are tensors.
        dtype: the dtype of the weights, float32 or bfloat16.
        renormalize: make all vectors unit vectors after each step; they must be so at the start (see
            ``cpnorm.renormalize``). If False, vectors of any length are trained, and W is built from their directions.

    Example::

        model = cpnorm.renormalize(cpnorm.canonical_norm(model)).cuda()
        layers = [y for y in cpnorm.canonical_layers(model).values() if cpnorm.FusedTrainStep.supports(y)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fused = cpnorm.FusedTrainStep(layers, optimizer)
        for inputs, targets in loader:
            optimizer.zero_grad()
            fused.build()
            loss_function(model(inputs), targets).backward()
            fused.step()
            optimizer.step()
        fused.release()
    """

    def __init__(
        self,
        layers: Sequence[CPLayer],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype = torch.float32,
        *,
        renormalize: bool = True,
    ) -> None:
        check_type(optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        self._optimizer, self._dtype = optimizer, dtype
        self._settings = _settings(optimizer)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
        if not layers:
            raise ValueError("layers: expected at least one layer, got none")
        self.layers, self.renormalize = list(layers), renormalize
        self._used: list[Prebuilt | None] = []  # weights of the last step, which a stream beside it may still read
        self._captured: list[FusedUpdate] = []  # old ones, whose buffers CUDA graphs still use
        self._recorded = False
        self._make()

    def _make(self) -> None:
        """Tell the kernels where the terms and the state of the optimizer are."""
        for layer in self.layers:
            check_type(layer, CPLayer, "canonical layers")
            if not self.supports(layer):
                raise ValueError(f"layers: expected layers that FusedTrainStep.supports, got {layer}")
            if self.renormalize and not all(_is_unit(factor) for factor in layer.factors):
                raise ValueError(f"layers: expected unit columns, got others in {layer}: call cpnorm.renormalize first")
        from cpnorm.gpu.train_step import FusedUpdate

        terms = [layer.canonical_parameters() for layer in self.layers]
        rule = optimizer_rule(self._optimizer)
        assert rule is not None
        self._update = FusedUpdate(terms, self._dtype, rule, free=not self.renormalize)
        self._settings, self._memory = _settings(self._optimizer), self._memory_now()
        self._update.multiply()

    def _memory_now(self) -> tuple[list[int], list[Any]]:
        """Return the ranks and where the terms are, and what holds the optimizer's state and learning rates."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        places = [layer.rank for layer in self.layers]
        places += [parameter.data_ptr() for layer in self.layers for parameter in layer._term_parameters()]
        return places, [self._optimizer.state, groups, *rates]

    def _follow(self) -> None:
        """Notice terms in other memory, as after a truncation, and another state or other settings of the optimizer."""
        self._recorded = self._recorded or is_recorded(self.layers[0].lambdas)
        settings, (places, objects) = _settings(self._optimizer), self._memory_now()
        same = places == self._memory[0] and len(objects) == len(self._memory[1])
        same = same and bool(settings.get("beta1")) == bool(self._settings.get("beta1"))  # means of gradients are kept
        if not (same and all(map(is_, objects, self._memory[1]))):
            if self._recorded:
                self._captured.append(self._update)
            self._make()
        elif settings != self._settings:
            self._update.rule, self._settings = replace(self._update.rule, **settings), settings

    @staticmethod
    def supports(layer: CPLayer) -> bool:
        """Return True if the kernels can train this layer.

        That is a linear layer or 2-d convolution on a GPU with Triton, whose terms are trainable float32 parameters.
        """
        terms = layer.canonical_parameters()
        trainable = all(kernels_supported(p.device) and p.requires_grad for p in terms)
        return trainable and has_triton() and has_kernels(layer)

    def refresh(self) -> None:
        """Read the terms again, after something other than ``step`` has changed them."""
        self._follow()
        self._update.multiply()

    def build(self, *, through_factors: Collection[CPLayer] = ()) -> None:
        """Give every layer its weight for the next forward pass.

        Layers in ``through_factors`` get two matrices instead, whose product is the weight: a linear layer then takes
        two products, a convolution of 1 x k2 and one of k1 x 1. That takes less time where the rank is low. Grouped
        convolutions, and those that pad with anything but zeros, get their weight all the same.
        """
        self._follow()
        self._used.clear()
        for index, layer in enumerate(self.layers):
            low_rank = layer in through_factors and runs_through_sides(layer)
            built = self._update.sides[index] if low_rank else (self._update.weight(index),)
            layer.use_prebuilt(*(tensor.detach().requires_grad_() for tensor in built))

    def step(self) -> None:
        """Take the optimizer's step on all terms from the gradients of the weights, and renormalise."""
        self._follow()
        self._update.rule.copy_rates()
        found = []
        for layer in self.layers:
            tensors = layer.prebuilt.tensors if layer.prebuilt is not None else ()
            found.append([tensor.grad for tensor in tensors if tensor.grad is not None])
            if not found[-1]:
                raise RuntimeError(
                    f"no gradient for the weight of {layer}: call build(), a forward and a backward pass"
                )
        sides = []
        for index, (first, *rest) in enumerate(found):
            sides.append((first, rest[0]) if rest else self._update.side_gradients(index, first))
        self._update.train(sides)
        self._used += [layer.prebuilt for layer in self.layers]
        self._forget()

    def release(self) -> None:
        """Let the layers build their weights by themselves again."""
        self._forget()
        self._used.clear()

    def _forget(self) -> None:
        for layer in self.layers:
            layer.prebuilt = None


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    settings = rule_settings(optimizer)
    if settings is None:
        raise ValueError(
            "optimizer: expected an SGD, RMSprop, Adam or AdamW without nesterov, dampening, maximize, amsgrad or "
            f"centered, and with equal settings in all groups, got {optimizer}"
        )
    return settings


@torch.no_grad()
def _is_unit(factor: Tensor) -> bool:
    return bool((torch.linalg.vector_norm(factor, dim=0) - 1).abs().amax() < ROUNDING)
