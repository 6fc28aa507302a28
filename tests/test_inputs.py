"""Sparse inputs of linear models: every product, its derivatives, and tuning are those of the dense ones."""

import numpy as np
import pytest
import scipy.sparse
import torch

from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows, from_scipy, inputs_of, mean_of, rows_of
from bilevel.applications.tuning.linear_tuning import tune_linear


@pytest.fixture
def matrix():
    """Sixty rows of forty features; one row and one feature are empty."""
    draw = np.random.default_rng(0)
    dense = draw.normal(size=(60, 40)) * (draw.random((60, 40)) < 0.15)
    dense[7] = dense[:, 11] = 0
    return scipy.sparse.csr_matrix(dense)


@pytest.fixture
def pair(matrix):
    sparse, dense = from_scipy(matrix), torch.from_numpy(matrix.toarray())
    center = mean_of(sparse)
    torch.testing.assert_close(center, dense.mean(0))
    return inputs_of(sparse, center), inputs_of(dense, center)


def test_products_are_those_of_dense_inputs(pair):
    sparse, dense = pair
    assert sparse.dense is None
    w, p = torch.randn(3, 40, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)
    torch.testing.assert_close(sparse.scores(w), dense.scores(w))
    torch.testing.assert_close(sparse.pulled(p), dense.pulled(p))
    torch.testing.assert_close(sparse.squares(p), dense.squares(p))


def test_products_have_their_first_and_second_derivatives(pair):
    sparse, _ = pair
    w, p = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 40), (60, 2)))
    for function, value in ((sparse.scores, w), (sparse.pulled, p)):
        assert torch.autograd.gradcheck(function, value)
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x).sin(), value)


def test_rows_are_taken_by_a_mask(matrix):
    mask = torch.arange(60) % 3 != 0
    found = rows_of(from_scipy(matrix), mask)
    torch.testing.assert_close(found.to_dense(), torch.from_numpy(matrix.toarray())[mask])


@pytest.mark.parametrize("classes", [2, 3])
def test_sparse_rows_are_tuned_as_dense_ones(matrix, classes):
    draw = np.random.default_rng(1)
    scores = matrix.toarray() @ draw.normal(size=(40, classes)) + draw.normal(size=(60, classes))
    y = torch.from_numpy(scores.argmax(1))
    y, outputs = (y.double(), 1) if classes == 2 else (y, classes)
    found = [
        tune_linear(Rows(x, y, torch.arange(60) % 4, "logistic", outputs), caution=1.0, tolerance=1e-8)
        for x in (from_scipy(matrix), torch.from_numpy(matrix.toarray()))
    ]
    assert found[0].valid_loss == pytest.approx(found[1].valid_loss, rel=1e-6)
    torch.testing.assert_close(found[0].alpha.log(), found[1].alpha.log(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[0].weight, found[1].weight, rtol=1e-3, atol=1e-4)
    first, second = (one.bias - one.bias.mean() * (classes > 2) for one in found)  # scores that all rise tell nothing
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


def test_sparse_rows_never_become_dense(matrix, monkeypatch):
    wide = scipy.sparse.hstack([matrix, scipy.sparse.csr_matrix((60, 10**6))])
    rows = Rows(from_scipy(wide), torch.arange(60) % 2 * 1.0, torch.arange(60) % 2, "logistic")
    monkeypatch.setattr(torch.Tensor, "to_dense", None)
    model = FoldedModel(rows)  # 480 MB as a dense tensor
    product, near = model.second(torch.ones(wide.shape[1], dtype=torch.float64))
    vector = torch.ones(2 * wide.shape[1] + 2, dtype=torch.float64)
    assert torch.isfinite(product(near(vector))).all()
    assert rows.digest() != Rows(from_scipy(2 * wide), rows.y, rows.fold, "logistic").digest()
