""".npz files: shapes and types that are read, what is refused, and files that are broken."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bilevel.data import load
from bilevel.errors import DataError, OptionError

RANDOM = np.random.default_rng(0)
Y = np.arange(12) % 3


def save(folder: Path, name: str = "set.npz", **arrays: object) -> Path:
    path = folder / name
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 5, 6), (12, 1, 5, 6)),
        ((12, 5, 6, 3), (12, 3, 5, 6)),
        ((12, 5, 6, 1), (12, 1, 5, 6)),
        ((12, 3, 5, 6), (12, 3, 5, 6)),
        ((12, 1, 5, 6), (12, 1, 5, 6)),
        ((12, 4, 5, 6), (12, 4, 5, 6)),
        ((12, 5, 6, 4), (12, 4, 5, 6)),
    ],
)
def test_bytes_are_images_with_channels_first(tmp_path: Path, shape: tuple[int, ...], expected: object) -> None:
    x = RANDOM.integers(0, 256, shape, np.uint8)
    data = load(save(tmp_path, x=x, y=Y))
    assert data.kind == "images"
    assert data.x.shape == expected
    assert data.x.dtype == torch.float32
    where = data.x[7, -1, 4, 5]
    last = x[7, 4, 5] if x.ndim == 3 else x[7, -1, 4, 5] if shape == expected else x[7, 4, 5, -1]
    assert float(where) == pytest.approx(last / 255)


def test_fractions_from_0_to_1_stay_and_other_ranges_are_brought_there(tmp_path: Path) -> None:
    x = RANDOM.random((12, 4, 4)).astype(np.float32)
    data = load(save(tmp_path, x=x, y=Y))
    assert torch.equal(data.x[:, 0], torch.from_numpy(x))
    assert data.notes == ()
    wide = load(save(tmp_path, x=4 * x - 2, y=Y, x_test=np.full((1, 4, 4), 9, np.float32), y_test=[1]))
    assert (float(wide.x.min()), float(wide.x.max())) == (0, 1)
    assert "brought to [0, 1]" in wide.notes[0]
    assert wide.test is not None
    assert torch.equal(wide.test[0], torch.ones(1, 1, 4, 4))
    whole = load(save(tmp_path, x=(x * 200).astype(np.int64), y=Y))
    assert torch.allclose(whole.x[:, 0], torch.from_numpy((x * 200).astype(np.int64) / 255).float())


def test_columns_are_scaled_by_the_main_part_alone(tmp_path: Path) -> None:
    x = RANDOM.normal(5, 3, (12, 4))
    x[:, 2] = 7
    x_test = np.array([[5.0, 1e9, 7, 0]])
    data = load(save(tmp_path, x=x, y=Y, x_test=x_test, y_test=[2]))
    assert data.kind == "arrays"
    assert data.x.shape == (12, 3)
    assert data.notes == ("1 of 4 columns is constant and was left out.",)
    assert torch.allclose(data.x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(data.x.std(0, correction=0), torch.ones(3), atol=1e-6)
    assert data.test is not None
    mean, deviation = x.mean(0), x.std(0)
    expected = [(5 - mean[0]) / deviation[0], 10, (0 - mean[3]) / deviation[3]]
    assert data.test[0][0].tolist() == pytest.approx(expected, rel=1e-5)
    assert data.features == ("column 0", "column 1", "column 3")
    assert data.transformer is not None
    assert data.transformer.transform(x_test)[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        ([-1, 1] * 6, ("-1", "1")),
        ([10, 9] * 6, ("9", "10")),
        (["b", "a"] * 6, ("a", "b")),
        ([b"b", b"a"] * 6, ("a", "b")),
        ([True, False] * 6, ("False", "True")),
        ([2.0, 1.0] * 6, ("1", "2")),
        (["10", "9"] * 6, ("9", "10")),
        ([[3], [4]] * 6, ("3", "4")),
        ([0.5, 1.5] * 6, ("0.5", "1.5")),
    ],
)
def test_labels_are_sorted_by_value_or_name(tmp_path: Path, y: list[object], classes: tuple[str, ...]) -> None:
    data = load(save(tmp_path, x=RANDOM.random((12, 2)), y=np.array(y)))
    assert data.classes == classes
    assert data.y.dtype == torch.int64
    first = y[0][0] if isinstance(y[0], list) else y[0].decode() if isinstance(y[0], bytes) else y[0]
    same = int(first) if isinstance(first, float) and first.is_integer() else first
    assert data.classes[data.y[0]] == str(same)


def test_trusted_and_test_may_be_inside_or_in_further_files(tmp_path: Path) -> None:
    x, few = RANDOM.random((12, 2)), RANDOM.random((3, 2))
    inside = load(save(tmp_path, x=x, y=Y, x_trusted=few, y_trusted=[0, 1, 2], x_test=few, y_test=[2, 2, 2]))
    main = save(tmp_path, "main.npz", x=x, y=Y)
    more = save(tmp_path, "more.npz", x=few, y=[0, 1, 2])
    apart = load(str(main), trusted=more)
    assert inside.trusted is not None
    assert apart.trusted is not None
    assert inside.test is not None
    assert torch.equal(inside.trusted[0], apart.trusted[0])
    assert inside.trusted[1].tolist() == apart.trusted[1].tolist() == [0, 1, 2]
    assert inside.test[1].tolist() == [2, 2, 2]
    assert apart.test is None
    with pytest.raises(OptionError, match="test is given twice"):
        load(tmp_path / "set.npz", test=more)


GOOD = RANDOM.random((12, 2))
HOLED = np.where(np.arange(24).reshape(12, 2) == 7, np.nan, GOOD)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": GOOD}, "array named 'y'; it holds x"),
        ({"x": GOOD, "y": Y[:-1]}, "x has 12 rows and y has 11"),
        ({"x": HOLED, "y": Y}, "has 1 NaN or infinite value, in 1 row; the first is row 3"),
        ({"x": GOOD.astype(str), "y": Y}, "must hold real numbers"),
        ({"x": GOOD, "y": np.where(Y == 1, np.nan, Y)}, r"4 of 12 labels are .* in rows 1, 4, 7, \.\.\. \(from 0\)"),
        ({"x": GOOD, "y": np.zeros(12)}, "at least 2 classes are needed; every label is '0'"),
        ({"x": GOOD[:9], "y": Y[:9]}, "at least 10 rows are needed; there are 9"),
        ({"x": GOOD, "y": np.eye(12)}, "vector of labels"),
        ({"x": GOOD, "y": Y, "x_test": GOOD}, "both x_test and y_test; y_test is missing"),
        ({"x": GOOD, "y": Y, "x_test": GOOD, "y_test": Y + 1}, "labels '3' do not occur in the main part"),
        ({"x": GOOD, "y": Y, "x_test": GOOD[:, :1], "y_test": Y}, r"rows of shape \(2,\), as x has; got \(1,\)"),
        ({"x": np.zeros((12, 7, 5, 5)), "y": Y}, "1, 3 or 4 channels"),
        ({"x": np.zeros((12, 0)), "y": Y}, "none of length 0"),
        ({"x": np.ones((12, 3)), "y": Y}, "no column that varies"),
        ({"x": np.float64(3), "y": Y}, "1 to 4 dimensions"),
        ({"x": np.zeros((12, 2, 2), int), "y": Y, "x_test": np.zeros((1, 2, 2)), "y_test": [0]}, "whole numbers or"),
        ({"x": np.array([None] * 12), "y": Y}, "Python objects"),
        ({"x": np.zeros(30), "y": np.linspace(0, 1, 30)}, "looks like regression"),
        ({"x": np.zeros(30), "y": np.arange(30)}, "30 different values in 30 rows"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, arrays: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(save(tmp_path, **arrays))


def test_files_that_are_not_there_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.npz does not exist"):
        load(tmp_path / "none.npz")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"must be a \.npz, \.csv or \.parquet file"):
        load(tmp_path / "a.txt")
    main = save(tmp_path, x=GOOD, y=Y)
    with pytest.raises(OptionError, match="same form"):
        load(main, test=tmp_path)
    with pytest.raises(OptionError, match="label names a column"):
        load(main, label="y")
    np.save(tmp_path / "one.npy", GOOD)
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(DataError, match="it is not a whole archive"):
        load(tmp_path / "one.npz")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_broken_file_gives_a_data_error_or_is_read(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = save(Path(folder), x=GOOD, y=Y)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        said = ""
        try:
            load(path)
        except DataError as error:
            said = str(error)
        assert "\n" not in said


@settings(max_examples=150, deadline=None)
@example(x=np.zeros((1, 1, 1), bool), y=np.array(["0", *"\ud800" * 9]))  # half a character, which UTF-8 does not know
@given(
    x=hnp.arrays(
        st.one_of(hnp.floating_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), st.just(np.dtype(bool))),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=12),
    ),
    y=hnp.arrays(
        st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.unicode_string_dtypes()), st.integers(10, 12)
    ),
)
def test_any_arrays_are_read_as_finite_numbers_or_refused(x: np.ndarray, y: np.ndarray) -> None:
    x = np.resize(x, (len(y), *x.shape[1:]))
    with TemporaryDirectory() as folder:
        try:
            data = load(save(Path(folder), x=x, y=y))
        except DataError:
            return
    assert bool(data.x.isfinite().all())
    assert len(data.x) == len(data.y) == len(data.keys) == len(y)
    assert 0 <= int(data.y.min()) <= int(data.y.max()) < len(data.classes)
    if data.kind == "images":
        assert 0 <= float(data.x.min()) <= float(data.x.max()) <= 1
