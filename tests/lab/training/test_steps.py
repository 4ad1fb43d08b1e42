"""A step recorded on a GPU does what the eager one does, alone or beside many others."""

from __future__ import annotations

import io
import statistics
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training import prebuilt, steps
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import drive
from cpnorm.lab.training.epoch_metrics import means
from cpnorm.lab.training.forward import batch_loss, batch_outputs, loss_of
from cpnorm.lab.training.prebuilt import PrebuiltWeights, front_and_back, rebuilt_weight
from cpnorm.lab.training.steps import Step
from cpnorm.lab.training.trainer import Options, Trainer

STEPS = 60
LOW_RANK = Config(
    rank=16,
    init="kaiming_normal",
    modes=True,
    dropout=False,
    augment="none",
    optimizer="adam",
    lr=0.001,
    batch_size=64,
    epochs=1,
)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    """Random images of CIFAR-10's size, whose brightness tells the class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (64 * STEPS,), generator=generator)
    pixels = torch.randint(0, 100, (len(labels), 3, 32, 32), generator=generator) + 15 * labels[:, None, None, None]
    pixels = pixels.to(torch.uint8)
    names = tuple("0123456789")
    return ImageSet("random", pixels, labels, pixels[:10], labels[:10], (120.0,) * 3, (60.0,) * 3, names)


def mean_losses(
    config: Config, data: ImageSet, count: int, *, compile: bool = True, random: int | None = None, steps: int = STEPS
) -> tuple[list[float], str]:
    """Of so many runs with the same settings that take turns, and how they took their steps.

    ``random``: a seed for other random numbers than those of the settings.
    """
    runs = [Trainer(config, data, Options(compile=compile)) for _ in range(count)]
    torch.cuda.synchronize()
    for run in runs:
        with run.step.stream():
            run.step.begin_epoch(0)
        if random is not None:
            run.step.random.manual_seed(random)
    for batch in range(steps):
        for run in runs:
            with run.step.stream():
                run.step(batch)
    torch.cuda.synchronize()
    return [means(run.step.totals().tolist())[0] for run in runs], runs[0].step.mode


def movements(config: Config, data: ImageSet, *, compile: bool) -> tuple[dict[str, Tensor], Step]:
    """How far each parameter goes in the first two steps, and what took them."""
    run = Trainer(config, data, Options(compile=compile))
    with torch.no_grad():
        for layer in run.step.layers:
            layer.sigma *= 3  # as drawn, hardly anything comes through so many layers of low rank
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with run.step.stream():
        run.step.begin_epoch(0)
        for batch in range(2):
            run.step(batch)
    torch.cuda.synchronize()
    moved = {name: p.detach() - before[name] for name, p in run.model.named_parameters()}
    # All do, but for single numbers, which may come back to where they were.
    assert all(moved[name].norm() > 1e-4 * p.norm() for name, p in before.items() if p.numel() > 1)
    return moved, run.step


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none adam", "weight adam", "cp adam", "cp rmsprop"])
def test_a_recorded_step_is_the_eager_one(kind: str, images: ImageSet) -> None:
    norm, optimizer = kind.split()
    lr = {"adam": 0.001, "rmsprop": 0.0005}[optimizer]
    config = LOW_RANK.replace(norm=norm, optimizer=optimizer, lr=lr, lambdas="ones", precision="fp32")
    eager, _ = movements(config, images, compile=False)
    recorded, step = movements(config, images, compile=True)
    assert step.mode == ("CUDA graph, prebuilt weights" if norm == "cp" else "CUDA graph")
    # Such an optimizer takes a whole step by the sign of a gradient that is nearly nothing. On a CPU, rounding that
    # differs by one in a million moves the median of these ratios to 0.08 at most; an optimizer's state or step count
    # left over from a warm-up, to 0.44 at least.
    ratios = [((recorded[name] - p).norm() / p.norm()).item() for name, p in eager.items() if p.numel() > 1]
    assert statistics.median(ratios) < 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"renormalize": False}, {"momentum": 0.5}])
def test_recorded_steps_lead_where_eager_ones_do(changes: dict[str, Any], images: ImageSet) -> None:
    config = LOW_RANK.replace(optimizer="sgd", lr=0.3, lambdas="ones", precision="fp32", **changes)
    eager, _ = movements(config, images, compile=False)
    recorded, _ = movements(config, images, compile=True)
    for name, moved in eager.items():
        assert (recorded[name] - moved).norm() < 0.01 * moved.norm(), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's, where they are not wanted
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5}])
def test_last_layers_trained_beside_the_backward_pass(
    changes: dict[str, Any], images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "EARLY_FROM", 1)
    for name in ("COMPILE_FROM_STEPS", "COMPILE_PREBUILT_FROM_STEPS"):
        monkeypatch.setattr(steps, name, 0)
    config = LOW_RANK.replace(modes=False, optimizer="sgd", lr=0.3, lambdas="ones", precision="fp32", **changes)
    eager, _ = movements(config, images, compile=False)
    recorded, step = movements(config, images, compile=True)
    assert step.mode == "compiled, CUDA graph, prebuilt weights"
    assert [len(group.layers) for group in step.kernels or ()] == [3, 5]
    for name, moved in eager.items():
        assert (recorded[name] - moved).norm() < 0.01 * moved.norm(), name


@pytest.mark.gpu
def test_a_compiled_fine_tuning_is_the_eager_one(images: ImageSet) -> None:
    # Long enough to be compiled, and not for its ranks alone. Over 60 steps, eager runs from weights that differ by one
    # in 10,000 scatter by 3 % (five of them: 1.53 to 1.65); over the first 24, single losses by 1 %.
    config = LOW_RANK.replace(epochs=100, precision="tf32")
    (eager,), _ = mean_losses(config, images, 1, compile=False, steps=24)
    (recorded,), kind = mean_losses(config, images, 1, steps=24)
    assert kind == "compiled, CUDA graph, prebuilt weights"
    assert recorded == pytest.approx(eager, rel=0.02)


@pytest.mark.gpu
def test_a_run_saved_in_the_middle_of_an_epoch_goes_on(images: ImageSet) -> None:
    (whole,), _ = mean_losses(LOW_RANK, images, 1)
    first = Trainer(LOW_RANK, images)
    steps = first.run()
    for _ in range(STEPS // 2):  # handed over faster than they are done
        with first.step.stream():
            next(steps)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second = Trainer(LOW_RANK, images)
    second.load_state(torch.load(file, weights_only=True))
    assert second.step.cursor.item() == STEPS // 2 * LOW_RANK.batch_size
    with second.step.stream():
        for _ in second.run():
            pass
    assert second.history[0]["loss"] == pytest.approx(whole, rel=0.05)


@pytest.mark.gpu
def test_runs_that_share_a_gpu_do_not_disturb_each_other(images: ImageSet) -> None:
    (alone,), _ = mean_losses(LOW_RANK, images, 1)
    together, _ = mean_losses(LOW_RANK, images, 12)
    assert together == pytest.approx([alone] * 12, rel=0.05)


@pytest.mark.gpu
def test_random_numbers_of_a_run_do_not_depend_on_its_company(images: ImageSet) -> None:
    config = LOW_RANK.replace(
        norm="none", dropout=True, augment="crop-flip", optimizer="sgd", lr=1e-9, precision="fp32"
    )
    (alone,), kind = mean_losses(config, images, 1)  # of a network that stays as it is: chance alone tells
    together, _ = mean_losses(config, images, 5)
    assert kind == "CUDA graph"
    assert together == pytest.approx([alone] * 5, rel=1e-6)
    (other,), _ = mean_losses(config, images, 1, random=123)
    assert other != pytest.approx(alone, rel=3e-6)


@pytest.mark.gpu
def test_the_line_of_an_epoch_is_about_that_epoch(images: ImageSet) -> None:
    runs = [Trainer(LOW_RANK.replace(seed=seed), images) for seed in range(3)]
    drive([(run, None) for run in runs])
    for run in runs:
        loss, _ = run.evaluate(images.test_images.cuda(), images.test_labels.cuda())
        assert run.history[0]["test_loss"] == pytest.approx(loss, rel=0.01)  # in bf16, on another path
        layer = run.history[0]["layers"]["features.3"]
        assert layer["sigma"] == pytest.approx(run.model.get_parameter("features.3.sigma").item(), rel=1e-4)
        assert len(layer["lambdas"]) == 16


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_smaller_last_batch_leaves_the_recorded_step_alone(images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that torch trains is renormalised in the graph, whose table must outlive the second recording."""
    monkeypatch.setattr(steps, "COMPILE_PREBUILT_FROM_STEPS", 0)
    config = LOW_RANK.replace(rank=64, batch_size=48 * 64 - 37, epochs=4, optimizer="sgd", lr=0.05, precision="fp32")
    eager, recorded = (Trainer(config, images, Options(compile=compile)) for compile in (False, True))
    drive([(eager, None), (recorded, None)])
    assert [line["loss"] for line in recorded.history] == pytest.approx([line["loss"] for line in eager.history], 0.05)


