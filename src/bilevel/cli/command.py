"""What all commands have in common: help whose lines flow, and refusals that name options."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

from ..errors import OptionError
from .naming import by_option


class Command(TyperCommand):
    """A command with help in paragraphs as wide as the terminal, whose refusals name its options."""

    def __init__(self, *given: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*given, help=help and re.sub(r"(?<!\n)\n(?!\n)", " ", help), **more)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OptionError as error:
            error.args = (by_option(str(error), [opt for param in self.params for opt in param.opts]),)
            raise
