"""Ridge regression in closed form: what the general way finds, what scikit-learn finds, and the derivative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from bilevel._util.threads import threads_for
from bilevel.applications.tuning import closed_ridge
from bilevel.applications.tuning.closed_ridge import ClosedRidge, has_closed_form
from bilevel.applications.tuning.folded_linear_model import Rows
from bilevel.applications.tuning.linear_tuning import held_out_loss, trained, tune_linear
from bilevel.sklearn import TunedRidge


def rows_of(n=50, d=7, folds=3, never=0, seed=0):
    draw = np.random.default_rng(seed)
    x = torch.from_numpy(draw.normal(size=(n, d)) + 3.0)
    y = x @ torch.from_numpy(draw.normal(size=d)) + torch.from_numpy(draw.normal(size=n)) + 5.0
    fold = torch.arange(n) % folds
    fold[:never] = -1
    return Rows(x, y, fold, "squared")


@pytest.mark.parametrize(("d", "never"), [(7, 0), (7, 20), (60, 0)])
def test_losses_are_those_of_scikit_learn_on_every_fold(d, never):
    rows = rows_of(d=d, never=never)
    ridge = ClosedRidge(rows)
    values = torch.tensor([1e-2, 1.0, 50.0], dtype=torch.float64)
    expected = []
    for alpha in values:
        errors = []
        for k in range(3):
            out = (rows.fold == k).numpy()
            model = Ridge(alpha=float(alpha)).fit(rows.x.numpy()[~out], rows.y.numpy()[~out])
            errors.append((model.predict(rows.x.numpy()[out]) - rows.y.numpy()[out]) ** 2)
        expected.append(np.concatenate(errors).mean() / 2)
    found = [ridge.loss(alpha.expand(d)) for alpha in values]
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    np.testing.assert_allclose(ridge.single_losses(values), expected, rtol=1e-8)


def test_the_derivative_is_that_of_differences():
    rows = rows_of(never=10)
    ridge, alpha = ClosedRidge(rows), torch.logspace(-1, 2, 7, dtype=torch.float64)
    value, slope = ridge.with_slope(alpha)
    assert value == pytest.approx(ridge.loss(alpha), rel=1e-12)
    for j in range(7):
        step = torch.zeros_like(alpha)
        step[j] = 1e-4 * alpha[j]
        difference = (ridge.loss(alpha + step) - ridge.loss(alpha - step)) / (2 * float(step[j]))
        assert slope[j].item() == pytest.approx(difference, rel=1e-6)


def test_the_general_way_ends_at_the_same_penalties(monkeypatch):
    rows = rows_of(n=60, d=5)
    closed = tune_linear(rows, caution=0.1, tolerance=1e-7)
    alpha = closed.alpha
    weight, loss = trained(rows, alpha)[0], held_out_loss(rows, alpha)
    monkeypatch.setattr(closed_ridge, "FACTOR", 0)
    assert not has_closed_form(rows)
    slow = tune_linear(rows, caution=0.1, tolerance=1e-7)
    assert closed.valid_loss == pytest.approx(slow.valid_loss, rel=1e-4)
    torch.testing.assert_close(trained(rows, alpha)[0], weight, rtol=1e-5, atol=1e-7)  # Newton's tolerance
    assert held_out_loss(rows, alpha) == pytest.approx(loss, rel=1e-6)


def test_the_single_penalty_is_at_or_below_every_value_of_a_grid():
    rows = rows_of(n=30, d=20, seed=3)
    found = tune_linear(rows, penalty="single")
    grid = [held_out_loss(rows, torch.full((20,), value, dtype=torch.float64)) for value in np.logspace(-3, 5, 40)]
    assert found.valid_loss <= min(grid) * (1 + 1e-9)


def test_matrices_that_are_singular_in_floating_point_still_give_a_model():
    rows = rows_of(n=12, d=30)
    x = rows.x.clone()
    x[:, 5] = x[:, 4]
    weight, bias = ClosedRidge(Rows(x, rows.y, rows.fold, "squared"), held_out=False).model(
        torch.full((30,), 1e-18, dtype=torch.float64)
    )
    assert torch.isfinite(weight).all()
    torch.testing.assert_close(x @ weight[0] + bias, rows.y, rtol=1e-5, atol=1e-5)


def test_small_problems_have_one_thread_and_the_setting_comes_back(monkeypatch):
    seen, before = [], torch.get_num_threads()
    plain = ClosedRidge.with_slope
    monkeypatch.setattr(ClosedRidge, "with_slope", lambda *a: seen.append(torch.get_num_threads()) or plain(*a))
    torch.set_num_threads(2)
    try:
        rows = rows_of()
        TunedRidge(random_state=0, caution=1.0).fit(rows.x.numpy(), rows.y.numpy())
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyboardInterrupt), threads_for(10):
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2
        with threads_for(10**9):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
