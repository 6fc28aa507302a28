"""Data as people have them: free text, tables in memory with names, dates and holes, Hugging Face's data sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction.text import HashingVectorizer

import bilevel
from bilevel import DataError, OptionError
from bilevel.cli.main import main
from bilevel.data import load
from bilevel.data.column_rules import HASHES, LENGTH
from bilevel.data.preparation import new_rows
from bilevel.sklearn import DenoisingClassifier

ROWS = 160
NOUNS = {"sport": "goal match team coach player league", "kitchen": "oven recipe flour butter sugar soup"}


def reviews(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Sentences on two themes, with a number, a date and a place that say nothing, and some holes."""
    rng = np.random.default_rng(seed)
    theme = [("sport", "kitchen")[i % 2] for i in range(rows)]
    text = [" ".join(rng.choice([*NOUNS[each].split(), "the", "a", "of", "and"], 9)) for each in theme]
    frame = pd.DataFrame({"text": text, "price": rng.normal(size=rows), "theme": theme})
    frame["day"] = pd.Timestamp("2024-03-01") + pd.to_timedelta(rng.integers(300, size=rows), unit="D")
    frame["place"] = rng.choice(["north", "south"], rows)
    frame.loc[3, ["price", "text"]] = None
    return frame


def test_free_text_becomes_hashed_words_and_pairs_of_words(tmp_path: Path) -> None:
    frame = reviews()
    frame.to_csv(tmp_path / "r.csv", index=False)
    data = load(tmp_path / "r.csv", label="theme")
    at = [i for i, name in enumerate(data.features) if name.startswith("words of text")]
    assert len(at) == HASHES
    words = HashingVectorizer(n_features=HASHES, ngram_range=(1, 2)).transform(frame["text"].fillna("")).toarray()
    assert data.x[:, at].numpy() == pytest.approx(LENGTH * words, abs=1e-5)
    assert data.x[3, at].abs().sum() == 0
    assert not any("text" in note for note in data.notes)


def test_names_and_codes_are_left_out_as_before(tmp_path: Path) -> None:
    frame = reviews().assign(who=[f"Ann {i} Lee" for i in range(ROWS)])
    (note,) = load(frame, label="theme").notes
    assert note == "Left out of the inputs: who (is text whose values nearly all differ)."


def test_a_table_of_text_is_cleaned_and_new_text_predicted(tmp_path: Path) -> None:
    frame = reviews()
    frame["theme"] = [("kitchen" if t == "sport" else "sport") if i in (60, 77, 95) else t for i, t in
                      enumerate(frame["theme"])]  # fmt: skip
    frame[40:].to_csv(tmp_path / "main.csv", index=False)
    frame[:40].to_csv(tmp_path / "trusted.csv", index=False)
    words = ["--label", "theme", "--trusted", tmp_path / "trusted.csv", "--steps", 100, "--no-baselines"]
    assert main(["denoise", *map(str, [tmp_path / "main.csv", *words, "--out", tmp_path / "r"])]) == 0
    new = reviews(20, seed=9)
    assert np.mean(bilevel.load(tmp_path / "r").predict(new) == new["theme"]) >= 0.95  # row 3 has no text
    issues = pd.read_csv(tmp_path / "r" / "issues.csv")
    assert {*issues.sort_values("label_quality")["index"][:5]} >= {20, 37, 55}
    assert issues["is_label_issue"][[20, 37, 55]].sum() >= 2
    assert '["text","' in (tmp_path / "r" / "report.html").read_text()


class FaceDataset:
    """What `datasets.Dataset` has of interest here: `to_pandas`, and `features` with the names of classes."""

    def __init__(self, frame: pd.DataFrame) -> None:
        names = ("kitchen", "sport")
        self.features = {"theme": SimpleNamespace(names=names)}
        self.frame = frame.assign(theme=[names.index(each) for each in frame["theme"]])

    def to_pandas(self) -> pd.DataFrame:
        return self.frame.copy()