class Replayed:
    """Stands for a recorded graph where there is no GPU: the step is taken again instead."""

    def __init__(self, step: Step, size: int) -> None:
        self.step, self.size = step, size

    def replay(self) -> None:
        self.step._take(self.size, batch_loss)


def test_ways_to_take_a_step_without_a_gpu(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is decided before a recording, and that one compilation serves fine-tunings at all ranks."""
    counter = CompileCounter()
    compiled = torch.compile(batch_loss, backend=counter, dynamic=False)
    monkeypatch.setattr(steps, "compiled_loss", lambda: compiled)
    monkeypatch.setattr(Step, "_recorded", lambda step, size, *_: Replayed(step, size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for rank, epochs, how in (
        (16, 100, "compiled, CUDA graph"),
        (9, 100, "compiled, CUDA graph"),
        (9, 1, "CUDA graph"),
    ):
        run = Trainer(LOW_RANK.replace(rank=rank, epochs=epochs), images, Options(device="cpu"))
        run.step.captures = True
        before = [p.detach().clone() for p in run.model.parameters()]
        run.step._capture(64)
        assert run.step.mode == f"{how}, prebuilt weights"
        assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))
        assert run.step.sums.sum() == run.step.cursor == 0
        assert all(layer.prebuilt is None for layer in run.step.layers)
        run.step(0)
        assert run.step.sums[2] == 64
    assert counter.frame_count == 1
    assert not [record for record in caplog.records if record.name.startswith("cpnorm")]


def test_a_second_recording_leaves_the_first_its_renormalizer(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled layers and eager ones take inputs of different layouts, which tells programs of weights apart."""

    class Recorded:
        captured = True

        def __call__(self) -> None:
            pass

    made: list[ref[Recorded]] = []

    def make(*_: object) -> Recorded:
        one = Recorded()
        made.append(ref(one))
        return one

    monkeypatch.setattr("cpnorm.nn.prebuilt.make_renormalizer", make)
    monkeypatch.setattr(steps, "COMPILE_PREBUILT_FROM_STEPS", 0)
    monkeypatch.setattr(steps, "compiled_loss", lambda: torch.compile(batch_loss, backend="eager", dynamic=False))
    monkeypatch.setattr(Step, "_recorded", lambda step, size, *_: Replayed(step, size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    step = Trainer(LOW_RANK, images, Options(device="cpu")).step
    step.captures = True
    for size in (64, 40):
        step._capture(size)
    assert len(made) == 2
    assert all(one() for one in made)


def test_constant_weights_outlive_the_recording_that_reads_them(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sigma alone is trained; the step of a smaller last batch has weights of its own."""
    made: list[list[ref[Tensor]]] = []

    class Watched(PrebuiltWeights):
        def __init__(self, paths: Any, *rest: Any) -> None:
            super().__init__(dict.fromkeys(paths, "rebuild"), *rest)
            made.append([ref(weight) for weight in self.constant.values()])

    monkeypatch.setattr(steps, "PrebuiltWeights", Watched)
    monkeypatch.setattr(Step, "_recorded", lambda step, size, *_: Replayed(step, size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    step = Trainer(LOW_RANK.replace(trainable="sigma-bias"), images, Options(device="cpu")).step
    step.captures = True
    for size in (64, 40):
        step._capture(size)
    assert [len(weights) for weights in made] == 2 * [len(step.layers)]
    assert all(weight() is not None for weights in made for weight in weights)


def test_a_model_cut_in_two(images: ImageSet) -> None:
    """The same loss and gradients as in one piece, and one compilation of each part for all seeds."""
    counters = CompileCounter(), CompileCounter()
    functions = batch_outputs, loss_of
    front_of, loss_behind = (
        torch.compile(f, backend=counter, dynamic=False) for f, counter in zip(functions, counters, strict=True)
    )
    for seed in (0, 1):
        step = Trainer(LOW_RANK.replace(seed=seed), images, Options(device="cpu")).step
        model, data = step.model.eval(), step.data
        batch = (data.train_images, data.train_labels, step.order, step.cursor, step.offsets, data.mean, data.std)
        expected, line = batch_loss(model, *batch, "none", 0.1, "fp32")
        expected.backward()
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        front, back = front_and_back(model)
        outputs, answers = front_of(front, *batch, "none", "fp32")
        between = outputs.detach().requires_grad_()
        loss, same_line = loss_behind(back, between, answers, 0.1, "fp32")
        loss.backward()
        outputs.backward(between.grad)
        torch.testing.assert_close((loss, same_line), (expected, line))
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    assert [counter.frame_count for counter in counters] == [1, 1]


def test_compiled_tests_without_a_gpu(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same numbers as eager ones, one compilation for all ranks, and a compiler that fails costs nothing."""
    counter = CompileCounter()
    compiled = torch.compile(batch_loss, backend=counter, dynamic=False)
    monkeypatch.setattr(steps, "compiled_loss", lambda: compiled)
    monkeypatch.setattr(steps, "TEST_BATCH", 24)
    several = images.train_images[:60], images.train_labels[:60]
    for rank in (16, 9):
        step = Trainer(LOW_RANK.replace(rank=rank), images, Options(device="cpu")).step
        step.test_prebuilt = PrebuiltWeights(dict.fromkeys(step.layers, "rebuild"), "fp32", rebuilt_weight)
        expected = step.tested(step.model, *several)
        assert expected[2] == 60
        torch.testing.assert_close(step.tested_fast(*several), expected, rtol=0, atol=0)
        assert counter.frame_count == (0 if rank == 16 else 1)
        step.test_compiled = True
        torch.testing.assert_close(step.tested_fast(*several), expected, rtol=1e-5, atol=0)
        assert all(layer.prebuilt is None for layer in step.layers)
        assert step.model.training
    assert counter.frame_count == 1

    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(steps, "compiled_loss", fails)
    with caplog.at_level("WARNING", logger="cpnorm.lab"):
        torch.testing.assert_close(step.tested_fast(*several), expected, rtol=0, atol=0)
    assert "tests not compiled: no compiler" in caplog.text
    assert not step.test_compiled
