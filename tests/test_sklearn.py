"""The estimator: scikit-learn's own checks, wrong labels found, trusted rows in each form, and what is refused."""

from __future__ import annotations

import pickle
import re
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
import torch
from common import global_state
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from bilevel import BilevelWarning, DataError, History, OptionError, Penalty, ProblemError, Progress, ValueGap
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.networks import mlp
from bilevel.sklearn import DenoisingClassifier

PAGE = Path(__file__).parent.parent / "docs" / "sklearn.md"
TINY = {"steps": 20, "hidden": (8,), "random_state": 0}


@pytest.mark.filterwarnings("ignore:fit has no trusted labels:bilevel.BilevelWarning")
@parametrize_with_checks([DenoisingClassifier(steps=40, hidden=(16,))])
def test_scikit_learn_accepts_the_estimator(estimator, check):
    check(estimator)


@cache
def digits():
    """Training digits with 40% wrong labels from the 100th row on, which are wrong, and test digits."""
    draw = np.random.default_rng(0)
    X, right = load_digits(return_X_y=True)
    order = draw.permutation(len(right))
    X, right = X[order], right[order]
    y, wrong = right.copy(), np.zeros(len(right), dtype=bool)
    wrong[100:1300] = draw.random(1200) < 0.4
    y[wrong] = (y[wrong] + draw.integers(1, 10, wrong.sum())) % 10
    return X[:1300], y[:1300], wrong[:1300], X[1300:], y[1300:]


def blobs(rows=60, classes=2, noise=0.3, seed=0):
    """Classes far apart, labels of which some are wrong, a mask of a third, all right, and of the wrong."""
    draw = np.random.default_rng(seed)
    right = np.arange(rows) % classes
    X = draw.normal(size=(rows, 4)) + 5 * np.eye(max(4, classes))[right][:, :4]
    trusted = draw.random(rows) < 1 / 3
    wrong = ~trusted & (draw.random(rows) < noise)
    return X, np.where(wrong, (right + 1) % classes, right), trusted, wrong


def test_wrong_digits_are_found_and_do_not_harm_the_classifier():
    X, y, wrong, X_test, y_test = digits()
    clf = DenoisingClassifier(random_state=0).fit(X[100:], y[100:], trusted=(X[:100], y[:100]))
    wrong = wrong[100:]
    assert roc_auc_score(~wrong, clf.importance_) > 0.97
    assert clf.score(X_test, y_test) > 0.92
    plain = LogisticRegression(C=0.01, max_iter=2000).fit(X, y).score(X_test, y_test)
    assert clf.score(X_test, y_test) > plain
    assert clf.noise_rate_ == pytest.approx(wrong.mean(), abs=0.05)
    assert clf.noise_rate_ == len(clf.suspects_) / len(y[100:])
    assert wrong[clf.suspects_].mean() > 0.9
    right = digits_right()[100:]
    assert (clf.suggested_[clf.suspects_] == right[clf.suspects_]).mean() > 0.9
    assert isinstance(clf.history_, History)
    assert len(clf.history_) == 600


def digits_right():
    order = np.random.default_rng(0).permutation(1797)
    return load_digits(return_X_y=True)[1][order][:1300]


def test_a_mask_of_rows_works_as_a_pair_does_and_keeps_the_order_of_the_rows():
    X, y, wrong, X_test, y_test = digits()
    trusted = np.arange(len(y)) < 100
    mixed = np.random.default_rng(1).permutation(len(y))
    clf = DenoisingClassifier(steps=400, random_state=0).fit(X[mixed], y[mixed], trusted=trusted[mixed])
    assert clf.importance_.shape == clf.quality_.shape == clf.suggested_.shape == y.shape
    assert (clf.importance_[trusted[mixed]] == 1).all()
    assert (clf.quality_[trusted[mixed]] == 1).all()
    judged = ~trusted[mixed]
    assert roc_auc_score(~wrong[mixed][judged], clf.importance_[judged]) > 0.97
    assert not trusted[mixed][clf.suspects_].any()
    assert clf.noise_rate_ == len(clf.suspects_) / judged.sum()
    assert clf.score(X_test, y_test) > 0.92


