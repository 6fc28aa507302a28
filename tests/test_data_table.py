"""Tables: how columns become numbers, what is left out or refused, and that nothing leaks from other parts."""

from __future__ import annotations

import datetime
import pickle
import string
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.data import load
from bilevel.errors import BilevelError, DataError, OptionError

N = 40
LABELS = ["yes", "no", "no", "perhaps"] * (N // 4)
NUMBERS = np.random.default_rng(0).normal(3, 2, N)


def write(folder: Path, name: str = "set.csv", **columns: Any) -> Path:
    path = folder / name
    frame = pd.DataFrame({"label": LABELS[: len(next(iter(columns.values()), LABELS))], **columns})
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["set.csv", "set.parquet"])
def test_numbers_are_scaled_and_missing_ones_marked(tmp_path: Path, name: str) -> None:
    holed = NUMBERS.copy()
    holed[[3, 5]] = np.nan
    data = load(write(tmp_path, name, a=NUMBERS, b=holed), label="label")
    assert (data.kind, data.classes, data.x.shape) == ("table", ("no", "perhaps", "yes"), (N, 3))
    assert data.y[:4].tolist() == [2, 0, 0, 1]
    assert data.x[:, 0].numpy() == pytest.approx((NUMBERS - NUMBERS.mean()) / NUMBERS.std(), abs=1e-5)
    assert data.x[:, 2].nonzero().flatten().tolist() == [3, 5]
    filled = np.where(np.isnan(holed), np.nanmedian(holed), holed)
    assert data.x[:, 1].numpy() == pytest.approx((filled - filled.mean()) / filled.std(), abs=1e-5)
    assert [key.split("-")[0] for key in data.keys[:2]] == ["0", "1"]
    assert list(data.fields) == ["a", "b"]
    assert data.fields["a"].tolist() == pytest.approx(NUMBERS.tolist())


def test_infinite_numbers_count_as_missing(tmp_path: Path) -> None:
    wild = NUMBERS.copy()
    wild[[3, 5]] = np.inf, -np.inf
    data = load(write(tmp_path, a=wild), label="label")
    assert data.x[:, 1].nonzero().flatten().tolist() == [3, 5]
    assert bool(data.x.isfinite().all())


