"""Every public name explains itself: each argument or field, and an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest

import bilevel

PUBLIC = [
    name
    for name in bilevel.__all__
    if not name.startswith("__")
    and not (inspect.isclass(getattr(bilevel, name)) and issubclass(getattr(bilevel, name), BaseException))
]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_names_each_argument(name):
    item = getattr(bilevel, name)
    if name == "Status":  # an enum is not called
        return
    text = inspect.getdoc(item) or ""
    named = [each for each in inspect.signature(item).parameters if each not in ("self", "args", "kwargs")]
    missing = [each for each in named if not each.startswith("_") and not re.search(rf"\b{each}\b", text)]
    assert not missing, f"the docstring of bilevel.{name} does not say what {', '.join(missing)} is"


@pytest.mark.parametrize("name", PUBLIC)
def test_example_of_the_docstring_runs(name):
    item = getattr(bilevel, name)
    module = inspect.getmodule(item)
    names = {**vars(bilevel), **vars(module)}
    (found,) = doctest.DocTestFinder(recurse=False).find(item, name, module=module, globs=names)
    assert found.examples, f"bilevel.{name} has no example"
    assert doctest.DocTestRunner().run(found).failed == 0


def test_exceptions_and_warnings_say_what_they_stand_for():
    others = [getattr(bilevel, name) for name in bilevel.__all__ if name not in PUBLIC and not name.startswith("__")]
    assert others
    assert all(item.__doc__ for item in others)
