"""Models with stages in the place of canonical layers and of what is behind them, where layers stand in line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import Inputs
from cpnorm.deploy.rewrite import DROPOUTS, halves_maps
from cpnorm.deploy.tracing import has_hooks, places_in, run
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue, can_fuse, fused_block, fused_input
from cpnorm.nn.layers import CPConv2d, CPLayer, CPLinear, tie_key

FUSED, FUSED_PATCHES = "fused", "fused-patches"
ROUNDING = 0.03  # of a stage's output: bfloat16 is off by 0.003, one of sixteen terms left out by 0.25


class Place(NamedTuple):
    """Of a layer in a Sequential."""

    sequence: nn.Sequential
    name: str

    @property
    def layer(self) -> nn.Module:
        """That stands there."""
        return self.sequence.get_submodule(self.name)

    def put(self, layer: nn.Module) -> None:
        """Another one there."""
        self.sequence.register_module(self.name, layer.train(self.sequence.training))

    def clear(self) -> None:
        """Nothing stands there any more."""
        del self.sequence._modules[self.name]


class Behind(NamedTuple):
    """What follows a layer: whether a ReLU and a pooling, how many places they take, and a batch norm before them."""

    relu: bool
    pool: bool
    places: int
    norm: nn.BatchNorm2d | None = None


def fuse_blocks(model: nn.Module, widest: int) -> dict[str, str]:
    """Let canonical layers of at most so many terms be stages, with what is behind them; their forms by name.

    A first layer of few input channels runs on patches of the image, whatever its number of terms, but not for 0.
    """
    names = {id(module): name for name, module in model.named_modules()}
    places = places_in(model)
    tied = Counter(tie_key(module) for module in model.modules() if isinstance(module, CPLayer))
    staged: dict[str, str] = {}

    def fits(layer: nn.Module | None, *, patches: bool = False) -> bool:
        if not isinstance(layer, CPLayer) or has_hooks(layer):
            return False
        alone = places[id(layer)] == 1 and tied[tie_key(layer)] == 1
        return alone and can_fuse(layer, patches=patches) and (patches or layer.rank <= widest)

    for line in lines_of(model):
        first = 0
        while first < len(line):
            layer, end = line[first].layer, first
            patches = widest > 0 and fits(layer, patches=True)
            pieces: list[nn.Module] = [] if patches or not fits(layer) else [fused_input(cast(CPLayer, layer))]
            while patches or pieces:
                staged[names[id(layer)]] = FUSED_PATCHES if patches else FUSED
                conv = isinstance(layer, CPConv2d)
                behind = behind_of(line, end + 1, maps=conv, norms=conv)
                end += 1 + behind.places
                then = line[end].layer if end < len(line) else None
                goes_on = fits(then) and conv == isinstance(then, CPConv2d)
                following = cast(CPLayer, then) if goes_on else None
                pieces.append(_stage(layer, behind, following, patches))
                patches = False
                if not goes_on:
                    flattened = _linear_behind(line, end) if conv else None
                    if flattened is None or not fits(then := line[flattened].layer):
                        break
                    channels = cast(CPConv2d, layer).out_channels
                    if cast(CPLinear, then).in_features % channels:  # then it was not these maps that were flattened
                        break
                    pieces.append(fused_input(cast(CPLayer, then), channels))
                    end = flattened
                layer = cast(CPLayer, then)
            if pieces:
                line[first].put(nn.Sequential(*pieces))
                for place in line[first + 1 : end]:
                    place.clear()
            first = max(end, first + 1)
    return staged


def _stage(layer: nn.Module, behind: Behind, following: CPLayer | None, patches: bool) -> FusedBlock:
    scale = None if behind.norm is None else scale_and_shift(behind.norm)
    asked = {"relu": behind.relu, "pool": behind.pool, "patches": patches}
    return fused_block(cast(CPLayer, layer), following=following, affine=scale, **asked)


def fuse_epilogues(model: nn.Module) -> bool:
    """Let bias, ReLU and pooling behind convolutions, and ReLU and pooling behind others, be one; False if none are.

    A batch norm right behind a convolution goes into its weights.
    """
    places = places_in(model)
    tied = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    found = False
    for line in lines_of(model):
        at = 0
        while at < len(line):
            layer = line[at].layer
            conv = type(layer) is nn.Conv2d and places[id(layer)] == 1 and not has_hooks(layer)
            behind = behind_of(line, at + 1, norms=conv and tied[id(layer.weight)] == 1)
            bias = cast(Tensor | None, layer.bias) if conv else None
            if behind.norm is not None:
                bias = _scale(cast(nn.Conv2d, layer), behind.norm)
            if behind.pool or (bias is not None and (behind.relu or behind.norm is not None)):
                if conv:
                    layer.register_parameter("bias", None)
                line[at + 1].put(FusedEpilogue(bias, relu=behind.relu, pool=behind.pool))
                for place in line[at + 2 : at + 1 + behind.places]:
                    place.clear()
                found = True
            at += 1 + behind.places
    return found


@torch.no_grad()
def _scale(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Take a batch norm into the weight of the convolution before it; the bias that they have together."""
    scale, shift = scale_and_shift(norm)
    conv.weight.copy_(conv.weight * scale[:, None, None, None])
    return (shift if conv.bias is None else conv.bias * scale + shift).to(conv.weight.dtype)


