"""Denoising as a scikit-learn estimator.

scikit-learn passes arrays, and labels of any kind; `denoise` takes tensors and class indices. This module converts
between them, and finds the trusted rows if they are part of X.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor, nn

from bilevel import DataError, OptionError, Progress
from bilevel._util.checks import check_counts, in_range, true_or_false, warn_user
from bilevel._util.random_state import seeded
from bilevel.applications.denoising.denoise import denoise
from bilevel.applications.networks import mlp
from bilevel.applications.training import probabilities
from bilevel.data.arrays import standard_scaler
from bilevel.data.column_rules import ColumnRules, named_columns
from bilevel.methods.base import Method

# Called with the count of numbers in one input and the count of classes; returns a network.
ModuleFactory = Callable[[int, int], nn.Module]
# The number of rows that are predicted together; the last part is padded to it.
CHUNK = 32


class _LabelledClasses(ClassifierMixin):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier whose labels can be of any kind: `classes_` holds them, and the model predicts indices into it."""

    def _indices(self, y: ArrayLike) -> np.ndarray:
        """Set `classes_`, and return the labels as indices into it."""
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y must have at least two classes; got 1 class, {self.classes_.tolist()[0]!r}.")
        return labels

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the class of each row."""
        indices = self.predict_proba(X).argmax(1)  # first: this raises NotFittedError before `fit`
        return self.classes_[indices]  # type: ignore[no-any-return]


class DenoisingClassifier(_LabelledClasses, BaseEstimator):  # type: ignore[misc]
    """A classifier for data with some wrong labels, which also finds these labels, with the help of a few right ones.

    Parameters
    ----------
    module : a network that gives one score for each class, trained in float32. None (default): fully connected layers
        with `hidden` units. A function is called with the count of numbers in one input and the count of classes, and
        its first weights come from `random_state`. An `nn.Module` is copied with its weights. With a `module`, X can
        have more than two dimensions, as images (n, channels, height, width) have.
    hidden : the units of the default network, default (128,).
    method : the method of the bilevel run. None (default): `Penalty(cotangent="same", decay="linear")`.
    steps : the number of steps of the bilevel run and of each training. None (default): 12 passes over the rows, and at
        least 600, or 1,200 with more than 2,000 rows.
    batch : the number of rows in a batch. None (default): 100, or 200 with 10,000 rows or more.
    rate : the learning rate of the trainings. None (default): 1e-3 before the bilevel run and, after it, the rate that
        the penalty method chose.
    trusted_share : the share of the rows that replaces the trusted rows if `fit` gets none, default 0.1.
    standardize : scale each column of X (or each channel) to mean 0 and deviation 1, as measured in `fit`, and clip at
        10 deviations. Default True. A table with text, dates or missing values needs True.
    device : the device for training and prediction. None (default): the module's.
    random_state : a seed or a numpy.random.RandomState. The same value gives the same bits. None (default): numpy's
        global generator.
    verbose : show a progress bar of the bilevel run if standard error is a terminal. Default False.

    Attributes
    ----------
    importance_ : a number in [0, 1] for each row of X. 1 in rows passed as trusted, NaN in rows that replace trusted
        rows; neither are judged, and neither are suspects.
    quality_ : the importance times the probability of the given label; 1 and NaN as above.
    suggested_ : the class that the classifier predicts for each row.
    suspects_ : the indices of the rows whose label is considered wrong, lowest quality first.
    noise_rate_ : the share of suspects in the rows that were judged.
    module_, history_ : the trained network, and the record of the bilevel run.
    classes_, n_features_in_, feature_names_in_ : as in scikit-learn; `n_features_in_` is `X.shape[1]`.

    >>> X = np.random.default_rng(0).normal(size=(80, 4))
    >>> model = DenoisingClassifier(steps=20, random_state=0).fit(X, X[:, 0] > 0, trusted=np.arange(80) < 20)
    >>> model.importance_.shape
    (80,)
    """

    def __init__(
        self,
        module: nn.Module | ModuleFactory | None = None,
        *,
        hidden: int | Sequence[int] = (128,),
        method: Method | None = None,
        steps: int | None = None,
        batch: int | None = None,
        rate: float | None = None,
        trusted_share: float = 0.1,
        standardize: bool = True,
        device: str | torch.device | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.module, self.hidden, self.method = module, hidden, method
        self.steps, self.batch, self.rate = steps, batch, rate
        self.trusted_share, self.standardize, self.device = trusted_share, standardize, device
        self.random_state, self.verbose = random_state, verbose

    def fit(
        self, X: ArrayLike, y: ArrayLike, trusted: tuple[ArrayLike, ArrayLike] | ArrayLike | None = None
    ) -> DenoisingClassifier:
        """Learn the importance of each row of X, and the classifier.

        X is an array of finite numbers, or a pandas.DataFrame. Its text, dates and missing values become numbers as in
        `bilevel.data.load`.

        `trusted` is a tuple (X, y) of further rows, or a mask of the rows of X whose labels are known to be right, with
        some rows of each class. With None, a part of X replaces them, and a warning says so.
        """
        true_or_false("standardize", self.standardize)
        self._rules = _rules_of(X)
        if self._rules is not None and not self.standardize:
            raise OptionError(
                "standardize must be True for a table with text, dates or missing values, whose numbers are always "
                "scaled; got False. Pass an array of finite numbers, or leave standardize out."
            )
        inputs, given = self._validated(X, y)
        labels = self._indices(given)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        scales = self.standardize and self._rules is None  # a table is scaled by its rules
        self._scale = standard_scaler().fit(_columns(inputs)) if scales else None
        self._shape = inputs.shape[1:]
        x, known = self._tensor(inputs), np.zeros(len(labels), dtype=np.bool_)
        if isinstance(trusted, tuple):
            x_trusted, y_trusted = self._pair(trusted)
        else:
            known = self._stand_in(labels, random) if trusted is None else _mask(trusted, len(labels))
            x_trusted, y_trusted = x[known], labels[known]
        if missing := [label for i, label in enumerate(self.classes_.tolist()) if i not in y_trusted]:
            raise DataError(
                f"trusted must have an example of every class of y; it has none of {missing[:10]}. Add some, or leave "
                "these classes out of X and y."
            )
        if known.all():
            raise DataError(f"some rows of X must be left to judge; all {len(labels)} are trusted or replace them.")
        module = self._network(x, seed)
        found = denoise(
            (x[~known], labels[~known]),
            (x_trusted, y_trusted),
            module,
            method=self.method,
            steps=_plain(self.steps),
            batch=_plain(self.batch),
            rate=_plain(self.rate),
            seed=seed,
            callbacks=[Progress("importances")] if self.verbose else [],
        )
        self.module_, self.history_ = module, found.solution.history
        unjudged = np.nan if trusted is None else 1.0
        self.importance_ = _spread(found.importance, known, unjudged)
        self.quality_ = _spread(found.quality, known, unjudged)
        self.suggested_ = self.classes_[self._probabilities(x).argmax(1)]
        suspects = np.flatnonzero(~known)[found.suspect.numpy()]
        self.suspects_ = suspects[np.argsort(self.quality_[suspects], kind="stable")]
        self.noise_rate_ = found.noise_rate
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        check_is_fitted(self, "module_")
        return self._probabilities(self._tensor(self._like_fitted(X)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = self.module is not None
        return tags

    def _validated(self, X: ArrayLike, *y: ArrayLike, **rules: Any) -> Any:
        """Return X, and y if given, as arrays that scikit-learn has checked."""
        if self._rules is not None:
            # The columns by which a table is prepared are those of `fit`, so scikit-learn only looks at their names.
            if not hasattr(X, "columns"):
                raise DataError(f"X must be a table with the columns of fit; got {type(X).__name__}.")
            validate_data(self, X, skip_check_array=True, reset=rules.get("reset", True))
            check_consistent_length(X, *y)
            prepared = self._rules.transform(X, "X")
            return (prepared, column_or_1d(*y, warn=True)) if y else prepared
        # Only numbers that are scaled can exceed the range of float32; others would become infinite, and are refused.
        dtype = [np.float64, np.float32] if self.standardize else np.float32
        with np.errstate(over="ignore", invalid="ignore"):
            return validate_data(self, X, *y, dtype=dtype, allow_nd=self.module is not None, **rules)

    def _like_fitted(self, X: ArrayLike, **rules: Any) -> np.ndarray:
        """Return more inputs; they must have the shape of the inputs in `fit`."""
        found: np.ndarray = self._validated(X, reset=False, **rules)
        if found.shape[1:] != self._shape:
            raise DataError(f"inputs must have shape {self._shape}, as in fit; got {found.shape[1:]}.")
        return found

    def _tensor(self, X: np.ndarray) -> Tensor:
        """Return X as the module takes it."""
        if self._scale is not None and len(X):
            scaled = self._scale.transform(_columns(X))
            X = np.moveaxis(scaled.reshape(len(X), *X.shape[2:], X.shape[1]), -1, 1)
        return torch.from_numpy(np.array(X, dtype=np.float32, order="C"))

    def _probabilities(self, x: Tensor) -> np.ndarray:
        # Rounding depends on the number of rows: with a fixed number, the result of a row depends on no other row.
        padded = torch.cat([x, x.new_zeros(-len(x) % CHUNK, *x.shape[1:])])
        found = probabilities(self.module_, padded, batch=CHUNK)[: len(x)].double()
        return (found / found.sum(1, keepdim=True)).numpy()

    def _pair(self, trusted: tuple[ArrayLike, ...]) -> tuple[Tensor, np.ndarray]:
        """Return trusted rows that are not in X, with labels as indices into `classes_`."""
        if len(trusted) != 2:
            raise DataError(f"trusted must be a pair (X, y) or a mask of the rows of X; got a tuple of {len(trusted)}.")
        labels = np.asarray(trusted[1])
        try:
            X = self._like_fitted(trusted[0], ensure_min_samples=0)
        except (TypeError, ValueError) as error:
            raise DataError(f"the inputs of trusted must be like X: {error}") from error
        if labels.shape != (len(X),):
            raise DataError(
                f"trusted must have one label for each input; got {len(X)} inputs and labels of shape {labels.shape}."
            )
        index = {label: i for i, label in enumerate(self.classes_.tolist())}
        if unknown := list(dict.fromkeys(label for label in labels.tolist() if label not in index)):
            raise DataError(f"the labels of trusted must all occur in y; {unknown[:10]} do not.")
        return self._tensor(X), np.array([index[label] for label in labels.tolist()], dtype=np.int64)

    def _stand_in(self, labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Return a mask of rows drawn from each class in proportion, at least one of each."""
        share = _plain(self.trusted_share)
        in_range("trusted_share", share, above=0, below=1)
        known = np.zeros(len(labels), dtype=np.bool_)
        for i in range(len(self.classes_)):
            members = random.permutation(np.flatnonzero(labels == i))
            known[members[: max(1, round(share * len(members)))]] = True
        warn_user(
            f"fit has no trusted labels: {known.sum()} of the {len(labels)} rows replace them. Their labels can be as "
            "wrong as the others, so wrong labels are found less reliably, and these rows are not judged: their "
            "importance is NaN. Pass trusted=(X, y), or a mask of rows whose labels are known to be right."
        )
        return known

    def _network(self, x: Tensor, seed: int) -> nn.Module:
        """Return the network with its first weights, on its device; refuse one without one score for each class."""
        classes, module = len(self.classes_), self.module
        with seeded(seed):
            if module is None:
                hidden = np.atleast_1d(self.hidden).tolist()
                for units in hidden:
                    check_counts(hidden=units)
                module = mlp(x[0].numel(), hidden, classes)
            elif isinstance(module, nn.Module):
                module = copy.deepcopy(module)
            elif callable(module):
                module = module(x[0].numel(), classes)
        if not isinstance(module, nn.Module):
            raise OptionError(
                "module must be None, an nn.Module, or a function of the numbers of inputs and of classes that returns "
                f"an nn.Module; got {self.module!r}."
            )
        try:
            network: nn.Module = module.float() if self.device is None else module.float().to(self.device)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise OptionError(f"device must be one that torch has here; got {self.device!r}: {error}") from error
        if (scores := probabilities(network, x[:1]).shape) != (1, classes):
            raise OptionError(
                f"module must give one score for each of the {classes} classes of y; for one input its scores have "
                f"shape {tuple(scores)}."
            )
        return network


