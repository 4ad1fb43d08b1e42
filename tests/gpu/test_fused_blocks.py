"""Stages compute what the layers do that they stand for: by the GPU kernel, by triton's interpreter, and by torch."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
from cpnorm.gpu import fused_launch
from cpnorm.gpu.fused_blocks import Blocks, FusedBlock, FusedEpilogue, can_fuse, fused_block, fused_input
from cpnorm.nn.layers import CPConv1d, CPConv2d, CPLayer, CPLinear
from ways import HAS_TRITON, INTERPRETED, KERNEL, NEEDS_TRITON, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1.5e-2, torch.bfloat16: 0.12}


@pytest.fixture(autouse=True)
def _interpreter_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it keeps as integers, and forgets (3.9) about in matrix products."""
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


def forced(way: str, block: FusedBlock | FusedEpilogue, x: Tensor) -> Tensor:
    """The block, or the epilogue, by the kernel, or by torch, whatever it would choose."""
    chosen: list[str] = []
    own = "_by_torch" if isinstance(block, FusedBlock) else "by_torch"

    def noted(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (chosen.append(name), function(x))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block.__dict__, "_by_kernel", noted("kernel", block._by_kernel))
        patch.setitem(block.__dict__, own, noted("torch", getattr(block, own)))
        if way == "torch":
            patch.setattr(fused_launch, "has_triton", lambda: False)
        y = block(x)
    assert chosen == [way]
    return y


def conv(*arguments: Any, rank: int, **keywords: Any) -> CPConv2d:
    return canonical(CPConv2d(*arguments, rank=rank, init="kaiming_normal", **keywords))


def linear(*arguments: Any, rank: int, **keywords: Any) -> CPLinear:
    return canonical(CPLinear(*arguments, rank=rank, init="kaiming_normal", **keywords))


def canonical(layer: Any) -> Any:
    """With lambdas of all sizes and both signs."""
    layer.lambdas.data = torch.randn(layer.rank)
    return layer.requires_grad_(False).eval()


def in_double(x: Tensor, layer: CPLayer, relu: bool, pool: bool) -> Tensor:
    """What the layer and those behind it make of an input, by the dense weight."""
    layer = copy.deepcopy(layer).double()
    layer.path = "rebuild"
    y = layer(x.double())
    y = F.relu(y) if relu else y
    return F.max_pool2d(y, 2) if pool else y


def terms_in_double(y: Tensor, layer: CPLayer) -> Tensor:  # (N, I, ...) -> (N, ..., R)
    """What the layer's first step makes of an input."""
    cp = copy.deepcopy(layer).double().cp
    return y.movedim(1, -1) @ (cp.factors[1] * (cp.sigma * cp.lambdas).abs().sqrt())


def assert_near(y: Tensor, wanted: Tensor, layers: int = 1) -> None:
    """No number is wrong by more than what rounding does to numbers as large as most."""
    assert y.shape == wanted.shape
    error = (y.double().cpu() - wanted.cpu()).abs().max()
    common = wanted.square().mean().sqrt().clamp_min(0.1)
    assert error < layers * TOLERANCES[y.dtype] * common, f"{error} among {common}"


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
def test_with_and_without_what_is_behind(way: str, relu: bool, pool: bool, bias: bool) -> None:
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
def test_a_linear_layer_behind_a_flatten(way: str) -> None:
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
def test_nothing_in_nothing_out_and_too_little_is_said(way: str) -> None:
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
def test_what_is_not_a_number_is_not_hidden(way: str) -> None:
    block = fused_block(conv(3, 20, 3, rank=8, padding=1), relu=True, pool=True).to(device(way))
    x = torch.zeros(1, 4, 4, 16, device=device(way))
    x[0, 0, 0, 0] = torch.nan
    y = forced(way, block, x)
    assert y[0, :, 0, 0].isnan().all()
    assert not y[0, :, 1, 1].isnan().any()


def test_in_double_precision_and_where_gradients_are_asked_for_torch_does_it() -> None:
    layer = conv(3, 20, 3, rank=8, padding=1)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    block = fused_block(copy.deepcopy(layer).double(), relu=True, pool=True, patches=True)
    y = block(x)
    wanted = in_double(x, layer, relu=True, pool=True)
    assert_near(y.detach(), wanted.detach())
    made, right = (torch.autograd.grad(one.square().sum(), x)[0] for one in (y, wanted))
    assert_near(made, right)
    assert fused_block(layer, patches=True)(x.detach().float().requires_grad_()).requires_grad


