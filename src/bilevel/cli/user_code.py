"""Networks and problems from a user's Python file: `path.py`, or `path.py:name`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bilevel._util.checks import did_you_mean
from bilevel._util.random_state import seeded
from bilevel.applications.comparison.compare import Start, Subject
from bilevel.applications.comparison.synthetic_problems import nth
from bilevel.applications.default_classifier import KINDS, Classifier, classifier
from bilevel.data import Labelled
from bilevel.errors import BilevelError, OptionError, reason
from bilevel.problem.problem import Problem

NEEDED = ("problem", "u", "v")


def is_file(text: str) -> bool:
    """Tell whether the text names a Python file."""
    return ".py:" in text or text.endswith(".py")


def path_and_name(text: str, rule: str = "a Python file is needed") -> tuple[Path, str | None]:
    """Split `path.py:name`. `rule` begins the error if there is no such file."""
    before, colon, name = text.partition(".py:")
    path = Path(before + ".py" if colon else text)
    if not path.is_file():
        raise OptionError(f"{rule}; there is no file {path}.")
    return path, name or None


def load(text: str, rule: str) -> tuple[Path, Any]:
    """Return the path and the object that the name after the colon has; without a name, the module."""
    path, name = path_and_name(text, rule)
    module = _imported(path)
    if name is not None and not hasattr(module, name):
        raise OptionError(f"{path.name} does not define {name!r}.")
    return path, module if name is None else getattr(module, name)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bilevel_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} could not be run: {_described(error)}") from error
    return module


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}."


# -- networks ----------------------------------------------------------------------------------------------------------


def network(text: str, option: str, call: str, arguments: Sequence[Any], seed: int) -> nn.Module:
    """Return the network that the function after the colon makes; `call` shows how it is called, for errors."""
    path, make = load(text, f"{option} must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"{option} must name a function {call}, as in {path.name}:make.")
    with seeded(seed):
        try:
            found = make(*arguments)
        except Exception as error:
            raise OptionError(f"{option} {text} could not be run: {_described(error)}") from error
    if not isinstance(found, nn.Module):
        raise OptionError(f"{option} {text} must return an nn.Module; got {type(found).__name__}.")
    return found


def classifier_of(model: str, data: Labelled, source: str, device: torch.device, seed: int) -> Classifier:
    """Return the classifier that --model names for data that were read from `source`."""
    shape, classes = tuple(data.x.shape[1:]), len(data.classes)
    if not is_file(model):
        if model not in KINDS:
            near, kinds = did_you_mean(model, KINDS), ", ".join(KINDS)
            raise OptionError(f"--model must be one of {kinds}, or path.py:make; got {model!r}.{near}")
        return classifier(model, shape, classes, device=device, seed=seed, source=source)
    found = network(model, "--model", "make(shape, classes)", (shape, classes), seed)
    try:
        with torch.no_grad():
            scores = tuple(found.eval().to(device)(data.x[:2].to(device)).shape)
    except Exception as error:
        raise OptionError(f"--model {model} does not take inputs of shape {shape}: {_described(error)}") from error
    if scores != (2, classes):
        raise OptionError(
            f"--model {model} must give one score for each of the {classes} classes; for two inputs it gives shape "
            f"{scores}."
        )
    return Classifier(found.train(), model)


# -- problems ----------------------------------------------------------------------------------------------------------


def problem_of(text: str, trials: int, seed: int) -> Subject:
    """Return the problem that a file defines, with a start for each trial."""
    path, found = load(text, "PROBLEM must be a synthetic problem or a Python file")
    takes_seed = callable(found) and "seed" in inspect.signature(found).parameters
    if trials > 1 and not takes_seed:
        raise OptionError(
            f"--trials {trials} needs `{path.name}:name` with a function name(seed) that returns problem, u and v for "
            "each start; this file has one start."
        )
    return Subject(text, [_start(path, found, nth(seed, k) if takes_seed else None) for k in range(trials)])


def _start(path: Path, found: Any, seed: int | None) -> Start:
    if callable(found) and not isinstance(found, type):
        try:
            found = found() if seed is None else found(seed=seed)
        except BilevelError:
            raise
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {_described(error)}") from error
    if isinstance(found, (tuple, list)):
        if len(found) not in (3, 4):
            raise OptionError(f"{path} must give (problem, u, v) or (problem, u, v, data); got {len(found)} values.")
        found = dict(zip((*NEEDED, "data"), found, strict=False))
    values = found if isinstance(found, Mapping) else {key: getattr(found, key, None) for key in (*NEEDED, "data")}
    for key in NEEDED:
        if values.get(key) is None:
            raise OptionError(f"{path} must define {key!r}: a Problem `problem` and its variables `u` and `v`.")
    if not isinstance(values["problem"], Problem):
        raise OptionError(f"problem in {path} must be a bilevel.Problem; got {type(values['problem']).__name__}.")
    return Start(values["problem"], values["u"], values["v"], values.get("data"))
