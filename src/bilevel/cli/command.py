"""What all commands have in common: help whose lines flow, and refusals in one sentence that names options."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from bilevel._util.checks import did_you_mean
from bilevel.cli.naming import by_option
from bilevel.cli.usage import UsageError, lacks, name_of, sentence
from bilevel.distributed.process_group import first_rank
from bilevel.errors import OptionError


class _Plain:
    """Help that shows flags without a type, and wrong use as an `OptionError`."""

    params: list[Any]

    def get_help_option(self, ctx: Any) -> Any:
        return _flag(super().get_help_option(ctx))  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except UsageError as error:
            if not words and getattr(self, "no_args_is_help", False):
                raise  # the help
            raise _refusal(sentence(error, self, ctx.command_path, words)) from None


class Command(_Plain, TyperCommand):
    """A command with help in paragraphs as wide as the terminal, whose refusals name its options."""

    def __init__(self, *given: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*given, help=help and re.sub(r"(?<!\n)\n(?!\n)", " ", help), **more)
        for param in self.params:
            _flag(param)
            if isinstance(getattr(param, "show_default", None), str):
                param.help, param.show_default = f"{param.help} By default {param.show_default}.", False

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(name_of(each) if each.required else f"[{name_of(each)}]" for each in arguments)]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OptionError as error:
            error.args = (by_option(str(error), [opt for param in self.params for opt in param.opts]),)
            raise


class Group(_Plain, TyperGroup):
    """A command of commands."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for param in self.params:
            _flag(param)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            names = ", ".join(self.commands)
            near = did_you_mean(args[0], self.commands)
            raise _refusal(f"{lacks(ctx.command_path, f'command {args[0]!r}')}{near} The commands are {names}.")
        return super().resolve_command(ctx, args)


def _flag(param: Any) -> Any:
    """The parameter; where it takes no value, without a word for one."""
    if getattr(param, "is_flag", False):
        param.metavar = ""
    return param


def _refusal(message: str) -> OptionError:
    error = OptionError(message)
    error.told = not first_rank()
    return error
