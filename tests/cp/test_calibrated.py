"""Decomposition in the norm of a layer's inputs: against the closed form, against dense maths, and against ALS."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import cpnorm
from cpnorm.cp.calibrated import cp_calibrated, fit, regression_target
from cpnorm.cp.elimination import elimination_order
from cpnorm.cp.output_metric import Problem
from cpnorm.cp.quasi_newton import NORM_CONTROL, AllModes, OutputsEliminated, quasi_newton


def correlated(samples: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64) * 0.8 ** torch.arange(size)
    return torch.randn(samples, size, generator=generator, dtype=torch.float64) @ mixing.mT


def output_error(weight: Tensor, cp: cpnorm.CPTensor, x: Tensor) -> float:
    difference = (weight - cp.to_dense()).reshape(len(weight), -1)
    return ((difference @ x.mT).norm() / (weight.reshape(len(weight), -1) @ x.mT).norm()).item()


def test_a_matrix_has_the_singular_values_of_the_whitened_one() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(12, 9, dtype=torch.float64), correlated(500, 9)
    values = torch.linalg.svdvals(weight @ x.mT)
    for rank in (1, 4, 8):
        expected = (values[rank:].square().sum() / values.square().sum()).sqrt().item()
        assert output_error(weight, cp_calibrated(weight, rank, x.mT @ x / 500), x) == pytest.approx(expected, rel=1e-2)


def test_errors_are_measured_in_the_metric_of_the_outputs() -> None:
    """Outputs of small weight in the metric may be wrong."""
    torch.manual_seed(0)
    weight = torch.randn(8, 6, dtype=torch.float64)
    metric = torch.diag(torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64))
    fitted = cp_calibrated(weight, 4, torch.eye(6, dtype=torch.float64), outputs=metric).to_dense()
    assert (fitted - weight)[:4].norm() < 0.05 * weight[:4].norm()
    assert (fitted - weight)[4:].norm() > 0.3 * weight[4:].norm()


def test_convolutions_are_fitted_far_better_than_by_their_weight() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, 8, 3, 3), correlated(2000, 72).float()
    moments = x.mT @ x / len(x)
    found = cp_calibrated(weight, 30, moments)
    start = cp_calibrated(weight, 30, moments, steps=0)
    by_weight = cpnorm.cp_als(weight, 30, generator=torch.Generator().manual_seed(0))
    assert output_error(weight, found, x) < 0.8 * output_error(weight, start, x)
    assert output_error(weight, start, x) < 0.5 * output_error(weight, by_weight, x)
    assert found.cancellation() < 10
    assert all(torch.allclose(f.norm(dim=0), torch.ones(30), atol=1e-5) for f in found.factors)


def test_moments_may_be_singular() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 4, 3, 3), torch.randn(5, 36)
    fitted = cp_calibrated(weight, 12, x.mT @ x)
    assert all(f.isfinite().all() for f in fitted.factors)
    assert output_error(weight, fitted, x) < 0.02
    nothing = cp_calibrated(weight, 5, torch.zeros(36, 36))
    assert nothing.to_dense().isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_weights_may_be_zero_or_of_any_size(scale: float) -> None:
    torch.manual_seed(0)
    weight, x = scale * torch.randn(8, 4, 3, 3), torch.randn(500, 36)
    fitted = cp_calibrated(weight, 20, x.mT @ x / 500).to_dense()
    assert (fitted - weight).norm() <= 0.2 * weight.norm()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_group_has_its_own_moments(groups: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    x = torch.stack([correlated(300, 27, seed) for seed in range(groups)])
    fitted = cp_calibrated(weight, 8, x.mT @ x, groups=groups)

    def error(cp: cpnorm.CPTensor) -> float:
        return ((weight - cp.to_dense()).reshape(groups, -1, 27) @ x.mT).norm().item()

    assert error(fitted) < 0.7 * error(cpnorm.cp_als(weight, 8))


def test_several_modes_may_make_up_the_outputs() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(3, 4, 5, 2, dtype=torch.float64), correlated(200, 10)
    init = cpnorm.cp_als(weight, 6)
    fitted = cp_calibrated(weight, 6, x.mT @ x, output_modes=2, init=init)

    def error(cp: cpnorm.CPTensor) -> float:
        return ((weight - cp.to_dense()).reshape(12, 10) @ x.mT).norm().item()

    assert error(fitted) < 0.9 * error(init)


def test_the_gradient_is_that_of_the_error() -> None:
    """Against autograd, in double precision, with outputs of two modes and a metric of their own."""
    torch.manual_seed(0)
    weight, x, y = torch.randn(3, 2, 4, 3, dtype=torch.float64), correlated(100, 12), correlated(50, 6, seed=1)
    problem = Problem.of(weight, x.mT @ x, y.mT @ y, output_modes=2)
    factors = [torch.randn(n, 5, dtype=torch.float64).requires_grad_() for n in (3, 2, 4, 3)]
    difference = problem.weight - problem.left(factors) @ problem.right(factors).mT
    error = ((problem.outputs @ difference @ problem.inputs) * difference).sum()
    expected = torch.autograd.grad(error / 2, factors)
    at = AllModes(problem, [f.detach() for f in factors], 0.0)
    assert at.objective == pytest.approx(error.item(), rel=1e-9)
    for mine, theirs in zip(at.gradient, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8)


def test_without_the_output_vectors_the_gradient_is_that_with_the_best_ones() -> None:
    """Against autograd, in double precision, with groups."""
    torch.manual_seed(0)
    weight, x = torch.randn(6, 4, 3, dtype=torch.float64), correlated(100, 12)
    problem = Problem.of(weight, torch.stack([x.mT @ x, x.mT @ x + torch.eye(12)]), groups=2)
    at = OutputsEliminated(problem, [torch.randn(n, 5, dtype=torch.float64) for n in (6, 4, 3)], 0.0)
    free = [f.clone().requires_grad_() for f in at.free]
    left = problem.left(at.factors)
    difference = problem.weight - left @ problem.right([at.factors[0], *free]).mT
    error = ((problem.outputs @ difference @ problem.inputs) * difference).sum()
    assert at.objective == pytest.approx(error.item(), rel=1e-9)
    for mine, theirs in zip(at.gradient, torch.autograd.grad(error / 2, free), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-8)
    other = left + 1e-3 * torch.randn_like(left)
    assert problem.error([other.flatten(0, 1), *at.free]) > at.objective


@pytest.mark.parametrize("output_modes", [1, 2])
def test_a_fit_comes_as_low_as_a_general_minimizer(output_modes: int) -> None:
    """SciPy's L-BFGS on the same objective, with derivatives by autograd, from the same start, until it converges."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 6, 3, 3, dtype=torch.float64), correlated(500, 54)
    weight, x = (weight, x) if output_modes == 1 else (weight.reshape(4, 2, 6, 9), x)
    problem = Problem.of(weight, x.mT @ x, output_modes=output_modes)
    start = cpnorm.cp_als(weight, 10, generator=torch.Generator().manual_seed(0))
    factors = [start.factors[0] * (start.sigma * start.lambdas / problem.scale), *start.factors[1:]]
    sizes = [f.numel() for f in factors]
    ridge = NORM_CONTROL * problem.error(factors) / 10

    def objective(parts: list[Tensor]) -> Tensor:
        left = problem.left(parts)
        difference = problem.weight - left @ problem.right(parts).mT
        error = ((problem.outputs @ difference @ problem.inputs) * difference).sum()
        others = (left * (problem.outputs @ left)).sum() if output_modes == 1 else parts[0].square().sum()
        return error + ridge * (others + sum(part.square().sum() for part in parts[1:]))

    def value(vector: np.ndarray) -> tuple[float, np.ndarray]:
        flat = torch.tensor(vector, requires_grad=True)
        parts = [part.reshape(f.shape) for part, f in zip(flat.split(sizes), factors, strict=True)]
        loss = objective(parts)
        loss.backward()
        return loss.item(), flat.grad.numpy()

    options = {"maxiter": 5000, "maxfun": 10_000}
    flat = torch.cat([f.flatten() for f in factors]).numpy()
    found = scipy.optimize.minimize(value, flat, jac=True, method="L-BFGS-B", options=options)
    before = objective(factors).item()
    assert found.fun < 0.5 * before
    assert objective(quasi_newton(problem, factors, 500)).item() < 1.2 * found.fun
    assert objective(quasi_newton(problem, factors, 40)).item() < found.fun + 0.2 * (before - found.fun)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
