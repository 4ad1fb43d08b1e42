"""Weight normalisation and the low-rank form of Tai et al. against the dense layers they stand for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cpnorm.lab.training.baselines import low_rank, tai, weight_norm
from cpnorm.lab.training.models import alexnet, lenet

TAI_RANKS = {"features.3": 12, "features.6": 36, "features.8": 48, "features.10": 48}


def dense_of(pair: nn.Sequential) -> torch.Tensor:  # (O, I, kh, kw)
    groups = pair.vertical.groups
    vertical, horizontal = (part.weight.unflatten(0, (groups, -1)) for part in (pair.vertical, pair.horizontal))
    return torch.einsum("gkihx,gokyw->goihw", vertical, horizontal).flatten(0, 1)


def matricised(weight: torch.Tensor) -> torch.Tensor:  # (O, I, kh, kw) -> (I kh, O kw)
    return weight.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)


@pytest.fixture
def fresh_lenet() -> nn.Sequential:
    return lenet(image_size=12).eval()


class TestWeightNorm:
    def test_the_network_computes_what_it_did(self, fresh_lenet):
        x = torch.randn(4, 1, 12, 12)
        before = fresh_lenet(x)
        torch.testing.assert_close(weight_norm(fresh_lenet)(x), before, rtol=1e-5, atol=1e-6)
        assert before.std() > 1e-2

    def test_one_length_per_output_is_added(self):
        model = weight_norm(lenet())
        assert sum(p.numel() for p in model.parameters()) == 1_199_882 + 32 + 64 + 128 + 10  # published: 1.20 M

    def test_length_and_direction_are_apart(self, fresh_lenet):
        layer = weight_norm(fresh_lenet).classifier[1]
        direction, length = layer.parametrizations.weight.original1, layer.parametrizations.weight.original0
        with torch.no_grad():
            direction.mul_(7)
            torch.testing.assert_close(layer.weight.norm(dim=1, keepdim=True), length)
            length.mul_(2)
            torch.testing.assert_close(layer.weight.norm(dim=1, keepdim=True), length)

    def test_skipped_layers_stay_plain(self, fresh_lenet):
        model = weight_norm(fresh_lenet, skip=["features.*"])
        assert not hasattr(model.features[0], "parametrizations")
        assert hasattr(model.classifier[4], "parametrizations")


LAYERS = {
    "plain": {},
    "no bias": {"bias": False},
    "tall": {"kernel_size": (5, 2)},
    "wide": {"kernel_size": (1, 4)},
    "pointwise": {"kernel_size": 1},
    "strided": {"stride": (2, 3)},
    "padded": {"padding": (2, 1)},
    "dilated": {"dilation": (1, 2)},
    "same": {"padding": "same", "kernel_size": (3, 4), "dilation": (2, 1)},
    "valid": {"padding": "valid"},
    "reflected": {"padding": (1, 2), "padding_mode": "reflect"},
    "circular, same": {"padding": "same", "padding_mode": "circular"},
    "grouped": {"groups": 2, "kernel_size": (2, 3)},
    "depthwise": {"groups": 4},
    "everything": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (2, 1), "groups": 2},
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def conv(request) -> nn.Conv2d:
    return nn.Conv2d(4, 6 if request.param.get("groups") != 4 else 8, **{"kernel_size": 3, **request.param})


class TestLowRank:
    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
    @pytest.mark.parametrize("batch_norm", [False, True])
    def test_full_rank_computes_what_the_dense_layer_did(self, conv, batch_norm):
        pair = low_rank(conv, batch_norm=batch_norm).eval()
        x = torch.randn(3, 4, 11, 9)
        expected = conv(x)
        torch.testing.assert_close(pair(x), expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 0.1

    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
    def test_low_rank_is_the_dense_layer_with_the_approximated_weight(self, conv):
        pair = low_rank(conv, 1, batch_norm=False)
        x = torch.randn(3, 4, 11, 9)
        oracle = copy.deepcopy(conv)
        oracle.weight.data = dense_of(pair).detach()
        torch.testing.assert_close(pair(x), oracle(x), rtol=1e-5, atol=1e-5)
        assert (oracle.weight - conv.weight).norm() > 0.1 * conv.weight.norm()

    def test_shapes_are_those_of_tai_et_al(self):
        pair = low_rank(nn.Conv2d(5, 7, (3, 2)), 4)
        assert [name for name, _ in pair.named_children()] == ["vertical", "horizontal", "norm"]
        assert pair.vertical.weight.shape == (4, 5, 3, 1)
        assert pair.horizontal.weight.shape == (7, 4, 1, 2)
        assert pair.vertical.bias is None
        assert pair.norm.num_features == 7

    @pytest.mark.parametrize("rank", [1, 3, 8, 12])
    def test_the_error_is_the_tail_of_the_singular_values(self, rank):
        conv = nn.Conv2d(6, 5, (2, 3)).double()
        values = torch.linalg.svdvals(matricised(conv.weight))
        error = (dense_of(low_rank(conv, rank)) - conv.weight).square().sum()
        torch.testing.assert_close(error, values[rank:].square().sum(), rtol=1e-9, atol=1e-12)
        assert (error > 1e-3) == (rank < 12)

    def test_no_better_pair_of_that_rank_is_found_by_descent(self):
        conv = nn.Conv2d(4, 5, 3).double()
        pair = low_rank(conv, 3, batch_norm=False)
        optimum = (dense_of(pair) - conv.weight).square().sum().item()
        for weight in pair.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        optimizer = torch.optim.LBFGS(
            [pair.vertical.weight, pair.horizontal.weight], max_iter=500, tolerance_grad=1e-12
        )

        def closure():
            optimizer.zero_grad()
            loss = (dense_of(pair) - conv.weight.detach()).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) > 1.01 * optimum  # where the descent starts, so that it has something to do
        assert closure().item() == pytest.approx(optimum, rel=1e-6)

    def test_both_convolutions_start_at_the_same_scale(self):
        pair = low_rank(nn.Conv2d(6, 9, 3), 5)
        lengths = pair.vertical.weight.flatten(1).norm(dim=1)
        torch.testing.assert_close(pair.horizontal.weight.transpose(0, 1).flatten(1).norm(dim=1), lengths)

    def test_gradients_reach_everything_but_a_bias_before_batch_norm(self):
        pair = low_rank(nn.Conv2d(3, 4, 3), 2)
        pair(torch.randn(5, 3, 8, 8)).pow(3).sum().backward()
        assert all(p.grad is not None for p in pair.parameters())
        assert pair.vertical.weight.grad.norm() > 1e-3
        assert pair.horizontal.weight.grad.norm() > 1e-3

    def test_random_numbers_are_left_alone(self):
        conv = nn.Conv2d(3, 4, 3)
        state = torch.get_rng_state()
        low_rank(conv, 2)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("rank", [0, -1, 10])
    def test_an_impossible_rank_is_refused(self, rank):
        expected = rf"expected 1 <= rank <= 9, got {rank} with weight of shape \(8, 3, 3, 3\)"
        with pytest.raises(ValueError, match=expected):
            low_rank(nn.Conv2d(3, 8, 3), rank)

    def test_dtype_mode_and_device_are_the_layers(self):
        pair = low_rank(nn.Conv2d(3, 4, 3, dtype=torch.bfloat16).eval(), 2)
        assert {p.dtype for p in pair.parameters()} == {torch.bfloat16}
        assert not pair.norm.training


class TestTai:
    def test_weights_are_those_of_the_papers_comparison(self):
        with torch.device("meta"):  # shapes only
            model = alexnet()
        plain = sum(model.get_submodule(name).weight.numel() for name in TAI_RANKS)
        tai(model, TAI_RANKS, batch_norm=False)
        kept = sum(p.numel() for name in TAI_RANKS for p in model.get_submodule(name).parameters() if p.ndim == 4)
        assert plain == 2_248_704  # published: 2.25 M
        assert kept == 237_312  # published: 0.23 M
        assert isinstance(model.features[0], nn.Conv2d)

    def test_without_ranks_every_convolution_is_taken_at_full_rank(self, fresh_lenet):
        x = torch.randn(4, 1, 12, 12)
        before = fresh_lenet(x)
        model = tai(fresh_lenet)
        assert [model.features[i].vertical.out_channels for i in (0, 2)] == [3, 96]
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)

    def test_skipped_layers_stay_plain(self, fresh_lenet):
        model = tai(fresh_lenet, skip=["*.0"])
        assert isinstance(model.features[0], nn.Conv2d)
        assert isinstance(model.features[2], nn.Sequential)

    @pytest.mark.parametrize("name", ["features.1", "classifier.1", "nowhere"])
    def test_ranks_for_other_layers_are_refused(self, fresh_lenet, name):
        with pytest.raises(ValueError, match=rf"Conv2d layers \(features.0, features.2\), got {name}"):
            tai(fresh_lenet, {name: 2})

    def test_a_refused_rank_names_its_layer_and_changes_nothing(self, fresh_lenet):
        with pytest.raises(ValueError, match=r"rank <= 96, got 97 .* for features\.2"):
            tai(fresh_lenet, {"features.0": 2, "features.2": 97})
        assert isinstance(fresh_lenet.features[0], nn.Conv2d)

    def test_parameters_reload_into_the_same_form(self, fresh_lenet):
        x = torch.randn(4, 1, 12, 12)
        ranks = {"features.0": 2, "features.2": 20}
        model = tai(fresh_lenet, ranks, images=x)
        other = tai(lenet(image_size=12).eval(), ranks)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


class TestBatchNorm:
    """Where the low-rank network starts: as the approximation of the dense one, and in which mode."""

    RANKS = {"features.0": 2, "features.2": 30}  # noqa: RUF012

    def test_without_images_it_is_the_identity_in_evaluation_only(self, fresh_lenet):
        x = torch.randn(8, 1, 12, 12)
        plain = tai(copy.deepcopy(fresh_lenet), self.RANKS, batch_norm=False)
        normed = tai(fresh_lenet, self.RANKS)
        torch.testing.assert_close(normed(x), plain(x), rtol=1e-5, atol=1e-6)
        assert (normed.features.train()(x) - plain.features(x)).norm() > 0.5 * plain.features(x).norm()

    def test_with_images_it_is_the_identity_in_both_modes(self, fresh_lenet):
        x, other = torch.randn(2, 256, 1, 12, 12)
        plain = tai(copy.deepcopy(fresh_lenet), self.RANKS, batch_norm=False)
        normed = tai(fresh_lenet, self.RANKS, images=x)
        torch.testing.assert_close(normed(other), plain(other), rtol=1e-4, atol=1e-5)
        normed.features.train()
        torch.testing.assert_close(normed.features(x), plain.features(x), rtol=1e-4, atol=1e-5)
        expected = plain.features(other)  # another batch of the same kind: close, since its statistics are
        assert (normed.features(other) - expected).norm() < 0.1 * expected.norm()

    def test_calibration_leaves_the_mode_and_the_hooks_as_they_were(self):
        model = tai(lenet(image_size=12).train(), self.RANKS, images=torch.randn(8, 1, 12, 12))
        assert all(m.training for m in model.modules())
        assert not any(m._forward_pre_hooks for m in model.modules())
        before = model.features[0].norm.weight.clone()
        model(torch.randn(8, 1, 12, 12))
        assert torch.equal(model.features[0].norm.weight, before)
        assert model.features[0].norm.num_batches_tracked == 1

    def test_other_batch_norms_keep_their_statistics(self):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).eval()
        model[0].running_mean.fill_(5)
        tai(model, {"1": 2}, images=torch.randn(8, 3, 6, 6))
        assert torch.equal(model[0].running_mean, torch.full((3,), 5.0))

    def test_training_from_the_calibrated_start_goes_down(self, fresh_lenet):
        x, y = torch.randn(32, 1, 12, 12), torch.randint(10, (32,))
        model = tai(fresh_lenet, self.RANKS, images=x)
        model.features.train()  # not the dropout
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < 0.5 * losses[0]