def test_tables_in_memory_are_read_like_files(tmp_path: Path) -> None:
    frame = reviews()
    frame.to_parquet(tmp_path / "r.parquet")
    expected = load(tmp_path / "r.parquet", label="theme")
    sources = [frame, frame.set_axis(np.arange(5, ROWS + 5)), {name: frame[name] for name in frame}, FaceDataset(frame)]
    for source in sources:
        data = load(source, label="theme", trusted=source)
        assert (data.classes, data.y.tolist(), data.features) == (
            expected.classes,
            expected.y.tolist(),
            expected.features,
        )
        assert np.array_equal(data.x, expected.x)
        assert np.array_equal(data.part("trusted")[0], expected.x)
    with pytest.raises(OptionError, match=r"label must be a column of source; got 'them'. Did you mean 'theme'"):
        load(frame, label="them")
    with pytest.raises(DataError, match=r"source must be a pandas.DataFrame, .* got list"):
        load([1, 2], label="theme")


def test_several_labels_in_a_row_are_refused_in_a_sentence() -> None:
    frame = reviews()
    frame["theme"] = [["sport", "news"]] * ROWS
    with pytest.raises(DataError, match=r"each label must be one class; got lists, such as .*Data with several labels"):
        load(frame, label="theme")
    classifier = DenoisingClassifier(steps=5)
    with pytest.raises(ValueError, match="1d array"):
        classifier.fit(np.zeros((20, 2)), np.ones((20, 2), int))
    with pytest.raises(ValueError, match="continuous"):
        classifier.fit(np.zeros((20, 2)), np.linspace(0, 1, 20))


def test_the_estimator_takes_tables_with_text_dates_and_holes() -> None:
    frame, new = reviews(), reviews(30, seed=4)
    y, x = frame["theme"], frame.drop(columns="theme")
    known = np.arange(ROWS) < 40
    model = DenoisingClassifier(steps=100, random_state=0).fit(x, y, trusted=known)
    assert list(model.feature_names_in_) == list(x.columns)
    assert model.n_features_in_ == 4
    assert np.mean(model.predict(new.drop(columns="theme")) == new["theme"]) > 0.95
    again = DenoisingClassifier(steps=100, random_state=0).fit(x[~known], y[~known], trusted=(x[known], y[known]))
    assert np.mean(again.predict(x) == y) > 0.95
    with pytest.raises(ValueError, match="feature names"):
        model.predict(x.drop(columns="text"))
    with pytest.raises(DataError, match="X must be a table with the columns of fit"):
        model.predict(np.zeros((3, 4)))


def test_a_table_of_finite_numbers_is_the_same_as_its_array() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    known = np.arange(60) < 20
    found = [
        DenoisingClassifier(steps=20, random_state=0).fit(each, y, trusted=known).importance_
        for each in (x, pd.DataFrame(x, columns=list("abc")))
    ]
    assert found[0].tolist() == found[1].tolist()


def test_text_needs_one_label_for_each_row_and_scaled_numbers() -> None:
    frame = reviews()
    y, x, known = frame["theme"], frame.drop(columns="theme"), np.arange(ROWS) < 40
    for labels in (y[:-3], [*y.tolist(), "sport"]):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            DenoisingClassifier(steps=5).fit(x, labels, trusted=known)
    with pytest.raises(OptionError, match="standardize must be True for a table with text"):
        DenoisingClassifier(steps=5, standardize=False).fit(x, y, trusted=known)


def test_tables_whose_columns_are_numbered_are_cleaned_and_predicted(tmp_path: Path) -> None:
    frame = reviews().rename(columns={"text": 0, "price": 1, "day": 2, "place": 3})
    data = load(frame, label="theme")
    rows = new_rows(data.transformer, frame.drop(columns="theme"), data.x.shape[1:])
    assert np.array_equal(rows.x, data.x.numpy())
    assert rows.notes == ()
    assert new_rows(data.transformer, frame.assign(place="x"), data.x.shape[1:]).notes == (
        "Not read, because the run does not use them: theme, place.",
    )
    assert np.array_equal(data.transformer.transform(frame), data.x.numpy())
    assert data.transformer.unknown(frame.replace({3: {"north": "east"}})) == {"3": int((frame[3] == "north").sum())}
    with pytest.raises(DataError, match="the data has no column '1', which the main data have"):
        new_rows(data.transformer, frame.drop(columns=1), data.x.shape[1:])
    known = np.arange(ROWS) < 40
    x, y = frame.drop(columns="theme"), frame["theme"]
    model = DenoisingClassifier(steps=60, random_state=0).fit(x, y, trusted=known)
    assert np.mean(model.predict(x) == y) > 0.9


def test_every_source_of_load_has_a_transformer_for_new_rows() -> None:
    assert load("digits").transformer is not None
