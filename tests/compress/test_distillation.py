"""Training towards the outputs of the dense network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cpnorm


def network() -> nn.Module:
    """A small convolutional network with batch norms that have seen data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )
    with torch.no_grad():
        for _ in range(20):
            model(images(64, seed=1))
    return model.eval()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def cut(dense: nn.Module) -> nn.Module:
    small = cpnorm.canonical_norm(copy.deepcopy(dense))
    cpnorm.truncate(small, rate=0.7, refit="lambdas")
    return small


@torch.no_grad()
def error(small: nn.Module, dense: nn.Module, inputs: Tensor) -> float:
    return ((small.eval()(inputs) - dense.eval()(inputs)).norm() / dense(inputs).norm()).item()


def test_outputs_on_new_images_come_nearer_and_all_else_stays() -> None:
    dense = network()
    small = cut(dense).train()
    small[0].bias.requires_grad_(False)
    new, before = images(200, seed=2), copy.deepcopy(dense.state_dict())
    bias, statistics = small[0].bias.clone(), small[1].running_mean.clone()
    first = error(copy.deepcopy(small), dense, new)
    assert cpnorm.distill(small, dense, images(512), steps=60) is small
    assert all(module.training for module in small.modules())
    assert error(small, dense, new) < 0.85 * first
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    assert torch.equal(small[0].bias, bias)
    assert torch.equal(small[1].running_mean, statistics)
    assert all(parameter.grad is None for parameter in small.parameters())
    for layer in cpnorm.canonical_layers(small).values():
        for factor in layer.factors:
            torch.testing.assert_close(factor.norm(dim=0), torch.ones(factor.shape[1]))


def test_what_layers_compute_is_compared_too() -> None:
    dense = network()
    seen: dict[bool, Tensor] = {}
    for layers in (True, False):
        small = cpnorm.distill(cut(dense), dense, images(256), steps=80, lr=2e-3, layers=layers)
        seen[layers] = (small[:4](images(64, seed=2)) - dense[:4](images(64, seed=2))).norm()
    assert seen[True] < 0.95 * seen[False]


def test_a_teacher_may_have_other_names_and_be_canonical() -> None:
    dense = network()
    wrapped = nn.Sequential(cpnorm.canonical_norm(copy.deepcopy(dense)))  # its layers are called "0.0", "0.3", ...
    small = cut(dense)
    first = error(copy.deepcopy(small), dense, images(200, seed=2))
    cpnorm.distill(small, wrapped, images(256), steps=40)
    assert error(small, dense, images(200, seed=2)) < first


class ByName(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *, pixels: Tensor, scale: Tensor) -> dict[str, Any]:
        return {"scores": self.inner(pixels) * scale, "kind": "scores"}


def by_name(x: Tensor) -> dict[str, Tensor]:
    return {"pixels": x, "scale": torch.tensor(2.0)}


@pytest.mark.parametrize("form", ["tensor", "loader", "list", "tuples", "mapping"])
def test_data_may_have_every_form(form: str) -> None:
    x, labels = images(96), torch.zeros(96, dtype=torch.long)
    dense = network()
    data: Any = {
        "tensor": x,
        "loader": DataLoader(TensorDataset(x, labels), batch_size=32, shuffle=True),
        "list": list(x.split(32)),
        "tuples": [((part,), labels[:32]) for part in x.split(32)],
        "mapping": [by_name(part) for part in x.split(32)],
    }[form]
    small: nn.Module = cut(dense)
    models = (ByName(small), ByName(dense)) if form == "mapping" else (small, dense)
    first = error(copy.deepcopy(small), dense, images(200, seed=2))
    cpnorm.distill(*models, data, steps=40)
    assert error(small, dense, images(200, seed=2)) < first


def test_samples_are_used_once_in_each_pass() -> None:
    dense, seen = network(), []
    small, x = cut(dense), images(10)
    x[:, 0, 0, 0] = torch.arange(10.0)
    hook = dense.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, 0, 0, 0]))
    cpnorm.distill(small, dense, [x[:7], x[7:]], steps=8, batch_size=4)
    hook.remove()
    assert [len(part) for part in seen] == [4, 3, 3] * 2 + [4, 3]
    assert torch.cat(seen[:3]).sort().values.tolist() == list(range(10))
    assert torch.cat(seen[:2]).tolist() != torch.cat(seen[3:5]).tolist()  # drawn anew


def test_the_same_seed_gives_the_same_model() -> None:
    dense = network()
    found = [cpnorm.distill(cut(dense), dense, images(256), steps=5, batch_size=16, seed=s) for s in (0, 0, 1)]
    same, other = (torch.equal(found[0][0].lambdas, each[0].lambdas) for each in found[1:])
    assert same
    assert not other


class Masked(nn.Module):
    """Scores of which some are minus infinity, as masked ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(torch.arange(8) < 2, -torch.inf)


def test_masked_outputs_do_not_count() -> None:
    torch.manual_seed(0)
    dense, x = Masked(), torch.randn(128, 12)
    small = cpnorm.canonical_norm(copy.deepcopy(dense))
    cpnorm.truncate(small, rate=0.5, refit="lambdas")
    cpnorm.distill(small, dense, x, steps=20)
    assert all(parameter.isfinite().all() for parameter in small.parameters())


def test_padded_positions_of_a_transformer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    dense = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, mask = torch.randn(64, 5, 16), torch.zeros(64, 5, dtype=torch.bool)
    mask[:, 3:] = True
    data = [{"src": x, "src_key_padding_mask": mask}]
    found = cpnorm.shrink(dense, data, parameters=0.6)
    small = found.canonical
    known = (~mask)[..., None]

    @torch.no_grad()
    def distance() -> float:
        return (
            ((small.eval()(x, src_key_padding_mask=mask) - dense(x, src_key_padding_mask=mask)) * known).norm().item()
        )

    first = distance()
    cpnorm.distill(small, dense, data, steps=40, batch_size=16)
    assert distance() < first


def test_shrink_distils_on_all_of_the_data() -> None:
    dense, x = network(), images(512)
    errors, told = [], []
    for steps in (0, 60):
        batches = iter(x.split(64)) if steps else DataLoader(TensorDataset(x), batch_size=64)
        small = cpnorm.shrink(
            dense, batches, parameters=0.3, distill=steps, samples=256, progress=lambda *each: told.append(each[0])
        )
        assert small.report.parameters_after <= 0.3 * small.report.parameters_before
        errors.append(small.report.output_error)
    assert errors[1] < errors[0]
    assert "trained for 60 steps towards the given network's outputs" in str(small.report)
    assert told.count("distilling") == 61


def test_it_works_where_gradients_are_off() -> None:
    dense, small = network(), cut(network())
    first = error(copy.deepcopy(small), dense, images(64))
    with torch.inference_mode():
        cpnorm.distill(small, dense, images(64).clone(), steps=20)
    assert error(small, dense, images(64)) < first


def test_progress_is_told() -> None:
    dense, told = network(), []
    cpnorm.distill(cut(dense), dense, images(8), steps=2, progress=lambda *each: told.append(each))
    assert told == [("distilling", done, 2) for done in range(3)]


def once() -> Iterator[Tensor]:
    yield images(8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr: expected a learning rate > 0, got 0.0"),
        ({"data": once(), "steps": 3}, "data: expected batches that can be read again, got none"),
        ({"data": []}, "data: expected batches that can be read again, got none"),
        ({"model": nn.Linear(3, 3)}, "Linear has no canonical layer to train: truncate it first"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    dense = network()
    given: dict[str, Any] = {"model": cut(dense), "teacher": dense, "data": images(8)} | arguments
    with pytest.raises(ValueError, match=message):
        cpnorm.distill(**given)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    dense = network()
    with pytest.raises(FloatingPointError, match=r"the loss was nan at step 1: use an lr below 0\.001"):
        cpnorm.distill(cut(dense), dense, torch.full((4, 3, 12, 12), torch.nan), steps=2)


@pytest.mark.gpu
def test_on_a_gpu_the_model_comes_as_near() -> None:
    errors = []
    for device in ("cpu", "cuda"):
        dense = network().to(device)
        small = cut(dense)
        cpnorm.distill(small, dense, images(512), steps=60)
        errors.append(error(small, dense, images(200, seed=2).to(device)))
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
