"""Errors of the library in the words of the command line: `label` is `--label`, `model='mlp'` is `--model mlp`."""

from __future__ import annotations

import re
from collections.abc import Sequence

QUOTE = "'"


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
