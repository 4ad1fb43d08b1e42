"""Killed at any moment, without disk, without rights, without a folder: the next start goes on and nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cpnorm.lab.paper.jobs import Results
from cpnorm.lab.training.jsonfiles import parse_object
from cpnorm.lab.training.runs import RunError, RunFolder
from trust.workers import JOBS, Hardship, last_words, start

CONTENT = random.Random(0).randbytes(2**20)
SECONDS: dict[str, float] = {}  # that a job takes which nothing happens to
KILLS = 125  # of each of the four jobs, by make test-kill
MOMENTS = {"train": 30, "cut": 35, "queue": 80, "fetch": 3}  # files are changed at least so often in a whole job


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where CONTENT is served, slowly enough to be killed while it comes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            self.send_response(206 if at else 200)
            self.send_header("Content-Length", str(len(CONTENT) - at))
            self.end_headers()
            try:
                for here in range(at, len(CONTENT), 2**16):
                    self.wfile.write(CONTENT[here : min(here + 2**16, len(CONTENT))])
                    time.sleep(0.01)
            except ConnectionError:
                pass  # who was killed reads no more

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/file.bin"
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, address: str) -> Callable[[str], Path]:
    """The folder of a job that nothing happened to; each is done once."""
    folders: dict[str, Path] = {}

    def do(job: str) -> Path:
        if job not in folders:
            for _ in range(2):  # the very first process of all takes seconds to start
                folders[job] = prepared(tmp_path_factory.mktemp(job), job, do, address)
                began = time.monotonic()
                assert last_words(*start(job, folders[job])) == "done"
                SECONDS[job] = time.monotonic() - began
        return folders[job]

    return do


def prepared(folder: Path, job: str, undisturbed: Callable[[str], Path], address: str) -> Path:
    """With what the job needs to begin."""
    if job == "cut":
        shutil.copytree(undisturbed("train") / "run", folder / "source")
    if job == "fetch":
        (folder / "address").write_text(f"{address} {len(CONTENT)} {hashlib.md5(CONTENT).hexdigest()}")
    return folder


def expect_whole(folder: Path) -> None:
    """At any moment whatever stands under its own name is whole, but for a last line of results."""
    for path in folder.rglob("*.json"):
        parse_object(path.read_bytes())
    for path in folder.rglob("*.safetensors"):
        load_file(path)
    for path in folder.rglob("metrics.jsonl"):
        RunFolder(path.parent).metrics()
    if (folder / "results").exists():
        done = [(line["row"], line["seed"]) for line in Results(folder / "results").lines()]
        assert len(done) == len(set(done))
    if (folder / "data/file.bin").exists():
        assert (folder / "data/file.bin").read_bytes() == CONTENT


def outcome(folder: Path, job: str) -> Any:
    """All that counts of a finished job, to the bit."""
    if job == "fetch":
        return sorted(path.name for path in (folder / "data").iterdir())
    if job == "queue":
        lines = [json.loads(line) for line in (folder / "results/tiny.jsonl").read_text().splitlines()]
        return sorted((line["row"], line["seed"], line["parameters"], json.dumps(line["curve"])) for line in lines)
    run = RunFolder(folder / "run")
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in run.metrics()]
    model = {key: value.tolist() for key, value in load_file(run / "model.safetensors").items()}
    files = sorted(path.name for path in run.path.iterdir())
    return lines, (run.record() or {})["curve"], model, files


def killed_and_resumed(
    job: str, seed: int, kills: int, folder: Path, undisturbed: Callable[[str], Path], address: str
) -> int:
    """Start the job over and over, kill it each time, then let it finish; returns how often it was really killed."""
    draw, really = random.Random(f"{job}{seed}"), 0
    undisturbed(job)
    prepared(folder, job, undisturbed, address)
    for attempt in range(kills):
        if (seed + attempt) % 2:
            words = last_words(*start(job, folder, Hardship(moment=draw.randrange(MOMENTS[job]))))
        else:
            process, pipe = start(job, folder)
            process.join(draw.uniform(0, SECONDS[job]))
            process.kill()
            words = last_words(process, pipe)
        assert words in ("killed", "done")
        really += words == "killed"
        expect_whole(folder)
    assert last_words(*start(job, folder)) == "done"
    expect_whole(folder)
    assert outcome(folder, job) == outcome(undisturbed(job), job)
    return really


@pytest.mark.parametrize("job", MOMENTS)
def test_a_killed_job_goes_on(job: str, tmp_path: Path, undisturbed: Callable[[str], Path], address: str) -> None:
    assert killed_and_resumed(job, 1, 2, tmp_path, undisturbed, address)


class Killed(BaseException):
    """Stands for the end of a process: nothing after it is done."""


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_run_that_ends_after_any_step_goes_on_with_the_same_bits(
    step: int, tmp_path: Path, undisturbed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = RunFolder.save_checkpoint, []

    def save_and_end(folder: RunFolder, state: dict[str, Any]) -> None:
        save(folder, state)
        saved.append(1)
        if len(saved) == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", save_and_end)
        with pytest.raises(Killed):
            JOBS["train"](tmp_path)
    JOBS["train"](tmp_path)
    assert outcome(tmp_path, "train") == outcome(undisturbed("train"), "train")


@pytest.mark.kill
@pytest.mark.parametrize("job", MOMENTS)
def test_a_job_killed_many_times_goes_on(
    job: str, tmp_path: Path, undisturbed: Callable[[str], Path], address: str
) -> None:
    kills, seeds = 0, iter(range(KILLS))  # an attempt in three ends before it is killed
    while kills < KILLS:
        folder = tmp_path / str(seed := next(seeds))
        folder.mkdir()
        kills += killed_and_resumed(job, seed, 4, folder, undisturbed, address)
        shutil.rmtree(folder)
    sys.stdout.write(f"{job} was killed {kills} times\n")


# --- no room, no rights, no folder --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_with_room_again_it_goes_on(
    small_disk: Path, undisturbed: Callable[[str], Path]
) -> None:
    words = last_words(*start("train", small_disk))
    assert words.startswith("RunError: cannot write ")
    assert words.endswith("checkpoint.pt: No space left on device")
    expect_whole(small_disk)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert last_words(*start("train", small_disk)) == "done"
    assert outcome(small_disk, "train") == outcome(undisturbed("train"), "train")


@pytest.mark.parametrize("largest", [300, 20_000])
def test_files_that_may_not_grow(largest: int, tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    """Stands in for a full disk where no small one can be mounted."""
    words = last_words(*start("train", tmp_path, Hardship(largest_file=largest)))
    assert words.startswith("RunError: cannot write ")
    assert words.endswith(": File too large")
    expect_whole(tmp_path)
    assert last_words(*start("train", tmp_path)) == "done"
    assert outcome(tmp_path, "train") == outcome(undisturbed("train"), "train")


def line(seed: int, size: int = 0) -> dict[str, Any]:
    return {"table": "tiny", "row": "tiny/base", "seed": seed, "more": "x" * size}


def test_a_line_that_does_not_fit_leaves_no_trace(small_disk: Path) -> None:
    results = Results(small_disk)
    results.append(line(0))
    before = (small_disk / "tiny.jsonl").read_bytes()
    with pytest.raises(OSError, match="No space left on device"):
        results.append(line(1, size=2**20))
    assert (small_disk / "tiny.jsonl").read_bytes() == before
    results.append(line(2))
    assert [found["seed"] for found in results.lines()] == [0, 2]


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_half_a_line_is_forgotten_and_a_whole_one_without_its_end_is_not(cut: int, tmp_path: Path) -> None:
    results, path = Results(tmp_path), tmp_path / "tiny.jsonl"
    for seed in range(2):
        results.append(line(seed, size=50))
    path.write_bytes(path.read_bytes()[:-cut])
    left = [0, 1] if cut == 1 else [0]
    assert [found["seed"] for found in results.lines()] == left
    results.append(line(2))
    results.append(line(2))
    assert [found["seed"] for found in results.lines()] == [*left, 2]
    assert path.read_bytes().count(b"\n") == len(left) + 1


@pytest.mark.skipif(os.name != "posix", reason="needs users and modes")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(folder):
            folder.chmod(0o755)  # for nobody, who is not root
    (tmp_path / "run").mkdir(mode=0o555)
    nobody = Hardship(user=65534) if os.getuid() == 0 else Hardship()
    words = last_words(*start("train", tmp_path, nobody))
    assert words == f"RunError: cannot use {tmp_path / 'run'} as a run folder: Permission denied"
    assert not list((tmp_path / "run").iterdir())


def test_a_folder_that_goes_away_is_named(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    process, pipe = start("train", tmp_path)
    while not (tmp_path / "run/checkpoint.pt").exists():
        time.sleep(0.01)
    (tmp_path / "run").rename(tmp_path / "moved")
    words = last_words(process, pipe)
    assert words.startswith("RunError: cannot write ")
    assert words.endswith("No such file or directory")
    assert not (tmp_path / "run").exists()
    (tmp_path / "moved").rename(tmp_path / "run")
    assert last_words(*start("train", tmp_path)) == "done"
    assert outcome(tmp_path, "train") == outcome(undisturbed("train"), "train")


def test_two_processes_in_one_folder(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    first = start("train", tmp_path)
    while not (tmp_path / "run/checkpoint.pt").exists():
        time.sleep(0.01)
    os.kill(first[0].pid, signal.SIGSTOP)  # or it may have ended before the other has begun
    words = last_words(*start("train", tmp_path))
    os.kill(first[0].pid, signal.SIGCONT)
    assert words == f"InUseError: {tmp_path / 'run'} is in use by another process"
    assert last_words(*first) == "done"
    assert outcome(tmp_path, "train") == outcome(undisturbed("train"), "train")


def test_leftovers_of_a_kill_are_cleared_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".checkpoint.pt.123.tmp", ".model.safetensors.0123456789abcdef.part"):
        (run / name).write_bytes(b"half")
    assert last_words(*start("train", tmp_path)) == "done"
    names = {path.name for path in run.iterdir()}
    assert names == {".lock", "config.json", "environment.json", "metrics.jsonl", "model.safetensors", "record.json"}


# --- checkpoints that are not ours --------------------------------------------------------------------------------


def test_a_checkpoint_of_another_network_does_not_fit(tmp_path: Path, undisturbed: Callable[[str], Path]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for state in ({}, {"model": {}}, {"model": load_file(undisturbed("train") / "run/model.safetensors")}):
        folder.save_checkpoint(state)
        words = last_words(*start("train", tmp_path))
        assert words.startswith(f"RunError: {folder / 'checkpoint.pt'} does not fit this run: ")
        assert len(words) < 600
    (folder / "checkpoint.pt").unlink()
    assert last_words(*start("train", tmp_path)) == "done"


def test_a_run_folder_whose_files_are_nonsense(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("", "[]", "null", "{", "[" * 100_000, '{"epochs": ' + "9" * 5000 + "}", '{"a": NaN, "epochs": 1}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=r"config\.json"):
            folder.config()
    for settings in (
        {"lr": "fast"},
        {"lr": float("nan")},
        {"epochs": 1.5},
        {"dropout": 1},
        {"momentum": float("inf")},
        {"skip": "features"},
        {"skip": [1]},
        {"model": ["lenet"]},
        {"seed": -1},
        {"run": "os.system"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(RunError, match=r"config\.json: (expected|unknown)"):
            folder.config()
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\nnonsense\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: not JSON"):
        folder.metrics()
