"""Which options a command line has, and that some have no place beside others."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from bilevel.errors import OptionError


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Which of these parameters the command line has."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def refuse(context: typer.Context, names: Sequence[str], what: str) -> None:
    found = given(context, names)
    options = [param.opts[0] for param in context.command.params if param.name in found]
    if options:
        raise OptionError(f"{' and '.join(options)} must be left out with {what}.")
