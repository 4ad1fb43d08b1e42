"""The kernels build the weights and gradients of a whole network as torch's operations do."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.nn.weight_programs import TorchProgram
from laws import close, close_way
from ways import full_precision  # noqa: F401 (a fixture)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 12, (1, 5)), nn.Conv2d(12, 8, 1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 8 * 4, 24), nn.Linear(24, 10, bias=False))
    cpnorm.canonical_norm(model, rank=21, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    return cpnorm.renormalize(model).to(DEVICE)


@pytest.mark.parametrize("channels_last", [False, True])
def test_as_torch_does(channels_last: bool) -> None:
    from cpnorm.gpu.network_program import KernelProgram

    layers = list(cpnorm.canonical_layers(network()).values())
    for layer in layers:
        layer._form.channels_last = channels_last
    kernels = KernelProgram(layers, torch.float32, lambda others: TorchProgram(others, torch.float32))
    plain = TorchProgram(layers, torch.float32)
    generator = torch.Generator(DEVICE).manual_seed(0)
    held = []
    for _ in range(4):  # run as written, then as a CUDA graph
        with torch.no_grad():
            layers[0].lambdas.mul_(1.5)
        weights, expected = kernels.build(), plain.build()
        for got, wanted in zip(weights, expected, strict=True):
            close(got, wanted, 1e-5)
            assert layout_of(got) == (torch.channels_last if channels_last and got.ndim == 4 else torch.preserve_format)
        d_weights = [torch.randn(weight.shape, generator=generator, device=DEVICE) for weight in expected]
        d_weights[2] = None
        found, wanted_all = kernels.gradients(d_weights), plain.gradients(d_weights)
        assert [gradient is None for gradient in found] == [gradient is None for gradient in wanted_all]
        held.append((found, wanted_all))  # gradients returned before stay as they are
        for got, wanted in (pair for lists in held for pair in zip(*lists, strict=True)):
            if wanted is None or (wanted.ndim == 2 and len(wanted) == 1):  # of unit length: no gradient
                continue
            if wanted.ndim == 0:  # sigma's is a sum that may cancel
                torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
            else:
                close(got, wanted, 2e-5)


def layout_of(weight: torch.Tensor) -> torch.memory_format:
    """Return the layout in which a convolution with this weight runs; preserve_format: that of its input."""
    strides = torch.empty(weight.shape).stride()
    return torch.preserve_format if weight.stride() == strides else torch.channels_last


def test_the_memory_of_gradients_is_used_again() -> None:
    from cpnorm.gpu.network_program import KernelProgram

    layers = list(cpnorm.canonical_layers(network()).values())
    kernels = KernelProgram(layers, torch.float32, lambda others: TorchProgram(others, torch.float32))
    d_weights = [torch.randn_like(weight) for weight in kernels.build()]
    addresses = [kernels.gradients(d_weights)[2].data_ptr() for _ in range(3)]
    assert len(set(addresses)) == 1
    kept = kernels.gradients(d_weights)[2][:1]  # a view is enough
    assert kernels.gradients(d_weights)[2].data_ptr() != kept.data_ptr()
    assert all(gradient.data_ptr() % 16 == 0 for gradient in kernels.gradients(d_weights))


def test_gradients_are_found_wherever_an_allocator_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpnorm.gpu import network_program

    monkeypatch.setattr(network_program, "TABLES", 2)
    layer = cpnorm.renormalize(cpnorm.canonical_norm(nn.Linear(6, 4))).to(DEVICE)
    kernels = network_program.KernelProgram([layer], torch.float32, list)
    plain = TorchProgram([layer], torch.float32)
    kernels.build(), plain.build()
    generator = torch.Generator(DEVICE).manual_seed(0)
    places = [torch.randn(4, 6, generator=generator, device=DEVICE) for _ in range(3)]
    for place in (0, 1, 0, 1, 2, 0):  # in turns, and more of them than are kept
        found, wanted = (program.gradients([places[place]]) for program in (kernels, plain))
        close(found[2], wanted[2], 2e-5)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have training loops use the kernels in triton's interpreter, too."""
    from cpnorm.gpu.network_program import KernelProgram
    from cpnorm.nn import canonical, prebuilt

    if INTERPRETED:
        monkeypatch.setattr(canonical.CPLayer, "trains_by_rebuilding", lambda layer: True)
        monkeypatch.setattr(prebuilt, "make_program", lambda layers, dtype: KernelProgram(layers, dtype, list))


def in_training(model: nn.Module) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return lambda: model(x).square().mean(), optimizer, cpnorm.renormalize_after(optimizer, model).weights


