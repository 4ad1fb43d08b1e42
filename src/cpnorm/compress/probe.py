"""What data do to a model: the work of each layer, what its terms respond with, and what the loss says of them.

Everything here runs the model in eval mode and leaves it as it was: training flags, hooks, gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm.cp.tensor import CPTensor, khatri_rao
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.planner import linear_modes
from cpnorm.nn.running import Instead, evaluating, run, to_device_of, watch

RESPONSES_AT_ONCE = 2**22  # entries: 16 MiB, and a few times that while they are computed
Batch = tuple[Any, Any]  # inputs, targets
LossFunction = Callable[[Any, Any], Any]  # -> a tensor, or a number where no gradient is asked for


# --- responses ----------------------------------------------------------------------------------------------------
#
# A layer computes y = sum_r scale_r a_r z_r + bias, with z_r = (b_r o c_r o ...)(x) what term r makes of the input
# before its output vector a_r. So z tells how far y moves when terms go or change, whatever the geometry of the layer.


def term_moments(model: nn.Module, inputs: Iterable[Any]) -> dict[int, Tensor]:  # -> (G, R, R) each
    """z z^T summed over positions and inputs, for every group of every canonical layer that runs, by ``identity``."""
    moments: dict[int, Tensor] = {}

    def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(layer, CPLayer):
            for z in term_responses(layer, *args, **kwargs):
                z = z.transpose(0, 1)
                moments[tie_key(layer)] = moments.get(tie_key(layer), 0.0) + (z.mT @ z).double()

    for each in inputs:
        watch(model, each, seen)
    return moments


def with_terms(layer: CPLayer, cp: CPTensor, bias: Tensor | None = None) -> CPLayer:
    """Return a layer that shares all settings with the given one and holds other terms; the given one is untouched."""
    twin: Any = copy.copy(layer)
    twin.__dict__.pop("forward", None)  # of a run that watches the given one
    twin.prebuilt = None
    twin._parameters, twin._modules = dict(layer._parameters), dict(layer._modules)
    for key, value in (("sigma", cp.sigma), ("lambdas", cp.lambdas), ("bias", bias)):
        twin._parameters[key] = None if value is None else nn.Parameter(value.detach(), requires_grad=False)
    twin._modules["factors"] = nn.ParameterList([nn.Parameter(f.detach(), requires_grad=False) for f in cp.factors])
    return cast(CPLayer, twin)


def term_responses(layer: CPLayer, *args: Any, **kwargs: Any) -> Iterator[Tensor]:  # -> (positions, G, R) each
    """z of a layer that is called with these arguments, in pieces of bounded size along the batch."""
    # The layer itself computes z where each term has an output vector of its own: a column of the identity.
    twin: Any = copy.copy(layer)
    twin._parameters, twin._modules = dict(layer._parameters), dict(layer._modules)
    units, copies = torch.eye(layer.rank, dtype=layer.lambdas.dtype, device=layer.lambdas.device), 1
    if isinstance(layer, nn.Linear):
        factors = [units, *layer.factors[len(linear_modes(layer)[0]) :]]
        twin.out_features = layer.rank
    elif cast(nn.modules.conv._ConvNd, layer).transposed:
        factors = [layer.factors[0], units, *layer.factors[2:]]  # the groups share the output vectors
    else:
        copies = cast(nn.modules.conv._ConvNd, layer).groups
        factors = [units.repeat(copies, 1), *layer.factors[1:]]
    twin.sigma = nn.Parameter(layer.sigma.new_tensor(math.sqrt(copies)))  # the layer divides by the columns' norms
    twin.lambdas = nn.Parameter(torch.ones_like(layer.lambdas))
    twin.factors = nn.ParameterList(factors)
    twin.path, twin.bias, twin.renormalizer = "factors", None, None
    batched = 1 + len(getattr(layer, "kernel_size", ()))  # with fewer dimensions there is no batch to divide
    if kwargs or len(args) != 1 or args[0].ndim <= batched or not args[0].numel():
        yield by_position(layer, twin.forward(*args, **kwargs))
        return
    (x,) = args
    channels = x.shape[-1] if isinstance(layer, nn.Linear) else x.shape[1]
    entries = x.numel() // channels * layer.rank * getattr(layer, "groups", 1)
    for part in x.chunk(-(-entries // RESPONSES_AT_ONCE)):
        yield by_position(layer, twin.forward(part))


def by_position(layer: nn.Module, y: Tensor) -> Tensor:  # -> (positions, G, features of one group)
    """Outputs of a layer, with all that is not a feature in one dimension."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        y = y.movedim(-1 - len(layer.kernel_size), -1)
    groups = getattr(layer, "groups", 1)
    return y.reshape(-1, groups, y.shape[-1] // groups).float()


def output_vectors(layer: CPLayer, cp: CPTensor) -> Tensor:  # -> (G, O / G, R); G is 1 where groups share them
    """What takes the terms' responses to the outputs, in a layer whose weight has this form."""
    if isinstance(layer, nn.Linear):
        return khatri_rao(cp.factors[: len(linear_modes(layer)[0])])[None]
    convolution = cast(nn.modules.conv._ConvNd, layer)
    return cp.factors[1][None] if convolution.transposed else cp.factors[0].reshape(convolution.groups, -1, cp.rank)


def output_gram(layer: CPLayer, moments: Tensor) -> Tensor:  # (G, R, R) -> (R, R)
    """Inner products of the terms' outputs, over the positions whose ``term_moments`` these are."""
    cp = layer.cp.to(torch.float64)
    vectors = output_vectors(layer, cp) * (cp.sigma * cp.lambdas)
    return ((vectors.mT @ vectors) * moments).sum(0)


# --- loss ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], loss_function: LossFunction, instead: Instead | None = None
) -> float:
    """Over the batches, each counted by its size."""
    total, count = 0.0, 0
    with evaluating(model):
        for inputs, targets in batches:
            samples = next(n for n in (_length(targets), _length(inputs), 1) if n is not None)
            total += float(_loss(loss_function, run(model, inputs, instead), to_device_of(model, targets))) * samples
            count += samples
    if not count or not math.isfinite(total):
        raise ValueError(f"expected data with a finite loss, got {total} over {count} samples")
    return total / count


