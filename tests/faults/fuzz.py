"""Readers under fuzzed files: each ends with data or with one sentence, in bounded time and memory, and runs nothing.

Inputs are good files with bytes changed, put in, taken out and cut off, and texts of nasty cells.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from tally import Tally

from bilevel import BilevelError
from bilevel.cli.run_folder import RunFolder, open_run
from bilevel.data import apply_decisions, load, load_numbers
from bilevel.running import checkpoints as store

LIMIT = 30
"""Seconds after which a reader counts as hung."""
NASTY = (
    "",
    "0",
    "1",
    "-1",
    "1e999",
    "nan",
    "inf",
    "NULL",
    "=1+1",
    '"',
    "'",
    "\x00",
    "\ufeff",
    "a,b",
    "a;b",
    "\t",
    "\r",
    "\n",
    "../../out",
    "/etc/passwd",
    "<script>alert(1)</script>",
    "{{7*7}}",
    "%s",
    "9" * 5000,
    "é" * 40,
    "\u202e",
    "keep",
    "drop",
    "relabel",
    "index",
    "key",
    "decision",
    "label",
    "x",
    "1" * 40,
    "2020-01-01",
    "2020-99-99 99:99",
)
Reader = Callable[[Path, bytes], Any]


def rows() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(12, 3)).round(3), np.arange(12) % 3


def good_npz(**arrays: Any) -> bytes:
    x, y = rows()
    buffer = io.BytesIO()
    np.savez(buffer, **({"x": x, "y": y} | arrays))
    return buffer.getvalue()


def good_csv() -> bytes:
    x, y = rows()
    lines = [f"{a},{b},{c},{'uvw'[k]}" for (a, b, c), k in zip(x, y, strict=True)]
    return ("\n".join(["a,b,c,label", *lines]) + "\n").encode()


def good_parquet() -> bytes:
    buffer = io.BytesIO()
    pandas.read_csv(io.BytesIO(good_csv())).to_parquet(buffer)
    return buffer.getvalue()


def good_image() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def good_decisions(folder: Path) -> bytes:
    (folder / "data.csv").write_bytes(good_csv())
    data = load(folder / "data.csv", label="label")
    lines = [f"{i},{data.keys[i]},{d},{n}" for i, d, n in ((0, "keep", ""), (1, "drop", ""), (2, "relabel", "u"))]
    return ("\n".join(["index,key,decision,label", *lines]) + "\n").encode()


def good_checkpoint(folder: Path) -> bytes:
    store.save(folder, {"x": torch.arange(6.0), "n": 3, "list": [None, {"deep": torch.zeros(2)}], "text": "a"})
    content = (folder / store.FILE).read_bytes()
    (folder / store.FILE).unlink()
    return content


def read_npz(folder: Path, content: bytes) -> None:
    (folder / "a.npz").write_bytes(content)
    load(folder / "a.npz")


def read_csv(folder: Path, content: bytes) -> None:
    (folder / "a.csv").write_bytes(content)
    load(folder / "a.csv", label="label")


def read_parquet(folder: Path, content: bytes) -> None:
    (folder / "a.parquet").write_bytes(content)
    load(folder / "a.parquet", label="label")


def read_numbers(folder: Path, content: bytes) -> None:
    (folder / "b.csv").write_bytes(content)
    load_numbers(folder / "b.csv", label="c")


def read_images(folder: Path, content: bytes) -> None:
    root = folder / "images"
    for i in range(12):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        if not (root / "ab"[i % 2] / f"{i}.png").exists():
            (root / "ab"[i % 2] / f"{i}.png").write_bytes(good_image())
    (root / "a" / "0.png").write_bytes(content)
    load(root)


def read_decisions(folder: Path, content: bytes) -> None:
    (folder / "decisions.csv").write_bytes(content)
    out = folder / "cleaned.csv"
    try:
        apply_decisions(folder / "data.csv", folder / "decisions.csv", out, label="label")
    finally:
        out.unlink(missing_ok=True)


def read_checkpoint(folder: Path, content: bytes) -> None:
    (folder / store.FILE).write_bytes(content)
    store.load(folder)


def read_state(folder: Path, content: bytes) -> None:
    """A file whose digest is right and whose tree is not."""
    tree = content.decode("utf-8", "replace")
    tensors = {"/x": torch.zeros(2)}
    about = {"version": str(store.VERSION), "tree": tree, "sha256": store._digest(tree, tensors)}
    (folder / store.FILE).write_bytes(save(tensors, about))
    store.load(folder)


def read_config(folder: Path, content: bytes) -> None:
    run, asked = RunFolder(folder / "run"), {"command": "denoise", "steps": 3}
    with contextlib.redirect_stderr(io.StringIO()):
        for names in (("config.json",), ("config.json", "result.json")):
            for name in ("config.json", "result.json"):
                (run.path / name).unlink(missing_ok=True)
            for name in names:
                (run.path / name).write_bytes(content)
            (run.path / "checkpoint").mkdir(exist_ok=True)
            open_run(run, asked, True, ())


def readers(folder: Path) -> dict[str, tuple[Reader, bytes]]:
    """By name, what reads and a good file to change."""
    config = json.dumps({"command": "denoise", "steps": 3, "form": 2, "versions": {"torch": "2"}}).encode()
    tree = json.dumps({"dict": {"x": {"tensor": "/x"}, "n": {"value": 3}, "list": {"list": [{"float": "inf"}]}}})
    return {
        "npz": (read_npz, good_npz()),
        "csv": (read_csv, good_csv()),
        "parquet": (read_parquet, good_parquet()),
        "images": (read_images, good_image()),
        "decisions": (read_decisions, good_decisions(folder)),
        "checkpoint": (read_checkpoint, good_checkpoint(folder)),
        "state": (read_state, tree.encode()),
        "config": (read_config, config),
        "numbers": (read_numbers, good_csv()),
    }


@st.composite
def changed(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with some bytes changed, put in, taken out, repeated or cut off; or any bytes at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.integers(0, 6))
        if kind <= 1 and content:
            content[place] ^= draw(st.integers(1, 255))
        elif kind == 2:
            content[place:place] = draw(st.sampled_from(NASTY)).encode()
        elif kind == 3:
            content[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif kind == 4:
            del content[place : place + draw(st.integers(1, 20))]
        elif kind == 5:
            content[place : place + 8] = draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 10**12)]))
        else:
            del content[place:]
    return bytes(content)


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(reader: Reader, folder: Path, content: bytes) -> str | None:
    """Read; None where it went well, else the one sentence. Any other error is the reader's fault."""
    try:
        with in_time():
            reader(folder, content)
    except BilevelError as error:
        words = str(error)
    else:
        return None
    assert words.strip(), "an error without words"
    assert len(words) < 5000, "an error of thousands of characters"
    return words


