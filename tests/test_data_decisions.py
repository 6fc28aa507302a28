"""Decisions of the review page applied to their source: what changes, what stays, what is refused."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bilevel.data import Labelled, apply_decisions, decisions, load, split_trusted
from bilevel.errors import DataError, OptionError

N = 12
NAMES = ["ant", "bee", "cow"] * 4
X = np.random.default_rng(0).random((N, 3))
Rows = list[tuple[Any, ...]]


def decide(folder: Path, rows: Rows, keys: Sequence[str] = ()) -> Path:
    """Write decisions; a key that is a number stands for that one of `keys`."""
    path = folder / "decisions.csv"
    if keys:
        rows = [(row[0], keys[int(row[1])] if 0 <= int(row[1]) < len(keys) else row[1], *row[2:]) for row in rows]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("index", "key", "decision", "label"), *rows])
    return path


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez_compressed(folder / "set.npz", x=X, y=np.array(NAMES), **arrays)
    return folder / "set.npz"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


FEW: Rows = [(0, "0", "drop", "ant"), (4, "4", "relabel", "cow"), (5, "5", "keep", "cow"), (11, "11", "drop", "")]
LEFT = ["bee", "cow", "ant", "cow", "cow", "ant", "bee", "cow", "ant", "bee"]


def test_npz_keeps_its_other_arrays(tmp_path: Path) -> None:
    source = npz(tmp_path, x_test=X[:2], y_test=np.array(["ant", "bee"]), about=np.array("words"), ids=np.arange(N))
    before = source.read_bytes()
    done = apply_decisions(source, decide(tmp_path, FEW, load(source).keys), tmp_path / "new" / "clean.npz")
    assert (done.rows, done.dropped, done.relabelled, done.unchanged) == (12, 2, 1, 9)
    assert done.notes == ("ids has a value for each row of x and was not cut.",)
    assert source.read_bytes() == before
    with np.load(done.out, allow_pickle=False) as new:
        assert sorted(new.files) == ["about", "ids", "x", "x_test", "y", "y_test"]
        assert new["x"].tolist() == X[1:11].tolist()
        assert new["y"].tolist() == LEFT
        assert new["about"] == "words"
        assert new["ids"].tolist() == list(range(N))
        assert new["x_test"].tolist() == X[:2].tolist()
    assert load(done.out).count == 10
    source = npz(tmp_path, about=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(DataError, match="Python objects, which are not read"):
        apply_decisions(source, tmp_path / "decisions.csv", tmp_path / "other.npz")


def test_csv_keeps_the_text_of_every_other_cell(tmp_path: Path) -> None:
    source = tmp_path / "set.csv"
    rows = [f'{i * i % 7:03d},{name},"a, ""{i}"" 5\n"\r\n' for i, name in enumerate(NAMES[:9])]
    text = '\ufeffa,"label",note\r\n' + "".join(rows) + '\r\n004,"ant",5" pipe\r\n02,bee,"x\ry"\r\n011,cow,y'
    source.write_bytes(text.encode())
    decisions = decide(tmp_path, FEW, load(source, label="label").keys)
    done = apply_decisions(source, decisions, tmp_path / "clean.csv", label="label")
    expected = [row for row in csv.reader(io.StringIO(text[1:], newline="")) if row]
    expected[5][1] = "cow"
    written = done.out.read_bytes().decode()
    assert written.startswith("\ufeffa,label,note\r\n001,bee,")
    assert list(csv.reader(io.StringIO(written[1:], newline=""))) == [expected[0], *expected[2:-1]]
    assert expected[10] == ["004", "ant", '5" pipe']
    again = load(done.out, label="label")
    assert [again.classes[c] for c in again.y] == LEFT


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_writes_labels_as_the_file_writes_them(tmp_path: Path, delimiter: str) -> None:
    source = tmp_path / "set.csv"
    rows = [f"{i * i % 7}{delimiter}{'01' if i % 2 else '02'}\n" for i in range(N)]
    source.write_text("".join([f"a{delimiter}kind\n", *rows]))
    keys = load(source, label="kind").keys
    decisions = decide(tmp_path, [(0, "0", "relabel", "1"), (1, "1", "relabel", "1")], keys)
    done = apply_decisions(source, decisions, tmp_path / "clean.csv", label="kind")
    assert (done.relabelled, done.unchanged) == (1, 11)
    assert done.out.read_text() == source.read_text().replace("02", "01", 1)


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int8(), pa.string()), pa.large_string()])
def test_parquet_keeps_types_and_compression(tmp_path: Path, kind: pa.DataType) -> None:
    source = tmp_path / "set.parquet"
    table = pa.table(
        {"a": pa.array(X[:, 0], pa.float32()), "label": pa.array(NAMES).cast(kind), "l": [[i] for i in range(N)]}
    )
    pq.write_table(table.replace_schema_metadata({"who": "me"}), source, compression="ZSTD", row_group_size=5)
    decisions = decide(tmp_path, FEW, load(source, label="label").keys)
    done = apply_decisions(source, decisions, tmp_path / "clean.parquet", label="label")
    with pq.ParquetFile(done.out) as file:
        new = file.read()
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert new.schema.equals(pq.read_schema(source), check_metadata=True)
    assert new["label"].to_pylist() == LEFT
    assert new["a"].to_pylist() == table["a"].to_pylist()[1:11]
    assert new["l"].to_pylist() == [[i] for i in range(1, 11)]
    frame = pd.DataFrame({"a": X[:, 0], "label": NAMES})
    frame.to_parquet(tmp_path / "frame.parquet")
    decisions = decide(tmp_path, FEW, load(tmp_path / "frame.parquet", label="label").keys)
    done = apply_decisions(tmp_path / "frame.parquet", decisions, tmp_path / "f.parquet", label="label")
    assert pd.read_parquet(done.out)["label"].tolist() == LEFT


def pets(root: Path, train: str) -> Path:
    for name in ("cat", "dog"):
        for i in range(6):
            path = root / train / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (i, len(name), ord(name[0]))).save(path)
    (root / train / "cat" / "broken.png").write_bytes(b"broken")
    (root / "test" / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(root / "test" / "cat" / "t.png")
    return root


@pytest.mark.parametrize("train", ["", "train"])
def test_a_folder_is_copied_with_images_in_their_new_classes(tmp_path: Path, train: str) -> None:
    source = pets(tmp_path / "pets", train)
    at = f"{train}/" if train else ""
    before = files(source)
    decisions = [
        (0, f"{at}cat/0.png", "drop", ""),
        (1, f"{at}cat/1.png", "relabel", "dog"),
        (7, f"{at}dog/1.png", "drop", ""),
        (2, f"{at}cat/2.png", "relabel", "dog"),
    ]
    (tmp_path / "out").mkdir()
    done = apply_decisions(source, decide(tmp_path, decisions), tmp_path / "out")
    assert (done.dropped, done.relabelled) == (2, 2)
    expected = {name: content for name, content in before.items() if name != f"{at}cat/0.png"}
    expected[f"{at}dog/1.png"] = expected.pop(f"{at}cat/1.png")
    expected[f"{at}dog/2-from-cat.png"] = expected.pop(f"{at}cat/2.png")
    assert files(done.out) == expected
    assert files(source) == before
    with pytest.raises(OptionError, match="must not lie in"):
        apply_decisions(source, tmp_path / "decisions.csv", source / "clean")


def test_a_named_set_becomes_an_npz_file(tmp_path: Path) -> None:
    data = load("digits")
    shown = split_trusted(data, 100, 0)
    row = 50  # as the page shows it, after a split
    name = data.classes[int(shown.y[row]) - 1]
    decisions = decide(tmp_path, [(shown.positions[row], shown.keys[row], "relabel", name)])
    again = load(apply_decisions("digits", decisions, tmp_path / "digits.npz").out)
    assert torch.equal(again.x, data.x)
    assert again.classes == data.classes
    assert torch.nonzero(again.y != data.y).flatten().tolist() == [shown.positions[row]]
    assert again.test is not None
    assert data.test is not None
    assert torch.equal(again.test[0], data.test[0])
    assert torch.equal(again.test[1], data.test[1])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(12, "12", "keep", "ant")], "line 2: index must be a whole number from 0 to 11; got '12'"),
        ([(-1, "0", "keep", "ant")], "line 2: index must be"),
        ([("one", "1", "keep", "bee")], "line 2: index must be"),
        ([(1, "1", "keep", "bee"), (2, "3", "keep", "cow")], "line 3: row 2 .* the key '2-.*', but the line says '3-"),
        ([(1, "1", "keep", "bee"), (1, "1", "drop", "")], "line 3: index 1 was decided in line 2 already"),
        ([(1, "1", "remove", "bee")], "line 2: decision must be one of keep, drop, relabel; got 'remove'"),
        ([(1, "1", "relabel", "emu")], "line 2: label must be one of the classes ant, bee, cow; got 'emu'"),
        ([(1, "1", "relabel", "")], "line 2: label must be"),
        ([(1, "1", "keep", "ant")], "line 2: row 1 is kept with the label 'ant', but has 'bee'"),
        ([(1, "1")], "line 2 has 2 cells"),
        ([(i, str(i), "drop", "") for i in range(N)], "drops all 12 rows"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_nothing_is_written(tmp_path: Path, rows: Rows, said: str) -> None:
    source = npz(tmp_path)
    decisions = decide(tmp_path, rows, load(source).keys)
    with pytest.raises(DataError, match=said):
        apply_decisions(source, decisions, tmp_path / "clean.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decisions.csv", "set.npz"]


def test_what_cannot_be_written_or_read_is_refused(tmp_path: Path) -> None:
    source = npz(tmp_path)
    decisions = decide(tmp_path, FEW, load(source).keys)
    before = source.read_bytes()
    with pytest.raises(OptionError, match="out must be new"):
        apply_decisions(source, decisions, source)
    assert source.read_bytes() == before
    with pytest.raises(OptionError, match=r"out must end in \.npz"):
        apply_decisions(source, decisions, tmp_path / "clean.csv")
    (tmp_path / "full.npz").mkdir()
    (tmp_path / "full.npz" / "file").touch()
    with pytest.raises(OptionError, match="out must be new"):
        apply_decisions(source, decisions, tmp_path / "full.npz")
    with pytest.raises(DataError, match="cannot be written"):
        apply_decisions(source, decisions, source / "below.npz")
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        apply_decisions(source, tmp_path / "none.csv", tmp_path / "clean.npz")
    decisions.write_text("index,key,label\n")
    with pytest.raises(DataError, match="decision is missing"):
        apply_decisions(source, decisions, tmp_path / "clean.npz")
    decisions.write_bytes(b"index,key,decision,label\n\xff")
    with pytest.raises(DataError, match="cannot be read"):
        apply_decisions(source, decisions, tmp_path / "clean.npz")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = pets(tmp_path / "pets", "")
    data = load(source)
    change = decisions.Change(np.ones(data.count, bool), data.y.numpy(), data.y.numpy(), np.zeros(data.count, bool))
    (source / "dog" / "5.png").unlink()
    (source / "dog" / "5.png").symlink_to(tmp_path / "out" / "none")
    with pytest.raises(RuntimeError), decisions.new_file_or_folder(tmp_path / "out") as temporary:  # noqa: PT012
        decisions.rewrite_folder(source, temporary, change, data)
        assert temporary.is_dir()
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pets"]


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_decisions_on_rows_that_have_moved_are_refused(tmp_path: Path, form: str) -> None:
    """Rows of a table or an array have no name: a checksum tells them apart."""
    label = "label" if form == "csv" else None
    for name, order in (("a", range(N)), ("b", reversed(range(N)))):
        rows = list(order)
        if form == "npz":
            np.savez(tmp_path / f"{name}.npz", x=X[rows], y=np.array(NAMES)[rows])
        else:
            frame = pd.DataFrame({"a": X[rows, 0], "b": X[rows, 1], "label": np.array(NAMES)[rows]})
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
    decisions = decide(tmp_path, FEW, load(tmp_path / f"a.{form}", label=label).keys)
    with pytest.raises(DataError, match="made for other data"):
        apply_decisions(tmp_path / f"b.{form}", decisions, tmp_path / f"new.{form}", label=label)
    once = apply_decisions(tmp_path / f"a.{form}", decisions, tmp_path / f"new.{form}", label=label).out
    with pytest.raises(DataError, match="made for other data"):
        apply_decisions(once, decisions, tmp_path / f"twice.{form}", label=label)


def as_told(data: Labelled, told: dict[int, tuple[str, int]]) -> tuple[list[int], list[str]]:
    rows = [i for i in range(data.count) if told.get(i, ("keep", 0))[0] != "drop"]
    return rows, [
        data.classes[told[i][1]] if told.get(i, ("", 0))[0] == "relabel" else data.classes[data.y[i]] for i in rows
    ]


CELL = st.text(st.sampled_from("ab ,;\"\n'é1\t"), max_size=5)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_csv_holds_what_was_told_and_the_rest_as_it_was(data: st.DataObject) -> None:
    n = data.draw(st.integers(10, 15))
    names = data.draw(st.lists(st.sampled_from(["x", "y,z", 'q"q', "two\nlines"]), min_size=n, max_size=n))
    cells = data.draw(st.lists(CELL, min_size=n, max_size=n))
    told = data.draw(
        st.dictionaries(
            st.integers(0, n - 1),
            st.tuples(st.sampled_from(["keep", "drop", "relabel"]), st.integers(0, 9)),
            max_size=n - 1,
        )
    )
    with TemporaryDirectory() as folder:
        source = Path(folder) / "set.csv"
        with open(source, "w", newline="", encoding="utf-8") as file:
            end = data.draw(st.sampled_from(["\n", "\r\n"]))
            quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
            rows = [[cell, name, i * i % 5] for i, (cell, name) in enumerate(zip(cells, names, strict=True))]
            csv.writer(file, lineterminator=end, quoting=quoting).writerows([["text", "label", "n"], *rows])
        try:
            found = load(source, label="label")
        except DataError:
            return
        told = {i: (what, c % len(found.classes)) for i, (what, c) in told.items()}
        lines = [(i, str(i), what, found.classes[found.y[i] if what == "keep" else c]) for i, (what, c) in told.items()]
        decisions = decide(Path(folder), lines, found.keys)
        done = apply_decisions(source, decisions, Path(folder) / "new.csv", label="label")
        kept, labels = as_told(found, told)
        with open(done.out, newline="", encoding="utf-8") as file:
            new = list(csv.reader(file))
    assert new[1:] == [[cells[i], label, str(i * i % 5)] for i, label in zip(kept, labels, strict=True)]
    assert done.dropped == n - len(kept)
    assert done.relabelled == sum(found.classes[found.y[i]] != label for i, label in zip(kept, labels, strict=True))
    assert done.unchanged == n - done.dropped - done.relabelled