def test_a_mask_gives_the_very_fit_of_the_pair_where_x_is_not_scaled():
    X, y, trusted, _ = blobs()
    mask = DenoisingClassifier(standardize=False, **TINY).fit(X, y, trusted=trusted)
    pair = DenoisingClassifier(standardize=False, **TINY).fit(
        X[~trusted], y[~trusted], trusted=(X[trusted], y[trusted])
    )
    np.testing.assert_array_equal(mask.importance_[~trusted], pair.importance_)
    np.testing.assert_array_equal(mask.suspects_, np.flatnonzero(~trusted)[pair.suspects_])
    np.testing.assert_array_equal(mask.predict_proba(X), pair.predict_proba(X))


def test_suspects_come_worst_first():
    X, y, trusted, wrong = blobs(200)
    clf = DenoisingClassifier(steps=200, hidden=16, random_state=0).fit(X, y, trusted=trusted)
    assert set(clf.suspects_) <= set(np.flatnonzero(wrong))
    assert len(clf.suspects_) > 0.95 * wrong.sum()
    assert (np.diff(clf.quality_[clf.suspects_]) >= 0).all()
    assert (clf.suggested_[clf.suspects_] != y[clf.suspects_]).all()
    assert (clf.importance_[clf.suspects_] < 0.5).all()


def test_without_trusted_labels_a_part_stands_in_and_a_warning_says_what_that_costs():
    X, y, _, _ = blobs(100, classes=3)
    expected = sum(round(0.2 * count) for count in np.bincount(y))
    with pytest.warns(BilevelWarning, match=f"{expected} of the 100 rows replace them.*less reliably.*NaN") as caught:
        clf = DenoisingClassifier(trusted_share=0.2, **TINY).fit(X, y)
    assert Path(caught[0].filename) == Path(__file__)
    stood_in = np.isnan(clf.importance_)
    np.testing.assert_array_equal(stood_in, np.isnan(clf.quality_))
    assert stood_in.sum() == expected
    assert set(y[stood_in]) == {0, 1, 2}
    assert not stood_in[clf.suspects_].any()
    assert set(clf.suggested_) <= {0, 1, 2}


@pytest.mark.filterwarnings("ignore:fit has no trusted labels:bilevel.BilevelWarning")
def test_a_class_of_one_row_is_among_the_stand_ins():
    X, y, _, _ = blobs(10)
    y[3] = 7
    clf = DenoisingClassifier(**TINY).fit(X, y)
    assert np.isnan(clf.importance_[3])
    assert clf.predict_proba(X).shape == (10, 3)


@pytest.mark.parametrize("names", [("spam", "ham"), (True, False), (-3, 4), (0.0, 1.0)])
def test_labels_of_any_kind_come_back(names):
    X, y, trusted, _ = blobs()
    named = np.array(names)[y]
    pair = X[trusted], named[trusted].tolist()
    clf = DenoisingClassifier(steps=100, hidden=8, random_state=0).fit(X[~trusted], named[~trusted], trusted=pair)
    assert set(clf.classes_) == set(names)
    assert clf.suggested_.dtype == clf.classes_.dtype == clf.predict(X).dtype
    assert (clf.predict(X[trusted]) == named[trusted]).all()
    np.testing.assert_allclose(clf.predict_proba(X).sum(1), 1, atol=1e-15)


def test_the_same_random_state_gives_the_same_bits_and_leaves_the_generators_alone():
    X, y, trusted, _ = blobs()
    before = global_state()
    first, again, other = (
        DenoisingClassifier(**TINY | {"random_state": seed}).fit(X, y, trusted=trusted) for seed in (0, 0, 1)
    )
    assert global_state() == before
    np.testing.assert_array_equal(first.importance_, again.importance_)
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))
    assert (first.predict_proba(X) != other.predict_proba(X)).any()
    first.fit(X, y, trusted=trusted)
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))


def test_a_row_is_predicted_alike_whatever_else_is_asked_for():
    X, y, _, X_test, _ = digits()
    clf = DenoisingClassifier(steps=20, random_state=0).fit(X[100:400], y[100:400], trusted=(X[:100], y[:100]))
    rows = X_test[:100]
    alone = np.concatenate([clf.predict_proba(row[None]) for row in rows])
    np.testing.assert_array_equal(clf.predict_proba(rows), alone)
    np.testing.assert_array_equal(clf.predict_proba(rows[::-1]), alone[::-1])


