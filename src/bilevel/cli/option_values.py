"""Values of options: the device, and what a user's Python file defines, `path.py` or `path.py:name`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilevel._util.checks import did_you_mean, first_of
from bilevel._util.random_state import seeded
from bilevel.applications.default_classifier import KINDS, Classifier, classifier
from bilevel.data import Labelled
from bilevel.distributed.process_group import world
from bilevel.errors import OptionError, reason


def known(option: str, value: str, names: Iterable[str], also: str = "") -> None:
    """Refuse a value that is not one of the names, with the closest name. `also` says what else the option takes."""
    names = tuple(names)
    if value not in names:
        near = did_you_mean(value, names)
        raise OptionError(f"{option} must be one of {first_of(names, 20)}{also}; got {value!r}.{near}")


def device_of(text: str) -> torch.device:
    """Return the device that --device names."""
    gpu = torch.cuda.is_available()
    if text == "auto":
        # Each rank of a machine has its own GPU.
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if world() > 1 else "cuda"
        text = own if gpu else "cpu"
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises all three
        found = "auto, cpu, cuda or cuda:0" if gpu else "auto or cpu, because torch finds no CUDA GPU here"
        raise OptionError(f"--device must be {found}; got {text!r}.") from None
    return device


def is_file(text: str) -> bool:
    """Return whether the text names a Python file."""
    return ".py:" in text or text.endswith(".py")


def path_and_name(text: str, rule: str = "a Python file is needed") -> tuple[Path, str | None]:
    """Split `path.py:name`. `rule` begins the error if the file is missing."""
    before, colon, name = text.partition(".py:")
    path = Path(before + ".py" if colon else text)
    if not path.is_file():
        raise OptionError(f"{rule}; there is no file {path}.")
    return path, name or None


def load(text: str, rule: str) -> tuple[Path, Any]:
    """Run a Python file; return its path and the object that the name after the colon has, or the module without one.

    `rule` begins the error if the file is missing.
    """
    path, name = path_and_name(text, rule)
    loader = SourceFileLoader(f"bilevel_file_{path.stem}", str(path))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses in the file look for their module
    try:
        loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} could not be run: {described(error)}") from error
    if name is not None and not hasattr(module, name):
        raise OptionError(f"{path.name} does not define {name!r}.")
    return path, module if name is None else getattr(module, name)


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}."


# -- networks ----------------------------------------------------------------------------------------------------------


def network(text: str, option: str, call: str, arguments: Sequence[Any], seed: int) -> nn.Module:
    """Return the network that the function after the colon makes; `call` shows how it is called, for errors."""
    path, make = load(text, f"{option} must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"{option} must name a function {call}, as in {path.name}:make.")
    try:
        with seeded(seed):
            found = make(*arguments)
    except Exception as error:
        raise OptionError(f"{option} {text} could not be run: {described(error)}") from error
    if not isinstance(found, nn.Module):
        raise OptionError(f"{option} {text} must return an nn.Module; got {type(found).__name__}.")
    return found


def classifier_of(model: str, data: Labelled, source: str, device: torch.device, seed: int) -> Classifier:
    """Return the classifier that --model names for data that were read from `source`."""
    shape, classes = tuple(data.x.shape[1:]), len(data.classes)
    if not is_file(model):
        known("--model", model, KINDS, ", or path.py:make")
        return classifier(model, shape, classes, device=device, seed=seed, source=source)
    found = network(model, "--model", "make(shape, classes)", (shape, classes), seed)
    try:
        with torch.no_grad():
            scores = tuple(found.eval().to(device)(data.x[:2].to(device)).shape)
    except Exception as error:
        raise OptionError(f"--model {model} does not take inputs of shape {shape}: {described(error)}") from error
    if scores != (2, classes):
        raise OptionError(
            f"--model {model} must give one score for each of the {classes} classes; for two inputs it gives shape "
            f"{scores}."
        )
    return Classifier(found.train(), model)
