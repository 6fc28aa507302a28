"""TunedRidge and TunedLogisticRegression: scikit-learn's checks, its numbers at a single penalty, useless features."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel import DataError, OptionError
from bilevel.applications.tuning.linear_tuning import STAGES
from bilevel.sklearn import TunedLogisticRegression, TunedRidge


@parametrize_with_checks(
    [TunedRidge(steps=2, caution=1.0, folds=2), TunedLogisticRegression(steps=2, caution=1.0, folds=2)]
)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


def sparse(rows=150, features=12, useful=3, seed=0):
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(rows, features))
    return X, X[:, :useful].sum(1) + 0.7 * draw.normal(size=rows)


def test_a_single_penalty_is_that_of_scikit_learn():
    X, y = sparse()
    ours = TunedRidge(penalty="single", random_state=0).fit(X, 100 * y + 7)
    theirs = Ridge(alpha=ours.alpha_[0]).fit(X, 100 * y + 7)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-4, atol=1e-3)
    assert len(set(ours.alpha_)) == 1
    labels = np.where(y > 0, "yes", "no")
    ours = TunedLogisticRegression(penalty="single", random_state=0).fit(X, labels)
    theirs = LogisticRegression(C=1 / ours.alpha_[0], tol=1e-10, max_iter=1000).fit(X, labels)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-3)
    assert (ours.predict(X) == theirs.predict(X)).all()


@pytest.mark.parametrize("folds", [4, 0.3])
def test_useless_features_are_penalised_more(folds):
    X, y = sparse()
    ridge = TunedRidge(folds=folds, caution=0, random_state=0).fit(X, y)
    assert np.median(ridge.alpha_[3:]) > 10 * np.median(ridge.alpha_[:3])
    assert ridge.valid_loss_ < ridge.single_valid_loss_
    logistic = TunedLogisticRegression(folds=folds, caution=0, random_state=0).fit(X, (y > 0).astype(int) + (y > 1))
    assert logistic.coef_.shape == (3, 12)
    assert np.median(logistic.alpha_[3:]) > 2 * np.median(logistic.alpha_[:3])
    assert logistic.valid_loss_ < logistic.single_valid_loss_


def test_rows_decide_the_caution_and_the_same_seed_gives_the_same_bits():
    X, y = sparse(rows=80)
    fits = [TunedRidge(folds=3, steps=30, random_state=3).fit(X, y) for _ in range(2)]
    assert fits[0].caution_ in (None, *STAGES, 0.0)
    np.testing.assert_array_equal(fits[0].alpha_, fits[1].alpha_)
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)


@pytest.mark.slow
@parametrize_with_checks([TunedRidge(), TunedLogisticRegression()])
def test_scikit_learn_accepts_the_estimators_as_they_come(estimator, check):
    check(estimator)


@pytest.mark.parametrize("folds", [2, 5, 0.3])
def test_few_rows_are_tuned_with_caution(folds):
    draw = np.random.default_rng(0)
    for rows in range(4, 9):
        X = draw.normal(size=(rows, 3))
        assert TunedRidge(folds=folds, steps=2, random_state=0).fit(X, X[:, 0] + 1).caution_ is not None
        TunedLogisticRegression(folds=folds, steps=2, random_state=0).fit(X, np.arange(rows) % 2)


def test_they_work_in_pipelines_and_cross_validation():
    X, y = sparse(rows=90)
    pipe = make_pipeline(StandardScaler(), TunedRidge(caution=1.0, folds=3, random_state=0))
    assert cross_val_score(pipe, X * np.logspace(-3, 3, 12), y, cv=3).mean() > 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": "some"}, "penalty"),
        ({"folds": 1}, "folds"),
        ({"folds": 1.5}, "folds"),
        ({"caution": -1}, "caution"),
        ({"caution": "much"}, "caution"),
        ({"steps": 0}, "steps"),
        ({"tol": 0.0}, "tol"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    X, y = sparse(rows=30)
    with pytest.raises(OptionError, match=message):
        TunedRidge(**options).fit(X, y)


@pytest.mark.parametrize("features", [20, 2000], ids=["narrow", "wide"])
def test_words_are_tuned_as_sparse_inputs(features):
    """The penalties and the model of sparse rows are those of the same rows, dense."""
    draw = np.random.default_rng(0)
    labels = draw.integers(2, size=120)
    words = (draw.random((120, features)) < 0.02) * 1.0
    words[:, :2] = np.where(draw.random((120, 2)) < 0.9, labels[:, None], 1 - labels[:, None]) * [1, 2]
    ways = {"caution": 1.0, "folds": 3, "random_state": 0, "tol": 1e-8}
    X = scipy.sparse.csr_matrix(words)
    ours, dense = (TunedLogisticRegression(**ways).fit(x, labels) for x in (X, words))
    np.testing.assert_allclose(np.log(ours.alpha_), np.log(dense.alpha_), atol=0.02)
    np.testing.assert_allclose(ours.predict_proba(X), dense.predict_proba(words), atol=1e-3)
    ridge, dense_ridge = (TunedRidge(**ways).fit(x, labels) for x in (X, words))
    np.testing.assert_allclose(ridge.predict(X), dense_ridge.predict(words), atol=1e-2)


def test_one_class_is_refused():
    with pytest.raises(DataError, match="two classes"):
        TunedLogisticRegression().fit(np.eye(4), np.ones(4))
