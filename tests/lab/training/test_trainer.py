"""Training on the CPU: it learns, it resumes to the bit, it says when it diverged, it shares work among processes."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cpnorm
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.paper.figure_data import explore
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Stop, drive, run_to_end
from cpnorm.lab.training.evaluation import prepared
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.setup import learning_rate, make_optimizer
from cpnorm.lab.training.trainer import Options, Trainer
from training_runs import fit

TINY = Config(
    model="lenet",
    data="digits",
    norm="cp",
    rank=4,
    init="kaiming_normal",
    optimizer="adam",
    lr=0.003,
    epochs=3,
    batch_size=32,
    modes=True,
)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    """A few images, made small: what is tested here is the loop."""
    whole = load("digits")
    return ImageSet(
        "digits",
        torch.nn.functional.interpolate(whole.train_images[:200].float(), size=12).to(torch.uint8),
        whole.train_labels[:200],
        torch.nn.functional.interpolate(whole.test_images[:100].float(), size=12).to(torch.uint8),
        whole.test_labels[:100],
        whole.mean,
        whole.std,
        whole.classes,
    )


def curve(trainer: Trainer) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in trainer.history]


@pytest.mark.parametrize("norm", ["none", "weight", "cp", "tai"])
def test_every_normalisation_learns(norm: str, digits: ImageSet) -> None:
    config = TINY.replace(norm=norm, rank="exact", init="exact", epochs=4, lr=0.002)
    trainer = fit(config, data=digits)
    losses = [line["loss"] for line in trainer.history]
    assert losses[-1] < 0.75 * losses[0]
    assert trainer.record()["test_accuracy_last"] > 40  # chance is 10
    assert trainer.history[-1]["epoch"] == 4
    for layer in cpnorm.canonical_layers(trainer.model).values():
        assert layer.renormalizer is None
        for factor in layer.factors:
            assert torch.allclose(factor.norm(dim=0), torch.ones(layer.rank), atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam", "adamw"])
def test_every_optimizer_and_schedule(optimizer: str, digits: ImageSet) -> None:
    config = TINY.replace(optimizer=optimizer, schedule="cosine", warmup=1, epochs=2, momentum=0.5, weight_decay=0.01)
    first, second = fit(config, data=digits), fit(config, data=digits)
    assert curve(first) == curve(second)
    assert first.history[0]["loss"] != first.history[1]["loss"]


def test_learning_rates() -> None:
    config = Config(lr=0.1, epochs=10, warmup=2, schedule="cosine")
    assert learning_rate(config, 1) == pytest.approx(0.05)
    assert learning_rate(config, 2) == pytest.approx(0.1)
    assert learning_rate(config, 6) == pytest.approx(0.05)
    assert learning_rate(config, 10) == pytest.approx(0)
    assert learning_rate(config.replace(schedule="linear"), 6) == pytest.approx(0.05)
    assert learning_rate(config.replace(schedule="constant"), 9) == 0.1


def test_the_step_is_what_a_plain_loop_does(digits: ImageSet) -> None:
    """The oracle: torch's own loop with renormalize_after, over the same order of images."""
    config = TINY.replace(dropout=False, epochs=1, optimizer="sgd", lr=0.1)
    trained = fit(config, data=digits)
    model = Trainer(config, digits).model
    optimizer = make_optimizer(config, model, torch.device("cpu"))
    cpnorm.renormalize_after(optimizer, model)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    images = (digits.train_images.float() - digits.mean[0]) / digits.std[0]
    for batch in order.split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), digits.train_labels[batch]).backward()
        optimizer.step()
    expected = model.state_dict()
    for name, value in trained.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-4), name


def test_all_images_are_trained_on_the_last_partial_batch_too(digits: ImageSet) -> None:
    trainer = Trainer(TINY.replace(epochs=1), digits)
    assert trainer.batches == 7
    steps = trainer.run()
    for _ in range(6):
        next(steps)
    assert trainer.step.cursor == 192
    next(steps)
    assert trainer.step.cursor == 200
    assert trainer.step.sums[2] == 200


