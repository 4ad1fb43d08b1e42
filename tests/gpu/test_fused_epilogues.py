"""Fused epilogues compute pooling, bias, residual and ReLU: by the kernel, by triton's interpreter, and by torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm.gpu.fused_blocks import FusedEpilogue
from fused_kernels_cases import (
    _interpreter_multiplies_bfloat16,  # noqa: F401 (a fixture)
    assert_near,
    forced,
)
from ways import HAS_TRITON, INTERPRETED, KERNEL, NEEDS_TRITON, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")


def check_epilogue(
    way: str, x: Tensor, *, bias: bool = True, relu: bool = True, pool: bool = True, residual: Tensor | None = None
) -> Tensor:
    """By the kernel: the same numbers as by torch; and near those of double precision."""
    x = x.to(device(way))
    shift = torch.randn(x.shape[1]).to(x) if bias else None
    epilogue = FusedEpilogue(shift, relu=relu, pool=pool)
    inputs = (x,) if residual is None else (x, residual.to(x))
    y = forced(way, epilogue, *inputs)
    assert y.dtype == x.dtype
    wanted = F.max_pool2d(x.double(), 2) if pool else x.double()
    wanted = wanted if shift is None else wanted + shift.double()[:, None, None]
    wanted = wanted if residual is None else wanted + residual.to(x).double()
    assert_near(y, F.relu(wanted) if relu else wanted)
    cut_off = INTERPRETED and x.dtype == torch.bfloat16  # the interpreter does not round to the nearest
    if residual is None:  # by torch, the sum of bias and residual is rounded in between
        torch.testing.assert_close(y, forced("torch", epilogue, x), rtol=2**-7 if cut_off else 0, atol=0)
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 20, 6, 4), (2, 3, 7, 5), (2, 1, 5, 6), (2, 130, 3, 2), (1, 2, 2, 261), (1, 1, 2, 2), (5, 8, 9, 2)]
)
def test_epilogues_of_all_sizes(way: str, layout: torch.memory_format, dtype: torch.dtype, shape: tuple) -> None:
    y = check_epilogue(way, torch.randn(shape).to(dtype).contiguous(memory_format=layout))
    assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("relu", "pool", "bias"), list(itertools.product([False, True], repeat=3)))
def test_epilogues_of_all_kinds(way: str, relu: bool, pool: bool, bias: bool) -> None:
    x = torch.randn(2, 6, 5, 7)
    for maps in (x, x.contiguous(memory_format=torch.channels_last)):
        check_epilogue(way, maps, relu=relu, pool=pool, bias=bias)
    copied = FusedEpilogue(torch.zeros(3) if bias else None, relu=relu, pool=pool)
    named = ["relu"] * relu + ["pool"] * pool + ["bias"] * bias
    assert str(copied) == f"FusedEpilogue({', '.join(named)})"
    assert list(copied.state_dict()) == ["bias"] * bias
    assert not list(copied.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", [False, True])
def test_epilogues_of_maps_in_any_layout(way: str, pool: bool) -> None:
    x = torch.randn(4, 9, 6, 8, device=device(way))
    last = x.contiguous(memory_format=torch.channels_last)
    views = [
        x[::2, 1:8:3],
        last[::2, 1:8:3],
        x.mT,
        last.mT,
        x[..., ::2, 1:],
        last[..., 1:, ::3],
        x[:1, :1].expand(3, 5, -1, -1),
        x.permute(1, 0, 3, 2),
        x[:, :1],
        last[:, 4:5],
    ]
    for view in views:
        check_epilogue(way, view, pool=pool)


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=15)  # on a GPU each one is compiled
def test_any_other_epilogue(way: str, data: st.DataObject) -> None:
    drawn = [data.draw(st.integers(low, high)) for low, high in ((1, 5), (1, 200), (2, 12), (2, 12))]
    x = torch.randn(drawn).permute(data.draw(st.permutations(range(4))))
    relu, bias = data.draw(st.booleans()), data.draw(st.booleans())
    pool = min(x.shape[2:]) > 1 and data.draw(st.booleans())
    check_epilogue(way, x, relu=relu, pool=pool, bias=bias)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_epilogue_of_nothing_and_of_what_is_not_a_number(way: str, layout: torch.memory_format) -> None:
    epilogue = FusedEpilogue(torch.ones(3), relu=True, pool=True).to(device(way))
    assert forced(way, epilogue, torch.zeros(0, 3, 6, 4, device=device(way))).shape == (0, 3, 3, 2)
    for row, column in itertools.product(range(2), repeat=2):
        x = -torch.ones(2, 3, 5, 4, device=device(way)).contiguous(memory_format=layout)
        x[1, 1, 2 + row, column] = torch.nan
        x[:, :, 4] = torch.nan  # in no window
        x[0, 0, 0, 0] = torch.inf
        y = forced(way, epilogue, x)
        assert y[1, 1, 1, 0].isnan()
        assert y.isnan().sum() == 1
        assert y[0, 0, 0, 0] == torch.inf


def test_where_torch_computes_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps without images, double precision, another precision than the bias, and where gradients are asked for."""
    epilogue, x = FusedEpilogue(torch.randn(4), relu=True, pool=True), torch.randn(2, 4, 6, 5)
    monkeypatch.setattr(epilogue, "_by_kernel", None)
    wanted = F.relu(F.max_pool2d(x, 2) + epilogue.bias[:, None, None])
    torch.testing.assert_close(epilogue(x[0]), wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(epilogue(x.double()), wanted.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(epilogue(x.bfloat16()), wanted, rtol=0.02, atol=0.02)
    x.requires_grad_()
    epilogue(x).sum().backward()
    assert x.grad.sum() == (wanted > 0).sum()


def test_an_epilogue_copies_its_bias() -> None:
    bias = nn.Parameter(torch.ones(4))
    epilogue = FusedEpilogue(bias, relu=True, pool=False)
    with torch.no_grad():
        bias.zero_()
    assert (epilogue(torch.zeros(1, 4, 2, 2)) == 1).all()
    assert not epilogue.bias.requires_grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("relu", "pool", "bias"), list(itertools.product([False, True], repeat=3)))
def test_epilogues_with_residuals(way: str, relu: bool, pool: bool, bias: bool) -> None:
    x = torch.randn(2, 6, 5, 7)
    other = torch.randn(2, 6, 2, 3) if pool else torch.randn(2, 6, 5, 7)
    for maps in (x, x.contiguous(memory_format=torch.channels_last)):
        for residual in (other, other.contiguous(memory_format=torch.channels_last)):
            check_epilogue(way, maps, relu=relu, pool=pool, bias=bias, residual=residual)
    check_epilogue(way, x.bfloat16(), relu=relu, pool=pool, bias=bias, residual=other)
