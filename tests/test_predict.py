"""`bilevel predict` and `bilevel.load`: new rows are prepared and classified as the rows of the run were."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import bilevel
from bilevel import DataError, OptionError
from bilevel.applications.training import probabilities
from bilevel.cli.main import main
from bilevel.data import load
from bilevel.data.preparation import rules_from_json, rules_to_json

QUICK = ["--steps", "60", "--no-baselines"]
ROWS = 120


def denoise(*arguments: object) -> int:
    return main(["denoise", *map(str, arguments), *QUICK])


def predict(*arguments: object) -> int:
    return main(["predict", *map(str, arguments)])


def table(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Numbers with holes, dates, categories with rare values, and true or false; `kind` depends on size and colour."""
    rng = np.random.default_rng(seed)
    kind = np.arange(rows) % 2
    size = rng.normal(3 + 4 * kind, 1)
    size[::11] = np.nan
    colour = np.where(kind == 1, "red", np.array(["blue", "green"])[rng.integers(2, size=rows)]).astype(object)
    colour[5] = None
    return pd.DataFrame(
        {
            "size": size,
            "born": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(900, size=rows), unit="D"),
            "colour": colour,
            "code": [f"c{i:02d}" for i in rng.integers(30, size=rows)],
            "sold": rng.integers(2, size=rows) == 1,
            "kind": np.where(kind == 1, "ripe", "raw"),
        }
    )


@pytest.fixture(scope="module", params=["csv", "parquet"])
def run(request, tmp_path_factory) -> Path:
    """The run on a table whose first 40 rows are trusted; the data lie next to it."""
    folder, frame = tmp_path_factory.mktemp("run"), table()
    for name, part in (("main", frame[40:]), ("trusted", frame[:40])):
        path = folder / f"{name}.{request.param}"
        part.to_csv(path, index=False) if request.param == "csv" else part.to_parquet(path, index=False)
    main_file, trusted = folder / f"main.{request.param}", folder / f"trusted.{request.param}"
    assert denoise(main_file, "--label", "kind", "--trusted", trusted, "--out", folder / "r") == 0
    return folder / "r"