def test_a_fitted_classifier_is_pickled_and_cloned():
    X, y, trusted, _ = blobs()
    clf = DenoisingClassifier(mlp(4, (5,), 2), method=Penalty(lower_steps=2), **TINY).fit(X, y, trusted=trusted)
    back = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    assert back.history_["upper"] == clf.history_["upper"]
    fresh = clone(clf)
    assert not hasattr(fresh, "module_")
    np.testing.assert_array_equal(fresh.fit(X, y, trusted=trusted).importance_, clf.importance_)
    assert "Penalty(" in repr(clf)


def test_scaling_is_measured_in_fit_and_used_in_predict():
    X, y, trusted, _ = blobs(noise=0)
    stretched = np.column_stack([X * [1e30, 1e-30, 1, 100] + [0, 0, 1e6, 0], np.full(len(X), 0.1)])
    clf = DenoisingClassifier(steps=100, hidden=8, random_state=0).fit(stretched, y, trusted=trusted)
    assert clf.score(stretched, y) > 0.95
    assert clf.predict(stretched[:1]) == y[0]
    plain = DenoisingClassifier(standardize=False, **TINY)
    with pytest.raises(ValueError, match="too large for dtype"):
        plain.fit(stretched * 1e30, y, trusted=trusted)


def test_a_module_is_copied_and_a_function_is_called_with_the_sizes():
    X, y, trusted, _ = blobs(classes=3)
    given = mlp(4, (5,), 3).double()
    weights = {name: value.clone() for name, value in given.state_dict().items()}
    clf = DenoisingClassifier(given, steps=20, random_state=0).fit(X, y, trusted=trusted)
    assert all(torch.equal(value, weights[name]) for name, value in given.state_dict().items())
    assert next(clf.module_.parameters()).dtype == torch.float32
    assert not torch.equal(clf.module_[1].weight, weights["1.weight"].float())
    sizes = []

    def network(inputs, classes):
        sizes.append((inputs, classes))
        return mlp(inputs, (5,), classes)

    first, again = (DenoisingClassifier(network, steps=20, random_state=0).fit(X, y, trusted=trusted) for _ in "ab")
    assert sizes == [(4, 3), (4, 3)]
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))


def test_images_go_to_a_module_with_each_channel_scaled():
    draw = np.random.default_rng(0)
    y = np.arange(90) % 3
    X = draw.normal(size=(90, 2, 8, 8))
    X[:, 0] += 2 * y[:, None, None]
    X = X * np.array([100, 1e-3])[:, None, None] + np.array([0, 50])[:, None, None]
    trusted = np.arange(90) < 30
    seen = []

    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 3))

        def forward(self, x):
            seen.append(x.detach())
            return self.inner(x)

    clf = DenoisingClassifier(lambda inputs, classes: Looked(), steps=150, random_state=0).fit(X, y, trusted=trusted)
    assert clf.score(X, y) > 0.9
    clf.predict(X[:1])
    scaled = np.stack([(X[:, c] - X[:, c].mean()) / X[:, c].std() for c in (0, 1)], axis=1)
    np.testing.assert_allclose(seen[-1][0], scaled[0], atol=1e-4)  # float32, from a mean of 50 deviations of 1e-3
    with pytest.raises(DataError, match=r"shape \(2, 8, 8\), as in fit; got \(2, 9, 8\)"):
        clf.predict(np.zeros((1, 2, 9, 8)))
    with pytest.raises(ValueError, match="dim 4"):
        DenoisingClassifier().fit(X, y, trusted=trusted)


def test_frames_of_pandas_are_taken_with_their_names():
    X, y, trusted, _ = blobs()
    frame = pd.DataFrame(X, columns=list("abcd"))
    clf = DenoisingClassifier(**TINY)
    clf.fit(frame, pd.Series(y), trusted=pd.Series(trusted))
    clf.fit(frame, pd.Series(y).map({0: "no", 1: "yes"}), trusted=pd.Series(trusted, dtype="boolean"))
    assert set(clf.predict(frame)) <= {"no", "yes"}
    assert clf.feature_names_in_.tolist() == list("abcd")
    with pytest.raises(DataError, match="inputs of trusted must be like X: The feature names"):
        clf.fit(frame, y, trusted=(frame[["b", "a", "c", "d"]], y))


class Spy(DenoisingClassifier):
    """Notes whether the mask is that of the rows: their last column says which are trusted."""

    seen: ClassVar[list[tuple[int, bool]]] = []

    def fit(self, X, y, trusted=None):
        self.seen.append((len(y), np.array_equal(X[:, -1] == 1, trusted)))
        return super().fit(X, y, trusted)


