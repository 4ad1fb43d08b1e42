"""Measure a model on data: what the terms of its layers compute, its loss, and the gradient of the loss by lambda.

All functions run the model in eval mode and leave its training flags, hooks and gradients as they were.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm.compress.calibration_data import Batch, batch_size
from cpnorm.cp.tensor import CPTensor, khatri_rao
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.planner import linear_modes
from cpnorm.nn.running import Instead, evaluating, run, to_device_of, watch

RESPONSES_AT_ONCE = 2**22  # entries: 16 MiB, and a few times that while they are computed
LossFunction = Callable[[Any, Any], Any]  # returns a tensor, or a number where no gradient is needed


# --- responses ----------------------------------------------------------------------------------------------------
#
# A layer computes y = sum_r scale_r a_r z_r + bias, where z_r = (b_r o c_r o ...)(x) is the response of term r to the
# input, before the output vector a_r. The responses determine how y changes when terms are dropped or changed,
# whatever kind of layer it is.


def term_moments(model: nn.Module, inputs: Iterable[Any]) -> dict[int, Tensor]:  # -> (G, R, R) each
    """Return the sum of z z^T over positions and inputs for every canonical layer that runs, by ``tie_key``."""
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
    """Return a copy of a layer with all its settings and other terms; the layer itself does not change."""
    changed: Any = copy.copy(layer)
    changed.__dict__.pop("forward", None)  # patched during a run that watches the layer
    changed.prebuilt = None
    changed._parameters, changed._modules = dict(layer._parameters), dict(layer._modules)
    for key, value in (("sigma", cp.sigma), ("lambdas", cp.lambdas), ("bias", bias)):
        changed._parameters[key] = None if value is None else nn.Parameter(value.detach(), requires_grad=False)
    changed._modules["factors"] = nn.ParameterList([nn.Parameter(f.detach(), requires_grad=False) for f in cp.factors])
    return cast(CPLayer, changed)


def term_responses(layer: CPLayer, *args: Any, **kwargs: Any) -> Iterator[Tensor]:  # -> (positions, G, R) each
    """Yield the responses z of a layer that is called with these arguments, in chunks along the batch."""
    # A copy of the layer whose output vectors are the columns of the identity returns z as its output.
    probe: Any = copy.copy(layer)
    probe._parameters, probe._modules = dict(layer._parameters), dict(layer._modules)
    units, copies = torch.eye(layer.rank, dtype=layer.lambdas.dtype, device=layer.lambdas.device), 1
    if isinstance(layer, nn.Linear):
        factors = [units, *layer.factors[len(linear_modes(layer)[0]) :]]
        probe.out_features = layer.rank
    elif cast(nn.modules.conv._ConvNd, layer).transposed:
        factors = [layer.factors[0], units, *layer.factors[2:]]  # groups share the output vectors
    else:
        copies = cast(nn.modules.conv._ConvNd, layer).groups
        factors = [units.repeat(copies, 1), *layer.factors[1:]]
    probe.sigma = nn.Parameter(layer.sigma.new_tensor(math.sqrt(copies)))  # the layer divides by the columns' norms
    probe.lambdas = nn.Parameter(torch.ones_like(layer.lambdas))
    probe.factors = nn.ParameterList(factors)
    probe.path, probe.bias, probe.renormalizer = "factors", None, None
    batched = 1 + len(getattr(layer, "kernel_size", ()))  # an input of fewer dimensions has no batch dimension
    if kwargs or len(args) != 1 or args[0].ndim <= batched or not args[0].numel():
        yield by_position(layer, probe.forward(*args, **kwargs))
        return
    (x,) = args
    channels = x.shape[-1] if isinstance(layer, nn.Linear) else x.shape[1]
    entries = x.numel() // channels * layer.rank * getattr(layer, "groups", 1)
    for part in x.chunk(-(-entries // RESPONSES_AT_ONCE)):
        yield by_position(layer, probe.forward(part))


def by_position(layer: nn.Module, y: Tensor) -> Tensor:  # -> (positions, G, features of one group)
    """Return the outputs of a layer with batch and space in one dimension, and features by group in the others."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        y = y.movedim(-1 - len(layer.kernel_size), -1)
    groups = getattr(layer, "groups", 1)
    return y.reshape(-1, groups, y.shape[-1] // groups).float()


def output_vectors(layer: CPLayer, cp: CPTensor) -> Tensor:  # -> (G, O / G, R); G is 1 where groups share them
    """Return the output vectors of a layer with these terms, which map responses to outputs."""
    if isinstance(layer, nn.Linear):
        return khatri_rao(cp.factors[: len(linear_modes(layer)[0])])[None]
    convolution = cast(nn.modules.conv._ConvNd, layer)
    return cp.factors[1][None] if convolution.transposed else cp.factors[0].reshape(convolution.groups, -1, cp.rank)


def output_gram(layer: CPLayer, moments: Tensor) -> Tensor:  # (G, R, R) -> (R, R)
    """Return the inner products of the terms' outputs from the layer's ``term_moments``."""
    cp = layer.cp.to(torch.float64)
    vectors = output_vectors(layer, cp) * (cp.sigma * cp.lambdas)
    return ((vectors.mT @ vectors) * moments).sum(0)


# --- loss ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], loss_function: LossFunction, instead: Instead | None = None
) -> float:
    """Return the mean loss over the batches, weighted by their sizes."""
    total, count = 0.0, 0
    with evaluating(model):
        for inputs, targets in batches:
            samples = batch_size((targets, inputs))
            total += float(_loss(loss_function, run(model, inputs, instead), to_device_of(model, targets))) * samples
            count += samples
    if not count or not math.isfinite(total):
        raise ValueError(f"data: expected a finite loss, got {total} over {count} samples")
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


def taylor_scores(
    model: nn.Module, layers: Mapping[str, CPLayer], batches: Iterable[Batch], loss_function: LossFunction
) -> dict[str, Tensor]:
    """Return |lambda * dL/dlambda| of every term, summed over the batches: an estimate of what its absence costs.

    The absolute value is taken per batch, since the gradient of a trained network over all data is about zero.
    """
    lambdas: dict[Tensor, Tensor] = {
        p: p.detach().clone().requires_grad_() for p in (y.lambdas for y in layers.values())
    }
    scores = [torch.zeros_like(values, dtype=torch.float64) for values in lambdas.values()]
    with evaluating(model), torch.enable_grad():
        for inputs, targets in batches:
            loss = _loss(loss_function, run(model, inputs, lambdas), to_device_of(model, targets))
            if not loss.requires_grad:
                raise ValueError("loss_function: expected a differentiable one for criterion='taylor'")
            gradients = torch.autograd.grad(loss, list(lambdas.values()), allow_unused=True)
            for score, values, gradient in zip(scores, lambdas.values(), gradients, strict=True):
                if gradient is not None:
                    score += (values.detach() * gradient).abs()
    return dict(zip(layers, scores, strict=True))
