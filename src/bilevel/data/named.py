"""Image sets that are known by name, and where they are looked for.

A set's files are taken from `$BILEVEL_DATA/<name>`, else from where a Debian package puts them, else from the cache
(`~/.cache/bilevel/<name>` on Linux), else downloaded into the cache and checked against their published sums. `digits`
comes with scikit-learn and needs no file; 400 of its rows, drawn by class with a fixed seed, are its test part.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bilevel.data.files import ARCHIVE, IDX, MAT, SHEETS, Part, read_archive, read_idx, read_mat, read_sheets
from bilevel.data.labelled import Labelled
from bilevel.data.splits import split_test
from bilevel.errors import DataError

DIGITS_TEST, DIGITS_SEED = 400, 0
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the four files."""
DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Files:
    """A form in which a set is stored: the names of its files, and what reads them in a folder."""

    names: tuple[str, ...]
    read: Callable[[Path], tuple[Part, Part]]

    def are_in(self, folder: Path) -> bool:
        return all((folder / name).is_file() for name in self.names)


@dataclass(frozen=True)
class ImageSet:
    """A set: the forms it is read from (the first is the one published), its address, and the sums of its files."""

    classes: tuple[str, ...]
    forms: tuple[Files, ...]
    address: str
    sums: Mapping[str, str]
    folder: Path | None = None
    """Where a system package puts the files."""


SETS = {
    "mnist": ImageSet(
        DIGITS,
        (Files(IDX, read_idx),),
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
        (Files(IDX, read_idx),),
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
        (Files(ARCHIVE, read_archive), Files(SHEETS, read_sheets)),
        "https://www.cs.toronto.edu/~kriz/",
        {ARCHIVE[0]: "md5:c58f30108f718f92721af3b95e74349a"},
    ),
    "svhn": ImageSet(
        DIGITS,
        (Files(MAT, read_mat),),
        "http://ufldl.stanford.edu/housenumbers/",
        {MAT[0]: "md5:e26dedcc434d2e4c54c9b2d4a06d8373", MAT[1]: "md5:eb5a983be6a315427106f1b164d9cef3"},
    ),
}
NAMES = ("digits", *SETS)


def load_named(name: str) -> Labelled:
    """The set of this name, one of `NAMES`."""
    if name == "digits":
        return _digits()
    known = SETS[name]
    (x, y), (x_test, y_test) = _read(name, known)
    return Labelled(
        name=name,
        kind="images",
        x=_unit(x),
        y=torch.from_numpy(y),
        classes=known.classes,
        keys=[str(i) for i in range(len(y))],
        test=(_unit(x_test), torch.from_numpy(y_test)),
    )


def _digits() -> Labelled:
    found = importlib.import_module("sklearn.datasets").load_digits()
    whole = Labelled(
        name="digits",
        kind="images",
        x=torch.from_numpy(found.images[:, None] / 16).float(),
        y=torch.from_numpy(found.target).long(),
        classes=DIGITS,
        keys=[str(i) for i in range(len(found.target))],
    )
    data = split_test(whole, count=DIGITS_TEST, seed=DIGITS_SEED)
    return replace(data, positions=np.arange(data.count))


def _unit(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).float().div_(255)  # a copy: the bytes of a file are read-only


def _read(name: str, known: ImageSet) -> tuple[Part, Part]:
    folder = found_in(name, known)
    if folder is None:
        folder = _cache(name)
        _download(name, known, folder)
    return (_form_in(folder, known) or known.forms[0]).read(folder)


def found_in(name: str, known: ImageSet) -> Path | None:
    """The folder that has the set's files; None where they would be downloaded."""
    return next((folder for folder in _places(name, known) if _form_in(folder, known) is not None), None)


def _places(name: str, known: ImageSet) -> Iterator[Path]:
    """Where the files may lie; pooch is asked for its cache only when they are nowhere else."""
    if given := os.environ.get("BILEVEL_DATA"):
        yield Path(given) / name
    if known.folder is not None:
        yield known.folder
    yield _cache(name)


def _cache(name: str) -> Path:
    return Path(importlib.import_module("pooch").os_cache("bilevel")) / name


def _form_in(folder: Path, known: ImageSet) -> Files | None:
    return next((form for form in known.forms if form.are_in(folder)), None)


def _download(name: str, known: ImageSet, cache: Path) -> None:
    pooch = importlib.import_module("pooch")
    try:
        for file in known.forms[0].names:
            pooch.retrieve(known.address + file, known_hash=known.sums[file], fname=file, path=cache)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong sum is a ValueError
        wanted = " (or ".join(", ".join(form.names) for form in known.forms) + ")" * (len(known.forms) - 1)
        raise DataError(
            f"{name} is not here and cannot be downloaded from {known.address} ({_why(error)}): put {wanted} into "
            f"$BILEVEL_DATA/{name} or {cache}."
        ) from None


def _why(error: Exception) -> str:
    answer = getattr(error, "response", None)
    if answer is not None:
        return f"the server answers {answer.status_code}"
    if "hash" in str(error):
        return "what came has another sum than the published file"
    return error.strerror if isinstance(error, OSError) and error.strerror else "the server cannot be reached"