def _rules_of(X: Any) -> ColumnRules | None:
    """Return how a pandas.DataFrame becomes numbers; None for one of finite numbers, and for arrays."""
    if not hasattr(X, "columns") or not hasattr(X, "iloc"):
        return None
    plain = all(getattr(kind, "kind", "O") in "buif" for kind in X.dtypes)
    return None if plain and np.isfinite(X.to_numpy(np.float64)).all() else ColumnRules.fit(named_columns(X), "X")


def _columns(X: np.ndarray) -> np.ndarray:
    """Return X as numbers by columns, or by channels if it has more than two dimensions."""
    return np.moveaxis(X, 1, -1).reshape(-1, X.shape[1]).astype(np.float64)


def _mask(trusted: ArrayLike, rows: int) -> np.ndarray:
    """Return a mask of rows. Indices are refused: cross-validation would pass them with parts of X."""
    try:
        mask = np.array(trusted)
    except ValueError:  # a list of arrays of several lengths
        mask = np.empty(0, dtype=object)
    if mask.dtype != bool or mask.shape != (rows,):
        raise DataError(
            f"trusted must be a tuple (X, y), or a mask with True or False for each of the {rows} rows of X; got "
            f"{type(trusted).__name__} of {mask.dtype} and shape {mask.shape}. For indices, pass "
            "np.isin(np.arange(len(X)), indices)."
        )
    return mask


def _spread(values: Tensor, known: np.ndarray, unjudged: float) -> np.ndarray:
    """Return the values of the judged rows in their places among all rows."""
    spread = np.full(len(known), unjudged)
    spread[~known] = values.double().numpy()
    return spread


def _plain(value: Any) -> Any:
    """Return a NumPy number, as a parameter search passes, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value