@pytest.mark.usefixtures("_kernels")
def test_one_node_serves_all_steps() -> None:
    results = []
    for fast in (True, False):
        model = network()
        loss, optimizer, weights = in_training(model)
        weights.enabled = fast
        nodes = []
        for passes in (1, 1, 2, 1, 1):  # with two of them, gradients are accumulated
            optimizer.zero_grad()
            for _ in range(passes):
                loss().backward()
            nodes += [weights._graph.node] if fast else []
            optimizer.step()
        assert len(set(map(id, nodes[1:]))) == (1 if fast else 0)  # the first pass finds how inputs lie in memory
        results.append([parameter.detach() for parameter in model.parameters()])
    for got, wanted in zip(*results, strict=True):
        close(got, wanted, 1e-4)


@pytest.mark.usefixtures("_kernels")
def test_a_node_that_waits_for_its_backward_pass_is_left_alone() -> None:
    model = nn.Linear(6, 4)  # whose product does not save the weight, so that no version of it is checked
    model = cpnorm.renormalize(cpnorm.canonical_norm(model)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = cpnorm.renormalize_after(optimizer, model).weights
    x = torch.ones(3, 6, device=DEVICE)
    waiting = model(x).sum()
    first = weights._graph.node
    model(x).square().sum().backward()  # of the same parameters: one node can serve both
    assert weights._graph.node is first
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    assert weights._graph.node is not first
    with pytest.raises(RuntimeError, match="changed in place"):
        waiting.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.usefixtures("_kernels")
def test_a_model_in_training_is_collected() -> None:
    model = network()
    loss, optimizer, weights = in_training(model)
    loss().backward()
    optimizer.step()
    loss().backward()
    gone = ref(model[0]), ref(weights)
    del model, loss, optimizer, weights
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch's compiler, once in a process
@pytest.mark.parametrize(
    ("autocast", "compiled", "channels_last"),
    [
        (False, None, False),
        (True, None, False),
        (True, None, True),
        (True, "default", False),
        (False, "reduce-overhead", False),
    ],
)
def test_a_loop_on_a_gpu(autocast: bool, compiled: str | None, channels_last: bool) -> None:
    def trained(fast: bool) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        handle = cpnorm.renormalize_after(optimizer, model)
        handle.weights.enabled = fast
        called = torch.compile(model, mode=compiled) if compiled and fast else model
        x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
        if channels_last:
            x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = called(x).float().square().mean()
            loss.backward()
            optimizer.step()
        return model

    torch._dynamo.reset()
    fast, slow, start = trained(True), trained(False), network()
    for got, wanted, begun in zip(fast.parameters(), slow.parameters(), start.parameters(), strict=True):
        close_way(got.detach(), wanted.detach(), begun.detach(), 1e-1 if autocast else 2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_cuda_graph_sees_vectors_that_are_not_unit() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cpnorm.renormalize_after(optimizer, model)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()

    def gradients(called: nn.Module) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        called(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(4):  # the last ones replay a graph
        gradients(compiled)
        optimizer.step()
    model.load_state_dict({key: 3 * value if "factors" in key else value for key, value in model.state_dict().items()})
    for got, wanted in zip(gradients(compiled), gradients(model), strict=True):
        if wanted.ndim < 2 or len(wanted) > 1:  # others are of unit length: no gradient
            close(got, wanted, 1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision")
def test_a_users_cuda_graph_outlives_other_inputs() -> None:
    """Steps that are replayed after eager ones on inputs of another layout, which need programs of their own."""

    def trained(replayed: bool) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        cpnorm.renormalize_after(optimizer, model)
        x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
        other = x.flip(0).contiguous(memory_format=torch.channels_last)

        def step(inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if replayed:
            optimizer.zero_grad()
            with torch.cuda.graph(graph, stream=stream):
                step(x)
        for _ in range(3):
            for _ in range(2):
                step(other)
            gc.collect()
            torch.cuda.synchronize()
            # The memory of what is gone becomes somebody else's.
            room = [torch.zeros(size, device=DEVICE) for size in (2**6, 2**10, 2**14) for _ in range(200)]
            graph.replay() if replayed else step(x)
            torch.cuda.synchronize()
            assert not any(other.any() for other in room)
        return model

    replayed, eager, start = trained(True), trained(False), network()
    for got, wanted, begun in zip(replayed.parameters(), eager.parameters(), start.parameters(), strict=True):
        close_way(got.detach(), wanted.detach(), begun.detach(), 2e-2)


@pytest.mark.gpu
def test_weights_lie_as_the_inputs_do() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cpnorm.renormalize_after(optimizer, model)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(6, 3, 8, 8, device=DEVICE).contiguous(memory_format=layout)
        for _ in range(2):  # the first pass finds out
            model(x).sum().backward()
            optimizer.step()
        outputs = model[:3](x)
        assert outputs.is_contiguous(memory_format=layout)
        assert not outputs.is_contiguous() or layout == torch.contiguous_format
