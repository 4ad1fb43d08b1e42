"""The package as others get it: an sdist, a wheel made from it, installed elsewhere and tried out."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import cpnorm

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that the sdist has all that it takes."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install 'cpnorm[dev]'")
    folder = tmp_path_factory.mktemp("dist")

    def build(target: str, source: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
        subprocess.run(command, cwd=source, check=True)

    build("sdist", ROOT)
    with tarfile.open(folder / f"cpnorm-{cpnorm.__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    build("wheel", folder / f"cpnorm-{cpnorm.__version__}")
    return folder / f"cpnorm-{cpnorm.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_wheel_has_everything_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:  # in a checkout
        assert {name for name in names if ".dist-info" not in name} >= {
            path.removeprefix("src/") for path in listed.stdout.split() if (ROOT / path).exists()
        }
    assert {"cpnorm/py.typed", "cpnorm/lab/report/templates/page.css", "cpnorm/lab/report/templates/page.js"} <= names
    assert all(name.startswith(("cpnorm/", f"cpnorm-{cpnorm.__version__}.dist-info/")) for name in names)


@pytest.mark.slow
def test_it_works_where_nothing_else_of_it_is(wheel: Path, tmp_path: Path) -> None:
    """A new environment that borrows this one's packages, but not its cpnorm."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    lib = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (lib / "borrowed.pth").write_text(
        "\n".join(borrowed)
    )  # a path file does not follow the ones after it, so that none is editable
    subprocess.run([str(python), "-I", str(ROOT / "tests/smoke.py")], cwd=tmp_path, check=True)


def test_extras_are_what_the_commands_promise() -> None:
    from cpnorm.lab.cli.main import EXTRAS

    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])
    inner = re.findall(r"cpnorm\[([\w,-]+)\]", str(PROJECT["optional-dependencies"]))
    assert {name for names in inner for name in names.split(",")} <= set(PROJECT["optional-dependencies"])


def test_the_files_that_mutate_names_exist() -> None:
    code = (ROOT / "tests/trust/mutate.py").read_text()
    modules, others = (
        re.findall(r'^    "([\w/]+\.py)": \[', code, re.M),
        re.findall(r'"((?:tests|src)/[\w/]+\.py)"', code),
    )
    assert len(modules) == 5
    assert [
        path for path in [*(f"src/cpnorm/{module}" for module in modules), *others] if not (ROOT / path).exists()
    ] == []


def test_the_changelog_is_in_the_form_it_names() -> None:
    """Keep a Changelog: versions in brackets with a date, newest first, and the six kinds of change."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.M)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds
