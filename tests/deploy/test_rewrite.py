"""Rewrites around the layers: batch norms, ReLUs, poolings, dropout and layouts; the outputs stay the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm import canonical_norm
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.forms import forms_of
from cpnorm.deploy.rewrite import slice_pools
from laws import close
from small_network import image, network


def test_sliced_pools() -> None:
    pools = [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), stride=(2, 2))]
    others = [nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1)]
    heard = nn.MaxPool2d(2)
    heard.register_forward_hook(lambda *_: None)
    model = nn.Sequential(*pools, nn.Sequential(*others), heard)
    assert slice_pools(model)
    assert not any(isinstance(module, nn.MaxPool2d) for module in model[:2])
    assert list(model[2]) == others
    assert model[3] is heard
    assert not slice_pools(nn.Sequential(*others, heard))
    for size in ((8, 8), (7, 9), (2, 3), (5, 2)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(3, 4, *size).contiguous(memory_format=layout)
            x[0, 0, 0, 1] = torch.nan
            wanted = F.max_pool2d(x, 2)
            made = model[0](x)
            torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)
            assert made.stride() == wanted.stride()
        torch.testing.assert_close(model[0](x[1]), wanted[1], rtol=0, atol=0)


def test_channels_last_weights_give_channels_last_outputs() -> None:
    """With weights that lie channels last, what comes out of a convolution does too, and means the same."""
    model = network().eval()
    choice = choose_forms(model, image(), measure=False)
    assert choice.channels_last
    for form in ("dense", "depthwise", "separable", "split", "pointwise-first", "pointwise-last"):
        small = choose_forms(model, image(), measure=False, forms={"0": form}).apply(model)
        with torch.no_grad():
            assert small[:2](image()).is_contiguous(memory_format=torch.channels_last)
            close(small(image()), model(image()), 1e-5)
    thin = canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)), 1)
    for form in forms_of(thin[2]):
        small = choose_forms(thin, image(), measure=False, forms={"0": form, "1": "low-rank", "2": form}).apply(thin)
        assert small(image()).is_contiguous(memory_format=torch.channels_last)
    flat = canonical_norm(nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU()), rank=2)
    assert not choose_forms(flat, torch.randn(2, 4, 9), measure=False).channels_last


def test_relus_run_in_place_where_nothing_else_reads() -> None:
    class Reads(nn.Module):
        def __init__(self, also: str) -> None:
            super().__init__()
            relu = nn.ReLU()
            self.body = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), nn.Sequential(nn.ReLU()))
            self.also, self.other = also, nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.ReLU())
            if also == "shared":
                self.other.append(relu)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.also == "nothing":
                return self.other(self.body(x)), x
            kept = []
            for layer in self.body:
                kept.append(x)
                x = layer(x)
            return self.other(x), kept[1 if self.also == "kept" else 0]

    def relus(model: nn.Module) -> list[bool]:
        return [module.inplace for module in model.modules() if isinstance(module, nn.ReLU)]

    x = torch.randn(5, 8)
    for also in ("nothing", "kept", "shared"):
        model = canonical_norm(Reads(also), 2, "kaiming_normal")
        small = choose_forms(model, x, measure=False).apply(model)
        assert relus(small) == [also == "nothing", True, False]
        assert relus(model) == [False] * 3
        for got, want in zip(small(x), model(x), strict=True):
            close(got, want, 1e-5)
        sum(y.sum() for y in small(x)).backward()


def test_relus_move_after_the_pooling() -> None:
    """Fewer numbers to look at, the same outputs and gradients; not where the pooling hands out more than numbers."""

    class Where(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)[1].double()

    model = network()
    small = factorize(model, image(), measure=False)
    assert [type(module).__name__ for module in small][1:6] == ["MaxPool2d", "ReLU", "Sequential", "MaxPool2d", "ReLU"]
    assert small[2].inplace
    assert [type(module).__name__ for module in model][1:3] == ["ReLU", "MaxPool2d"]
    x, y = image().requires_grad_(), image().requires_grad_()
    close(small(x), model(y), 1e-5)
    small(x).square().sum().backward()
    model(y).square().sum().backward()
    close(x.grad, y.grad, 1e-5)

    found = canonical_norm(Where(), 2, "kaiming_normal")
    plain = choose_forms(found, image(), measure=False).apply(found)
    assert [type(module).__name__ for module in plain.body][1:] == ["ReLU", "MaxPool2d"]
    close(plain(image()), found(image()), 0)


class Views(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.view(len(y), -1)


@pytest.mark.parametrize("measure", [True, False])
def test_maps_that_are_flattened_by_view_stay_contiguous(measure: bool) -> None:
    model, x = canonical_norm(Views(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), rank=2), torch.randn(2, 3, 8, 8)
    choice = choose_forms(model, x, measure=measure)
    assert not choice.channels_last
    close(choice.apply(model)(x), model(x), 1e-5)
    with pytest.raises(RuntimeError, match="expected input"):
        choose_forms(model, x[:, :2], measure=measure)


@pytest.mark.parametrize("training", [False, True])
def test_idle_dropout_is_left_out(training: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.9), nn.Sequential(nn.AlphaDropout(), nn.Linear(16, 4)))
    canonical_norm(model, rank=2).train(training)
    small = choose_forms(model, torch.randn(2, 16), measure=False).apply(model)
    kinds = [type(layer) for layer in (small[1], small[2][0])]
    assert kinds == ([nn.Dropout, nn.AlphaDropout] if training else [nn.Identity, nn.Identity])
    assert all(module.training is training for module in small.modules())
    assert type(model[1]) is nn.Dropout
    x = torch.randn(3, 16)
    torch.testing.assert_close(small.eval()(x), model.eval()(x))


# --- batch norms --------------------------------------------------------------------------------------------------


def norm(kind: type[nn.Module], channels: int) -> Any:
    made = kind(channels)
    for tensor in (made.running_mean, made.weight, made.bias):
        tensor.data.normal_()
    made.running_var.uniform_(0.1, 3.0)
    return made


class Residual(nn.Module):
    """A block with a shortcut, as in a residual network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.bn1, self.act1 = norm(nn.BatchNorm2d, outputs), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1), norm(nn.BatchNorm2d, outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), norm(nn.BatchNorm2d, outputs))
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.act2(y)


