"""How a command says that Ctrl-C ended it: `main` prints the message, and makes it the exit code that shells expect."""

from __future__ import annotations

INTERRUPTED = 130
"""128 + SIGINT: what shells take for Ctrl-C, and what typer makes of one that no command has handled."""
BY_CTRL_C = "Stopped by Ctrl-C."
"""What is said of one that no command has handled."""


class Stopped(Exception):  # noqa: N818
    """Ctrl-C ended the command. The message says what is kept; it is empty where another rank says it."""
