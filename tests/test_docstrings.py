"""Every public name explains itself: each argument or field, its default, and an example that runs."""

from __future__ import annotations

import dataclasses
import doctest
import enum
import importlib
import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

MODULES = (
    "bilevel",
    "bilevel.applications.comparison",
    "bilevel.applications.denoising",
    "bilevel.applications.few_shot",
    "bilevel.applications.poisoning",
    "bilevel.applications.tuning",
    "bilevel.data",
    "bilevel.sklearn",
)
# The names that an example can use without an import, with those of its module and of `bilevel`.
USUAL = {"torch": torch, "nn": nn, "np": np}
ENTRY = re.compile(r"\s*(?!Default:)([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*) ?: \S")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def names_of(module: str) -> dict[str, object]:
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__}


def explained(item: object) -> bool:
    """Whether the name is a class or a function, and not an exception, a constant or a type."""
    return inspect.isfunction(item) or (inspect.isclass(item) and not issubclass(item, BaseException))


PUBLIC = {
    f"{module}.{name}": (module, item)
    for module in MODULES
    for name, item in names_of(module).items()
    if explained(item)
}
SLOW = {"bilevel.applications.poisoning.audit": "it denoises in 1,200 steps or more, which no option lowers"}
"""Examples that take more than a second, with the reason; `-m slow` runs them. The list may only shrink."""
EXAMPLES = [
    pytest.param(*found, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, found in PUBLIC.items()
]


def entries(text: str) -> dict[str, str]:
    """Return the text about each argument; an entry begins with `name: ` or `one, other: ` and ends at a blank line."""
    found, names = {}, []
    for line in text.splitlines():
        if match := ENTRY.match(line):
            names = match[1].split(", ")
        elif not line.strip():
            names = []
        found |= {name: f"{found.get(name, '')} {line.strip()}" for name in names}
    return found


def states(text: str, default: object) -> bool:
    """Whether the text states this default: None and what has no short form by a sentence, others by their value."""
    if "default" not in text.lower():
        return default is None and "None" in text
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(text)]
    if isinstance(default, (bool, str, torch.dtype)):
        return str(default) in text
    if isinstance(default, (int, float, tuple)) and default == default:
        return all(number in numbers for number in np.ravel(default))
    return not inspect.isfunction(default) or default.__name__ in ("<lambda>", *re.findall(r"\w+", text))


def parameters(item: object) -> list[inspect.Parameter]:
    if isinstance(item, enum.EnumType):  # it is not called
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(item).parameters.values()
    return [each for each in found if each.kind not in variable and not each.name.startswith("_")]


@pytest.mark.parametrize(("module", "item"), PUBLIC.values(), ids=PUBLIC)
def test_docstring_names_each_argument_and_states_its_default(module, item):
    said = entries(inspect.getdoc(item) or "")
    missing = [each.name for each in parameters(item) if each.name not in said]
    assert not missing, f"the docstring of {module}.{item.__name__} does not say what {', '.join(missing)} is"
    given = [each for each in parameters(item) if each.default is not each.empty]
    silent = [f"{each.name}={each.default!r}" for each in given if not states(said[each.name], each.default)]
    assert not silent, f"the docstring of {module}.{item.__name__} does not state the defaults {', '.join(silent)}"


@pytest.mark.parametrize(("module", "item"), EXAMPLES)
def test_example_of_the_docstring_runs(module, item, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example can write a file
    names = {**names_of("bilevel"), **names_of(module), **USUAL}
    (found,) = doctest.DocTestFinder(recurse=False).find(
        item, item.__name__, module=inspect.getmodule(item), globs=names
    )
    assert found.examples, f"{module}.{item.__name__} has no example"
    assert not any(example.options.get(doctest.SKIP) for example in found.examples)
    assert doctest.DocTestRunner().run(found).failed == 0


# What the fields of a dataclass hold if they can be large, by a word of their type.
LARGE = re.compile(r"Tensor|Pair|Points|ndarray|list|tuple|dict|Sequence|Mapping|Module|Objective|Price|Any\b")
OWN_REPR = {"Solution"}
"""Classes whose `repr` needs a whole object; tests/test_solve.py has them."""
DATACLASSES = {
    name: item for name, (_, item) in PUBLIC.items() if dataclasses.is_dataclass(item) and item.__name__ not in OWN_REPR
}


@pytest.mark.parametrize(
    "large", [torch.rand(30, 30), [0.5] * 10_000, nn.Sequential(*[nn.Linear(2, 2)] * 100)], ids=type
)
@pytest.mark.parametrize("item", DATACLASSES.values(), ids=DATACLASSES)
def test_repr_is_short_however_large_the_fields_are(item, large):
    shown = object.__new__(item)
    for each in dataclasses.fields(item):
        object.__setattr__(shown, each.name, large if LARGE.search(str(each.type)) else 0.5)
    assert len(repr(shown)) < 2000


def test_check_of_defaults_sees_a_default_that_is_missing_or_wrong():
    said = entries("Args:\n    a, b: Two numbers. Default: 1,000 and 1e-4.\n    c: A name.\n\nc: Later. Default: 'x'.")
    assert list(said) == ["a", "b", "c"]
    assert states(said["a"], 1000)
    assert states(said["b"], (1000, 0.0001))
    assert states(said["c"], "x")
    assert states("None: all.", None)
    assert not states(said["a"], 100)
    assert not states(said["c"], "y")
    assert not states("c: A name.", None)
    assert not states("c: The value 5.", 5)


def test_exceptions_and_warnings_say_what_they_stand_for():
    others = [item for item in names_of("bilevel").values() if inspect.isclass(item) and not explained(item)]
    assert others
    assert all(item.__doc__ for item in others)
