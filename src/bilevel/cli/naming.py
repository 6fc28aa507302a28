"""Errors of the library in the words of the command line: `label` is `--label`, `model='mlp'` is `--model mlp`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from ..errors import OptionError

QUOTE = "'"


class Command(TyperCommand):
    """A command whose refusals name its options."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OptionError as error:
            error.args = (by_option(str(error), [opt for param in self.params for opt in param.opts]),)
            raise


def by_option(message: str, options: Sequence[str]) -> str:
    """The message, with options where it begins with names of arguments, and where it shows an argument's value."""
    known = {option[2:].replace("-", "_"): option for option in options if option.startswith("--")}
    if not known:
        return message
    name = "|".join(sorted(known, key=len, reverse=True))
    shown = re.sub(
        rf"(?<!\S)({name})=('[^']*'|[^\s;,.]+)", lambda found: f"{known[found[1]]} {found[2].strip(QUOTE)}", message
    )
    subject = re.match(rf"({name})(( and | or | \+ )({name}))*(?= )", shown)
    if subject is None:
        return shown
    return re.sub(name, lambda found: known[found[0]], subject[0]) + shown[subject.end() :]
