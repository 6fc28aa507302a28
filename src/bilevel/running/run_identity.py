"""What makes a run this run and no other: compared before a checkpoint is resumed."""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel._util.atomic_files import write_whole
from bilevel.errors import CheckpointError
from bilevel.methods.base import Method
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable

DEPTH = 4


def fingerprint(
    problem: Problem, method: Method, u: Variable, v: Variable, data: Any, accumulate: int, seed: int
) -> dict[str, Any]:
    """Objectives by name and by what they compute, variables by shape, options, data by length, seed."""

    def shapes(variable: Variable) -> dict[str, str]:
        return {key: f"{tuple(t.shape)} {t.dtype}" for key, t in variable.tensors().items()}

    sets = [problem.project_upper, problem.project_lower, problem.prepare, problem.start_lower]
    below = [*problem.lower_equalities, *problem.lower_inequalities]
    functions = [problem.upper, problem.lower, *problem.equalities, *problem.inequalities, *below, *sets]
    lengths = [len(source) if isinstance(source, Sized) else "?" for source in data or ()]
    return {
        "objectives": [described(function) for function in functions if function is not None],
        "u": shapes(u),
        "v": shapes(v),
        "method": type(method).__name__,
        "options": method.describe(),
        "data": "none" if data is None else f"batches {lengths}",
        "accumulate": accumulate,
        "seed": seed,
    }


def compare(old: Mapping[str, Any], new: Mapping[str, Any], folder: Any) -> None:
    """Refuse a checkpoint of another run."""
    for key, value in new.items():
        if old.get(key) != value:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another run: its {key} differ: there {old.get(key)}, here {value}. "
                "It is left as it is; pass the same arguments to resume it, or another folder to start anew."
            )


def claim(folder: Path, task: Mapping[str, Any], *, resume: bool = True) -> None:
    """Write the task of a run to `folder`/task.json, or check that the folder holds this task.

    A folder of another task is refused, and without `resume` every folder that holds a task.
    """
    file = folder / "task.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(task) + "\n")
        return
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a run, and nothing is overwritten. Pass resume=True to continue it, or another "
            "folder."
        )
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        raise CheckpointError(f"{file} cannot be read. Use another folder.") from None
    compare(before if isinstance(before, dict) else {}, json.loads(json.dumps(task)), folder)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A digest of every number of these tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def described(value: Any) -> str:
    """The name of a function and a digest of its code and of the values it closes over; of all else, its type's."""
    digest = hashlib.sha256()
    _feed(digest, value, DEPTH)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {digest.hexdigest()[:12]}"


def _feed(digest: Any, value: Any, depth: int) -> None:
    """Values that describe themselves are fed as text, functions by their code, all else by its type."""
    if isinstance(value, Tensor):
        # What requires grad is a variable, and changes as the run goes.
        content = "" if value.requires_grad else repr(value.double().sum().item())
        digest.update(f"{tuple(value.shape)} {value.dtype} {content}".encode())
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        digest.update(repr(value).encode())
    elif depth and isinstance(value, (tuple, list, frozenset, set)):
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            _feed(digest, item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key in value:
            _feed(digest, [key, value[key]], depth)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        _feed(digest, [type(value).__qualname__, *(getattr(value, f.name) for f in fields(value))], depth)
    elif depth and isinstance(value, types.CodeType):
        digest.update(value.co_code)
        _feed(digest, [value.co_consts, value.co_names, value.co_varnames], depth)
    elif depth and isinstance(value, functools.partial):
        _feed(digest, [value.func, value.args, value.keywords], depth)
    elif depth and isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        _feed(digest, [value.__code__, value.__defaults__, cells], depth)
    else:
        digest.update(type(value).__qualname__.encode())


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
