"""Fused blocks compute what their layers do: by the GPU kernel, by triton's interpreter, and by torch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import cpnorm
from cpnorm.gpu.block_sizes import Blocks
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue
from cpnorm.gpu.fused_layers import can_fuse, fused_block, fused_input
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import CPConv1d, CPConv2d
from fused_kernels_cases import (
    _interpreter_multiplies_bfloat16,  # noqa: F401 (a fixture)
    assert_near,
    canonical,
    conv,
    forced,
    in_double,
    linear,
    terms_in_double,
)
from ways import HAS_TRITON, INTERPRETED, KERNEL, NEEDS_TRITON, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")


def check(
    way: str,
    layer: CPLayer,
    size: tuple[int, ...],
    *,
    relu: bool = True,
    pool: bool = False,
    following: CPLayer | None = None,
    patches: bool = False,
    dtype: torch.dtype = torch.float32,
    blocks: Blocks | None = None,
) -> None:
    """The block of this layer, for an input of this size, against dense mathematics."""
    layer = copy.deepcopy(layer).to(dtype)
    following = None if following is None else copy.deepcopy(following).to(dtype)
    x = torch.randn(3, layer.in_channels if isinstance(layer, CPConv2d) else layer.in_features, *size).to(dtype)
    wanted = in_double(x, layer, relu, pool)
    block = fused_block(layer, relu=relu, pool=pool, following=following, patches=patches).to(device(way))
    block.blocks = blocks
    opened = x if patches else fused_input(layer)(x)
    y = forced(way, block, opened.to(device(way)))
    if following is None:
        assert y.ndim == 2 or y.is_contiguous(memory_format=torch.channels_last)
        assert_near(y, wanted)
        return
    rank = following.rank
    assert y.is_contiguous()
    assert y.shape[-1] % 16 == 0
    assert (y[..., rank:] == 0).all()
    assert_near(y[..., :rank], terms_in_double(wanted, following))


# kernel, stride, padding, dilation, size
GEOMETRIES: list[tuple[Any, Any, Any, Any, tuple[int, int]]] = [
    (1, 1, 0, 1, (5, 4)),
    (3, 1, 1, 1, (7, 8)),
    (3, 2, 0, 1, (9, 8)),
    (5, 1, 2, 1, (6, 5)),
    (5, 2, 1, 1, (11, 9)),
    ((3, 1), (2, 1), (1, 0), 1, (7, 6)),
    ((1, 3), 1, (0, 2), (1, 2), (4, 7)),
    (3, 2, 2, 2, (9, 10)),
    (2, 1, 1, 3, (7, 9)),
    (3, 1, "same", 2, (6, 5)),
    (3, 1, "valid", 1, (6, 5)),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "size"), GEOMETRIES)
def test_all_geometries(
    way: str, pool: bool, kernel: Any, stride: Any, padding: Any, dilation: Any, size: tuple[int, int]
) -> None:
    where = {"stride": stride, "padding": padding, "dilation": dilation}
    layer = conv(2, 20, kernel, rank=10, **where)
    check(way, layer, size, pool=pool)
    check(way, layer, size, pool=pool, patches=True, following=conv(20, 4, 1, rank=5))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("rank", "channels", "following"), [(1, 10, 130), (16, 64, 16), (33, 70, 1), (130, 130, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_widths_and_precisions(
    way: str, pool: bool, rank: int, channels: int, following: int, dtype: torch.dtype
) -> None:
    layer, then = conv(5, channels, 3, rank=rank, padding=1), conv(channels, 6, 3, rank=following)
    check(way, layer, (6, 5), pool=pool, dtype=dtype)
    check(way, layer, (6, 5), pool=pool, following=then, dtype=dtype)
    rows, then_rows = linear(40, channels, rank=rank), linear(channels, 9, rank=following)
    check(way, rows, (), dtype=dtype)
    check(way, rows, (), following=then_rows, dtype=dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("relu", "pool", "bias"), list(itertools.product([False, True], repeat=3)))
def test_with_and_without_what_follows(way: str, relu: bool, pool: bool, bias: bool) -> None:
    for following in (None, conv(12, 4, 1, rank=3)):
        check(way, conv(3, 12, 3, rank=4, bias=bias), (7, 7), relu=relu, pool=pool, following=following)
        patches = conv(3, 12, 3, rank=4, bias=bias, padding=1)
        check(way, patches, (5, 7), relu=relu, pool=pool, following=following, patches=True)
    check(way, linear(7, 12, rank=4, bias=bias), (), relu=relu)


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=15)  # on a GPU each one is compiled
def test_anything_else(way: str, data: st.DataObject) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    kernel, stride, padding, dilation = pair(1, 4), pair(1, 3), pair(0, 2), pair(1, 2)
    pool, patches = data.draw(st.booleans()), data.draw(st.booleans())
    least = [
        max(1, d * (k - 1) + 1 - 2 * p + (s if pool else 0))
        for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]
    rows, columns = (n + extra for n, extra in zip(least, pair(0, 5), strict=True))
    O, R, R2 = (data.draw(st.integers(1, n)) for n in (80, 40, 40))  # noqa: E741
    layer = conv(2, O, kernel, stride, padding, dilation, rank=R)
    following = conv(O, 2, 1, rank=R2) if data.draw(st.booleans()) else None
    each = data.draw(st.sampled_from([16, 32]))
    blocks = data.draw(st.sampled_from([None, Blocks(16, 16, each, 4, 2), Blocks(32, 32, 64, 8, 3)]))
    check(way, layer, (rows, columns), pool=pool, patches=patches, following=following, blocks=blocks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_blocks_are_two_layers(way: str, patches: bool, dtype: torch.dtype) -> None:
    """17 x 17 -> 8 x 8 -> 4 x 4: the last row and column are in no window of the first pooling."""
    first, second = conv(3, 20, 3, rank=17, padding=1).to(dtype), conv(20, 70, 5, rank=10, padding=2).to(dtype)
    x = torch.randn(2, 3, 17, 17).to(dtype)
    wanted = in_double(in_double(x, first, relu=True, pool=True), second, relu=True, pool=True)
    block = fused_block(first, relu=True, pool=True, following=second, patches=patches).to(device(way))
    y = x if patches else fused_input(first)(x)
    y = forced(way, block, y.to(device(way)))
    y = forced(way, fused_block(second, relu=True, pool=True).to(device(way)), y)
    assert_near(y, wanted, layers=2)


@pytest.mark.parametrize("way", WAYS)
def test_a_linear_layer_after_a_flatten(way: str) -> None:
    """Its weight has finer modes than two, and its input more dimensions."""
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(4 * 3 * 3, 20)), rank=12, modes={"0": (20, 4, 3, 3)})
    first = canonical(model[0])
    second = linear(20, 10, rank=6)
    x = torch.randn(2, 5, 36)
    fused = [fused_block(first, relu=True, following=second), fused_block(second)]
    y = fused_input(first)(x).to(device(way))
    for block in fused:
        y = forced(way, block.to(device(way)), y)
    assert y.shape == (2, 5, 10)
    assert_near(y, in_double(in_double(x, first, relu=True, pool=False), second, relu=False, pool=False), layers=2)


@pytest.mark.parametrize("way", WAYS)
def test_images_in_any_layout(way: str) -> None:
    layer = conv(3, 20, 3, rank=8, padding=1)
    x = torch.randn(4, 6, 5, 7)
    wanted = in_double(x[::2, 1:4].mT, layer, relu=False, pool=False)
    block = fused_block(layer, patches=True).to(device(way))
    for image in (x[::2, 1:4].mT, x[::2, 1:4].mT.contiguous(memory_format=torch.channels_last)):
        assert_near(forced(way, block, image.to(device(way))), wanted)
    terms = fused_input(layer)(x[::2, 1:4].mT).to(device(way))
    assert not terms.mT.contiguous().mT.is_contiguous()
    assert_near(forced(way, fused_block(layer).to(device(way)), terms.mT.contiguous().mT), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_empty_batches_work_and_too_small_images_raise(way: str) -> None:
    block = fused_block(conv(3, 20, 3, rank=8), pool=True).to(device(way))
    assert forced(way, block, torch.zeros(0, 6, 6, 16, device=device(way))).shape == (0, 20, 2, 2)
    if way == "kernel":
        with pytest.raises(ValueError, match="as large as the kernel"):
            block(torch.zeros(1, 2, 2, 16, device=device(way)))
        with pytest.raises(ValueError, match="as large as the kernel"):  # nothing would be left to pool
            block(torch.zeros(1, 3, 3, 16, device=device(way)))
        with pytest.raises(ValueError, match="2 x 2 and more"):
            FusedEpilogue(None, relu=False, pool=True)(torch.zeros(1, 3, 1, 4, device=device(way)))
        with pytest.raises(ValueError, match="weights of 16 terms"):
            block(torch.zeros(1, 6, 6, 8, device=device(way)))


@pytest.mark.parametrize("way", WAYS)
def test_nan_is_not_hidden(way: str) -> None:
    block = fused_block(conv(3, 20, 3, rank=8, padding=1), relu=True, pool=True).to(device(way))
    x = torch.zeros(1, 4, 4, 16, device=device(way))
    x[0, 0, 0, 0] = torch.nan
    y = forced(way, block, x)
    assert y[0, :, 0, 0].isnan().all()
    assert not y[0, :, 1, 1].isnan().any()


def test_torch_computes_double_precision_and_gradients() -> None:
    layer = conv(3, 20, 3, rank=8, padding=1)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    block = fused_block(copy.deepcopy(layer).double(), relu=True, pool=True, patches=True)
    y = block(x)
    wanted = in_double(x, layer, relu=True, pool=True)
    assert_near(y.detach(), wanted.detach())
    made, right = (torch.autograd.grad(one.square().sum(), x)[0] for one in (y, wanted))
    assert_near(made, right)
    assert fused_block(layer, patches=True)(x.detach().float().requires_grad_()).requires_grad


def test_a_block_is_a_module() -> None:
    block = fused_block(conv(3, 20, 3, rank=8, padding=1), relu=True, pool=True, following=conv(20, 4, 1, rank=17))
    assert str(block) == "FusedBlock(terms 16 -> 20 -> 32, relu, pool, kernel=(3, 3))"
    assert {name: tuple(value.shape) for name, value in block.state_dict().items()} == {
        "taps": (3, 3, 16),
        "out": (16, 20),
        "bias": (20,),
        "into": (20, 32),
    }
    assert not list(block.parameters())
    copied, x = copy.deepcopy(block), torch.randn(1, 4, 4, 16)
    torch.testing.assert_close(copied(x), block(x), rtol=0, atol=0)
    assert copied.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_which_layers_can_be_blocks() -> None:
    assert can_fuse(conv(3, 8, 3, rank=256))
    assert can_fuse(conv(3, 8, 3, rank=4, padding="same", dilation=3))
    assert can_fuse(linear(3, 8, rank=256))
    assert can_fuse(conv(3, 8, 3, rank=300), patches=True)
    others = [
        conv(3, 8, 3, rank=257),
        linear(3, 8, rank=257),
        conv(4, 8, 3, rank=4, groups=2),
        conv(3, 8, 3, rank=4, padding=1, padding_mode="circular"),
        conv(3, 8, 2, rank=4, padding="same"),
        conv(3, 8, 8, rank=4),
        CPConv1d(3, 8, 3, rank=4),
        nn.Conv2d(3, 8, 3),
    ]
    assert not any(can_fuse(layer) for layer in others)
    assert not any(can_fuse(layer, patches=True) for layer in (linear(3, 8, rank=2), conv(8, 8, 3, rank=2)))


def test_misfits_are_errors() -> None:
    layer = conv(3, 8, 3, rank=4)
    with pytest.raises(ValueError, match="can be a fused block"):
        fused_block(conv(3, 8, 3, rank=257))
    with pytest.raises(ValueError, match="can be a fused block"):
        fused_block(layer, following=conv(8, 8, 3, rank=257))
    with pytest.raises(ValueError, match="8 inputs"):
        fused_block(layer, following=linear(9, 8, rank=4))
    with pytest.raises(ValueError, match="before a pooling"):
        fused_block(linear(3, 8, rank=4), pool=True)
    with pytest.raises(ValueError, match="got both"):
        FusedBlock(torch.zeros(16, 8), taps=torch.zeros(1, 1, 16), patches=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_fused_input_of_maps(layout: torch.memory_format) -> None:
    layer = conv(5, 8, 3, rank=20).double()
    x = torch.randn(2, 5, 4, 3).double().contiguous(memory_format=layout)
    entry = fused_input(layer)
    terms = entry(x)
    assert terms.shape == (2, 4, 3, 32)
    assert (terms[..., 20:] == 0).all()
    assert_near(terms[..., :20], terms_in_double(x, layer))
    assert str(entry) == "FusedInput(5 -> 32, maps)"
    assert not entry.training
    assert not list(entry.parameters())


@pytest.mark.parametrize("modes", [(9, 60), (3, 3, 60), (9, 5, 4, 3), (9, 20, 3), (9, 2, 30)], ids=str)
def test_a_fused_input_of_maps_that_are_flat_for_a_linear_layer(modes: tuple[int, ...]) -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(60, 9)), rank=7, modes={"0": modes})
    layer = canonical(model[0]).double()
    x = torch.randn(2, 5, 4, 3).double()
    entry = fused_input(layer, channels=5)
    for maps in (x, x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        assert_near(entry(maps), fused_input(layer)(x.flatten(1)))
    assert str(entry) == "FusedInput(60 -> 16, maps, flat)"
    assert str(fused_input(layer)) == "FusedInput(60 -> 16)"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", [False, True])
def test_a_convolution_and_a_linear_layer_after_it(way: str, pool: bool) -> None:
    first = conv(3, 20, 3, rank=17, padding=1)
    second = linear(20 * (3 * 2 if pool else 7 * 5), 30, rank=10)
    x = torch.randn(4, 3, 7, 5)
    wanted = in_double(x, first, relu=True, pool=pool).flatten(1)
    wanted = in_double(wanted, second, relu=True, pool=False)
    y = forced(way, fused_block(first, relu=True, pool=pool).to(device(way)), fused_input(first)(x).to(device(way)))
    y = fused_input(second, channels=20).to(device(way))(y)
    y = forced(way, fused_block(second, relu=True).to(device(way)), y)
    assert_near(y, wanted, layers=2)


@pytest.mark.gpu
def test_more_than_32_bits_can_count() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free memory")
    block = fused_block(conv(3, 64, 3, rank=60, padding=1), relu=True).cuda().bfloat16()
    x = torch.zeros(2**31 // (64 * 64 * 64) + 3, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
    x[-2:] = torch.randn(2, 64, 64, 64)
    torch.testing.assert_close(block(x)[-2:], block(x[-2:]), rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize(("relu", "pool"), list(itertools.product([False, True], repeat=2)))
def test_residuals_are_added_before_the_relu(
    way: str, relu: bool, pool: bool, patches: bool, dtype: torch.dtype
) -> None:
    layer, following = conv(3, 20, 3, rank=10, padding=1).to(dtype), conv(20, 4, 1, rank=5).to(dtype)
    x, other = torch.randn(2, 3, 9, 6).to(dtype), torch.randn(2, 20, 4 if pool else 9, 3 if pool else 6).to(dtype)
    wanted = in_double(x, layer, relu=False, pool=pool) + other.double()
    wanted = F.relu(wanted) if relu else wanted
    entry = (x if patches else fused_input(layer)(x)).to(device(way))
    for then in (None, following):
        block = fused_block(layer, relu=relu, pool=pool, patches=patches, following=then).to(device(way))
        for residual in (other, other.contiguous(memory_format=torch.channels_last), other.mT.contiguous().mT):
            y = forced(way, block, entry, residual.to(device(way)))
            if then is None:
                assert_near(y, wanted)
            else:
                assert_near(y[..., :5], terms_in_double(wanted, following))
    if way == "kernel":
        with pytest.raises(ValueError, match="expected a residual of the output's shape"):
            block(entry, other[:1].to(device(way)))