def test_a_gpu_finds_the_same_in_double_precision(groups: int) -> None:
    """In single precision, rounding changes the error of three steps by two per cent, on a CPU as well."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 16, 3, 3, dtype=torch.float64), correlated(2000, 144)
    start = cpnorm.cp_als(weight, 40)
    errors = []
    for device in ("cpu", "cuda"):
        problem = Problem.of(weight.to(device), (x.mT @ x / len(x)).to(device), groups=groups)
        errors.append(output_error(weight, fit(problem, 40, None, start.to(device), steps=3).to("cpu"), x))
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)
    assert errors[1] < 0.01 * output_error(weight, start, x)


def test_more_steps_are_better() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, 8, 3, 3), correlated(2000, 72).float()
    few, many = (cp_calibrated(weight, 30, x.mT @ x / 2000, steps=steps) for steps in (10, 150))
    assert output_error(weight, many, x) < 0.8 * output_error(weight, few, x)


def test_a_regression_finds_the_weight_and_keeps_it_where_nothing_is_known() -> None:
    torch.manual_seed(0)
    old, new = torch.randn(1, 4, 6, dtype=torch.float64), torch.randn(1, 4, 6, dtype=torch.float64)
    x = torch.randn(1, 400, 6, dtype=torch.float64)
    x[..., 5] = 0
    y = x @ new.mT
    target = regression_target(old, x.mT @ x, y.mT @ x, trust=1e-9)
    assert torch.allclose(target[..., :5], new[..., :5], atol=1e-5)
    assert torch.allclose(target[..., 5], old[..., 5])


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"inputs: expected second moments of shape \(36, 36\)"):
        cp_calibrated(torch.randn(6, 4, 3, 3), 3, torch.eye(9))
    with pytest.raises(ValueError, match=r"outputs: expected a metric of shape \(6, 6\)"):
        cp_calibrated(torch.randn(6, 4), 3, torch.eye(4), outputs=torch.eye(4))


def test_elimination_counts_overlaps() -> None:
    gram = torch.tensor([[1.0, -0.9, 0.0], [-0.9, 1.0, 0.0], [0.0, 0.0, 0.5]])
    order, loss = elimination_order(gram)
    assert order.tolist() == [2, 0, 1]
    assert loss.tolist() == pytest.approx([0.0, 0.5, 1.5])
