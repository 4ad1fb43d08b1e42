"""What an installed cpnorm must be able to do: python -I smoke.py, anywhere, with nothing but the package."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn

import cpnorm


def main() -> None:
    """The core without the lab's needs, then the command line and the report."""
    assert version("cpnorm") == cpnorm.__version__
    assert "site-packages" in cpnorm.__file__, cpnorm.__file__
    assert files("cpnorm").joinpath("py.typed").is_file()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    x = torch.randn(2, 3, 8, 8)
    dense = model(x)
    assert torch.allclose(cpnorm.canonical_norm(model)(x), dense, atol=1e-5)
    cpnorm.truncate(model, rate=0.5)
    assert cpnorm.factorize(model, x, measure=False)(x).shape == (2, 10)
    lab = {"sklearn", "scipy", "typer", "rich", "matplotlib", "PIL", "onnx", "onnxruntime", "ray", "tensorly"}
    assert not lab & set(sys.modules), lab & set(sys.modules)

    with tempfile.TemporaryDirectory() as folder:
        cpnorm.save(model, f"{folder}/model.safetensors")
        plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        assert torch.equal(cpnorm.load(f"{folder}/model.safetensors", plain)(x), model(x))

        command = str(Path(sys.executable).parent / "cpnorm")
        said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
        assert said.strip() == cpnorm.__version__
        Path(folder, "results").mkdir()
        page = f"{folder}/report.html"
        subprocess.run([command, "report", f"{folder}/results", "--out", page], check=True, stdout=subprocess.DEVNULL)
        html = Path(page).read_text()
        for name in ("page.css", "page.js"):  # the page carries them in itself
            assert files("cpnorm.lab.report").joinpath("templates", name).read_text().strip()[:40] in html, name


if __name__ == "__main__":
    main()
