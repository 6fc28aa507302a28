"""Find, download and read the image sets that have a name.

The files of a set are looked for in `$BILEVEL_DATA/<name>`, then in the folder of a Debian package, then in the cache
(`~/.cache/bilevel/<name>` on Linux). If no folder has them, they are downloaded into the cache and compared with their
published checksums. `digits` comes with scikit-learn and needs no file; 400 of its rows, drawn by class with a fixed
seed, are its test part.

Each reader takes the folder with the files and returns uint8 images (n, channels, height, width) and labels from 0 to
9, the training part first. `load_named` checks them.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel._util.checks import require
from bilevel.data.arrays import CHANNELS_LAST, PixelScale
from bilevel.data.labelled import Labelled, reading, split_test
from bilevel.errors import DataError

Part = tuple[np.ndarray, np.ndarray]
DIGITS_TEST, DIGITS_SEED = 400, 0
DIGITS = tuple("0123456789")
# The folder of the four files in Debian's package dataset-fashion-mnist.
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
IDX = tuple(f"{part}-{file}.gz" for part in ("train", "t10k") for file in ("images-idx3-ubyte", "labels-idx1-ubyte"))
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SHEETS = (*(f"{name}.webp" for name in BATCHES), "labels.npz")
ARCHIVE = ("cifar-10-python.tar.gz",)
MAT = ("train_32x32.mat", "test_32x32.mat")


def _read_idx(folder: Path) -> tuple[Part, Part]:
    """Read gzipped IDX files, the form of MNIST."""
    x, y, x_test, y_test = (_idx(folder / name) for name in IDX)
    return (x[:, None], y), (x_test[:, None], y_test)


def _idx(path: Path) -> np.ndarray:
    with reading(path):
        data = gzip.decompress(path.read_bytes())
        if data[:3] != b"\0\0\x08" or data[3] not in (1, 3):
            raise ValueError("it is not an IDX file of bytes")
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def _read_sheets(folder: Path) -> tuple[Part, Part]:
    """Read CIFAR-10 as lossless contact sheets of 100 by 100 images, one for each batch."""
    with reading(folder), np.load(folder / SHEETS[-1], allow_pickle=False) as labels:
        sheets = [sheet(folder / name) for name in SHEETS[:-1]]
        y, y_test = labels["train"], labels["test"]
    return (np.concatenate(sheets[:-1]), y), (sheets[-1], y_test)


def sheet(path: Path) -> np.ndarray:
    """Return the images of a contact sheet, 100 by 100 of 32 by 32 pixels, row by row."""
    with require("PIL.Image", "apps").open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _read_archive(folder: Path) -> tuple[Part, Part]:
    """Read CIFAR-10's archive of pickled batches, with an unpickler that builds numpy arrays only."""
    path = folder / ARCHIVE[0]
    with reading(path), tarfile.open(path) as archive:
        files = [archive.extractfile(f"cifar-10-batches-py/{name}") or io.BytesIO() for name in BATCHES]
        batches = [_ArraysOnly(file, encoding="bytes").load() for file in files]
        x = [np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32) for batch in batches]
        y = [np.array(batch[b"labels"]) for batch in batches]
    return (np.concatenate(x[:-1]), np.concatenate(y[:-1])), (x[-1], y[-1])


class _ArraysOnly(pickle.Unpickler):
    """Refuses every name in a pickle except those that rebuild a numpy array."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for the older protocols
            return lambda text, encoding: text.encode({"latin1": "latin1", b"latin1": "latin1"}[encoding])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image batch needs")


def _read_mat(folder: Path) -> tuple[Part, Part]:
    """Read SVHN's cropped digits: X (32, 32, 3, n) and y, in which 10 means the digit 0."""
    return _mat(folder / MAT[0]), _mat(folder / MAT[1])


def _mat(path: Path) -> Part:
    matlab = require("scipy.io", "apps")
    with reading(path):
        content = matlab.loadmat(str(path), variable_names=["X", "y"])
        return np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)), content["y"].ravel() % 10


# A form in which a set is stored: the names of its files, and the reader of a folder with them.
Form = tuple[tuple[str, ...], Callable[[Path], tuple[Part, Part]]]


@dataclass(frozen=True)
class ImageSet:
    """A set: the forms it is read from (the first is published), its address, and the checksums of its files."""

    classes: tuple[str, ...]
    forms: tuple[Form, ...]
    address: str
    sums: Mapping[str, str]
    # The folder of a system package with the files; None: there is none.
    folder: Path | None = None


