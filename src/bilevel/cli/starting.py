"""Ctrl-C while the command still imports, which takes seconds: one line and its exit code, as later.

The package imports this before all else. In a process that is not the `bilevel` command it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from bilevel.cli.stopped import BY_CTRL_C, INTERRUPTED


def is_command(arguments: Sequence[str], given: Sequence[str]) -> bool:
    """Whether a process is the command, by its `sys.argv` and `sys.orig_argv` at the first import of the package."""
    first = arguments[0] if arguments else ""
    if first == "-m":  # as it is until the module has been found
        at = next((i for i, word in enumerate(given) if word.startswith("-m")), 0)
        return "bilevel" in (given[at + 1 : at + 2] if given[at] == "-m" else [given[at].removeprefix("-m")])
    return os.path.basename(first) in ("bilevel", "bilevel.exe", "bilevel-script.py")


def _end(number: int, frame: FrameType | None) -> None:
    """At once: nothing is written yet, and a half-imported module is not to be cleaned up."""
    if os.environ.get("RANK", "0") == "0" and "--multiprocessing-fork" not in sys.orig_argv:
        os.write(2, f"bilevel: {BY_CTRL_C}\n".encode())
    os._exit(INTERRUPTED)


def over() -> None:
    """The command begins: Ctrl-C is its own to handle."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _plain and is_command(getattr(sys, "argv", ()), sys.orig_argv):
    signal.signal(signal.SIGINT, _end)
