"""Build weights before the network runs, and train their terms after its backward pass.

So the network is compiled as if it were a plain one, and what the canonical form asks for besides is left to kernels
made for it. Layers could be rebuilt on several streams at once: measured, that gains 2 % for a run alone on a GPU and
nothing for several that share it, and each stream would bring 64 MB of workspace for its matrix products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import CPLayer
from cpnorm.lab.training.rmsprop import FusedRMSprop

if TYPE_CHECKING:
    from cpnorm.gpu.train_step import FusedTrainStep, Rule

LONGEST = 16  # rows of a kernel's factor: the kernels are unrolled over them
EARLY_FROM = 2**22  # numbers of the last layers: below, it is not worth cutting the network in two
VARIANTS = ("nesterov", "dampening", "maximize", "amsgrad", "centered")  # of optimizers, which the kernels do not know
Rebuild = Callable[[CPLayer, str], Tensor]


def rebuilt_weight(layer: CPLayer, precision: str) -> Tensor:
    """Return W as the forward pass would build it."""
    with torch.autocast(layer.lambdas.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return layer.weight


@cache
def compiled_rebuild() -> Rebuild:
    """Return ``rebuilt_weight`` compiled, once for all layers and models of a process."""
    return torch.compile(rebuilt_weight, dynamic=False)


# --- which layers, and how -----------------------------------------------------------------------------------------


def has_kernel(layer: CPLayer) -> bool:
    """Return True for a 2-d convolution or linear layer on a GPU, all of it trained, which ``FusedTrainStep`` takes."""
    known = isinstance(layer, cpnorm.CPLinear) and len(layer.modes) == 2
    known = known or (isinstance(layer, cpnorm.CPConv2d) and max(layer.kernel_size) <= LONGEST)
    if not known or find_spec("triton") is None:
        return False
    return all(p.is_cuda and p.dtype == torch.float32 and p.requires_grad for p in layer.canonical_parameters())


@torch.no_grad()
def training_paths(model: nn.Module, images: Tensor) -> dict[CPLayer, str]:
    """Return the path of each layer in training on such a batch: "rebuild" or "factors".

    The planner knows what torch's own operations cost. Where there is a kernel, convolutions are rebuilt: that should
    be cheaper then, which is measured at the paper's ranks and reasoned at lower ones.
    """
    found: dict[CPLayer, str] = {}

    def ask(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, CPLayer)
        found[layer] = layer.path
        if layer.path == "auto":
            cheap = has_kernel(layer) and not isinstance(layer, cpnorm.CPLinear)
            found[layer] = "rebuild" if cheap else layer.plan(inputs[0].shape, training=True).path

    handles = [layer.register_forward_pre_hook(ask) for layer in cpnorm.canonical_layers(model).values()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


# --- what kernels train ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedLayers:
    """Layers whose weights kernels build, and whose terms they train as an optimizer would, in a few launches."""

    layers: list[CPLayer]
    terms: FusedTrainStep

    def hold(self, paths: Mapping[CPLayer, str]) -> None:
        """Give every layer its W, or its two sides."""
        for index, layer in enumerate(self.layers):
            made = (self.terms.weight(index),) if paths[layer] == "rebuild" else self.terms.sides[index]
            layer.use_prebuilt(*(tensor.detach().requires_grad_() for tensor in made))

    def train(self) -> None:
        """Take the optimizer's step from the gradients of the weights, and renormalise unless columns are free."""
        sides = []
        for index, layer in enumerate(self.layers):
            first, *rest = _gradients(layer)
            sides.append((first, rest[0]) if rest else self.terms.side_gradients(index, first))
        self.terms.train(sides)


def trained_layers(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, *, early: bool = True
) -> list[TrainedLayers]:
    """Return groups of layers that kernels can train; if ``early`` pays, the last layers form the first group.

    Columns of layers without a renormaliser are free: the forward pass alone divides them by their lengths.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, CPLayer)]
    uses = Counter(id(layer.lambdas) for layer in layers)  # tied ones have more than one gradient
    found = [layer for layer in layers if has_kernel(layer) and uses[id(layer.lambdas)] == 1]
    rule = optimizer_rule(optimizer) if found else None
    if rule is None:
        return []
    from cpnorm.gpu.train_step import FusedTrainStep

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    last = list(halves(model)[1].modules()) if early else []
    groups = [layer for layer in found if layer in last], [layer for layer in found if layer not in last]
    if not groups[1] or sum(p.numel() for layer in groups[0] for p in layer.canonical_parameters()) < EARLY_FROM:
        groups = [], found
    free = any(layer.renormalizer is None for layer in found)  # then no layer may be renormalised

    def trained(group: list[CPLayer]) -> TrainedLayers:
        terms = [layer.canonical_parameters() for layer in group]
        return TrainedLayers(group, FusedTrainStep(terms, dtype, rule, free=free))

    return [trained(group) for group in groups if group]


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split the model before its last part with canonical layers; the second half may be empty."""
    if type(model) is nn.Sequential:
        cut = max((i for i, part in enumerate(model) if cpnorm.canonical_layers(part)), default=0)
        if cut:
            return model[:cut], model[cut:]
    return model, nn.Sequential()


