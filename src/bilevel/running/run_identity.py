"""The identity of a run: names, shapes, options and seed. A checkpoint is resumed only if they agree."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel._util.atomic_files import read_json, write_whole
from bilevel.batches.sources import known_length
from bilevel.errors import CheckpointError
from bilevel.methods.base import Method
from bilevel.problem import Problem, Variable

# How releases before 0.2 described a function or an object: its name and a digest of its code.
WITH_CODE = re.compile(r"(\S+) [0-9a-f]{12}")


def run_identity(
    problem: Problem, method: Method, u: Variable, v: Variable, data: Any, accumulate: int, seed: int
) -> dict[str, Any]:
    """Return what two runs must have in common for one to resume the other."""

    def shapes(variable: Variable) -> dict[str, str]:
        return {key: f"{tuple(t.shape)} {t.dtype}" for key, t in variable.tensors().items()}

    sets = [problem.project_upper, problem.project_lower, problem.prepare, problem.start_lower]
    below = [*problem.lower_equalities, *problem.lower_inequalities]
    functions = [problem.upper, problem.lower, *problem.equalities, *problem.inequalities, *below, *sets]
    lengths = [known_length(source) for source in data or ()]
    return {
        "objectives": [described(function) for function in functions if function is not None],
        "u": shapes(u),
        "v": shapes(v),
        "method": type(method).__name__,
        "options": method.describe(),
        "data": "none" if data is None else f"batches {['?' if n is None else n for n in lengths]}",
        "accumulate": accumulate,
        "seed": seed,
    }


def compare(old: Mapping[str, Any], new: Mapping[str, Any], folder: Any) -> None:
    """Refuse a checkpoint of another run, or of a release that described runs otherwise."""
    if old and (missing := next((key for key in new if key not in old), None)):
        raise CheckpointError(
            f"the checkpoint in {folder} was written by another version of bilevel, because it does not record "
            f"its {missing}. It is left as it is; start again in another folder."
        )
    for key, value in new.items():
        if not _same(old.get(key), value):
            raise CheckpointError(
                f"the checkpoint in {folder} is of another run: its {key} differ (there {old.get(key)}, here {value}). "
                "It is left as it is; pass the same arguments to resume it, or another folder to start from scratch."
            )


def _same(old: Any, new: Any) -> bool:
    """Return whether two entries agree. In an old description with a digest of code, only the name counts."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, str) and isinstance(new, str) and (with_code := WITH_CODE.fullmatch(old)):
        return with_code[1] == new.partition("(")[0]
    return bool(old == new)


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
    if not (before := read_json(file)):
        raise CheckpointError(f"{file} cannot be read. Use another folder.")
    compare(before, json.loads(json.dumps(task)), folder)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of all numbers in the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def described(value: Any) -> str:
    """Return the name of a function or of an object's type; with its values, if these are plain.

    >>> described(functools.partial(torch.optim.SGD, lr=0.1))
    "partial(SGD, {'lr': 0.1})"
    """
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        return f"Tensor({tuple(value.shape)} {'' if value.requires_grad else digest_of([value])[:12]})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {described(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, functools.partial):
        return f"partial({', '.join(map(described, (value.func, *value.args, value.keywords)))})"
    if is_dataclass(value) and not isinstance(value, type):
        held = ", ".join(f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({held})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
