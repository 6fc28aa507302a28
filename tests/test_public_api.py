"""The public names of `bilevel` and of `MODULES` with their signatures, as data/public_api.txt has them.

A change of the interface is renewed there in the same commit, with a line in CHANGELOG.md:

    python tests/test_public_api.py --write

Other modules move, and are not part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import bilevel

FILE = Path(__file__).parent / "data" / "public_api.txt"
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


def signature(function: Any) -> str:
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        p.replace(default=_As(shown(p.default), p.default), annotation=_As(annotation(p.annotation), p.annotation))
        for p in found.parameters.values()
    ]
    returned = _As(annotation(found.return_annotation), found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returned))


class _As:
    """Shows a default value or an annotation as this text; one that is missing stays missing."""

    def __new__(cls, text: str, value: object) -> Any:
        return value if value is inspect.Parameter.empty else super().__new__(cls)

    def __init__(self, text: str, value: object) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown(value: object) -> str:
    """A default value without addresses or module paths, which are not part of the interface."""
    if isinstance(value, partial):
        options = [f"{key}={shown(item)}" for key, item in sorted(value.keywords.items())]
        return f"partial({', '.join([shown(value.func), *map(shown, value.args), *options])})"
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def annotation(value: object) -> str:
    """A type without the modules that its names come from."""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def described(name: str, value: Any) -> Iterator[str]:
    if get_origin(value) is not None:
        yield f"{name} = {annotation(str(value))}"
    elif inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object and not base.__name__.startswith("_")]
        yield f"class {name}({', '.join(bases)})"
        yield from (f"    {line}" for line in sorted(members(value)))
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def members(value: type) -> Iterator[str]:
    """The constructor, fields with defaults, methods and properties; those of a public base class are listed there."""
    fields: set[str] = set()
    if issubclass(value, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in value)
    elif dataclasses.is_dataclass(value):
        known = [field for field in dataclasses.fields(value) if not field.name.startswith("_")]
        fields = {field.name for field in known}
        yield f"(arguments: {', '.join(field.name for field in known if not field.kw_only) or 'by keyword'})"
        yield from (f"{field.name}: {annotation(field.type)}{default(field)}" for field in known)
    elif _own(value, "__init__"):
        yield f"__init__{signature(value.__init__)}"
    for name in dir(value):
        if (name.startswith("_") and name not in SPECIAL) or name in fields or not _own(value, name):
            continue
        attribute = inspect.getattr_static(value, name)
        if isinstance(attribute, property):
            yield f"property {name} -> {annotation(attribute.fget.__annotations__.get('return', '?'))}"
        elif isinstance(attribute, (classmethod, staticmethod)):
            yield f"{type(attribute).__name__} {name}{signature(getattr(value, name))}"
        elif inspect.isfunction(attribute):
            yield f"{name}{signature(attribute)}"
        elif not issubclass(value, enum.Enum) and not inspect.ismethoddescriptor(attribute):  # scikit-learn adds some
            yield f"{name} = {shown(attribute)}"


SPECIAL = ("__call__", "__getitem__", "__len__", "__iter__", "__setitem__", "__contains__")
"""Methods with underscores that users call all the same."""


def _own(value: type, name: str) -> bool:
    """Whether this attribute is written in `bilevel`, and not listed with a public base class."""
    home = next((base for base in value.__mro__ if name in vars(base)), object)
    listed = home is not value and any(getattr(module, home.__name__, None) is home for module in modules())
    return home.__module__.partition(".")[0] == "bilevel" and not listed


def default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {shown(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {shown(field.default_factory)}()"
    return ""


@cache
def modules() -> list[ModuleType]:
    return [importlib.import_module(name) for name in MODULES]


def public() -> Iterator[tuple[ModuleType, str, Any]]:
    for module in modules():
        yield from ((module, name, getattr(module, name)) for name in sorted(module.__all__))


def interface() -> str:
    """Return the names of `bilevel`, then each other module with its names."""
    lines: list[str] = []
    for module, found in groupby(public(), lambda one: one[0]):
        lines += [] if module is bilevel else ["", f"# {module.__name__}"]
        lines += [line for _, name, value in found for line in described(name, value)]
    return "\n".join(lines) + "\n"


def test_public_names_and_signatures_are_the_recorded_ones():
    changes = list(
        difflib.unified_diff(
            FILE.read_text().splitlines(), interface().splitlines(), "recorded", "now", lineterm="", n=0
        )
    )
    assert not changes, "\n".join(
        [
            "The public interface is another one:",
            *changes,
            "If this is meant, add it to CHANGELOG.md and run: python tests/test_public_api.py --write",
        ]
    )


def test_each_public_name_is_there_and_has_a_docstring():
    for module, name, value in public():
        described = inspect.isclass(value) or inspect.isroutine(value)
        assert not described or (value.__doc__ and value.__doc__.strip()), f"{module.__name__}.{name}"


def test_record_sees_names_defaults_and_methods():
    text = interface()
    assert "\nsolve(problem: Problem, method: Method, u: U, v: V, data: object = None, *, max_steps: int" in text
    assert "class Penalty(" in text
    assert "    gamma: PenaltyWeight | None = None\n" in text
    assert "    classmethod algorithm_1(" in text
    assert "\n# bilevel.applications.tuning\nclass Augmentation(" in text
    assert "\nclass DenoisingClassifier(" in text
    assert "0x" not in text
    assert "bilevel." not in text.replace("'bilevel.", "").replace("\n# bilevel.", "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the record of the public interface.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    FILE.write_text(interface())
