"""Measure second moments of the inputs of layers, and how much the network's outputs depend on their outputs.

Only sums are kept, so that memory does not depend on the number of inputs. Large feature maps are sampled at random
positions, since neighbouring positions are nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.compress.calibration_data import batch_size, tensors_of
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.planner import output_space
from cpnorm.nn.running import evaluating, run

LEAST_SAMPLES = 2**15  # patches per layer over all inputs, if there are that many
SAMPLES_PER_ENTRY = 48  # patches for each entry of a patch
MOST_ENTRIES = 8192  # of a patch; the second moments of a larger one take more than half a GiB
PRODUCT_ROWS = 192  # of a block of a symmetric product
SENSITIVITY_INPUTS = 256  # inputs for which gradients of the network are computed
SENSITIVITY_ROWS = 2**14  # output positions of a layer and a batch at which these are looked at


# --- patches ------------------------------------------------------------------------------------------------------


def patch_size(layer: nn.Module) -> int | None:
    """Return how many input entries one output depends on; None for a layer whose patches cannot be used."""
    if isinstance(layer, nn.Linear):
        size = layer.in_features
    else:
        conv = cast(nn.modules.conv._ConvNd, layer)
        if conv.transposed and conv.groups > 1:
            return None  # its groups share the output vectors instead of the input vectors
        size = conv.in_channels // conv.groups * math.prod(conv.kernel_size)
    return size if size <= MOST_ENTRIES else None


def out_features(layer: nn.Module) -> int:
    """Return the number of output features or channels."""
    return layer.out_features if isinstance(layer, nn.Linear) else cast(nn.modules.conv._ConvNd, layer).out_channels


def output_sizes(layer: nn.Module, x: Tensor) -> list[int]:
    """Return the sizes of the output positions: rows of a linear layer, places of a convolution."""
    if isinstance(layer, nn.Linear):
        return [x.numel() // max(x.shape[-1], 1)]
    conv = cast(nn.modules.conv._ConvNd, layer)
    return output_space(conv, x.shape[-len(conv.kernel_size) :])


def images_in(layer: nn.Module, x: Tensor) -> int:
    """Return the number of images whose positions are the output positions; a linear layer has rows only."""
    return 1 if isinstance(layer, nn.Linear) or x.ndim < len(cast(Any, layer).kernel_size) + 2 else len(x)


def choose_positions(layer: nn.Module, x: Tensor, share: float, seed: int) -> Tensor:
    """Return the indices of a random share of the output positions, the same ones for the same seed."""
    count = math.prod(output_sizes(layer, x))
    kept = max(1, min(count, math.ceil(share * count)))
    if kept == count:
        return torch.arange(count, device=x.device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:kept].sort().values.to(x.device)


def patches_at(layer: nn.Module, x: Tensor, positions: Tensor) -> Tensor:  # -> (g, samples, D)
    """Return what the outputs at these positions depend on, in the order of the weight's entries."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])[:, positions].to(wide)
    conv = cast(Any, layer)
    dims, space = len(conv.kernel_size), output_sizes(layer, x)
    x = x if x.ndim == dims + 2 else x[None]
    if conv.transposed:
        x, stride = _spread(conv, x), (1,) * dims
    else:
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x, stride = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode), conv.stride
    # Rows of channels are contiguous with channels last, and copied several times as fast as single numbers.
    index = positions.new_zeros(len(positions), *(1,) * dims)  # of the places that each output depends on
    rest, step = positions, 1
    for dim in reversed(range(dims)):
        taps = torch.arange(conv.kernel_size[dim], device=x.device) * conv.dilation[dim]
        taps = taps.flip(0) if conv.transposed else taps
        at = (rest % space[dim])[:, None] * stride[dim] + taps  # (P, k)
        index = index + step * at.reshape(len(positions), *(-1 if other == dim else 1 for other in range(dims)))
        rest, step = rest // space[dim], step * x.shape[2 + dim]
    taken = x.flatten(2).mT.contiguous().index_select(1, index.flatten())  # (N, P * k ..., I)
    taken = taken.reshape(len(x) * len(positions), math.prod(conv.kernel_size), conv.groups, -1)
    return taken.permute(2, 0, 3, 1).reshape(conv.groups, len(x) * len(positions), -1).to(wide)