def _loss(loss_function: LossFunction, outputs: Any, targets: Any) -> Any:
    """Return the loss; where the model returns no tensor, say which argument has to know what it returns."""
    try:
        return loss_function(outputs, targets)
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(outputs, Tensor):
            raise
        part = "outputs['logits']" if isinstance(outputs, Mapping) else "outputs[0]"
        raise TypeError(
            f"loss_function: the model returns a {type(outputs).__name__}, which the loss function does not take "
            f"({error}): give one that does, such as loss_function=lambda outputs, targets: "
            f"torch.nn.functional.cross_entropy({part}, targets)"
        ) from error


def _length(batch: Any) -> int | None:
    """How many samples there are, by the first tensor of a batch of any structure."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        lengths = (_length(part) for part in batch)
        return next((n for n in lengths if n is not None), len(batch) if isinstance(batch, list) else None)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str) else None


def taylor_scores(
    model: nn.Module, layers: Mapping[str, CPLayer], batches: Iterable[Batch], loss_function: LossFunction
) -> dict[str, Tensor]:
    """|lambda * dL/dlambda| of every term, averaged over the batches: what the loss would feel of its absence.

    The absolute value is taken per batch, since over all data the gradient of a trained network is about zero.
    """
    lambdas: dict[Tensor, Tensor] = {
        p: p.detach().clone().requires_grad_() for p in (y.lambdas for y in layers.values())
    }
    scores = [torch.zeros_like(values, dtype=torch.float64) for values in lambdas.values()]
    with evaluating(model), torch.enable_grad():
        for inputs, targets in batches:
            loss = _loss(loss_function, run(model, inputs, lambdas), to_device_of(model, targets))
            if not loss.requires_grad:
                raise ValueError("expected a differentiable loss function for criterion='taylor'")
            gradients = torch.autograd.grad(loss, list(lambdas.values()), allow_unused=True)
            for score, values, gradient in zip(scores, lambdas.values(), gradients, strict=True):
                if gradient is not None:
                    score += (values.detach() * gradient).abs()
    return dict(zip(layers, scores, strict=True))