def fuzzed(name: str, folder: Path, examples: int, number: int = 0) -> Tally:
    """So many inputs to one reader."""
    inside = folder / "inside"
    inside.mkdir(parents=True)
    reader, good = readers(inside)[name]
    assert told(reader, inside, good) is None, "the file to change is not good itself"
    tally, refused = Tally(), 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(good))
    def one(content: bytes) -> None:
        nonlocal refused
        with tally.attempt(repr(content[:80])):
            refused += told(reader, inside, content) is not None
            assert [path.name for path in folder.iterdir()] == ["inside"], "a file lies outside of its folder"

    one()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) // 1024
    tally.facts = {"refused with a sentence": refused, "peak memory grew by MiB": grown}
    if grown > 300:
        tally.failures.append(f"the peak of memory grew by {grown} MiB")
    return tally


# -- files that claim much, or ask to be run ---------------------------------------------------------------------------


def claiming_npz(shape: tuple[int, ...] | None, dtype: str) -> bytes:
    """An .npz file of a few hundred bytes whose x claims this shape; None: whose x is no array."""
    header = io.BytesIO()
    if shape is not None:
        np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    labels, buffer = io.BytesIO(), io.BytesIO()
    np.save(labels, np.arange(12) % 2)
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"\0" * 64)
        archive.writestr("y.npy", labels.getvalue())
    return buffer.getvalue()


def claiming_parquet(rows: int, known: int = 777) -> bytes:
    """A .parquet file of about a kilobyte whose footer claims this number of rows."""
    buffer = io.BytesIO()
    pandas.DataFrame({"a": np.zeros(known), "label": np.zeros(known)}).to_parquet(buffer)
    content = buffer.getvalue()
    length = struct.unpack("<I", content[-8:-4])[0]
    footer = content[-8 - length : -8]
    changed = footer.replace(b"\x16" + _varint(2 * known), b"\x16" + _varint(2 * rows))  # an i64, zigzag
    assert changed != footer
    return content[: -8 - length] + changed + struct.pack("<I", len(changed)) + content[-4:]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


class Run:
    """What touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)
