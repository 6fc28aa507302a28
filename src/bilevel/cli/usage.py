"""Wrong use of the command line in one sentence: what is wrong, the rule, the value, and the name that was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from bilevel._util.checks import did_you_mean

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What all of typer's refusals are."""


def name_of(param: Any) -> str:
    """DATA, or --option."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return str(max(param.opts, key=len))


def lacks(path: str, what: str) -> str:
    """That a command, called by this path, does not have something."""
    return f"There is no {what}." if path == "bilevel" else f"{path.removeprefix('bilevel ')} has no {what}."


def sentence(error: Any, command: Any, path: str, words: Sequence[str]) -> str:
    """What a refusal of typer's says, of a command that was given these words; `path` is how the command is called."""
    param = getattr(error, "param", None)
    if param is not None:
        value = _given(words, param)
        if value is None:
            return f"{name_of(param)} is needed: {str(param.help).split(': ')[0].rstrip('.')}."
        got = value if re.fullmatch(r"[-+]?[\d.]+", value) else repr(value)
        return f"{name_of(param)} must be {_rule(param)}; got {got}.{did_you_mean(value, _choices(param))}"
    if hasattr(error, "possibilities"):
        option = str(error.option_name)
        known = [each for each in _options(command.params) if each.startswith("--")]
        return f"{lacks(path, f'option {option}')}{did_you_mean(option, known)} {_all(path)}"
    if hasattr(error, "option_name"):
        takes = "takes no value" if "does not take" in str(error.message) else "needs a value"
        return f"{error.option_name} {takes}. {_all(path)}"
    extra = re.search(r"argument.*\((.*)\)", str(error.message))
    return _too_many(extra[1].split(), command, path, words) if extra else f"{error.message} {_all(path)}"


def _all(path: str) -> str:
    return f"`{path} -h` lists what there is."


def _options(params: Sequence[Any]) -> list[str]:
    return [option for param in params if param.param_type_name == "option" for option in param.opts]


def _given(words: Sequence[str], param: Any) -> str | None:
    """The value of an option that is not a flag, as it was written; None where there is none."""
    if param.param_type_name == "argument":
        return None
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        option, equals, value = word.partition("=")
        if option in param.opts:
            found = value if equals else following
    return found


def _rule(param: Any) -> str:
    """What values of a parameter must be."""
    if choices := _choices(param):
        return f"one of {', '.join(choices)}"
    noun = "a whole number" if _is_whole(_kind(param)) else "a number"
    bounds = [(word, _bound(param, name)) for word, name in (("at least", "min"), ("at most", "max"))]
    words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return noun + (f" of {' and '.join(words)}" if words else "")


def _is_whole(kind: Any) -> bool:
    return kind.annotation is int if hasattr(kind, "annotation") else "int" in str(getattr(kind, "name", ""))


def _kind(param: Any) -> Any:
    """The type of a parameter, as one version of typer has it or another."""
    return getattr(param, "type_descriptor", None) or getattr(param, "type", None)


def _bound(param: Any, name: str) -> Any:
    found = getattr(param, name, None)
    return getattr(_kind(param), name, None) if found is None else found


def _choices(param: Any) -> list[str]:
    return [str(getattr(choice, "value", choice)) for choice in getattr(_kind(param), "choices", None) or ()]


def _too_many(extra: Sequence[str], command: Any, path: str, words: Sequence[str]) -> str:
    flags = [option for param in command.params if getattr(param, "is_flag", False) for option in param.opts]
    before = words[words.index(extra[0]) - 1] if extra[0] in words[1:] else ""
    if before in flags:
        return f"{before} takes no value; got {extra[0]!r}."
    names = [name_of(param) for param in command.params if param.param_type_name == "argument"]
    takes = f"{' and '.join(names)} alone" if names else "nothing"
    return f"{path.removeprefix('bilevel ')} takes {takes} beside its options; {' '.join(extra)!r} is too many."