def _spread(conv: Any, x: Tensor) -> Tensor:
    """Return the input on which a convolution with the mirrored kernel does what the transposed one does."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], conv.stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in conv.stride))] = x
    border: list[int] = []
    for dim in reversed(range(len(sizes))):
        around = conv.dilation[dim] * (conv.kernel_size[dim] - 1) - conv.padding[dim]
        border += [around, around + conv.output_padding[dim]]
    return F.pad(spread, border)


def outputs_at(layer: nn.Module, x: Tensor, y: Tensor, positions: Tensor) -> Tensor:  # -> (g, samples, o)
    """Return the outputs at these positions less the bias, in the order of the patches."""
    bias = cast(Tensor | None, layer.bias)
    values = values_at(layer, x, y, positions)
    return values if bias is None else values - bias.to(values).reshape(len(values), 1, -1)


def values_at(layer: nn.Module, x: Tensor, y: Tensor, positions: Tensor) -> Tensor:  # -> (g, samples, o)
    """Return a map of the outputs' shape at these positions, in the order of the patches."""
    wide = torch.promote_types(y.dtype, torch.float32)
    if isinstance(layer, nn.Linear):
        return y.reshape(1, -1, y.shape[-1])[:, positions].to(wide)
    conv = cast(nn.modules.conv._ConvNd, layer)
    y = y if y.ndim == len(conv.kernel_size) + 2 else y[None]
    known: Any = (..., *(slice(size) for size in output_sizes(layer, x)))  # output_size= may have made it larger
    y = y[known].flatten(2)[:, :, positions]  # (N, O, P)
    return y.reshape(len(y), conv.groups, -1, y.shape[-1]).permute(1, 0, 3, 2).flatten(1, 2).to(wide)


def outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """Swap inputs and outputs of a transposed convolution's weight, which has its inputs first; or swap them back."""
    return weight.transpose(0, 1) if getattr(layer, "transposed", False) else weight


# --- sums ---------------------------------------------------------------------------------------------------------


Added = tuple[int, list[Tensor]]  # the number of samples, and their sums


class Moments:
    """Means and covariances of the patches x of one layer and of the outputs y that belong to them, as running sums.

    Samples are summed relative to the mean of the first ones, since in single precision a large mean would leave
    nothing of a small spread.

    Args:
        like: moments of the same patches with other outputs; the sums over patches alone are taken from there.
    """

    def __init__(self, like: Moments | None = None) -> None:
        self.count = self.calls = 0
        self._shift: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []
        self._like = like

    def add(self, patches: Tensor, outputs: Tensor | None = None) -> Added:  # (g, n, D), (g, n, o)
        """Add these samples to the sums; return what was added."""
        outputs = patches[:, :, :0] if outputs is None else outputs
        if self._shift is None:
            self._shift = patches.mean(1, keepdim=True), outputs.mean(1, keepdim=True)
        x, y = patches - self._shift[0], outputs - self._shift[1]
        sums = [y.mT @ x, y.sum(1)]
        if self._like is None:
            sums += [symmetric_product(x), x.sum(1)]
        return self._add(patches.shape[1], sums)

    def add_again(self, other: Moments, added: Added) -> bool:
        """Add what was added to others; return False if theirs are relative to another mean."""
        if self._shift is not None and self._shift is not other._shift:
            return False
        self._shift = other._shift
        self._add(*added)
        return True

    def _add(self, count: int, sums: list[Tensor]) -> Added:
        if self._sums:
            for total, part in zip(self._sums, sums, strict=True):
                total += part
        else:
            self._sums = [part.to(torch.float64, copy=True) for part in sums]
        self.count += count
        return count, sums

    def _of_patches(self) -> list[Tensor]:
        """Return the sums over patches alone: second moments and first moments."""
        return self._sums[2:] if self._like is None else self._like._of_patches()

    def means(self) -> tuple[Tensor, Tensor]:  # -> (g, D), (g, o)
        """Return the means of patches and outputs."""
        assert self._shift is not None
        totals = self._of_patches()[1], self._sums[1]
        x, y = (total / self.count + shift[:, 0] for total, shift in zip(totals, self._shift, strict=True))
        return x, y

    def second(self, centered: bool) -> tuple[Tensor, Tensor]:  # -> (g, D, D), (g, o, D)
        """Return E[x x^T] and E[y x^T], optionally centred at the means."""
        products, y = (total / self.count for total in self._sums[:2])
        squares, x = (total / self.count for total in self._of_patches())
        squares = squares - x[..., :, None] * x[..., None, :]
        products = products - y[..., :, None] * x[..., None, :]
        if not centered:
            x, y = self.means()
            squares = squares + x[..., :, None] * x[..., None, :]
            products = products + y[..., :, None] * x[..., None, :]
        return squares, products


def symmetric_product(x: Tensor) -> Tensor:  # (g, n, D) -> (g, D, D)
    """Return x^T x; on a CPU the blocks above the diagonal are computed, and mirrored."""
    if x.is_cuda or x.shape[-1] < 2 * PRODUCT_ROWS:
        return x.mT @ x
    whole = x.new_empty(len(x), x.shape[-1], x.shape[-1])
    for start in range(0, x.shape[-1], PRODUCT_ROWS):
        stop = min(start + PRODUCT_ROWS, x.shape[-1])
        whole[:, start:stop, start:] = x[..., start:stop].mT @ x[..., start:]
        whole[:, stop:, start:stop] = whole[:, start:stop, stop:].mT
    return whole