def test_it_is_a_module() -> None:
    block = fused_block(conv(3, 20, 3, rank=8, padding=1), relu=True, pool=True, following=conv(20, 4, 1, rank=17))
    assert str(block) == "FusedBlock(terms 16 -> 20 -> 32, relu, pool, kernel=(3, 3))"
    assert {name: tuple(value.shape) for name, value in block.state_dict().items()} == {
        "taps": (3, 3, 16),
        "out": (16, 20),
        "bias": (20,),
        "into": (20, 32),
    }
    assert not list(block.parameters())
    twin, x = copy.deepcopy(block), torch.randn(1, 4, 4, 16)
    torch.testing.assert_close(twin(x), block(x), rtol=0, atol=0)
    assert twin.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


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


def test_what_does_not_fit_is_said() -> None:
    layer = conv(3, 8, 3, rank=4)
    with pytest.raises(ValueError, match="can be a block"):
        fused_block(conv(3, 8, 3, rank=257))
    with pytest.raises(ValueError, match="can be a block"):
        fused_block(layer, following=conv(8, 8, 3, rank=257))
    with pytest.raises(ValueError, match="8 inputs"):
        fused_block(layer, following=linear(9, 8, rank=4))
    with pytest.raises(ValueError, match="before a pooling"):
        fused_block(linear(3, 8, rank=4), pool=True)
    with pytest.raises(ValueError, match="got both"):
        FusedBlock(torch.zeros(16, 8), taps=torch.zeros(1, 1, 16), patches=True)


# --- what opens a block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_fused_input_of_maps(layout: torch.memory_format) -> None:
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
def test_an_fused_input_of_maps_that_are_flat_for_a_linear_layer(modes: tuple[int, ...]) -> None:
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
def test_a_convolution_and_a_linear_layer_behind_it(way: str, pool: bool) -> None:
    first = conv(3, 20, 3, rank=17, padding=1)
    second = linear(20 * (3 * 2 if pool else 7 * 5), 30, rank=10)
    x = torch.randn(4, 3, 7, 5)
    wanted = in_double(x, first, relu=True, pool=pool).flatten(1)
    wanted = in_double(wanted, second, relu=True, pool=False)
    y = forced(way, fused_block(first, relu=True, pool=pool).to(device(way)), fused_input(first)(x).to(device(way)))
    y = fused_input(second, channels=20).to(device(way))(y)
    y = forced(way, fused_block(second, relu=True).to(device(way)), y)
    assert_near(y, wanted, layers=2)


# --- what closes other layers -------------------------------------------------------------------------------------


def check_epilogue(way: str, x: Tensor, *, bias: bool = True, relu: bool = True, pool: bool = True) -> Tensor:
    """By the kernel: the same numbers as by torch; and near those of double precision."""
    x = x.to(device(way))
    shift = torch.randn(x.shape[1]).to(x) if bias else None
    epilogue = FusedEpilogue(shift, relu=relu, pool=pool)
    y = forced(way, epilogue, x)
    assert y.dtype == x.dtype
    wanted = F.max_pool2d(x.double(), 2) if pool else x.double()
    wanted = wanted if shift is None else wanted + shift.double()[:, None, None]
    assert_near(y, F.relu(wanted) if relu else wanted)
    cut_off = INTERPRETED and x.dtype == torch.bfloat16  # the interpreter does not round to the nearest
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
    twin = FusedEpilogue(torch.zeros(3) if bias else None, relu=relu, pool=pool)
    named = ["relu"] * relu + ["pool"] * pool + ["bias"] * bias
    assert str(twin) == f"FusedEpilogue({', '.join(named)})"
    assert list(twin.state_dict()) == ["bias"] * bias
    assert not list(twin.parameters())


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
def test_a_epilogue_of_nothing_and_of_what_is_not_a_number(way: str, layout: torch.memory_format) -> None:
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


