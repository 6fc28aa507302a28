"""The `bilevel` command. Exit codes: 0 done, 1 ended badly, 2 wrong use, 130 Ctrl-C; messages go to standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer

from bilevel import __version__
from bilevel.cli import compare, denoise, doctor, fewshot, poison, tune
from bilevel.cli.command import Command, Group
from bilevel.cli.progress import LINES
from bilevel.cli.starting import over
from bilevel.cli.stopped import BY_CTRL_C, INTERRUPTED, Stopped
from bilevel.distributed.process_group import first_rank, world
from bilevel.errors import BilevelError, BilevelWarning, OptionError

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("denoise", cls=Command)(denoise.command)
app.command("poison", cls=Command)(poison.command)
app.command("tune", cls=Command)(tune.command)
app.command("fewshot", cls=Command)(fewshot.command)
app.command("compare", cls=Command)(compare.command)
app.command("doctor", cls=Command)(doctor.command)
for entry in entry_points(group="bilevel.commands"):
    found = entry.load()
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=entry.name)
    else:
        app.command(entry.name, cls=Command)(found)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"bilevel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Solve bilevel optimization problems by the penalty method."""
    if world() > 1 and context.invoked_subcommand != "denoise":
        error = OptionError(f"torchrun is for denoise alone; got {context.invoked_subcommand}. Run it in one process.")
        error.told = not first_rank()
        raise error


def _say(error: Exception) -> None:
    """Print an error, once where all ranks have the same."""
    if not getattr(error, "told", False):
        print(f"bilevel: {error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (that of the process by default) and return its exit code."""
    LINES.begin()
    try:
        over()
        with warnings.catch_warnings():
            warnings.showwarning = _note
            app(args=None if arguments is None else list(arguments), prog_name="bilevel")
    except SystemExit as end:
        if end.code != INTERRUPTED:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        print(f"bilevel: {BY_CTRL_C}", file=sys.stderr)
        return INTERRUPTED
    except Stopped as end:
        if str(end):
            print(f"bilevel: {end}", file=sys.stderr)
        return INTERRUPTED
    except OptionError as error:
        _say(error)
        return 2
    except (BilevelError, OSError) as error:
        _say(error)
        return 1
    except MemoryError:
        print("bilevel: There is not enough memory for this.", file=sys.stderr)
        return 1
    return 0


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    """A warning of this library as a sentence; any other as Python writes it."""
    own = issubclass(category, BilevelWarning)
    print(f"note: {message}" if own else warnings.formatwarning(message, category, filename, lineno), file=sys.stderr)
