"""Named sets: where they are looked for, the readers of their files, and what is said where they are not."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from common import needs
from PIL import Image
from scipy.io import savemat

from bilevel.data import NAMES, load, named_sets
from bilevel.data.named_sets import BATCHES, IDX, MAT
from bilevel.errors import DataError, OptionError

RANDOM = np.random.default_rng(0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data: empty folders for the data and the cache, no system package, no server."""
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, known in named_sets.SETS.items():
        monkeypatch.setitem(named_sets.SETS, name, replace(known, address="http://127.0.0.1:9/", folder=None))
    return tmp_path


def idx(values: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def write_idx(folder: Path, n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    x, y = RANDOM.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10
    for name, values in zip(IDX, (x, y, x[:5], y[:5]), strict=True):
        (folder / name).write_bytes(gzip.compress(idx(values)))
    return x, y


def write_archive(folder: Path, extra: object = None) -> np.ndarray:
    """Six batches of 4 images in the layout of CIFAR-10's archive, pickled as Python 2 did it."""
    folder.mkdir(parents=True)
    x = RANDOM.integers(0, 256, (24, 3072), np.uint8)
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for i, name in enumerate(BATCHES):
            content = {
                b"data": x[4 * i : 4 * i + 4],
                b"labels": [i, 9, 0, 1],
                b"batch_label": b"batch",
                b"extra": extra,
            }
            data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return x


def test_digits_need_no_file() -> None:
    data = load("digits")
    assert data.test is not None
    assert data.x.shape == (1397, 1, 8, 8)
    assert data.test[0].shape == (400, 1, 8, 8)
    assert data.x.dtype == torch.float32
    assert (float(data.x.min()), float(data.x.max())) == (0, 1)
    assert int(torch.bincount(data.test[1]).min()) >= 38
    assert data.classes == tuple("0123456789")
    assert data.keys[:3] != ["0", "1", "2"]  # rows of the test part are gone
    assert data.positions.tolist() == list(range(1397))
    assert torch.equal(load("digits").x, data.x)


@needs("mnist")
def test_mnist_is_read_from_its_own_files() -> None:
    data = load("mnist")
    assert data.test is not None
    assert data.x.shape == (60000, 1, 28, 28)
    assert torch.bincount(data.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert len(data.test[1]) == 10000
    assert float(data.x.mean()) == pytest.approx(0.1307, abs=1e-4)


@needs("mnist")
def test_the_sums_of_mnist_are_those_of_the_files_at_hand() -> None:
    for name, expected in named_sets.SETS["mnist"].sums.items():
        content = (Path(os.environ["BILEVEL_DATA"]) / "mnist" / name).read_bytes()
        assert expected == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_fashion_mnist_is_read_from_the_debian_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not named_sets.FASHION_FOLDER.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    known = named_sets.SETS["fashion-mnist"]
    monkeypatch.setitem(named_sets.SETS, "fashion-mnist", replace(known, folder=named_sets.FASHION_FOLDER))
    data = load("fashion-mnist")
    assert torch.bincount(data.y).tolist() == [6000] * 10
    assert data.classes[9] == "Ankle boot"
    assert int(data.y[0]) == 9
    assert float(data.x.mean()) == pytest.approx(0.2860, abs=1e-4)


@needs("cifar10")
def test_cifar10_is_read_from_contact_sheets() -> None:
    data = load("cifar10")
    assert data.test is not None
    assert data.x.shape == (50000, 3, 32, 32)
    assert torch.bincount(data.y).tolist() == [5000] * 10
    assert torch.bincount(data.test[1]).tolist() == [1000] * 10
    with Image.open(Path(os.environ["BILEVEL_DATA"]) / "cifar10" / "data_batch_2.webp") as sheet:
        crop = np.asarray(sheet.convert("RGB").crop((7 * 32, 3 * 32, 8 * 32, 4 * 32)))
    assert torch.equal((data.x[10307] * 255).round().byte(), torch.from_numpy(crop.transpose(2, 0, 1).copy()))
    # The published means; float32 sums of 51 million values carry the tolerance.
    assert data.x.mean((0, 2, 3)).tolist() == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-4)


def test_cifar10_is_read_from_its_own_archive(home: Path) -> None:
    x = write_archive(home / "data" / "cifar10")
    data = load("cifar10")
    assert data.test is not None
    assert torch.equal((data.x * 255).round().byte(), torch.from_numpy(x[:20].reshape(-1, 3, 32, 32)))
    assert data.y[::4].tolist() == [0, 1, 2, 3, 4]
    assert data.test[1].tolist() == [5, 9, 0, 1]
    assert data.classes[data.test[1][0]] == "dog"


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_an_archive_that_wants_to_run_code_is_refused(home: Path) -> None:
    write_archive(home / "data" / "cifar10", extra=Trap(home / "sprung"))
    with pytest.raises(DataError, match=r"mkdir, which no image batch needs"):
        load("cifar10")
    assert not (home / "sprung").exists()


def test_svhn_is_read_from_mat_files_with_ten_for_zero(home: Path) -> None:
    folder = home / "data" / "svhn"
    folder.mkdir(parents=True)
    x = RANDOM.integers(0, 256, (32, 32, 3, 12), np.uint8)
    savemat(folder / MAT[0], {"X": x, "y": np.array([10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1], np.uint8)[:, None]})
    savemat(folder / MAT[1], {"X": x[..., :2], "y": np.array([10, 3], np.uint8)[:, None]})
    data = load("svhn")
    assert data.test is not None
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test[1].tolist() == [0, 3]
    assert data.x.shape == (12, 3, 32, 32)
    assert float(data.x[7, 2, 5, 9]) == pytest.approx(x[5, 9, 2, 7] / 255)
    (folder / MAT[0]).write_bytes((folder / MAT[0]).read_bytes()[:500])
    with pytest.raises(DataError, match="train_32x32"):
        load("svhn")


def test_files_that_are_here_need_nothing_that_downloads(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(home / "data" / "mnist")
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert load("mnist").count == 20


def test_files_given_by_the_user_come_before_the_cache(home: Path) -> None:
    write_idx(home / "cache" / "bilevel" / "mnist", 30)
    assert load("mnist").count == 30
    x, y = write_idx(home / "data" / "mnist", 20)
    data = load("mnist")
    assert data.y.tolist() == y.tolist()
    assert torch.equal((data.x[:, 0] * 255).round().byte(), torch.from_numpy(x))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: gzip.compress(b"no"),
        lambda content: gzip.compress(gzip.decompress(content)[:-1]),
    ],
)
@pytest.mark.parametrize("file", [0, 1])
def test_a_broken_idx_file_is_named(home: Path, spoil: Callable[[bytes], bytes], file: int) -> None:
    write_idx(home / "data" / "mnist")
    path = home / "data" / "mnist" / IDX[file]
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=IDX[file]):
        load("mnist")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_without_files_and_network_one_sentence_says_what_to_put_where(home: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name)
    said = str(caught.value)
    assert "cannot be reached" in said
    assert f"$BILEVEL_DATA/{name}" in said
    assert str(home / "cache" / "bilevel" / name) in said
    assert all(file in said for file in named_sets.SETS[name].forms[0][0])
    assert said.count("\n") == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server of the files in tmp_path / "site", on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "site").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site"))) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/files/"
        found.shutdown()
        thread.join()


def test_what_is_missing_is_downloaded_once_and_checked(
    home: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, y = write_idx(home / "site" / "files")
    files = {name: home / "site" / "files" / name for name in IDX}
    sums = {name: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in files.items()}
    monkeypatch.setitem(named_sets.SETS, "mnist", replace(named_sets.SETS["mnist"], address=server, sums=sums))
    monkeypatch.setitem(named_sets.SETS, "fashion-mnist", replace(named_sets.SETS["fashion-mnist"], address=server))
    assert load("mnist").y.tolist() == y.tolist()
    with pytest.raises(DataError, match="the download differs from"):
        load("fashion-mnist")
    for file in files.values():
        file.unlink()
    assert load("mnist").y.tolist() == y.tolist()
    with pytest.raises(DataError, match="answers 404"):
        load("fashion-mnist")


def test_a_misspelt_name_gets_a_hint() -> None:
    with pytest.raises(DataError, match=r"Did you mean 'mnist'\? The named sets are digits, mnist, fashion-mnist"):
        load("minst")


def test_a_named_set_takes_no_label_and_no_further_files() -> None:
    with pytest.raises(OptionError, match="label"):
        load("digits", label="y")
    with pytest.raises(OptionError, match="trusted"):
        load("digits", trusted="more.npz")