def test_or_whole_batches_alone(digits: ImageSet) -> None:
    trainer = fit(TINY.replace(drop_last=True), data=digits)
    assert trainer.batches == 6
    assert trainer.step.sums[2] == trainer.step.cursor == 192
    exact = TINY.replace(batch_size=25)
    assert Trainer(exact, digits).batches == Trainer(exact.replace(drop_last=True), digits).batches == 8
    with pytest.raises(ValueError, match="expected a whole batch of images, got 200, fewer than 201"):
        Trainer(TINY.replace(drop_last=True, batch_size=201), digits)


def test_stopped_anywhere_and_resumed_gives_the_same_curve(tmp_path: Path, digits: ImageSet) -> None:
    whole = fit(TINY, data=digits, out=tmp_path / "whole")
    for stop_after in (1, 5, 7, 9):
        out = tmp_path / f"stopped-{stop_after}"
        folder = RunFolder(out)
        with folder.claimed(TINY):
            trainer = Trainer(TINY, digits)
            steps = trainer.run()
            for _ in range(stop_after):
                next(steps)
            folder.save_checkpoint(trainer.state())
        resumed = fit(TINY, data=digits, out=out)
        assert curve(resumed) == curve(whole)
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value)
        assert [line["epoch"] for line in folder.metrics()] == [1, 2, 3]
        assert not (folder / "checkpoint.pt").exists()