def optimizer_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the optimizer's rule for the kernels, or None if they do not implement it."""
    from cpnorm.gpu.train_step import Rule

    names: tuple[str | None, str | None]
    first, *groups = (
        {k: v for k, v in g.items() if k not in ("params", "lr", "scale")} for g in optimizer.param_groups
    )
    if any(group != first for group in groups) or any(first.get(name) for name in VARIANTS):
        return None
    if isinstance(optimizer, torch.optim.SGD):
        names = ("momentum_buffer" if first["momentum"] else None, None)
        settings = {"decay": first["weight_decay"], "beta1": first["momentum"]}
    elif isinstance(optimizer, FusedRMSprop):
        names = (None, "square_avg")
        settings = {"decay": first["weight_decay"], "beta2": first["alpha"], "eps": first["eps"]}
    elif isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        names = ("exp_avg", "exp_avg_sq")
        beta1, beta2 = first["betas"]
        settings = {"decay": first["weight_decay"], "decoupled": first["decoupled_weight_decay"], "eps": first["eps"]}
        settings |= {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "corrected": True}
    else:
        return None
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}

    def slots(parameter: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        state = optimizer.state[parameter]
        for name in names:
            if name is not None and name not in state:
                state[name] = torch.zeros_like(parameter)
        if "beta2" in settings and "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        one, two = (None if name is None else state[name] for name in names)
        return one, two, rates[parameter], state["step"] if settings.get("corrected") else None

    return Rule(slots, **settings)


def _gradients(layer: CPLayer) -> list[Tensor]:
    found = [tensor.grad for tensor in layer.prebuilt.tensors] if layer.prebuilt is not None else []
    return [gradient for gradient in found if gradient is not None]


def _trains_sigma_alone(layer: CPLayer) -> bool:
    frozen = not any(parameter.requires_grad for parameter in (layer.lambdas, *layer.factors))
    return frozen and layer.sigma.requires_grad


@torch.no_grad()
def _without_sigma(layer: CPLayer) -> Tensor:
    sigma = layer.sigma.clone()
    layer.sigma.fill_(1.0)
    try:
        return layer.weight.clone()
    finally:
        layer.sigma.copy_(sigma)


class PrebuiltWeights:
    """Build weights by ``hold()`` before the forward pass, and finish by ``backward()`` after the loss's own.

    Layers that kernels train have had their step then, and their columns are unit again; the terms of others have got
    their gradients.
    """

    def __init__(
        self, paths: Mapping[CPLayer, str], precision: str, rebuild: Rebuild, trained: Sequence[TrainedLayers] = ()
    ) -> None:
        self.trained = list(trained)
        by_kernels = [layer for group in trained for layer in group.layers]
        self.others = [layer for layer, path in paths.items() if path == "rebuild" and layer not in by_kernels]
        self.paths, self.precision, self.rebuild_one = dict(paths), precision, rebuild
        self.weights: list[Tensor] = []  # of the others
        # Where sigma alone is trained, the rest of the weight is built once: it never changes.
        self.constant = {layer: _without_sigma(layer) for layer in self.others if _trains_sigma_alone(layer)}

    @property
    def early(self) -> TrainedLayers | None:
        """The last layers, if they can be trained while the backward pass continues."""
        first = self.trained[0] if len(self.trained) > 1 else None
        return first if first and all(self.paths[layer] == "factors" for layer in first.layers) else None

    def hold(self) -> None:
        """Give every layer its W, or its two sides."""
        for group in self.trained:
            group.hold(self.paths)
        self.weights += [self._rebuilt(layer) for layer in self.others]
        for layer, weight in zip(self.others, self.weights, strict=True):
            layer.use_prebuilt(weight.detach().requires_grad_())

    def _rebuilt(self, layer: CPLayer) -> Tensor:
        if layer in self.constant:
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
            return (layer.sigma * self.constant[layer]).to(dtype)
        return self.rebuild_one(layer, self.precision)

    def backward(self, *, early_done: bool = False) -> None:
        """Train the terms by kernels, or compute their gradients, from the gradients of the weights."""
        if self.weights:
            torch.autograd.backward(self.weights, [_gradients(layer)[0] for layer in self.others])
        for group in self.trained:
            if not (early_done and group is self.early):
                group.train()

    def release(self) -> None:
        """Let the layers build their own weights again."""
        for layer in (*(layer for group in self.trained for layer in group.layers), *self.others):
            layer.prebuilt = None
        self.weights.clear()
