"""The `bilevel` command. Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C. Messages go to standard error.

Importing this module does not import torch: each command imports what it needs when it is called.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.main import get_command

import bilevel
from bilevel._util.checks import EXTRAS, how_to_install
from bilevel.cli import commands, denoise, doctor, predict
from bilevel.cli.run_folder import INTERRUPTED, STOPPED, Stopped
from bilevel.errors import BilevelError, BilevelWarning, OptionError

COMMANDS: dict[str, Callable[..., None]] = {
    "denoise": denoise.command,
    "predict": predict.command,
    "poison": commands.poison,
    "tune": commands.tune,
    "fewshot": commands.fewshot,
    "compare": commands.compare,
    "doctor": doctor.command,
}
# The group of entry points by which other distributions add commands.
PLUGINS = "bilevel.commands"


def build_app(words: Sequence[str] | None = None) -> typer.Typer:
    """Return the command line. Commands of other distributions are loaded if `words` has their name, or by default."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, command in COMMANDS.items():
        app.command(name)(command)
    for entry in entry_points(group=PLUGINS):
        _add_plugin(app, entry, load=words is None or entry.name in words)
    return app


def _add_plugin(app: typer.Typer, entry: EntryPoint, *, load: bool) -> None:
    """Add a command of another distribution; if it is not loaded, only its name and what it belongs to."""
    if not load:
        about = entry.dist.metadata if entry.dist is not None else {"Name": entry.value}
        app.command(entry.name, help=f"Part of {about['Name']}: see bilevel {entry.name} --help.")(lambda: None)
        return
    command = entry.load()
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=entry.name)
    else:
        app.command(entry.name)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bilevel {bilevel.__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Solve bilevel optimization problems by the penalty method."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and context.invoked_subcommand != "denoise":
        error = OptionError(f"torchrun works with denoise only; run {context.invoked_subcommand} in one process.")
        error.reported = os.environ.get("RANK", "0") != "0"
        raise error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the one of this process, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            build_app(words)(args=words, prog_name="bilevel")
    except KeyboardInterrupt:
        return _end(STOPPED, INTERRUPTED)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return _end(STOPPED, code) if code == INTERRUPTED else code
    except Stopped as end:
        return _end(str(end), INTERRUPTED)
    except OptionError as error:
        return _end("" if error.reported else _name_option(str(error), words), 2)
    except (BilevelError, OSError) as error:
        return _end("" if getattr(error, "reported", False) else str(error), 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        return _end(how_to_install(error.name or ""), 1)
    except MemoryError:
        return _end("There is not enough memory for this.", 1)
    return 0


def _end(message: str, code: int) -> int:
    if message:
        print(f"bilevel: {message}", file=sys.stderr)
    return code


def _name_option(message: str, words: Sequence[str]) -> str:
    """Return the message of an error; if it begins with an argument, `label` or `model='cnn'`, as the option."""
    commands: dict[str, Any] = getattr(get_command(build_app(words)), "commands", {})
    command = next((commands[word] for word in words if word in commands), None)
    found = re.match(r"(\w+)(?:='?([^' ]+)'?)?(?= )", message)
    option = "" if found is None else "--" + found[1].replace("_", "-")
    if found is None or command is None or not any(option in param.opts for param in command.params):
        return message
    return " ".join(filter(None, (option, found[2]))) + message[found.end() :]


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    """Print a warning of this library as a sentence, and any other as Python does."""
    own = issubclass(category, BilevelWarning)
    print(f"note: {message}" if own else warnings.formatwarning(message, category, filename, lineno), file=sys.stderr)