@pytest.mark.parametrize("routing", [False, True])
def test_a_mask_goes_through_a_pipeline_and_is_split_by_cross_validation(routing):
    X, y, trusted, _ = blobs(120, classes=3)
    X = np.column_stack([trusted, X])
    Spy.seen.clear()
    with sklearn.config_context(enable_metadata_routing=routing):
        clf = Spy(**TINY).set_fit_request(trusted=True) if routing else Spy(**TINY)
        name = "trusted" if routing else "clf__trusted"
        pipe = Pipeline([("reversed", FunctionTransformer(np.fliplr)), ("clf", clf)])
        pipe.fit(X, y, **{name: trusted})
        assert Spy.seen == [(120, True)]
        GridSearchCV(pipe, {"clf__steps": np.array([5, 20])}, cv=3, error_score="raise").fit(X, y, **{name: trusted})
        assert Spy.seen[1:] == [(80, True)] * 6 + [(120, True)]
        scores = cross_val_score(pipe, X, y, cv=3, params={name: trusted}, error_score="raise")
        assert Spy.seen[8:] == [(80, True)] * 3
    assert scores.shape == (3,)


@pytest.mark.parametrize("routing", [False, True])
def test_a_pair_reaches_every_part_of_cross_validation_whole(routing):
    X, y, trusted, _ = blobs(120)
    pair = X[trusted], y[trusted]
    with sklearn.config_context(enable_metadata_routing=routing):
        clf = DenoisingClassifier(steps=100, hidden=8, random_state=0)
        clf = clf.set_fit_request(trusted=True) if routing else clf
        scores = cross_val_score(clf, X[trusted], y[trusted], cv=3, params={"trusted": pair}, error_score="raise")
    assert (scores == 1).all()


def test_the_mask_as_weight_scores_the_trusted_rows_alone():
    X, y, trusted, _ = blobs(150, noise=0.6)
    clf = DenoisingClassifier(steps=60, hidden=8, random_state=0)
    with sklearn.config_context(enable_metadata_routing=True):
        clf.set_fit_request(trusted=True).set_score_request(sample_weight=True)
        weights = {"trusted": trusted, "sample_weight": trusted.astype(float)}
        scores = cross_val_score(clf, X, y, cv=3, params=weights, error_score="raise")
    assert scores.min() > 0.9
    assert cross_val_score(clf, X, y, cv=3, params={"trusted": trusted}).max() < 0.9


def test_numbers_of_numpy_are_parameters_too():
    X, y, trusted, _ = blobs()
    options = {
        "steps": np.int64(20),
        "batch": np.int32(8),
        "rate": np.float32(0.01),
        "hidden": np.array([8]),
        "random_state": np.int64(0),
    }
    clf = DenoisingClassifier(**options).fit(X, y, trusted=trusted)
    plain = DenoisingClassifier(batch=8, rate=float(np.float32(0.01)), **TINY).fit(X, y, trusted=trusted)
    np.testing.assert_array_equal(clf.importance_, plain.importance_)


def test_method_steps_batch_and_rate_reach_the_run(monkeypatch):
    X, y, trusted, _ = blobs()
    given = {}

    def noted(*data, **options):
        given.update(options)
        return denoise(*data, **options)

    monkeypatch.setattr("bilevel.sklearn.denoising.denoise", noted)
    method = ValueGap(lower_steps=2)
    DenoisingClassifier(method=method, batch=7, rate=0.02, verbose=True, **TINY).fit(X, y, trusted=trusted)
    assert (given["method"], given["steps"], given["batch"], given["rate"]) == (method, 20, 7, 0.02)
    assert [type(callback) for callback in given["callbacks"]] == [Progress]


