"""Ridge in closed form and logistic regression by Newton steps: next to scikit-learn, the general way, differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from bilevel._util.threads import threads_for
from bilevel.applications.tuning import closed_ridge, newton_logistic
from bilevel.applications.tuning.closed_ridge import ClosedRidge, has_closed_form
from bilevel.applications.tuning.folded_linear_model import Rows
from bilevel.applications.tuning.linear_tuning import held_out_loss, trained, tune_linear
from bilevel.applications.tuning.newton_logistic import NewtonLogistic
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


def classes_of(count, n=90, d=5, never=0, seed=1):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, d)) + 2.0
    y = ((x - 2.0) @ draw.normal(size=(d, count)) + 2 * draw.gumbel(size=(n, count))).argmax(1)
    fold = torch.arange(n) % 3
    fold[:never] = -1
    target = torch.from_numpy(y).double() if count == 2 else torch.from_numpy(y)
    return Rows(torch.from_numpy(x), target, fold, "logistic", 1 if count == 2 else count)


@pytest.mark.parametrize(("count", "never"), [(2, 0), (2, 30), (3, 0)])
def test_losses_of_newton_steps_are_those_of_scikit_learn_on_every_fold(count, never):
    rows = classes_of(count, never=never)
    newton, x, y = NewtonLogistic(rows), rows.x.numpy(), rows.y.numpy().astype(int)
    for alpha in (0.05, 2.0):
        losses = []
        for k in range(3):
            out = (rows.fold == k).numpy()
            model = LogisticRegression(C=1 / alpha, tol=1e-12, max_iter=10_000).fit(x[~out], y[~out])
            losses.append(-np.log(model.predict_proba(x[out])[np.arange(out.sum()), y[out]]))
        found = newton.loss(torch.full((5,), alpha, dtype=torch.float64))
        assert found == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)  # scikit-learn's lbfgs


@pytest.mark.parametrize("count", [2, 3])
def test_the_derivative_of_newton_steps_is_that_of_differences(count):
    rows = classes_of(count, never=9)
    newton, alpha = NewtonLogistic(rows), torch.logspace(-2, 1, 5, dtype=torch.float64)
    value, slope = newton.with_slope(alpha)
    assert value == pytest.approx(newton.loss(alpha), rel=1e-12)
    for j in range(5):
        step = torch.zeros_like(alpha)
        step[j] = 1e-4 * alpha[j]
        difference = (newton.loss(alpha + step) - newton.loss(alpha - step)) / (2 * float(step[j]))
        assert slope[j].item() == pytest.approx(difference, rel=1e-5, abs=1e-10)


@pytest.mark.parametrize("count", [2, 3])
def test_newton_steps_and_the_general_way_end_at_the_same_losses(count, monkeypatch):
    rows = classes_of(count)
    fast = tune_linear(rows, caution=0.1, tolerance=1e-6)
    weight, bias = trained(rows, fast.alpha)
    monkeypatch.setattr(newton_logistic, "WIDTH", 0)
    assert not newton_logistic.has_newton_steps(rows)
    slow = tune_linear(rows, caution=0.1, tolerance=1e-6)
    assert fast.single_loss == pytest.approx(slow.single_loss, rel=1e-6)
    assert fast.valid_loss == pytest.approx(slow.valid_loss, rel=1e-3)  # of several minima with many penalties
    again, offset = trained(rows, fast.alpha)
    torch.testing.assert_close(again, weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(offset - offset.mean(), bias - bias.mean(), rtol=1e-4, atol=1e-5)


def test_newton_steps_reach_the_minimum_of_separable_classes_with_a_tiny_penalty():
    rows = classes_of(2)
    rows = replace(rows, y=(rows.x[:, 0] > rows.x[:, 0].median()).double())
    newton = NewtonLogistic(rows, held_out=False)
    alpha = torch.full((5,), 1e-4, dtype=torch.float64)
    weight, bias = newton.model(alpha)
    scores = rows.x @ weight[0] + bias
    slope = rows.x.T @ (torch.sigmoid(scores) - rows.y) + alpha * weight[0]
    assert float(slope.abs().max()) < 1e-8
    assert bool(((scores > 0) == (rows.y > 0)).all())


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
