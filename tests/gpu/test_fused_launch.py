"""How kernels are launched, compiled and captured, and that they stay within their tensors."""

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
from torch import Tensor, nn

from cpnorm.gpu import block_sizes, fused_launch
from cpnorm.gpu.fused_blocks import FusedEpilogue
from cpnorm.gpu.fused_layers import fused_block
from fused_kernels_cases import (
    TOLERANCES,
    _interpreter_multiplies_bfloat16,  # noqa: F401 (a fixture)
    conv,
    forced,
    in_line,
)
from ways import HAS_TRITON, INTERPRETED, KERNEL, NEEDS_TRITON, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")


@pytest.mark.parametrize("shared", [block_sizes.H200_SHARED, 99 * 1024, 64 * 1024])  # H200, RTX 30 and 40, T4
def test_blocks_fit_into_the_memory_that_threads_share(shared: int) -> None:
    sizes = itertools.product((1, 10**6), (10, 192, 1024), (16, 64, 256), (0, 16, 256), (False, True), (2, 4))
    for pixels, channels, terms, following, pool, itemsize in sizes:
        blocks = block_sizes.choose_blocks(pixels, channels, terms, following, pool, itemsize, shared)
        widths = terms, following, 4 if pool else 1, itemsize
        needed = block_sizes.shared_bytes(blocks.pixels, blocks.channels, blocks.stages, *widths)
        assert needed <= shared or (blocks.pixels, blocks.channels, blocks.stages) == (16, 16, 1)
        assert min(blocks.pixels, blocks.channels) >= 16
        assert blocks.each % blocks.channels == 0


def test_large_tiles_that_go_on_to_terms_take_more_than_one_turn() -> None:
    """For a loop with a single iteration, ptxas 12.8 generates code that reads an uninitialised register."""
    for channels, terms, following, pool in itertools.product((17, 32, 48, 64, 100), (16, 64, 128), (16, 32), (0, 1)):
        blocks = block_sizes.choose_blocks(10**6, channels, terms, following, bool(pool), 2, block_sizes.H200_SHARED)
        assert blocks.pixels < 64 or blocks.channels < channels


class CountingKernel:
    """A stand-in for a Triton kernel that records its launches."""

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


def test_everything_that_changes_the_code_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a kernel's code depends on, apart from addresses."""
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
    fused_block(first)(torch.randn(2, 6, 6, 16), torch.randn(2, 8, 6, 6))
    FusedEpilogue(None, relu=False, pool=False)(x, x)
    for bias, relu, pool in itertools.product((None, torch.ones(3)), (False, True), (False, True)):
        for image in (x, turned, x[:1], x.half()):
            FusedEpilogue(None if bias is None else bias.to(image.dtype), relu=relu, pool=pool)(image)
    assert len({id(plan.compiled) for plan in plans}) == len(plans) == 5 * 5 + 4 + 8 * 4
    FusedEpilogue(None, relu=False, pool=False)(x + 1)
    assert plans[-1].compiled is plans[29].compiled


@NEEDS_TRITON
def test_constants_are_in_the_order_of_the_kernel_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel takes them by position."""
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
def test_kernels_launched_in_turns_on_a_gpu() -> None:
    """Kernels are launched again with tensors of other addresses, sizes and dtypes, alternately."""
    block = fused_block(conv(12, 40, 3, rank=16, padding=1), relu=True, pool=True)
    fused = [copy.deepcopy(block).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    room = torch.randn(5 * 8 * 8 * 16 + 8, device="cuda")
    for turn in range(12):
        one, batch, shift = fused[turn % 3], 1 + turn % 4, turn // 6
        x = room.to(one.out.dtype)[shift:][: batch * 8 * 8 * 16].view(batch, 8, 8, 16)
        tolerance = TOLERANCES[one.out.dtype]
        torch.testing.assert_close(forced("kernel", one, x), forced("torch", one, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_as_a_whole(way: str) -> None:
    fused, x = in_line(way), torch.randn(2, 3, 8, 8, device=device(way))
    with torch.no_grad():
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(compiled, fused(x), rtol=1e-5, atol=1e-6)
        program = torch.export.export(fused, (x,)).module()
        torch.testing.assert_close(program(x), fused(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [KERNEL])
def test_fake_outputs_have_the_shapes_of_real_ones(way: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 5, 6, 4, device=device(way)).contiguous(memory_format=layout)
        torch.library.opcheck(
            torch.ops.cpnorm.fused_epilogue.default, (x, torch.randn(5, device=device(way)), None, True, True)
        )
    block = fused_block(conv(5, 9, 3, rank=4, padding=1), following=conv(9, 3, 1, rank=2)).to(device(way))
    weights = block.taps, block.out, block.bias, block.into, None
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


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
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