@pytest.mark.parametrize("name", ["set.csv", "set.parquet"])
def test_text_becomes_a_column_for_each_frequent_value(tmp_path: Path, name: str) -> None:
    colour = (["red", "red", "blue", None] * N)[:N]
    data = load(write(tmp_path, name, colour=colour, flag=[True, False] * (N // 2)), label="label")
    names = ("colour = blue", "colour = red", "colour is missing", "flag = False", "flag = True")
    assert data.features == names
    assert data.x[:4].tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [0, 0, 1, 1, 0]]


def test_rare_values_share_a_column(tmp_path: Path) -> None:
    letters = [*(2 * string.ascii_lowercase[:20]), *string.ascii_uppercase[:5], *("a" * 15)]
    path = tmp_path / "set.csv"
    pd.DataFrame({"c": letters, "label": (["x", "y"] * 60)[:60]}).to_csv(path, index=False)
    pd.DataFrame({"c": ["a", "b", "E", "new", None], "label": ["x", "y", "x", "y", "x"]}).to_csv(tmp_path / "t.csv")
    data = load(path, label="label", test=tmp_path / "t.csv")
    assert data.x.shape == (60, 21)
    assert data.x.sum(1).tolist() == [1] * 60
    assert data.x[:, 20].sum() == 5
    assert data.features[19:] == ("c = t", "c is another")
    assert data.test is not None
    where = [row.nonzero().flatten().tolist() for row in data.test[0]]
    assert where == [[0], [1], [20], [20], [20]]


def test_columns_without_use_are_left_out_with_a_note_and_kept_for_people(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "set.parquet",
        a=NUMBERS,
        row=np.arange(1, N + 1),
        same=[7] * N,
        word=["w"] * N,
        none=[np.nan] * N,
        who=[f"Name {i}" for i in range(N)],
        nested=[[i] for i in range(N)],
    )
    data = load(path, label="label")
    assert data.x.shape == (N, 1)
    (note,) = data.notes
    for said in (
        "row (counts the rows)",
        "same (is constant)",
        "word (is constant)",
        "none (has no values)",
        "who (is text whose values nearly all differ)",
        "nested (holds nested or mixed values)",
    ):
        assert said in note
    assert data.fields["who"][3] == "Name 3"


def test_a_few_values_that_are_no_numbers_count_as_missing_and_are_named(tmp_path: Path) -> None:
    size = [str(i * i) for i in range(N)]
    size[3] = "unknown"
    ids = np.arange(200, 200 + N)
    test = tmp_path / "t.csv"
    pd.DataFrame({"size": ["4", "?", None], "a": [1, 2, 3], "label": ["yes", "no", "no"]}).to_csv(test, index=False)
    data = load(write(tmp_path, size=size, a=NUMBERS, id=ids), label="label", test=test)
    assert data.notes == (
        "Left out of the inputs: id (counts the rows).",
        f"size: 1 of {N} values, such as 'unknown', is not a number and counts as missing.",
    )
    assert data.features == ("size", "a", "size is missing")
    assert data.x[:, 2].nonzero().flatten().tolist() == [3]
    assert data.test is not None
    assert data.test[0][:, 2].tolist() == [0, 1, 1]
    assert data.test[0][0, 0] == data.x[2, 0]


def test_text_with_more_that_is_no_number_stays_text(tmp_path: Path) -> None:
    size = ["1", "2", "many"] * N
    data = load(write(tmp_path, size=size[:N], a=NUMBERS), label="label")
    assert data.features == ("a", "size = 1", "size = 2", "size = many")


def test_a_table_without_a_column_to_learn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column to learn from except the labels: same \(is constant\)"):
        load(write(tmp_path, same=[7] * N), label="label")
    with pytest.raises(DataError, match=r"no column to learn from except the labels\."):
        load(write(tmp_path), label="label")


def test_dates_and_durations_become_numbers(tmp_path: Path) -> None:
    days = [datetime.datetime(2020, 1, 1) + datetime.timedelta(days=i * i) for i in range(N)]
    expected = np.arange(N) ** 2.0
    expected = (expected - expected.mean()) / expected.std()
    path = write(
        tmp_path,
        "set.parquet",
        stamp=days,
        day=[d.date() for d in days],
        text=[d.date().isoformat() for d in days],
        long=[d - days[0] for d in days],
        price=[Decimal(i * i) for i in range(N)],
    )
    data = load(path, label="label")
    assert data.x.shape == (N, 5)
    for column in data.x.T:
        assert column.numpy() == pytest.approx(expected, abs=1e-5)
    text = load(write(tmp_path, day=[d.date().isoformat() for d in days]), label="label")
    assert torch.allclose(text.x[:, 0], data.x[:, 0])


def test_nothing_of_the_test_part_reaches_the_main_one(tmp_path: Path) -> None:
    main = write(tmp_path, a=NUMBERS, c=["u", "v"] * (N // 2))
    alone = load(main, label="label")
    wild = write(tmp_path, "test.csv", a=NUMBERS * 1e6, c=["strange"] * N)
    beside = load(main, label="label", test=wild, trusted=main)
    assert torch.equal(alone.x, beside.x)
    assert beside.trusted is not None
    assert torch.equal(beside.trusted[0], alone.x)
    assert beside.test is not None
    assert beside.test[0].abs().max() == 10
    assert beside.test[0][:, 1:].sum() == 0


def test_codes_with_leading_zeros_mean_the_same_in_every_part(tmp_path: Path) -> None:
    main = write(tmp_path, code=["01", "x2"] * (N // 2))
    part = write(tmp_path, "part.csv", code=["01"] * N)
    data = load(main, label="label", test=part)
    assert data.test is not None
    assert data.test[0].tolist() == [data.x[0].tolist()] * N
    holed = write(tmp_path, flag=["TRUE", "FALSE", "", "TRUE"] * (N // 4))
    part = write(tmp_path, "part.csv", flag=["TRUE"] * N)
    data = load(holed, label="label", test=part)
    assert data.test is not None
    assert data.test[0].tolist() == [data.x[0].tolist()] * N


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": ["word"] * N}, "column 'a' must hold numbers, as in the main data; got 'word'"),
        ({"b": NUMBERS}, "has no column 'a'"),
        ({"a": NUMBERS, "label": ["yes", "never"] * (N // 2)}, "labels 'never' do not occur in the main part"),
        ({"a": NUMBERS, "label": ["yes", None] * (N // 2)}, "20 of 40 labels are missing"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    main = write(tmp_path, a=NUMBERS)
    with pytest.raises(DataError, match=said):
        load(main, label="label", trusted=write(tmp_path, "part.csv", **columns))


def test_the_transformer_is_kept_and_prepares_new_rows_after_pickling(tmp_path: Path) -> None:
    data = load(write(tmp_path, a=NUMBERS, c=["u", "v"] * (N // 2)), label="label")
    transformer = pickle.loads(pickle.dumps(data.transformer))
    rows = pd.DataFrame({"other": [1, 2], "c": ["v", "new"], "a": NUMBERS[1:3]})
    new = transformer.transform(rows)
    assert new.dtype == np.float32
    assert new[0].tolist() == data.x[1].tolist()
    assert new[1].tolist() == [data.x[2, 0], 0, 0]
    with pytest.raises(DataError, match="the table has no column 'c', which the main data have"):
        transformer.transform(rows[["a"]])


def test_names_of_columns_can_be_any_text(tmp_path: Path) -> None:
    names = ["b\0", "", "missingindicator_x", "x", "x = u", "x is missing"]
    frame = pd.DataFrame({name: NUMBERS * (i + 1) ** 2 for i, name in enumerate(names)})
    frame["c\0"], frame["label"] = ["u", "v\0"] * (N // 2), LABELS
    frame.to_parquet(tmp_path / "set.parquet")
    assert load(tmp_path / "set.parquet", label="label").features == (*names, "c\0 = u", "c\0 = v\0")


def test_huge_and_tiny_numbers_are_scaled_without_overflow(tmp_path: Path) -> None:
    huge = np.where(np.arange(N) % 2, 1.7e308, -1.7e308)
    data = load(write(tmp_path, huge=huge, tiny=NUMBERS * 1e-300), label="label")
    assert data.x[:, 0].tolist() == pytest.approx(np.sign(huge).tolist())
    assert bool(data.x.isfinite().all())


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_are_found_by_the_label(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "set.csv"
    pd.DataFrame({"a": NUMBERS, "label": LABELS, "b,c": NUMBERS**2}).to_csv(path, index=False, sep=delimiter)
    assert load(path, label="label").x.shape == (N, 2)


@pytest.mark.parametrize(("name", "module"), [("set.csv", "pandas"), ("set.parquet", "pyarrow.parquet")])
def test_without_the_extra_packages_the_command_to_install_them_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    path = write(tmp_path, name, a=NUMBERS)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BilevelError, match=rf"This needs {module.split('.')[0]}: pip install 'bilevel\[tables\]'\."):
        load(path, label="label")


def test_optional_packages_are_imported_only_when_they_are_needed() -> None:
    packages = ("pandas", "pyarrow", "sklearn", "scipy", "PIL", "pooch", "matplotlib", "jinja2", "markupsafe")
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import bilevel.data, bilevel.data.class_images, bilevel.report.page, bilevel.report.review_page
for call in (lambda: bilevel.data.load("digits"), lambda: bilevel.report.page.fill("page.html")):
    try:
        call()
    except bilevel.errors.BilevelError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        f"This needs {name}: pip install 'bilevel[apps]'." for name in ("scikit-learn", "jinja2")
    ]


def test_the_label_must_be_a_column(tmp_path: Path) -> None:
    path = write(tmp_path, a=NUMBERS)
    with pytest.raises(OptionError, match=r"label must name the column of .*; its columns are label, a"):
        load(path)
    with pytest.raises(OptionError, match="Did you mean 'label'"):
        load(path, label="lable")
    path.write_text("label,label,a\n" + "x,y,1\n" * 20)
    with pytest.raises(DataError, match="more than one column named 'label'"):
        load(path, label="label")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (list(NUMBERS), "looks like regression"),
        ([None, *LABELS[1:]], r"1 of 40 labels is missing or not finite, in row 0 \(from 0\)\. Fill or remove it\."),
        (list(range(N)), "40 different values in 40 rows"),
        (["one"] * N, "at least 2 classes"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: list[object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(write(tmp_path, a=NUMBERS, label=labels), label="label")


def test_whole_and_true_or_false_labels_are_classes(tmp_path: Path) -> None:
    ten = load(write(tmp_path, a=NUMBERS, label=[2.0, 10.0] * (N // 2)), label="label")
    assert ten.classes == ("2", "10")
    truth = load(write(tmp_path, "set.parquet", a=NUMBERS, label=[True, False] * (N // 2)), label="label")
    assert truth.classes == ("False", "True")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"label,a\n",
        b'label,a\nx,"1\ny,2\n',
        b"label,a\n\xff\xfe,1\n",
        b"label,a\n" + b"x,1,2,3\n" * 20,
        b"label,a\nx,1\ny,2,3\n",
        b"\0" * 50,
    ],
)
def test_a_csv_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "set.csv"
    path.write_bytes(content)
    with pytest.raises((DataError, OptionError), match=r"set\.csv"):
        load(path, label="label")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 3000), at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_broken_parquet_file_gives_a_data_error_or_is_read(cut: int, at: int, byte: int) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder), "set.parquet", a=NUMBERS, c=LABELS)
        content = bytearray(path.read_bytes())
        content[at % len(content)] = byte
        path.write_bytes(content[: cut or None])
        said = ""
        try:
            load(path, label="label")
        except (DataError, OptionError) as error:
            said = str(error)
        assert "\n" not in said


CELLS = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.dates(),
    st.sampled_from(["2020-01-05", "2020-13-45", "NA", "1e400", "-0", "0x1", " ", '"', "a,b", "a\nb", "inf", "True"]),
)
ONE_KIND = st.sampled_from(
    [
        st.none(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.booleans(),
        st.text(max_size=8),
        st.dates(),
        st.datetimes(),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_table_is_read_as_finite_numbers_or_refused(data: st.DataObject) -> None:
    n = data.draw(st.integers(9, 30))
    names = data.draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), min_size=1, max_size=4, unique=True)
    )
    columns = {
        name: data.draw(st.lists(data.draw(st.one_of(st.just(CELLS), ONE_KIND)), min_size=n, max_size=n))
        for name in names
    }
    labels = data.draw(st.one_of(st.just((LABELS * 2)[:n]), st.lists(CELLS, min_size=n, max_size=n)))
    frame = pd.DataFrame({**columns, "label": labels}, dtype=object)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "set.csv"
        if data.draw(st.booleans()):
            frame.to_csv(path, index=False)
        else:
            path = path.with_suffix(".parquet")
            try:
                frame.convert_dtypes().to_parquet(path)
            except (ValueError, TypeError, OverflowError):  # Arrow wants columns of one type
                frame.map(str).to_parquet(path)
        try:
            found = load(path, label="label", test=path)
        except (DataError, OptionError):
            return
    assert found.x.dtype == torch.float32
    assert bool(found.x.isfinite().all())
    assert len(found.x) == found.count == len(found.keys)
    assert all(len(values) == found.count for values in found.fields.values())
    assert found.test is not None
    assert torch.equal(found.test[0], found.x)
    assert torch.equal(found.test[1], found.y)


def test_a_line_with_too_many_fields_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n1,2,p\n1,2,q\n1,2,3,q\n")
    with pytest.raises(DataError, match=r"cannot be read as a \.csv file \(Expected 3 fields in line 4, saw 4"):
        load(path, label="label")