SETS = {
    "mnist": ImageSet(
        DIGITS,
        ((IDX, _read_idx),),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            IDX[0]: "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            IDX[1]: "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            IDX[2]: "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            IDX[3]: "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": ImageSet(
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ((IDX, _read_idx),),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            IDX[0]: "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            IDX[1]: "md5:25c81989df183df01b3e8a0aad5dffbe",
            IDX[2]: "md5:bef4ecab320f06d8554ea6380940ec79",
            IDX[3]: "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
        FASHION_FOLDER,
    ),
    "cifar10": ImageSet(
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        ((ARCHIVE, _read_archive), (SHEETS, _read_sheets)),
        "https://www.cs.toronto.edu/~kriz/",
        {ARCHIVE[0]: "md5:c58f30108f718f92721af3b95e74349a"},
    ),
    "svhn": ImageSet(
        DIGITS,
        ((MAT, _read_mat),),
        "http://ufldl.stanford.edu/housenumbers/",
        {MAT[0]: "md5:e26dedcc434d2e4c54c9b2d4a06d8373", MAT[1]: "md5:eb5a983be6a315427106f1b164d9cef3"},
    ),
}
NAMES = ("digits", *SETS)


def load_named(name: str) -> Labelled:
    """Return the set of this name, one of `NAMES`."""
    if name == "digits":
        return _digits()
    known = SETS[name]
    folder = found_in(name) or _download(name)
    _, read = _form_in(folder, known) or known.forms[0]
    parts = []
    for x, y in read(folder):
        if x.dtype != np.uint8 or x.ndim != 4 or y.shape != (len(x),) or len(x) == 0:
            raise DataError(
                f"{folder}: images and labels do not fit: shapes {x.shape} and {y.shape}, pixels of {x.dtype}."
            )
        if not np.issubdtype(y.dtype, np.integer) or int(y.min()) < 0 or int(y.max()) > 9:
            raise DataError(f"{folder}: the labels must be whole numbers from 0 to 9.")
        # A copy: the bytes of a file are read-only.
        parts.append((torch.from_numpy(np.array(x)).float().div_(255), torch.from_numpy(y.astype(np.int64))))
    (x_main, y_main), test = parts
    return Labelled(
        name=name,
        kind="images",
        x=x_main,
        y=y_main,
        classes=known.classes,
        keys=[str(i) for i in range(len(y_main))],
        test=test,
        transformer=PixelScale(CHANNELS_LAST, 0.0, 255.0),
    )


def _digits() -> Labelled:
    found = require("sklearn.datasets", "apps").load_digits()
    everything = Labelled(
        name="digits",
        kind="images",
        x=torch.from_numpy(found.images[:, None] / 16).float(),
        y=torch.from_numpy(found.target).long(),
        classes=DIGITS,
        keys=[str(i) for i in range(len(found.target))],
        transformer=PixelScale(CHANNELS_LAST, 0.0, 1.0),
    )
    data = split_test(everything, count=DIGITS_TEST, seed=DIGITS_SEED)
    return replace(data, positions=np.arange(data.count))


def found_in(name: str) -> Path | None:
    """Return the folder that has the set's files, or None if they would be downloaded."""
    known, given = SETS[name], os.environ.get("BILEVEL_DATA")
    for folder in (Path(given) / name if given else None, known.folder):
        if folder is not None and _form_in(folder, known) is not None:
            return folder
    folder = _cache(name)  # pooch is needed only if the files are nowhere else
    return None if _form_in(folder, known) is None else folder


def _cache(name: str) -> Path:
    return Path(require("pooch", "apps").os_cache("bilevel")) / name


def _form_in(folder: Path, known: ImageSet) -> Form | None:
    return next((form for form in known.forms if all((folder / name).is_file() for name in form[0])), None)


def _download(name: str) -> Path:
    pooch, known, cache = require("pooch", "apps"), SETS[name], _cache(name)
    try:
        for file in known.forms[0][0]:
            pooch.retrieve(known.address + file, known_hash=known.sums[file], fname=file, path=cache)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        answer = getattr(error, "response", None)
        why = "the server cannot be reached" if answer is None else f"the server answers {answer.status_code}"
        if isinstance(error, ValueError) and "hash" in str(error):
            why = "the download differs from the published file"
        wanted = " (or ".join(", ".join(names) for names, _ in known.forms) + ")" * (len(known.forms) - 1)
        raise DataError(
            f"{name} is not here and cannot be downloaded from {known.address} ({why}): put {wanted} into "
            f"$BILEVEL_DATA/{name} or {cache}."
        ) from None
    return cache