def test_predictions_on_a_table_are_those_of_the_network_on_inputs_as_load_prepares_them(run, capsys):
    source = next(run.parent.glob("main.*"))
    assert predict(run, source, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    with open(run / "predictions-main.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    data, trained = load(source, label="kind"), bilevel.load(run)
    expected = probabilities(trained.network, data.x).numpy()
    assert list(rows[0]) == ["index", "predicted_label", "probability of raw", "probability of ripe"]
    found = np.array([[float(row[f"probability of {name}"]) for name in data.classes] for row in rows])
    assert found == pytest.approx(expected, abs=1e-6)  # six decimals are written
    assert [row["predicted_label"] for row in rows] == [data.classes[i] for i in expected.argmax(1)]
    assert [row["index"] for row in rows] == [str(i) for i in range(ROWS - 40)]
    assert told["rows"] == ROWS - 40
    assert sum(told["predicted"].values()) == told["rows"]
    assert np.mean(trained.predict(source) == table()["kind"][40:]) > 0.9


def test_other_columns_are_named_and_not_read_and_missing_ones_refused(run, tmp_path, capsys):
    new = table(20, seed=1).drop(columns="kind")
    new.assign(price=1.5, shop="x").to_csv(tmp_path / "new.csv", index=False)
    assert predict(run, tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--json") == 0
    assert "Not read, because the run does not use them: price, shop." in json.loads(capsys.readouterr().out)["notes"]
    assert np.array_equal(bilevel.load(run).predict(new), bilevel.load(run).predict(tmp_path / "new.csv"))
    new.drop(columns="colour").to_csv(tmp_path / "less.csv", index=False)
    assert predict(run, tmp_path / "less.csv") == 1
    assert "less.csv has no column 'colour', which the main data have." in capsys.readouterr().err
    assert not (run / "predictions-less.csv").exists()


def test_unknown_categories_have_no_column_or_the_one_of_rare_values(run):
    trained, new = bilevel.load(run), table(20, seed=1)
    new["colour"], new["code"] = "violet", "c99"
    rows = trained.rows(new)
    assert rows.notes[-1] == "colour: 20 values do not occur in the run's data, and have no column."
    features = trained.rules.features
    of = {name: [i for i, each in enumerate(features) if each.startswith(name)] for name in ("colour", "code")}
    assert np.all(rows.x[:, of["colour"]] == 0)
    assert np.all(rows.x[:, of["code"]].sum(1) == 1)
    assert np.all(rows.x[:, features.index("code is another")] == 1)


def test_rules_are_the_same_after_a_way_through_json(run):
    source = next(run.parent.glob("main.*"))
    rules = load(source, label="kind").transformer
    assert rules_from_json(json.loads(json.dumps(rules_to_json(rules)))) == rules


def arrays(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    np.savez(folder / "data.npz", x=x[40:], y=y[40:], x_trusted=x[:40], y_trusted=y[:40])
    return folder / "data.npz"


def test_arrays_are_scaled_as_in_the_run(tmp_path, capsys):
    rng, y = np.random.default_rng(0), np.arange(ROWS) % 2
    x = np.column_stack([rng.normal(5, 3, ROWS) + 9 * y, np.ones(ROWS), rng.normal(size=ROWS)])
    assert denoise(arrays(tmp_path, x, y), "--out", tmp_path / "r") == 0
    np.savez(tmp_path / "new.npz", x=x)
    trained = bilevel.load(tmp_path / "r")
    assert trained.predict_proba(tmp_path / "new.npz").tolist() == trained.predict_proba(x).tolist()
    assert np.mean(trained.predict(x).astype(int) == y) > 0.9
    scaled = trained.rows(x).x
    assert scaled[:, 0] == pytest.approx((x[:, 0] - x[40:, 0].mean()) / x[40:, 0].std(), abs=1e-5)
    for wrong, said in ((x[:, :2], "must have 3 columns"), (x[:, :, None], "3 columns"), (x * np.nan, "finite")):
        with pytest.raises(DataError, match=said):
            trained.predict(wrong)
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    capsys.readouterr()
    assert predict(tmp_path / "r", tmp_path / "new.csv") == 1
    assert "must be an .npz file with an array x" in capsys.readouterr().err


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_a_folder_and_of_arrays_are_brought_to_the_form_of_the_run(tmp_path, channels):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    pixels = rng.integers(0, 60, (60, 12, 10, 3)).astype(np.uint8)
    pixels[y == 0, :, :5] += 180
    pixels[y == 1, :, 5:] += 180
    pixels = pixels if channels == 3 else pixels[..., 0]
    for i, (image, label) in enumerate(zip(pixels, y, strict=True)):
        place = tmp_path / "photos" / ("trusted" if i < 20 else "train") / ("left", "right")[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:03d}.png")
    assert denoise(tmp_path / "photos", "--out", tmp_path / "r") == 0
    trained = bilevel.load(tmp_path / "r")
    new = tmp_path / "new"
    (new / "deep").mkdir(parents=True)
    for i in range(6):
        image = Image.fromarray(pixels[i]).resize((20, 24), Image.Resampling.NEAREST)
        image.save(new / ("deep" if i % 2 else "") / f"{i}.png")
    (new / "9.png").write_bytes(b"no image")
    assert predict(tmp_path / "r", new) == 0
    with open(tmp_path / "r" / "predictions-new.csv", newline="") as file:
        found = {row["file"]: row["predicted_label"] for row in csv.DictReader(file)}
    assert found == {f"{'deep/' * (i % 2)}{i}.png": ("left", "right")[y[i]] for i in range(6)}
    np.savez(tmp_path / "a.npz", x=pixels[20:], y=y[20:], x_trusted=pixels[:20], y_trusted=y[:20])
    assert denoise(tmp_path / "a.npz", "--out", tmp_path / "s") == 0
    again = bilevel.load(tmp_path / "s")
    assert again.predict(pixels).astype(int).tolist() == y.tolist()
    with pytest.raises(DataError, match="whole numbers from 0 to 255"):
        again.predict(pixels / 255)
    with pytest.raises(DataError, match="inputs of shape"):
        again.predict(pixels[:, :5])
    assert trained.shape == again.shape == (channels, 12, 10)


def test_a_named_set_is_predicted_from_the_file_of_its_noisy_data(tmp_path):
    assert denoise("digits", "--noise", 0.2, "--trusted", 100, "--out", tmp_path / "r") == 0
    trained, data = bilevel.load(tmp_path / "r"), load("digits")
    with np.load(tmp_path / "r" / "noisy.npz") as noisy:
        x, x_test = noisy["x"], noisy["x_test"]
    assert trained.predict_proba(tmp_path / "r" / "noisy.npz").tolist() == trained.predict_proba(x).tolist()
    expected = probabilities(trained.network, data.test[0]).double()
    assert trained.predict_proba(x_test) == pytest.approx((expected / expected.sum(1, keepdim=True)).numpy())


def test_a_network_of_a_python_file_is_passed_again(tmp_path, capsys):
    rng, y = np.random.default_rng(0), np.arange(ROWS) % 2
    x = rng.normal(size=(ROWS, 3)) + 4 * y[:, None]
    net = tmp_path / "net.py"
    net.write_text("from torch import nn\ndef make(shape, classes):\n    return nn.Linear(shape[0], classes)\n")
    assert denoise(arrays(tmp_path, x, y), "--model", f"{net}:make", "--out", tmp_path / "r") == 0
    np.savez(tmp_path / "new.npz", x=x)
    capsys.readouterr()
    assert predict(tmp_path / "r", tmp_path / "new.npz") == 2
    assert "--model must be the network that" in capsys.readouterr().err
    assert predict(tmp_path / "r", tmp_path / "new.npz", "--model", f"{net}:make") == 0
    with pytest.raises(OptionError, match="model must be the network"):
        bilevel.load(tmp_path / "r")
    found = bilevel.load(tmp_path / "r", model=torch.nn.Linear(3, 2)).predict(x)
    assert np.mean(found.astype(int) == y) > 0.9


def test_what_is_no_run_or_no_new_file_is_refused_in_a_sentence(run, tmp_path, capsys):
    assert predict(tmp_path, tmp_path) == 1
    assert "must hold a finished run of `bilevel denoise`" in capsys.readouterr().err
    assert predict(run, tmp_path / "none.csv") == 1
    assert "none.csv does not exist." in capsys.readouterr().err
    (tmp_path / "empty.csv").write_text("")
    assert predict(run, tmp_path / "empty.csv") == 1
    assert "empty.csv is empty." in capsys.readouterr().err
    (tmp_path / "there.csv").write_text("mine")
    assert predict(run, tmp_path / "empty.csv", "--out", tmp_path / "there.csv") == 2
    assert "--out must be a new .csv file" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("result.json", "preparation.json", "model.safetensors"):
        (broken / name).write_bytes((run / name).read_bytes()[: -40 if name == "model.safetensors" else None])
    assert predict(broken, tmp_path / "empty.csv") == 1
    assert "cannot be loaded" in capsys.readouterr().err
