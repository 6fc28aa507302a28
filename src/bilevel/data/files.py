"""The readers of published image sets: IDX, contact sheets and the pickled batches of CIFAR-10, SVHN's .mat.

Each takes the folder with the files and returns uint8 images (n, channels, height, width) and labels from 0 to 9, the
training part first.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bilevel.errors import DataError

Part = tuple[np.ndarray, np.ndarray]
IDX = tuple(f"{part}-{file}.gz" for part in ("train", "t10k") for file in ("images-idx3-ubyte", "labels-idx1-ubyte"))
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SHEETS = (*(f"{name}.webp" for name in BATCHES), "labels.npz")
ARCHIVE = ("cifar-10-python.tar.gz",)
MAT = ("train_32x32.mat", "test_32x32.mat")


def read_idx(folder: Path) -> tuple[Part, Part]:
    """Gzipped IDX files, as those of MNIST."""
    x, y, x_test, y_test = (_idx(folder / name) for name in IDX)
    return _checked(x[:, None], y, folder), _checked(x_test[:, None], y_test, folder)


def _idx(path: Path) -> np.ndarray:
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}).") from None
    dimensions = data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    shape = np.frombuffer(data[4 : 4 + 4 * dimensions], ">u4").tolist() if len(data) >= 4 + 4 * dimensions else []
    values = np.frombuffer(data, np.uint8)[4 + 4 * dimensions :]
    if dimensions not in (1, 3) or not shape or int(np.prod(shape)) != len(values):
        raise DataError(f"{path} is not a whole IDX file of bytes.")
    return values.reshape(shape)


def read_sheets(folder: Path) -> tuple[Part, Part]:
    """CIFAR-10 as lossless contact sheets: 100 by 100 images of 32 by 32 pixels, row by row, a sheet for each batch."""
    try:
        sheets = [sheet(folder / name) for name in SHEETS[:-1]]
        with np.load(folder / SHEETS[-1], allow_pickle=False) as labels:
            y, y_test = labels["train"], labels["test"]
    except Exception as error:  # decoders raise anything on a broken file
        raise DataError(f"The sheets of CIFAR-10 in {folder} cannot be read ({error}).") from None
    return _checked(np.concatenate(sheets[:-1]), y, folder), _checked(sheets[-1], y_test, folder)


def sheet(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def read_archive(folder: Path) -> tuple[Part, Part]:
    """CIFAR-10's own archive of pickled batches, unpickled by a reader that builds numpy arrays and nothing else."""
    path = folder / ARCHIVE[0]
    try:
        with tarfile.open(path) as archive:
            batches = [_batch(archive, f"cifar-10-batches-py/{name}") for name in BATCHES]
    except Exception as error:  # tarfile, zlib and pickle raise anything on a broken file
        raise DataError(f"{path} cannot be read ({error}).") from None
    x, y = (np.concatenate([batch[i] for batch in batches[:-1]]) for i in range(2))
    return _checked(x, y, path), _checked(*batches[-1], path)


def _batch(archive: tarfile.TarFile, name: str) -> Part:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file")
    content = _ArraysOnly(io.BytesIO(file.read()), encoding="bytes").load()
    return np.asarray(content[b"data"]).reshape(-1, 3, 32, 32), np.array(content[b"labels"])


class _ArraysOnly(pickle.Unpickler):
    """Refuses every name in a pickle but those that rebuild a numpy array."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for the older protocols
            return lambda text, encoding: text.encode({"latin1": "latin1", b"latin1": "latin1"}[encoding])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image batch needs")


def read_mat(folder: Path) -> tuple[Part, Part]:
    """SVHN's cropped digits: X (32, 32, 3, n) and y, in which 10 means the digit 0."""
    train, test = (_mat(folder / name) for name in MAT)
    return train, test


def _mat(path: Path) -> Part:
    try:
        content = importlib.import_module("scipy.io").loadmat(str(path), variable_names=["X", "y"])
        x, y = content["X"], content["y"]
        return _checked(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel() % 10, path)
    except DataError:
        raise
    except Exception as error:  # scipy raises anything on a broken file
        raise DataError(f"{path} cannot be read as SVHN's .mat file ({error}).") from None


def _checked(x: np.ndarray, y: np.ndarray, where: Path) -> Part:
    if x.dtype != np.uint8 or x.ndim != 4 or y.shape != (len(x),) or len(x) == 0:
        raise DataError(f"{where}: images and labels do not fit: shapes {x.shape} and {y.shape}, pixels of {x.dtype}.")
    if not np.issubdtype(y.dtype, np.integer) or int(y.min()) < 0 or int(y.max()) > 9:
        raise DataError(f"{where}: the labels must be whole numbers from 0 to 9.")
    return x, y.astype(np.int64)
