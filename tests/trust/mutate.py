"""Mutation testing of the core: small wrong changes, one at a time, and whether the tests notice. Run: make mutate.

Cosmic Ray makes the mutants. The tests run in forks of a process that has imported torch already, on a copy of the tree
that holds the mutant: a mutant costs seconds, and the working tree is never touched. Mutants that differ from the
original in annotations only are left out, since these are never evaluated.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import cosmic_ray.plugins as mutation_operators
import pytest
import tensorly  # noqa: F401 - this and torch once for all forks
import torch
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]
LAWS = "tests/nn/test_layers.py"
TESTS = {  # the quickest to notice first
    "cp/tensor.py": ["tests/cp/test_tensor.py", "src/cpnorm/cp/tensor.py", LAWS],
    "cp/decompose.py": ["tests/cp/test_decompose.py", "src/cpnorm/cp/decompose.py"],
    "cp/als.py": ["tests/cp/test_decompose.py", "src/cpnorm/cp/decompose.py"],
    "nn/planner.py": ["tests/nn/test_planner.py", "src/cpnorm/nn/planner.py", LAWS],
    "compress/truncation.py": ["tests/compress/test_truncation.py", "src/cpnorm/compress/truncation.py"],
}


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    operator: str
    line: int
    code: str
    before: str
    after: str


def mutants(path: Path, shuffle: random.Random) -> Iterator[Mutant]:
    """All that Cosmic Ray can make of a module and that Python can tell from it, in random order."""
    code = path.read_text()
    original, tree = without_annotations(code), list(nodes(get_ast(code)))
    # Those with Variable in their names want to be told which.
    names = [name for name in sorted(mutation_operators.operator_names()) if "Variable" not in name]
    operators = {name: mutation_operators.get_operator(name)() for name in names}
    places = [
        (name, occurrence)
        for name, operator in operators.items()
        for occurrence in range(sum(1 for node in tree for _ in operator.mutation_positions(node)))
    ]
    shuffle.shuffle(places)
    for name, occurrence in places:
        changed = mutate_code(code, operators[name], occurrence)
        if changed and changed != code and without_annotations(changed) != original:
            old, new = code.splitlines(), changed.splitlines()
            line = next((n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), 0)
            yield Mutant(name, line + 1, changed, old[line].strip(), new[line].strip())


def nodes(tree: object) -> Iterator[object]:
    """Of Cosmic Ray's syntax tree, parents first."""
    yield tree
    for child in getattr(tree, "children", ()):
        yield from nodes(child)


def without_annotations(code: str) -> str:
    """What Python runs of a module."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, ast.Constant(0))
    return ast.dump(tree)


def passes(tree: Path, tests: list[str], seconds: float) -> bool | None:
    """Whether the tests pass on this copy of the tree; None if they take too long."""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        torch.set_num_threads(1)
        code = pytest.main(
            [
                "-x",
                "-q",
                "-n0",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow",
                "-k",
                "not compiles and not gradcheck",
                *tests,
            ]
        )
        os._exit(int(code))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def tell(text: str) -> None:
    """At once: a run takes half an hour."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print survivors as they come, and the score at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--each", type=int, default=30, help="mutants of a module, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("src", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for module in options.modules:
            tests = [test for test in TESTS[module] if (tree / test).exists()]
            started = time.monotonic()
            if not passes(tree, tests, 600):
                raise SystemExit(f"the tests of {module} fail on the code as it is")
            whole = time.monotonic() - started
            path = tree / "src/cpnorm" / module
            drawn = list(islice(mutants(path, random.Random(options.seed)), options.each or None))
            survivors = 0
            original = path.read_text()
            for mutant in drawn:
                path.write_text(mutant.code)
                if passes(tree, tests, 10 + 5 * whole):
                    survivors += 1
                    tell(f"survived: {module}:{mutant.line} {mutant.operator}\n  - {mutant.before}\n  + {mutant.after}")
            path.write_text(original)
            killed, share = len(drawn) - survivors, 1 - survivors / len(drawn)
            tell(f"{module}: {killed} of {len(drawn)} mutants killed, {100 * share:.0f} %")


if __name__ == "__main__":
    main()