def test_going_on_decomposes_nothing(tmp_path: Path, digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY.replace(norm="cp", init="power", lambdas="decomposition", rank=3, epochs=1)
    whole = fit(config, data=digits)
    folder = RunFolder(tmp_path / "run")
    with folder.claimed(config):
        trainer = Trainer(config, digits)
        next(trainer.run())
        folder.save_checkpoint(trainer.state())
    monkeypatch.setattr(cpnorm.nn.initial, "cp_power", None)
    resumed = fit(config, data=digits, out=folder.path)
    assert curve(resumed) == curve(whole)
    assert all(map(torch.equal, resumed.model.state_dict().values(), whole.model.state_dict().values()))
    with pytest.raises(TypeError):
        fit(config, data=digits)  # which does


def test_runs_that_take_turns_do_not_disturb_each_other(digits: ImageSet) -> None:
    configs = [TINY.replace(seed=seed, epochs=2) for seed in (0, 1)]
    together = [Trainer(config, digits) for config in configs]
    drive([(trainer, None) for trainer in together])
    for config, trainer in zip(configs, together, strict=True):
        assert curve(trainer) == curve(fit(config, data=digits))


def test_a_deadline_stops_and_saves(tmp_path: Path, digits: ImageSet) -> None:
    stop = Stop()

    def stop_after_an_epoch(trainer: Trainer, line: dict) -> None:
        stop.deadline = time.monotonic() - 1

    stopped = fit(TINY, data=digits, out=tmp_path, stop=stop, observers=[stop_after_an_epoch])
    assert stop.reason == "the time limit was reached"
    assert len(stopped.history) == 1
    assert not stopped.finished
    assert (tmp_path / "checkpoint.pt").exists()
    assert RunFolder(tmp_path).record() is None
    assert fit(TINY, data=digits, out=tmp_path).finished
    assert RunFolder(tmp_path).record()["epochs"] == 3
    record = run_to_end(RunFolder(tmp_path), TINY, lambda: pytest.fail("it is finished"))
    assert record == RunFolder(tmp_path).record()


def test_divergence_is_named_and_recorded(tmp_path: Path, digits: ImageSet) -> None:
    config = TINY.replace(norm="none", optimizer="sgd", lr=1e6, epochs=5)
    trainer = fit(config, data=digits, out=tmp_path)
    assert trainer.finished
    assert len(trainer.history) < 5
    assert "epoch 1" in trainer.diverged
    assert "diverged" in json.loads((tmp_path / "record.json").read_text())


def test_early_stopping_and_validation(digits: ImageSet) -> None:
    config = TINY.replace(validation=50, early_stopping=1, lr=1e-9, epochs=6)
    trainer = fit(config, data=digits)
    assert len(trainer.data.train_labels) == 150
    assert trainer.record()["stopped_early"]
    assert 2 <= len(trainer.history) < 6
    assert 0 <= trainer.history[0]["validation_accuracy"] <= 100


def test_lambda_pressure_shrinks_lambdas(digits: ImageSet) -> None:
    free, pressed = (
        cpnorm.lambda_penalty(fit(TINY.replace(lambdas="normal", lambda_l1=pressure), data=digits).model).item()
        for pressure in (0, 20)
    )
    assert pressed < 0.98 * free  # without the pressure the two would be equal to the bit


def test_metrics_tell_sigma_and_lambdas(digits: ImageSet) -> None:
    trainer = fit(TINY.replace(epochs=1), data=digits)
    layer = cpnorm.canonical_layers(trainer.model)["features.0"]
    entry = trainer.history[0]["layers"]["features.0"]
    assert entry["rank"] == 4
    assert entry["sigma"] == pytest.approx(layer.sigma.item(), rel=1e-4)
    assert entry["lambdas"] == pytest.approx(layer.lambdas.tolist(), rel=1e-3)
    assert entry["lambda_size_quartiles"][-1] == pytest.approx(layer.lambdas.abs().max().item(), rel=1e-3)


def test_a_folder_belongs_to_one_run_and_one_process(tmp_path: Path, digits: ImageSet) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.claimed(TINY), pytest.raises(RunError, match="in use by another process"):
        fit(TINY, data=digits, out=folder.path)
    with pytest.raises(RunError, match=r"other settings \(lr: 0.003 there, 0.5 now\)"):
        fit(TINY.replace(lr=0.5), data=digits, out=folder.path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot use"):
        fit(TINY, data=digits, out=tmp_path / "file" / "run")


def test_a_damaged_checkpoint_is_a_clear_error(tmp_path: Path, digits: ImageSet) -> None:
    folder = RunFolder(tmp_path)
    with folder.claimed(TINY):
        pass
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match=r"checkpoint\.pt cannot be read"):
        fit(TINY, data=digits, out=tmp_path)


def test_no_gpu_is_a_clear_error(digits: ImageSet) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch sees none"):
        Trainer(TINY, digits, Options(device="cuda"))


RUN = """
    import os, sys, json
    from cpnorm.lab.training.config import Config
    sys.path.insert(0, os.environ["TESTS"])
    from cpnorm.lab.training.trainer import Options
    from training_runs import fit
    config = Config(**json.loads(sys.argv[1]))
    trainer = fit(config, out=sys.argv[2], options=Options(checkpoint_every=float(sys.argv[3])))
    print("left", trainer.finished, flush=True)
"""
REAL = TINY.replace(epochs=2, batch_size=128, rank=2)


def start(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(RUN), json.dumps(REAL.to_json()), str(out), "0"]
    env = {
        **os.environ,
        "TESTS": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # other threads, other sums
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)


@cache
def whole_curve() -> list[Any]:
    return curve(fit(REAL))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=600)
    if number is signal.SIGTERM:
        assert process.returncode == 0
        assert "left" in out
    again = fit(REAL, out=tmp_path / "run")
    assert curve(again) == whole_curve()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """The same global batch, shared: equal up to the order of summation."""
    config = REAL.replace(dropout=False, optimizer="sgd", lr=0.05)
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    single = fit(config, out=tmp_path / "single")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [json.dumps(config.to_json()), str(tmp_path / "double"), "60"]
    env = {**os.environ, "TESTS": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = RunFolder(tmp_path / "double").metrics()
    for one, two in zip(single.history, lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=0.6)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif(
    "CPNORM_DATA" not in os.environ, reason="needs the official data files: set CPNORM_DATA to their folder"
)
def test_lenet_learns_mnist_in_an_epoch() -> None:
    config = Config(model="lenet", data="mnist", init="exact", optimizer="adam", lr=0.001, schedule="cosine", epochs=1)
    assert fit(config).record()["test_accuracy_last"] > 97.5


def test_the_explorer_s_accuracies_are_those_of_truncated_networks(digits: ImageSet) -> None:
    trainer = Trainer(TINY, digits, Options(device="cpu"))
    drive([(trainer, None)])
    whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = explore(trainer)
    expected = []
    for rate in found["rates"]:
        small = copy.deepcopy(trainer.model).eval()
        cpnorm.truncate(small, rate=rate, criterion="lambda", refit="none")
        with torch.no_grad():
            answers = small(prepared(digits.test_images, digits)).argmax(1)
        expected.append(100 * (answers == digits.test_labels).double().mean().item())
    assert found["accuracy"] == pytest.approx(expected, abs=0.01)
    assert found["accuracy"][0] > found["accuracy"][-1] + 10
    assert all(torch.equal(value, whole[name]) for name, value in trainer.model.state_dict().items())


def test_an_observer_that_fails_does_not_end_the_training(digits: ImageSet, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def broken(trainer: Trainer, line: dict[str, Any]) -> None:
        heard.append(line["epoch"])
        raise OSError(28, "No space left on device")

    trainer = fit(TINY.replace(epochs=2), data=digits, options=Options(device="cpu"), observers=[broken])
    assert trainer.finished
    assert heard == [1]
    assert "broken is not called any more: OSError: [Errno 28] No space left on device" in caplog.text


def test_only_leftovers_of_a_run_are_removed(tmp_path: Path, digits: ImageSet) -> None:
    own, others = tmp_path / ".model.safetensors.12ab.part", [tmp_path / ".notes.tmp", tmp_path / ".download.part"]
    for path in (own, *others):
        path.write_text("x")
    fit(TINY.replace(epochs=0), out=tmp_path, data=digits, options=Options(device="cpu"))
    assert not own.exists()
    assert all(path.exists() for path in others)


def test_a_signal_while_a_network_is_prepared_saves_it(tmp_path: Path, digits: ImageSet) -> None:
    stop = Stop()

    def begin() -> Trainer:
        os.kill(os.getpid(), signal.SIGTERM)
        return Trainer(TINY, digits, Options(device="cpu"))

    record = run_to_end(RunFolder(tmp_path), TINY, begin, stop=stop)
    assert record["stopped"] == "SIGTERM was received"
    assert RunFolder(tmp_path).has_checkpoint()


def test_runs_that_take_turns_keep_their_arithmetic(digits: ImageSet) -> None:
    seen: dict[str, set[tuple[str, bool]]] = {}

    def trainer(precision: str) -> Trainer:
        run = Trainer(TINY.replace(precision=precision), digits, Options(device="cpu"))
        flags = seen.setdefault(precision, set())
        run.model.register_forward_pre_hook(
            lambda module, args: flags.add((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        )
        return run

    drive([(trainer(precision), None) for precision in ("fp32", "tf32")])
    assert seen == {"fp32": {("highest", False)}, "tf32": {("high", True)}}


STOPPED_BY_ONE = """
    import atexit, json, os, signal, sys, time
    from pathlib import Path
    from cpnorm.lab.training.config import Config
    sys.path.insert(0, os.environ["TESTS"])
    from cpnorm.lab.training.trainer import Options
    from training_runs import fit

    def observer(trainer, line):
        if trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def threads_left():
        ended_by = time.monotonic() + 20
        while names := [f for f in Path("/proc/self/task").glob("*/comm") if "gloo" in f.read_text()]:
            if time.monotonic() > ended_by:
                print(f"{len(names)} threads of gloo are left\\n", end="", flush=True)
                break
            time.sleep(0.1)

    atexit.register(threads_left)  # called after what the training registers
    config = Config(**json.loads(sys.argv[1]))
    trainer = fit(config, out=sys.argv[2], options=Options(checkpoint_every=1000), observers=[observer])
    print(f"left {trainer.finished}\\n", end="", flush=True)  # one write: two processes share the pipe
"""


def test_processes_leave_together_whichever_is_asked_to(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(STOPPED_BY_ONE))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [json.dumps(REAL.replace(epochs=50).to_json()), str(tmp_path / "run")]
    env = {**os.environ, "TESTS": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left False") == 2
    assert "threads of gloo" not in done.stdout  # a thread that outlives the interpreter may abort the process
    assert RunFolder(tmp_path / "run").has_checkpoint()


@torch.no_grad()
def test_a_test_sees_parameters_that_changed_without_a_new_version(digits: ImageSet) -> None:
    """The replay of a CUDA graph writes parameters so; weights that evaluation keeps must not outlive it."""
    trainer = Trainer(TINY.replace(renormalize=False), digits, Options(device="cpu"))
    images, labels = digits.test_images, digits.test_labels
    before = trainer.evaluate(images, labels)
    for layer in cpnorm.canonical_layers(trainer.model).values():
        layer.sigma.data.mul_(-3.0)
    after = trainer.evaluate(images, labels)
    assert after == trainer.evaluate(images, labels, copy.deepcopy(trainer.model))
    assert after != before