def test_a_run_that_diverges_is_an_error():
    X, y, trusted, _ = blobs()
    wild = Penalty(lower_optimizer=partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(ProblemError, match="diverged"):
        DenoisingClassifier(method=wild, rate=1e-3, **TINY).fit(X, y, trusted=trusted)


X, Y, TRUSTED, _ = blobs(classes=3)


@pytest.mark.parametrize(
    ("trusted", "sentence"),
    [
        ((X[:0], Y[:0]), r"an example of every class of y; it has none of \[0, 1, 2\]"),
        ((X[Y < 2], Y[Y < 2]), r"an example of every class of y; it has none of \[2\]"),
        (TRUSTED & (Y > 0), r"an example of every class of y; it has none of \[0\]"),
        (np.zeros(60, dtype=bool), r"it has none of \[0, 1, 2\]"),
        (np.ones(60, dtype=bool), "some rows of X must be left to judge; all 60"),
        ((X[:, :3], Y), "inputs of trusted must be like X: X has 3 features, but .* 4"),
        ((X * np.nan, Y), "inputs of trusted must be like X: Input X contains NaN"),
        ((scipy.sparse.csr_array(X), Y), "inputs of trusted must be like X: Sparse"),
        ((X, np.where(Y == 2, 9, Y)), r"labels of trusted must all occur in y; \[9\] do not"),
        ((X, Y.astype(str)), r"labels of trusted must all occur in y; \['0', '1', '2'\] do not"),
        ((X, Y[:-1]), r"one label for each input; got 60 inputs and labels of shape \(59,\)"),
        ((X, Y, Y), r"trusted must be a pair \(X, y\) or a mask .* got a tuple of 3"),
        (np.flatnonzero(TRUSTED), r"a mask with True or False for each of the 60 rows .* np\.isin"),
        (TRUSTED.astype(int), r"each of the 60 rows of X; got ndarray of int64 and shape \(60,\)"),
        (TRUSTED[:-1], r"each of the 60 rows of X; got ndarray of bool and shape \(59,\)"),
        ([X, Y], r"trusted must be a tuple \(X, y\), or a mask"),
    ],
)
def test_trusted_rows_that_do_not_fit_are_refused(trusted, sentence):
    with pytest.raises(DataError, match=sentence):
        DenoisingClassifier(**TINY).fit(X, Y, trusted=trusted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"steps": 1.5}, "steps must be a whole number; got 1.5"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"rate": -1.0}, "rate must be above 0; got -1.0"),
        ({"hidden": (8, 0)}, "hidden must be at least 1; got 0"),
        ({"hidden": 2.5}, "hidden must be a whole number; got 2.5"),
        ({"standardize": "yes"}, "standardize must be True or False; got 'yes'"),
        ({"device": "abacus"}, "device must be one that torch has here; got 'abacus'"),
        ({"module": "mlp"}, "module must be None, an nn.Module, or a function .* got 'mlp'"),
        ({"module": lambda inputs, classes: None}, "module must be None, an nn.Module, or a function"),
        ({"module": mlp(4, (), 5)}, r"one score for each of the 3 classes of y; .* shape \(1, 5\)"),
        ({"module": mlp(4, (), 2)}, r"one score for each of the 3 classes of y; .* shape \(1, 2\)"),
    ],
)
def test_options_out_of_range_are_refused_in_fit(options, sentence):
    clf = DenoisingClassifier(**TINY | options)
    with pytest.raises(OptionError, match=sentence):
        clf.fit(X, Y, trusted=TRUSTED)


@pytest.mark.parametrize("share", [0, 1, 1.5, "half"])
def test_a_share_of_stand_ins_out_of_range_is_refused(share):
    with pytest.raises(OptionError, match="trusted_share must be"):
        DenoisingClassifier(trusted_share=share, **TINY).fit(X, Y)


def test_labels_of_object_type_are_named_in_errors():
    names = np.array(["a", "b", "c"], dtype=object)[Y]
    with pytest.raises(DataError, match=r"it has none of \['c'\]"):
        DenoisingClassifier(**TINY).fit(X, names, trusted=TRUSTED & (Y < 2))


@pytest.mark.filterwarnings("ignore:fit has no trusted labels:bilevel.BilevelWarning")
def test_as_many_rows_as_classes_are_refused():
    with pytest.raises(DataError, match="some rows of X must be left to judge; all 3"):
        DenoisingClassifier(**TINY).fit(X[:3], np.arange(3))


def test_one_class_is_refused():
    with pytest.raises(DataError, match="y must have at least two classes; got 1 class, 'a'"):
        DenoisingClassifier(**TINY).fit(X, ["a"] * 60)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_the_code_of_the_page_runs_and_finds_what_it_says(code, capsys):
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)
    if "wrong" in names and "scores" not in names:
        assert names["clf"].score(names["X_test"], names["y_test"]) == pytest.approx(0.96, abs=0.02)
        assert names["clf"].noise_rate_ == pytest.approx(0.40, abs=0.03)
        assert names["wrong"][names["worst"]].all()
    if "scores" in names:
        assert names["scores"].mean() > 0.8
