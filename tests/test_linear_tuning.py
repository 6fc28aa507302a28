"""Penalties of linear models against closed forms, scikit-learn, and data whose informative features are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from bilevel_studies.tuning.data import INFORMATIVE, sparse_regression
from bilevel_studies.tuning.ridge import leave_fold_out, leave_one_out
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from torch import Tensor

from bilevel import DataError
from bilevel.applications.tuning.folded_linear_model import FoldedModel, Rows
from bilevel.applications.tuning.implicit_descent import _Exact, objective
from bilevel.applications.tuning.linear_tuning import (
    beyond_chance,
    held_out_loss,
    trained,
    tune_cautiously,
    tune_linear,
)
from bilevel.errors import CheckpointError
from bilevel.problem.problem import Problem


def sparse_rows(seed: int) -> tuple[Rows, Tensor, Tensor]:
    """10 informative and 90 noise features, five folds; and test rows."""
    rows, test = sparse_regression(seed)
    return rows, test.x, test.y


def classes_of(seed: int, rows: int, classes: int, features: int = 6) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, features))
    scores = x @ draw.normal(size=(features, classes)) + draw.gumbel(size=(rows, classes))
    return torch.from_numpy(x), torch.from_numpy(scores.argmax(1))


@pytest.mark.parametrize("left_out", ["a split", "five folds", "rows one by one"])
def test_single_ridge_penalty_minimises_the_closed_form_curve(left_out):
    for seed in range(3):
        rows, _, _ = sparse_rows(seed)
        if left_out == "a split":
            rows = replace(rows, fold=torch.where(torch.arange(200) < 120, -1, 0))
        elif left_out == "rows one by one":
            rows = replace(rows.select(torch.arange(200) < 60), x=rows.x[:60, :20], fold=torch.arange(60))
        curve = leave_one_out if left_out == "rows one by one" else leave_fold_out
        found = tune_linear(rows, penalty="single", tolerance=1e-9)
        best = minimize_scalar(
            lambda log, rows=rows, curve=curve: curve(rows, np.exp(log)),
            bounds=(-5, 10),
            method="bounded",
            options={"xatol": 1e-6},
        )
        assert found.single == pytest.approx(np.exp(best.x), rel=0.01)
        assert found.valid_loss == pytest.approx(best.fun, rel=1e-6)
        assert bool((found.alpha == found.single).all())


def test_closed_forms_of_the_leave_out_error_agree_with_each_other_and_with_scikit_learn():
    rows, _, _ = sparse_rows(4)
    rows = replace(rows, x=rows.x[:, :30])
    each = replace(rows, fold=torch.arange(200))
    for alpha in (0.1, 10.0, 1000.0):
        ridge = RidgeCV([alpha], store_cv_results=True).fit(rows.x.numpy(), rows.y.numpy())
        assert leave_one_out(each, alpha) == pytest.approx(leave_fold_out(each, alpha), rel=1e-9)
        assert leave_one_out(each, alpha) == pytest.approx(ridge.cv_results_.mean() / 2, rel=1e-9)


def sparse_seed(seed: int) -> tuple[float, float, float]:
    """How much more the median noise feature is penalised, the test error, and that of the best single penalty."""
    rows, x, y = sparse_rows(seed)
    found = tune_linear(rows, caution=0)
    ratio = float(found.alpha[INFORMATIVE:].median() / found.alpha[:INFORMATIVE].median())
    error = float(((x @ found.weight[0] + found.bias - y) ** 2).mean())
    singles = []
    for alpha in np.logspace(-1, 4, 25):  # the best of these by the test rows themselves
        weight, bias = trained(rows, torch.full((100,), alpha, dtype=torch.float64))
        singles.append(float(((x @ weight[0] + bias - y) ** 2).mean()))
    return ratio, error, min(singles)


@pytest.mark.parametrize("seed", range(3))
def test_noise_features_are_penalised_a_hundred_times_more_and_the_test_error_is_below_any_single_penalty(seed):
    ratio, error, single = sparse_seed(seed)
    assert ratio >= 100
    assert error < single


@pytest.mark.slow
def test_noise_features_on_twenty_seeds():
    found = [sparse_seed(seed) for seed in range(20)]
    assert all(ratio >= 100 for ratio, _, _ in found)
    assert all(error < single for _, error, single in found)


def test_a_caution_that_falls_in_stages_ends_in_a_lower_minimum(monkeypatch):
    rows, _, _ = sparse_rows(18)
    staged = tune_linear(rows, caution=0)
    assert [caution for caution, _ in staged.stages] == [1.0, 0.1, 0.01, 0]
    assert torch.equal(staged.stages[-1][1], staged.alpha)
    monkeypatch.setattr("bilevel.applications.tuning.linear_tuning.STAGES", ())
    assert staged.valid_loss < 0.85 * tune_linear(rows, caution=0).valid_loss


def test_lower_level_of_a_split_has_the_training_rows_alone():
    rows, _, _ = sparse_rows(0)
    model = FoldedModel(Rows(rows.x, rows.y, torch.where(torch.arange(200) < 120, -1, 0), "squared"))
    assert (len(model.train.y), len(model.held.y)) == (120, 80)
    folded = FoldedModel(rows)
    assert (len(folded.train.y), len(folded.held.y)) == (200, 200)


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize(("why", "at"), [(KeyboardInterrupt, 0.6), (RuntimeError, 0.6), (KeyboardInterrupt, 1.0)])
def test_a_tuning_that_was_stopped_goes_on_bit_for_bit(classes, why, at, tmp_path, monkeypatch):
    monkeypatch.setattr("bilevel.applications.tuning.implicit_descent.SAVE_EVERY", 0.0)
    x, y = classes_of(6, 90, 3)
    rows = Rows(x, y if classes else y.double(), torch.arange(90) % 3, *(("logistic", 3) if classes else ("squared",)))
    straight, left = tune_linear(rows, caution=0.1, tolerance=1e-3), []
    steps = len(straight.path) - len(straight.stages) - 1
    last = round(at * steps)

    def on_progress(*told):
        left.append(told)
        if len(left) == last:
            raise why

    options = {"caution": 0.1, "tolerance": 1e-3, "checkpoint": tmp_path}
    with pytest.raises(why):
        tune_linear(rows, on_progress=on_progress, **options)
    assert len(left) == last
    again = tune_linear(rows, on_progress=on_progress, **options)
    assert torch.equal(again.alpha, straight.alpha)
    assert torch.equal(again.weight, straight.weight)
    assert again.path == straight.path
    assert len(left) == len(set(left)) == steps  # each step once
    with pytest.raises(CheckpointError, match="is of another run: its steps differ"):
        tune_linear(rows, steps=3, **options)
    with pytest.raises(CheckpointError, match="is of another run: its rows differ"):
        tune_linear(Rows(x + 1, rows.y, rows.fold, rows.loss, rows.outputs), **options)


def test_weights_are_those_of_scikit_learn_at_the_same_single_penalty():
    rows, _, _ = sparse_rows(0)
    weight, bias = trained(rows, torch.full((100,), 7.0, dtype=torch.float64))
    ridge = Ridge(alpha=7.0).fit(rows.x.numpy(), rows.y.numpy())
    np.testing.assert_allclose(weight[0], ridge.coef_, atol=1e-6)
    np.testing.assert_allclose(bias[0], ridge.intercept_, atol=1e-6)
    for classes in (2, 3):
        x, y = classes_of(1, 150, classes)
        given = Rows(
            x, y.double() if classes == 2 else y, torch.arange(150) % 3, "logistic", max(1, classes * (classes > 2))
        )
        weight, bias = trained(given, torch.full((6,), 2.0, dtype=torch.float64))
        theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=1000).fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(weight, theirs.coef_, atol=1e-5)
        if classes == 2:
            np.testing.assert_allclose(bias, theirs.intercept_, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_hypergradient_of_the_folds_is_that_of_differences(classes):
    x, y = classes_of(2, 90, classes)
    rows = Rows(x, y.double() if classes == 2 else y, torch.arange(90) % 3, "logistic", 1 if classes == 2 else 3)
    model = FoldedModel(rows)
    u = torch.linspace(-1, 2, 6, dtype=torch.float64).requires_grad_()
    problem = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(u.exp(), v))
    value, slope, _ = objective(problem, u, model.v, lambda: model.second(u.detach().exp()))(u.detach().clone())
    assert value == pytest.approx(held_out_loss(rows, u.detach().exp()), rel=1e-7)
    for j in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[j] = 1e-3
        ends = [held_out_loss(rows, (u.detach() + sign * step).exp()) for sign in (1, -1)]
        assert slope[j].item() == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=1e-3, abs=1e-7)


def test_diagonal_and_dense_inverses_lead_to_the_same_weights(monkeypatch):
    rows, _, _ = sparse_rows(1)
    alpha = torch.logspace(-1, 3, 100, dtype=torch.float64)
    dense = trained(rows, alpha)[0]
    monkeypatch.setattr("bilevel.applications.tuning.folded_linear_model.DENSE", 0)
    np.testing.assert_allclose(trained(rows, alpha)[0], dense, atol=1e-5)


def test_caution_keeps_penalties_near_the_single_one():
    rows, _, _ = sparse_rows(1)
    rows = Rows(rows.x[:, :20], rows.y, torch.where(torch.arange(200) < 100, -1, 0), "squared")
    spreads = [float(tune_linear(rows, caution=c).alpha.log().std()) for c in (0.0, 1.0, 100.0)]
    assert spreads[0] > 3 * spreads[1] > 9 * spreads[2]


@pytest.mark.slow
def test_rows_decide_the_caution():
    sparse, _, _ = sparse_rows(1)
    sparse = Rows(sparse.x[:, :50], sparse.y, sparse.fold % 2, "squared")
    _, caution = tune_cautiously(sparse, tolerance=1e-3)
    assert caution == 0.0
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(120, 40)))
    y = x @ torch.from_numpy(draw.choice([-1.0, 1.0], 40)) + 8 * torch.from_numpy(draw.normal(size=120))
    _, caution = tune_cautiously(Rows(x, y, torch.arange(120) % 2, "squared"), tolerance=1e-3)
    assert caution != 0.0


@pytest.mark.parametrize("seed", [8, 12])  # on these some caution has the least loss, by chance
def test_rows_whose_labels_are_noise_ask_for_a_single_penalty(seed):
    draw = np.random.default_rng(seed)
    x, y = torch.from_numpy(draw.normal(size=(100, 12))), torch.from_numpy(draw.integers(0, 2, 100)).double()
    found, caution = tune_cautiously(Rows(x, y, torch.arange(100) % 2, "logistic"), tolerance=1e-2)
    assert caution is None
    assert bool((found.alpha == found.single).all())


def test_a_gain_is_beyond_chance_where_its_mean_is_above_the_standard_error():
    gains = torch.tensor([0.0, 1.0, 2.0, 3.0])
    error = float(gains.std()) / 2
    assert beyond_chance(gains - 1.5 + 1.01 * error)
    assert not beyond_chance(gains - 1.5 + 0.99 * error)
    assert not beyond_chance(torch.zeros(5))


def test_a_budget_of_seconds_ends_the_tuning():
    rows, _, _ = sparse_rows(0)
    found = tune_linear(rows, seconds=0.0)
    assert len(found.path) <= 4


def test_folds_that_cannot_be_held_out_are_refused():
    x, y = classes_of(0, 30, 2)
    with pytest.raises(DataError, match="leave some"):
        tune_linear(Rows(x, y.double(), torch.zeros(30), "logistic"))
    fold = (y == 1).long()
    with pytest.raises(DataError, match="all of its rows in fold"):
        tune_linear(Rows(x, y.double(), fold, "logistic"))


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_product_with_the_second_derivative_is_that_of_autograd(classes):
    x, y = classes_of(3, 40, max(classes, 2))
    outputs = 3 if classes == 3 else 1
    rows = Rows(
        x, y if classes == 3 else y.double(), torch.arange(40) % 2, "logistic" if classes else "squared", outputs
    )
    model, alpha = FoldedModel(rows), torch.logspace(-1, 1, 6, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in model.v.values():
            leaf.copy_(torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype))
    leaves = list(model.v.values())
    d = [torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype) for leaf in leaves]
    slope = torch.autograd.grad(model.lower(alpha, model.v), leaves, create_graph=True)
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(slope, leaves, d)])
    found = model.second(alpha)[0](torch.cat([part.flatten() for part in d]))
    torch.testing.assert_close(found, expected)


def test_a_lower_level_that_is_nearly_solved_takes_few_newton_steps():
    x, y = classes_of(4, 90, 3)
    model, u = FoldedModel(Rows(x, y, torch.arange(90) % 3, "logistic", 3)), torch.zeros(6, dtype=torch.float64)
    problem = Problem(lambda u, v, _: model.upper(v), lambda u, v, _: model.lower(u.exp(), v))
    u.requires_grad_()

    nested = objective(problem, u, model.v, lambda: model.second(u.detach().exp()))

    def steps() -> int:
        before = nested.newton.steps
        nested.newton.minimise()
        return nested.newton.steps - before

    assert steps() <= 10
    assert steps() <= 2  # what it begins with is rounding
    with torch.no_grad():
        u += 0.1
    assert 1 <= steps() <= 5


def test_penalties_of_features_take_up_the_lower_level_where_the_single_one_left_it(monkeypatch):
    ends = []

    class Spied(_Exact):
        def __init__(self, *given):
            super().__init__(*given)
            ends.append(self)

    monkeypatch.setattr("bilevel.applications.tuning.implicit_descent._Exact", Spied)
    monkeypatch.setattr("bilevel.applications.tuning.newton_logistic.WIDTH", 0)
    x, y = classes_of(5, 120, 3)
    tune_linear(Rows(x, y, torch.arange(120) % 3, "logistic", 3), caution=0, steps=8)
    # A grid of five, the single penalty, cautions 1, 0.1 and 0.01, none, and the model on all rows.
    assert len(ends) == 11
    for end in ends[5:10]:
        assert end.newton.steps <= 6 * end.evaluations
