"""Products by either library are equal."""

from __future__ import annotations

import pytest
import torch

from cpnorm.nn import products


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 64, 130), (96, 288, 96), (0, 4, 3), (4, 0, 3)])
def test_products_by_one_dnn(shape: tuple[int, int, int], turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "one_dnn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "LEAST_COLUMNS", 1)
    rows, terms, columns = shape
    left, right = torch.randn(rows, terms), torch.randn(terms, columns)
    if turned:
        left, right = left.mT.contiguous().mT, right.mT.contiguous().mT
    expected = left.double() @ right.double()
    torch.testing.assert_close(products.product(left, right).double(), expected, atol=1e-4, rtol=1e-5)
    assert products.product(left, right).is_contiguous()
    torch.testing.assert_close(products.product(left.double(), right.double()), expected)
