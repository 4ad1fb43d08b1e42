"""Build weights before the network runs, and train their terms after its backward pass.

So the network is compiled as if it were a plain one, and what the canonical form asks for besides is left to kernels
made for it. Layers could be rebuilt on several streams at once: measured, that gains 2 % for a run alone on a GPU and
nothing for several that share it, and each stream would bring 64 MB of workspace for its matrix products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import CPLayer, FusedTrainStep

EARLY_FROM = 2**22  # numbers of the last layers: below, it is not worth cutting the network in two
BYTES_OF_TERM = 4  # a bfloat16 written and read
FLOPS_PER_BYTE = 45  # of a convolution in bfloat16 on an H200: 180 TFLOP in the time of 4 TB
# A step of a network of 64 to 384 channels took 0.66 ms instead of 0.73, one of 32 to 96 channels 3.1 instead of 2.6.
WORTH = 0.3
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


@torch.no_grad()
def training_paths(model: nn.Module, images: Tensor) -> dict[CPLayer, str]:
    """Return the path of each layer in training on such a batch: "rebuild" or "factors".

    The planner knows what torch's own operations cost. Where there is a kernel, convolutions are rebuilt or, at low
    rank, run as two thin ones.
    """
    found: dict[CPLayer, str] = {}

    def ask(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, CPLayer)
        found[layer] = layer.path
        if layer.path == "auto":
            if FusedTrainStep.supports(layer) and isinstance(layer, nn.Conv2d):
                found[layer] = "factors" if two_convolutions_pay(layer, layer.rank) else "rebuild"
            else:
                found[layer] = layer.plan(inputs[0].shape, training=True).path

    handles = [layer.register_forward_pre_hook(ask) for layer in cpnorm.canonical_layers(model).values()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


def two_convolutions_pay(conv: nn.Conv2d, rank: int) -> bool:
    """Return True if a convolution of 1 x k2 into the terms and one of k1 x 1 out of them take clearly less time.

    Counted are the FLOPs of an output pixel, and the bytes of its terms, which are written and read again.

    >>> two_convolutions_pay(nn.Conv2d(192, 384, 3), 24), two_convolutions_pay(nn.Conv2d(192, 384, 3), 571)
    (True, False)
    """
    (k1, k2), inputs, outputs = conv.kernel_size, conv.in_channels, conv.out_channels
    terms = -(-rank // 8) * 8
    two = terms * (2 * (k2 * inputs + k1 * outputs) + BYTES_OF_TERM * FLOPS_PER_BYTE)
    return two < WORTH * 2 * k1 * k2 * inputs * outputs


# --- what kernels train ----------------------------------------------------------------------------------------------


def trained_layers(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, *, early: bool = True
) -> list[FusedTrainStep]:
    """Return groups of layers that kernels can train; if ``early`` pays, the last layers form the first group.

    Without a renormaliser, vectors are divided by their lengths in the forward pass only.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, CPLayer)]
    uses = Counter(id(layer.lambdas) for layer in layers)  # tied ones have more than one gradient
    found = [layer for layer in layers if FusedTrainStep.supports(layer) and uses[id(layer.lambdas)] == 1]
    if not found:
        return []
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    last = list(front_and_back(model)[1].modules()) if early else []
    groups = [layer for layer in found if layer in last], [layer for layer in found if layer not in last]
    if not groups[1] or sum(p.numel() for layer in groups[0] for p in layer.canonical_parameters()) < EARLY_FROM:
        groups = [], found
    renormalize = all(layer.renormalizer is not None for layer in found)
    return [FusedTrainStep(group, optimizer, dtype, renormalize=renormalize) for group in groups if group]


def front_and_back(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the model in two parts, split before its last part with canonical layers; the back may be empty."""
    if type(model) is nn.Sequential:
        cut = max((i for i, part in enumerate(model) if cpnorm.canonical_layers(part)), default=0)
        if cut:
            return model[:cut], model[cut:]
    return model, nn.Sequential()


def _gradient(layer: CPLayer) -> Tensor | None:
    return None if layer.prebuilt is None else layer.prebuilt.tensors[0].grad


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
        self, paths: Mapping[CPLayer, str], precision: str, rebuild: Rebuild, trained: Sequence[FusedTrainStep] = ()
    ) -> None:
        self.trained = list(trained)
        by_kernels = [layer for group in trained for layer in group.layers]
        self.others = [layer for layer, path in paths.items() if path == "rebuild" and layer not in by_kernels]
        self.paths, self.precision, self.rebuild_one = dict(paths), precision, rebuild
        self.weights: list[Tensor] = []  # of the others
        # Where sigma alone is trained, the rest of the weight is built once: it never changes.
        self.constant = {layer: _without_sigma(layer) for layer in self.others if _trains_sigma_alone(layer)}

    @property
    def early(self) -> FusedTrainStep | None:
        """The last layers, if they can be trained while the backward pass continues."""
        first = self.trained[0] if len(self.trained) > 1 else None
        return first if first and all(self.paths[layer] == "factors" for layer in first.layers) else None

    def hold(self) -> None:
        """Give every layer its W, or its two sides."""
        low_rank = [layer for layer, path in self.paths.items() if path == "factors"]
        for group in self.trained:
            group.build(through_factors=low_rank)
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
            torch.autograd.backward(self.weights, [_gradient(layer) for layer in self.others])
        for group in self.trained:
            if not (early_done and group is self.early):
                group.step()

    def release(self) -> None:
        """Let the layers build their own weights again."""
        for group in self.trained:
            group.release()
        for layer in self.others:
            layer.prebuilt = None
        self.weights.clear()
