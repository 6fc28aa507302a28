"""Atomic save and exact load of a run's state: one safetensors file whose header carries the rest as JSON.

The state is a tree of dicts and lists whose leaves are tensors, numbers, strings, booleans and None. A digest of
everything is stored with it, so that a truncated or altered file is never mistaken for a good one. The previous
state is kept next to it, and is used if the last one is damaged. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import warn_user
from bilevel.errors import BilevelError, CheckpointError, reason

VERSION = 1
FILE = "state.safetensors"
# The state that was saved before the last.
BEFORE = "state.before.safetensors"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; the file that was there stays whole until the new one is on the disk."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_pack(state, "", tensors), sort_keys=True)
    metadata = {"version": str(VERSION), "tree": tree, "sha256": _digest(tree, tensors)}
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, before=folder / BEFORE) as temporary:
            save_file(tensors, temporary, metadata)
    except OSError as error:
        why = error.__cause__ or error
        raise CheckpointError(
            f"the checkpoint {path} cannot be written: {why}. The one before, if any, is untouched."
        ) from error


def prepare(folder: Path) -> None:
    """Make the folder, and check that files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be written: {error}. Pass a writable folder.") from error


def exists(folder: Path) -> bool:
    return (folder / FILE).exists() or (folder / BEFORE).exists()


def load(folder: Path) -> dict[str, Any]:
    """Read a state, or raise an error that says why it cannot be read.

    If the last checkpoint is bad and the one before is good, return the one before, with a warning that names both.
    """
    path, before = folder / FILE, folder / BEFORE
    if before.exists() and not path.exists():  # a save was killed between its two renamings
        path = before
    try:
        return _read(path)
    except CheckpointError as error:
        if path == before or not before.exists():
            raise
        try:
            state = _read(before)
        except CheckpointError:
            raise CheckpointError(f"{error} The one before, {before}, cannot be read either.") from error
        step = f", of step {state['step']}," if isinstance(state.get("step"), int) else ""
        warn_user(f"{error} The one before, {before}{step} is used instead.")
        return state


def _read(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, aligned as torch allocates: the last bit of a sum can depend on where its terms lie.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint {path} does not exist.") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read, because it is truncated or altered: {error}. It is left as it is."
        ) from error
    if metadata.get("version") != str(VERSION):
        raise CheckpointError(
            f"the checkpoint {path} has format version {metadata.get('version')}, this release reads {VERSION}. "
            "It is left as it is; resume it with the release that wrote it."
        )
    tree = metadata.get("tree", "")
    if metadata.get("sha256") != _digest(tree, tensors):
        raise CheckpointError(
            f"the checkpoint {path} is altered: its contents do not match their digest. It is left as it is."
        )
    try:
        state = _unpack(json.loads(tree), tensors)
    except (KeyError, StopIteration, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {path} holds no readable state. It is left as it is.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint {path} holds no state of a run. It is left as it is.")
    return state


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Raise a CheckpointError if the block fails because the state belongs to another kind of run."""
    try:
        yield
    except BilevelError:
        raise
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint {folder / FILE} belongs to another kind of run ({type(error).__name__}: "
            f"{reason(error)}). It is left as it is."
        ) from error


def _pack(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the node as a JSON tree. Tensors are moved to `tensors`; the tree has their names."""
    if isinstance(node, Tensor):
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = node.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(node, dict):
        # Slashes are escaped as in JSON pointers, so that two tensors never share a name.
        names = {key: f"{name}/{key.replace('~', '~0').replace('/', '~1')}" for key in node}
        return {"dict": {key: _pack(item, names[key], tensors) for key, item in node.items()}}
    if isinstance(node, (list, tuple)):
        return {"list": [_pack(item, f"{name}/{i}", tensors) for i, item in enumerate(node)]}
    if isinstance(node, float) and not math.isfinite(node):
        return {"float": str(node)}  # JSON has no infinity
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    raise CheckpointError(
        f"a checkpoint holds tensors, numbers and text; {name or 'the state'} is {type(node).__name__}."
    )


def _unpack(node: Any, tensors: dict[str, Tensor]) -> Any:
    kind, value = next(iter(node.items()))
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if kind == "list":
        return [_unpack(item, tensors) for item in value]
    return float(value) if kind == "float" else value


def _digest(tree: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