def test_where_torch_closes(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_epilogue_copies_its_bias() -> None:
    bias = nn.Parameter(torch.ones(4))
    epilogue = FusedEpilogue(bias, relu=True, pool=False)
    with torch.no_grad():
        bias.zero_()
    assert (epilogue(torch.zeros(1, 4, 2, 2)) == 1).all()
    assert not epilogue.bias.requires_grad


@pytest.mark.parametrize("shared", [fused_launch.H200_SHARED, 99 * 1024, 64 * 1024])  # H200, RTX 30 and 40, T4
def test_blocks_fit_into_the_memory_that_threads_share(shared: int) -> None:
    sizes = itertools.product((1, 10**6), (10, 192, 1024), (16, 64, 256), (0, 16, 256), (False, True), (2, 4))
    for pixels, channels, terms, following, pool, itemsize in sizes:
        blocks = fused_launch._blocks(pixels, channels, terms, following, pool, itemsize, shared)
        widths = terms, following, 4 if pool else 1, itemsize
        needed = fused_launch._shared_bytes(blocks.pixels, blocks.channels, blocks.stages, *widths)
        assert needed <= shared or (blocks.pixels, blocks.channels, blocks.stages) == (16, 16, 1)
        assert min(blocks.pixels, blocks.channels) >= 16
        assert blocks.each % blocks.channels == 0


def test_large_tiles_that_go_on_to_terms_take_more_than_one_turn() -> None:
    """Of code without turns ptxas 12.8 makes one that reads a register that nobody has written."""
    for channels, terms, following, pool in itertools.product((17, 32, 48, 64, 100), (16, 64, 128), (16, 32), (0, 1)):
        blocks = fused_launch._blocks(10**6, channels, terms, following, bool(pool), 2, fused_launch.H200_SHARED)
        assert blocks.pixels < 64 or blocks.channels < channels


# --- how kernels are started --------------------------------------------------------------------------------------


class CountingKernel:
    """Stands for one of triton's: notes who is asked to start what."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.looked: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., Any]:
        def look(*arguments: Any, **constants: Any) -> Any:
            self.looked.append((programs, arguments, constants))
            return self.compiled

        return look

    @property
    def compiled(self) -> Any:
        class Compiled:
            def __getitem__(_, programs: tuple[int, ...]) -> Callable[..., None]:  # noqa: N805
                return lambda *arguments: self.started.append((programs, arguments))

        return Compiled()


def test_triton_looks_at_arguments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernel, room = CountingKernel(), torch.zeros(64)
    constants, options = {"relu": True, "terms": 16}, {"num_warps": 4}
    plan = fused_launch.Plan((1,), 7, (5, (3, 1)), constants, options, [])
    for _ in range(3):
        fused_launch._start(kernel, plan, (room[:8], None))
    (programs, arguments, named), *others = kernel.looked
    assert (programs, arguments[1:], named, others) == ((7,), (None, 5, (3, 1)), constants | options, [])
    fused_launch._start(kernel, plan, (room[16:24], None))  # elsewhere, and at a multiple of 16 bytes as well
    assert [programs for programs, _ in kernel.started] == [(7, 1, 1)] * 3
    assert kernel.started[-1][1][0].data_ptr() == room[16:].data_ptr()
    assert kernel.started[-1][1][1:] == (None, 5, (3, 1), True, 16)
    fused_launch._start(kernel, plan, (room[1:9], None))
    fused_launch._start(kernel, plan, (room[:8], room[:8].double()))
    assert (len(kernel.looked), len(kernel.started), len(plan.compiled)) == (3, 3, 1)
    fused_launch._start(kernel, plan._replace(programs=0), (room[:8], None))
    fused_launch._start(kernel, plan._replace(compiled=[]), (room[1:9], None))
    assert (len(kernel.looked), len(kernel.started), len(plan.compiled)) == (4, 3, 1)


def test_what_is_compiled_anew_has_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a kernel's code depends on, beside where tensors lie."""
    plans: list[fused_launch.Plan] = []
    monkeypatch.setitem(
        sys.modules, "cpnorm.gpu.fused_kernels", SimpleNamespace(block_kernel=None, epilogue_kernel=None)
    )
    monkeypatch.setattr(fused_launch, "_start", lambda kernel, plan, tensors: plans.append(plan))
    monkeypatch.setattr(sys.modules["cpnorm.gpu.fused_blocks"], "runs_kernel", lambda *_: True)
    first, second = conv(3, 8, 3, rank=4, padding=1), conv(8, 20, 3, rank=17)
    x = torch.randn(2, 3, 8, 8)
    turned = x.contiguous(memory_format=torch.channels_last)
    for options in ({}, {"relu": True}, {"pool": True}, {"following": second}, {"following": conv(8, 4, 1, rank=2)}):
        for image in (x, turned, x[:1], x.half()):
            fused_block(first, patches=True, **options).to(image.dtype)(image)
        fused_block(first, **options)(torch.randn(2, 6, 6, 16))
    fused_block(conv(3, 8, 3, rank=4, padding=1, bias=False))(torch.randn(2, 6, 6, 16))
    fused_block(conv(3, 8, 3, rank=4, padding=1, stride=2))(torch.randn(2, 6, 6, 16))
    for bias, relu, pool in itertools.product((None, torch.ones(3)), (False, True), (False, True)):
        for image in (x, turned, x[:1], x.half()):
            FusedEpilogue(None if bias is None else bias.to(image.dtype), relu=relu, pool=pool)(image)
    assert len({id(plan.compiled) for plan in plans}) == len(plans) == 5 * 5 + 2 + 8 * 4
    FusedEpilogue(None, relu=False, pool=False)(x + 1)
    assert plans[-1].compiled is plans[27].compiled


@NEEDS_TRITON
def test_constants_stand_in_the_order_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a compiled kernel takes them by their place."""
    seen: dict[str, list[str]] = {}

    def note(kernel: Any, plan: fused_launch.Plan, tensors: Any) -> None:
        names = list(inspect.signature(kernel.fn).parameters)
        assert names[len(tensors) + len(plan.numbers) :] == list(plan.constants)
        seen[kernel.__name__] = names

    monkeypatch.setattr(fused_launch, "_start", note)
    monkeypatch.setattr(fused_launch, "kernels_supported", lambda device: True)
    fused_block(conv(3, 8, 3, rank=4), relu=True)(torch.randn(2, 6, 6, 16))
    FusedEpilogue(torch.ones(3), relu=True, pool=True)(torch.randn(2, 3, 4, 4))
    assert set(seen) == {"block_kernel", "epilogue_kernel"}


@pytest.mark.gpu
def test_one_after_the_other_on_a_gpu() -> None:
    """Kernels that are started again, with tensors elsewhere and of other sizes and kinds, between each other."""
    block = fused_block(conv(12, 40, 3, rank=16, padding=1), relu=True, pool=True)
    fused = [copy.deepcopy(block).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    room = torch.randn(5 * 8 * 8 * 16 + 8, device="cuda")
    for turn in range(12):
        one, batch, shift = fused[turn % 3], 1 + turn % 4, turn // 6
        x = room.to(one.out.dtype)[shift:][: batch * 8 * 8 * 16].view(batch, 8, 8, 16)
        tolerance = TOLERANCES[one.out.dtype]
        torch.testing.assert_close(forced("kernel", one, x), forced("torch", one, x), rtol=tolerance, atol=tolerance)


# --- for the compiler ---------------------------------------------------------------------------------------------


def in_line(way: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """All kinds of fused and a epilogue."""
    first, second, third = conv(3, 20, 3, rank=4, padding=1), conv(20, 12, 3, rank=5), linear(48, 7, rank=3)
    fused = nn.Sequential(
        FusedEpilogue(torch.ones(3), relu=True, pool=False),
        fused_block(first, relu=True, pool=True, following=second, patches=True),
        fused_block(second, relu=True),
        fused_input(third, 12),
        fused_block(third),
    )
    return fused.to(device(way), dtype).eval()


@pytest.mark.parametrize("way", WAYS)
def test_compiled_as_a_whole(way: str) -> None:
    fused, x = in_line(way), torch.randn(2, 3, 8, 8, device=device(way))
    with torch.no_grad():
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(compiled, fused(x), rtol=1e-5, atol=1e-6)
        program = torch.export.export(fused, (x,)).module()
        torch.testing.assert_close(program(x), fused(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [KERNEL])
def test_the_compiler_knows_what_comes_out(way: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 5, 6, 4, device=device(way)).contiguous(memory_format=layout)
        torch.library.opcheck(
            torch.ops.cpnorm.fused_epilogue.default, (x, torch.randn(5, device=device(way)), True, True)
        )
    block = fused_block(conv(5, 9, 3, rank=4, padding=1), following=conv(9, 3, 1, rank=2)).to(device(way))
    weights = block.taps, block.out, block.bias, block.into
    for blocks in ([], [16, 16, 16, 4, 2]):
        x = torch.randn(2, 6, 4, 16, device=device(way))
        arguments = (x, *weights, [3, 3, 1, 1, 1, 1, 1, 1], True, True, False, blocks)
        torch.library.opcheck(torch.ops.cpnorm.fused_block.default, arguments)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # one that torch takes first, on purpose
def test_compiled_on_a_gpu() -> None:
    fused, x = in_line("kernel", torch.bfloat16), torch.randn(64, 3, 8, 8, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = fused(x)
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(fused, fullgraph=True, mode=mode)
            for _ in range(3):
                y = compiled(x).clone()
            torch.testing.assert_close(y, wanted, rtol=0.02, atol=0.02)
        torch.testing.assert_close(fused(x), wanted, rtol=0, atol=0)  # and it is none the worse for it


# --- in the interpreter only --------------------------------------------------------------------------------------


@pytest.mark.skipif(not (INTERPRETED and HAS_TRITON), reason="needs triton's interpreter: make test-kernels")
@pytest.mark.parametrize("batch", [1, 5])
def test_kernels_stay_within_their_tensors(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address that is read or written lies in a tensor that the kernel was given."""
    import numpy as np
    from triton.runtime import interpreter

    ranges: list[tuple[int, int]] = []
    begin, builder = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder
    read, write = builder.create_masked_load, builder.create_masked_store
    seen = 0

    def beginning(self: Any, arguments: Any, named: Any) -> Any:
        given_to = begin(self, arguments, named)
        ranges.clear()
        for x in (*given_to[0], *given_to[1].values()):
            if isinstance(x, Tensor):
                last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                ranges.append((x.data_ptr(), x.data_ptr() + last * x.element_size()))
        return given_to

    def check(places: Any, mask: Any) -> None:
        nonlocal seen
        at = places.data[mask.data.astype(bool)].astype(np.int64)
        seen += at.size
        assert np.logical_or.reduce([(at >= first) & (at <= last) for first, last in ranges]).all()

    def reading(self: Any, places: Any, mask: Any, *rest: Any) -> Any:
        check(places, mask)
        return read(self, places, mask, *rest)

    def writing(self: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(places, mask)
        return write(self, places, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", beginning)
    monkeypatch.setattr(builder, "create_masked_load", reading)
    monkeypatch.setattr(builder, "create_masked_store", writing)
    in_line("kernel")(torch.randn(batch, 3, 8, 8))
    for pool in (False, True):
        block = fused_block(conv(7, 70, 3, rank=18, padding=1, stride=2), relu=True, pool=pool)
        block(torch.randn(batch, 9, 11, 32))
        FusedEpilogue(torch.randn(130), relu=True, pool=pool)(torch.randn(batch, 130, 5, 3))
    assert seen > 10_000


# --- on a GPU only ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    first, second = conv(3, 64, 3, rank=17, padding=1), conv(64, 192, 3, rank=30, padding=1)
    fused = nn.Sequential(fused_block(first, relu=True, pool=True, following=second, patches=True), fused_block(second))
    fused.cuda().bfloat16()
    x = torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    wanted = fused(x)
    still, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    fused(still)
    with torch.cuda.graph(graph):
        y = fused(still)
    still.copy_(x)
    graph.replay()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_more_than_32_bits_can_count() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free memory")
    block = fused_block(conv(3, 64, 3, rank=60, padding=1), relu=True).cuda().bfloat16()
    x = torch.zeros(2**31 // (64 * 64 * 64) + 3, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
    x[-2:] = torch.randn(2, 64, 64, 64)
    torch.testing.assert_close(block(x)[-2:], block(x[-2:]), rtol=0, atol=0)