def sampled_share(layer: nn.Module, positions: int) -> float:
    """Return the share of this many output positions that is enough to estimate second moments."""
    return min(1.0, max(LEAST_SAMPLES, SAMPLES_PER_ENTRY * (patch_size(layer) or 0)) / max(positions, 1))


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of a layer, given by position or by name."""
    return cast(Tensor, (*args, *kwargs.values())[0])


Versioned = tuple[Tensor, int]  # a tensor and how often it had been written in place


def versioned(*tensors: Tensor) -> list[Versioned]:
    """Return tensors with their versions, to compare with later; nothing for inference tensors, which have none."""
    return [] if any(x.is_inference() for x in tensors) else [(x, x._version) for x in tensors]


def are_unchanged(before: Sequence[Versioned], tensors: Sequence[Tensor]) -> bool:
    """Return True if these are the same tensors as before, and not written since."""
    return bool(before) and all(
        x is y and version == y._version for (x, version), y in zip(before, tensors, strict=True)
    )


# --- sensitivity --------------------------------------------------------------------------------------------------


def output_sensitivity(
    model: nn.Module, layers: Mapping[str, CPLayer], inputs: Iterable[Any]
) -> dict[str, Tensor] | None:  # -> (g, o, o) each
    """Return, for every layer, the metric G in which changes of its output move the outputs of the network.

    G is the mean over inputs of the sum over positions of g g^T, with g the gradient of the network's outputs projected
    on a random direction: dy^T G dy is the expected squared change of the outputs. None if they cannot be
    differentiated. No batch is read after the one with which SENSITIVITY_INPUTS are reached.
    """
    names = {tie_key(layer): name for name, layer in layers.items()}
    generators: dict[torch.device, torch.Generator] = {}
    found: dict[str, Tensor] = {}
    held: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hold(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()
        if not any(y is before for *_, before in held[-1:]):  # of the last part of stacked layers
            held.append((layer, first_argument(args, kwargs), y))
        return y.clone()  # the next module may change it in place

    hooked_layers = [m for m in model.modules() if isinstance(m, CPLayer) and tie_key(m) in names]
    hooks = [m.register_forward_hook(hold, with_kwargs=True) for m in hooked_layers]
    count = 0
    try:
        with evaluating(model), torch.enable_grad():
            for each in inputs:
                held.clear()
                outputs = [y for y in tensors_of(run(model, each)) if y.requires_grad]
                if not outputs:
                    return None
                drawn = [_direction(y, generators) for y in outputs]
                gradients = torch.autograd.grad(outputs, [y for *_, y in held], drawn, allow_unused=True)
                for layer, gradient in _by_input(held, gradients):
                    largest = torch.stack(gradient.aminmax()).abs().amax()
                    if bool(largest.isfinite()):
                        name = names[tie_key(layer)]
                        products, scale = _outer(layer, gradient, largest)
                        if name not in found:
                            found[name] = torch.zeros_like(products, dtype=torch.float64)
                        found[name].add_(products, alpha=scale)
                count += batch_size(each)
                if count >= SENSITIVITY_INPUTS:
                    break
    except (RuntimeError, ValueError):  # no tensors among the outputs, or operations without a gradient
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total.div_(count) for name, total in found.items()}


def _by_input(
    held: Sequence[tuple[nn.Module, Tensor, Tensor]], gradients: Sequence[Tensor | None]
) -> Iterable[tuple[nn.Module, Tensor]]:
    """Return layers with their gradients, added up over the calls of a layer with the same input."""
    sums: dict[tuple[nn.Module, int], Tensor] = {}
    for (layer, x, _), gradient in zip(held, gradients, strict=True):
        if gradient is not None:
            key = layer, id(x)  # which is alive
            sums[key] = sums[key] + gradient if key in sums and sums[key].shape == gradient.shape else gradient
    return [(layer, gradient) for (layer, _), gradient in sums.items()]


def _direction(y: Tensor, generators: dict[torch.device, torch.Generator]) -> Tensor:
    """Return normal numbers of the shape of y, drawn on its device: a language model has very many outputs."""
    if y.device not in generators:
        generators[y.device] = torch.Generator(y.device).manual_seed(0)
    return torch.randn(y.shape, generator=generators[y.device], device=y.device).to(y.dtype)


def _outer(layer: nn.Module, gradient: Tensor, largest: Tensor) -> tuple[Tensor, float]:  # -> (g, o, o), its scale
    """Return g g^T, divided by the square of the largest entry, which keeps squares in range."""
    dims = 0 if isinstance(layer, nn.Linear) else len(cast(Any, layer).kernel_size)
    rows = gradient.movedim(-1 - dims, -1).flatten(0, -2)
    share = 1.0
    if len(rows) > SENSITIVITY_ROWS:
        chosen = torch.randint(len(rows), (SENSITIVITY_ROWS,), generator=torch.Generator().manual_seed(0))
        rows, share = rows[chosen.to(rows.device)], SENSITIVITY_ROWS / len(rows)
    rows = rows.reshape(-1, getattr(layer, "groups", 1), rows.shape[-1] // getattr(layer, "groups", 1)).transpose(0, 1)
    scale = largest.clamp_min(torch.finfo(rows.dtype).tiny)
    rows = (rows / scale).float()
    return symmetric_product(rows), scale.double().square().item() / share
