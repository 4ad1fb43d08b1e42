"""The best matrix of a rank in two metrics, against a decomposition with roots of both."""

from __future__ import annotations

import pytest
import torch

from cpnorm.cp import closed_form
from cpnorm.cp.calibrated import fit
from cpnorm.cp.closed_form import best_factors, errors_by_rank
from cpnorm.cp.output_metric import Problem

SHAPES = [(12, 7), (7, 12), (9, 9), (12, 7, 1, 1), (5, 1, 8)]


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Problem:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64).to(dtype)
    rows, columns = shape[0], weight[0].numel()
    inputs, outputs = (
        torch.randn(40, size, dtype=torch.float64) * torch.linspace(0.1, 2, size) for size in (columns, rows)
    )
    return Problem.of(weight, inputs.T @ inputs, outputs.T @ outputs)


@pytest.mark.parametrize("in_double", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_matrix_of_the_rank_is_better(
    shape: tuple[int, ...], in_double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "WORK_IN_DOUBLE", 2**28 if in_double else 0)
    made = problem(shape)
    roots = [torch.linalg.cholesky(metric[0]) for metric in (made.outputs, made.inputs)]
    values = torch.linalg.svdvals(roots[0].mT @ made.weight[0] @ roots[1])
    errors = errors_by_rank(made)
    for rank in range(1, len(values) + 1):
        best = values[rank:].square().sum()
        torch.testing.assert_close(errors[len(errors) - rank], best)
        assert made.error(best_factors(made, rank)) == pytest.approx(best.item(), abs=1e-9)


def test_single_precision_is_enough() -> None:
    made, exact = problem((12, 7), torch.float32), problem((12, 7), torch.float64)
    torch.testing.assert_close(errors_by_rank(made), errors_by_rank(exact), rtol=1e-4, atol=1e-5)


def test_more_terms_than_a_matrix_has_are_zero() -> None:
    made = problem((12, 7))
    fitted = fit(made, 10, None)
    assert fitted.rank == 10
    torch.testing.assert_close(fitted.to_dense() / made.scale, made.weight[0])


def test_a_metric_that_is_not_definite() -> None:
    made = problem((12, 7))
    x = torch.randn(3, 7, dtype=torch.float64)
    made = Problem(made.weight, (x.T @ x - 1e-9 * torch.eye(7))[None], made.outputs, made.shape, 1, 1.0, 1.0)
    assert all(factor.isfinite().all() for factor in best_factors(made, 3))
