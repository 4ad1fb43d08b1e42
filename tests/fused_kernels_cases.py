"""Layers, oracles in double precision and a way to force kernels, for the tests of fused modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.gpu import fused_launch
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue
from cpnorm.gpu.fused_layers import fused_block, fused_input
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import CPConv2d, CPLinear
from ways import HAS_TRITON, INTERPRETED, KERNEL, NEEDS_TRITON, WAYS, device, full_precision  # noqa: F401 (a fixture)

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1.5e-2, torch.bfloat16: 0.12}


@pytest.fixture(autouse=True)
def _interpreter_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make triton's interpreter multiply bfloat16: version 3.9 multiplies the integers it keeps them as."""
    if not (INTERPRETED and HAS_TRITON):
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def as_single(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(one, tl.float32) for one in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", as_single)


def forced(way: str, block: FusedBlock | FusedEpilogue, *inputs: Tensor) -> Tensor:
    """Run a block or an epilogue by the kernel or by torch, whatever it would choose."""
    chosen: list[str] = []
    own = "_by_torch" if isinstance(block, FusedBlock) else "by_torch"

    def noted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: (chosen.append(name), function(*inputs))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block.__dict__, "_by_kernel", noted("kernel", block._by_kernel))
        patch.setitem(block.__dict__, own, noted("torch", getattr(block, own)))
        if way == "torch":
            patch.setattr(fused_launch, "has_triton", lambda: False)
        y = block(*inputs)
    assert chosen == [way]
    return y


def conv(*arguments: Any, rank: int, **keywords: Any) -> CPConv2d:
    """Return a canonical convolution."""
    return canonical(CPConv2d(*arguments, rank=rank, init="kaiming_normal", **keywords))


def linear(*arguments: Any, rank: int, **keywords: Any) -> CPLinear:
    """Return a canonical linear layer."""
    return canonical(CPLinear(*arguments, rank=rank, init="kaiming_normal", **keywords))


def canonical(layer: Any) -> Any:
    """Give a layer lambdas of all sizes and both signs."""
    layer.lambdas.data = torch.randn(layer.rank)
    return layer.requires_grad_(False).eval()


def in_double(x: Tensor, layer: CPLayer, relu: bool, pool: bool) -> Tensor:
    """Return what the layer and what follows it make of an input, by the dense weight."""
    layer = copy.deepcopy(layer).double()
    layer.path = "rebuild"
    y = layer(x.double())
    y = F.relu(y) if relu else y
    return F.max_pool2d(y, 2) if pool else y


def terms_in_double(y: Tensor, layer: CPLayer) -> Tensor:  # (N, I, ...) -> (N, ..., R)
    """Return what the layer's first step makes of an input."""
    cp = copy.deepcopy(layer).double().cp
    return y.movedim(1, -1) @ (cp.factors[1] * (cp.sigma * cp.lambdas).abs().sqrt())


def assert_near(y: Tensor, wanted: Tensor, layers: int = 1) -> None:
    """Assert that no number is wrong by more than what rounding does to numbers as large as most."""
    assert y.shape == wanted.shape
    error = (y.double().cpu() - wanted.cpu()).abs().max()
    common = wanted.square().mean().sqrt().clamp_min(0.1)
    assert error < layers * TOLERANCES[y.dtype] * common, f"{error} among {common}"


def in_line(way: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return all kinds of fused modules, one after the other."""
    first, second, third = conv(3, 20, 3, rank=4, padding=1), conv(20, 12, 3, rank=5), linear(48, 7, rank=3)
    fused = nn.Sequential(
        FusedEpilogue(torch.ones(3), relu=True, pool=False),
        fused_block(first, relu=True, pool=True, following=second, patches=True),
        fused_block(second, relu=True),
        fused_input(third, 12),
        fused_block(third),
    )
    return fused.to(device(way), dtype).eval()
