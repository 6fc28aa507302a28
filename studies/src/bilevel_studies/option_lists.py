"""Options of the commands that are lists with commas."""

from __future__ import annotations

from collections.abc import Sequence

from bilevel import OptionError
from bilevel._util.checks import one_of


def words(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    """Return the words of a list with commas, after a check that they are allowed. None stands for all of them."""
    found = list(allowed) if text is None else [word.strip() for word in text.split(",")]
    for word in found:
        one_of(option, word, tuple(allowed))
    return found


def shares(text: str | None) -> list[float] | None:
    """Return the numbers of `--noise`."""
    if text is None:
        return None
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(f"--noise must be numbers with commas, such as 0.25,0.5; got {text}.") from None
    for share in found:
        if not 0 < share < 1:
            raise OptionError(f"--noise must be above 0 and below 1; got {share:g}.")
    return found