def kinds_of(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("form", ["dense", "depthwise", "linear-depthwise", "aligned-depthwise", "split"])
def test_batch_norms_go_into_the_layers_before_them(form: str) -> None:
    model = canonical_norm(nn.Sequential(Residual(3, 8), Residual(8, 12)).eval().double(), 4, "kaiming_normal")
    x, names = torch.randn(2, 3, 9, 8).double(), [f"{i}.conv{j}" for i in (0, 1) for j in (1, 2)]
    choice = choose_forms(model, x, measure=False, forms=dict.fromkeys(names, form))
    assert len(choice.rewrites.norms) == 6
    small = choice.apply(model)
    assert nn.BatchNorm2d not in kinds_of(small)
    assert [small[0].act1.inplace, small[0].act2.inplace] == [True, True]
    with torch.no_grad():
        close(small(x), model(x), 1e-10)
    assert kinds_of(model).count(nn.BatchNorm2d) == 6
    assert "6 batch norms folded" in str(choice)


def test_batch_norms_of_every_kind() -> None:
    torch.manual_seed(0)
    cases: list[tuple[nn.Module, type[nn.Module], Tensor]] = [
        (nn.Linear(5, 6), nn.BatchNorm1d, torch.randn(4, 5)),
        (nn.Conv1d(5, 6, 3), nn.BatchNorm1d, torch.randn(4, 5, 7)),
        (nn.Conv3d(2, 6, 3, groups=2), nn.BatchNorm3d, torch.randn(2, 2, 4, 5, 4)),
        (nn.ConvTranspose2d(5, 6, 3, 2), nn.BatchNorm2d, torch.randn(2, 5, 4, 3)),
    ]
    for layer, kind, x in cases:
        model = canonical_norm(nn.Sequential(layer, norm(kind, 6), nn.ReLU()).double().eval(), skip="2")
        for form in ("dense", *forms_of(model[0])):
            small = choose_forms(model, x.double(), measure=False, forms={"0": form}).apply(model)
            assert type(small[1]) is nn.Identity
            close(small(x.double()), model(x.double()), 1e-10)


def test_batch_norms_that_must_stay() -> None:
    """In training mode, without statistics, where others read their input, after tied weights, and in sequences."""

    def left(model: nn.Module, x: Tensor) -> int:
        canonical_norm(model, 2, "kaiming_normal")
        small = choose_forms(model, x, measure=False).apply(model)
        with torch.no_grad():
            torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
        return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in small.modules())

    class Reads(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return self[1](y) + y

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x)) + self[1](x)

    def pair(bn: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(3, 3, 3, padding=1), bn or norm(nn.BatchNorm2d, 3)

    x = torch.randn(2, 3, 6, 6)
    assert left(nn.Sequential(*pair()).eval(), x) == 0
    assert left(nn.Sequential(*pair()).train(), x) == 1
    assert left(nn.Sequential(*pair(nn.BatchNorm2d(3, track_running_stats=False))).eval(), x) == 1
    assert left(Reads(*pair()).eval(), x) == 1
    assert left(Twice(*pair()).eval(), x) == 1
    tied = nn.Sequential(*pair(), *pair()).eval()
    tied[2].weight = tied[0].weight
    assert left(tied, x) == 2
    heard = nn.Sequential(*pair()).eval()
    heard[0].register_forward_hook(lambda module, inputs, output: None)
    assert left(heard, x) == 1
    sequence = nn.Sequential(nn.Linear(5, 6), norm(nn.BatchNorm1d, 6)).eval()
    assert left(sequence, torch.randn(2, 6, 5)) == 1  # its channels are not the layer's outputs


def test_models_that_cannot_be_traced_as_a_whole_are_traced_in_parts() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.stop = Residual(3, 8), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return self.stop(y) if y.sum() > -1e9 else y

    model, x = canonical_norm(Branches().eval(), 3, "kaiming_normal"), torch.randn(2, 3, 8, 8)
    choice = choose_forms(model, x, measure=False)
    assert [part.name for part in choice.parts] == ["body"]
    assert len(choice.rewrites.norms) == 3
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-5)


def test_other_threads_run_their_models_while_one_is_traced() -> None:
    model, x = canonical_norm(nn.Sequential(Residual(3, 8)).eval(), 3, "kaiming_normal"), torch.randn(2, 3, 8, 8)
    other, errors, stop = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [], threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                assert isinstance(other(torch.ones(1, 4)), Tensor)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(5):
        choose_forms(model, x, measure=False)
    stop.set()
    thread.join()
    assert not errors
    assert "__call__" not in nn.Linear.__dict__