@torch.no_grad()
def scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """What a batch norm in evaluation mode does to each channel, in single precision or more."""
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    wide = torch.promote_types(torch.float32, mean.dtype)
    mean, variance = mean.to(wide), variance.to(wide)
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    return scale, -mean * scale if norm.bias is None else norm.bias - mean * scale


def kernels_match_torch(model: nn.Module, example_input: Inputs) -> bool:
    """Whether every stage and closing makes of what it gets what torch's operations make of it, up to rounding.

    What a compiler made wrong may not show in the model's output, most of which may come from biases.
    """
    right: list[bool] = []

    def compare(stage: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        wanted = cast(FusedBlock | FusedEpilogue, stage).by_torch(*inputs).double()
        right.append(bool((output.double() - wanted).norm() <= ROUNDING * wanted.norm()))

    stages = [module for module in model.modules() if isinstance(module, FusedBlock | FusedEpilogue)]
    handles = [stage.register_forward_hook(compare) for stage in stages]
    try:
        run(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return all(right)


# --- lines --------------------------------------------------------------------------------------------------------


def lines_of(model: nn.Module) -> list[list[Place]]:
    """Places whose layers are called one after the other, a Sequential inside of another as part of it."""
    lines: list[list[Place]] = []
    places = places_in(model)
    seen = {module for module, count in places.items() if count > 1}  # what stands in several places is in no line

    def walk(module: nn.Module, line: list[Place] | None) -> None:
        if id(module) in seen:  # in another line already
            return
        seen.add(id(module))
        in_line = _is_line(module)
        if in_line and line is None:
            lines.append(line := [])
        for name, child in module._modules.items():
            if child is None:
                continue
            if in_line and line is not None and not (_is_line(child) and id(child) not in seen):
                line.append(Place(module, name))  # type: ignore[arg-type]
            walk(child, line if in_line and _is_line(child) else None)

    walk(model, None)
    return lines


def behind_of(line: Sequence[Place], start: int, *, maps: bool = True, norms: bool = False) -> Behind:
    """ReLUs and at most one pooling of maps from this place on, in any order, for they commute; and what is idle.

    Before them, if asked for, a batch norm that does to every image the same.
    """
    relu = pool = False
    norm: nn.BatchNorm2d | None = None
    for count, place in enumerate(line[start:]):
        layer = place.layer
        if type(layer) is nn.ReLU and not has_hooks(layer):
            relu = True
        elif maps and not pool and type(layer) is nn.MaxPool2d and halves_maps(layer) and not has_hooks(layer):
            pool = True
        elif norms and not (relu or pool or norm) and _is_fixed_norm(layer):
            norm = cast(nn.BatchNorm2d, layer)
        elif not _is_idle(layer):
            return Behind(relu, pool, count, norm)
    return Behind(relu, pool, len(line) - start, norm)


def _is_fixed_norm(layer: nn.Module) -> bool:
    fixed = type(layer) is nn.BatchNorm2d and not layer.training and layer.running_mean is not None
    return fixed and not has_hooks(layer)


def _linear_behind(line: Sequence[Place], start: int) -> int | None:
    """Where the linear layer stands that takes these maps flattened."""
    flatten = line[start].layer if start < len(line) else None
    if type(flatten) is not nn.Flatten or has_hooks(flatten) or (flatten.start_dim, flatten.end_dim) != (1, -1):
        return None
    end = next((i for i in range(start + 1, len(line)) if not _is_idle(line[i].layer)), None)
    return end if end is not None and isinstance(line[end].layer, CPLinear) else None


def _is_line(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not has_hooks(module)


def _is_idle(layer: nn.Module) -> bool:
    idle = type(layer) is nn.Identity or (type(layer) in DROPOUTS and not layer.training)
    return idle and not has_hooks(layer)
