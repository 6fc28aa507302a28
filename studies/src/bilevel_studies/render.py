"""Write a result page from its template: `python -m bilevel_studies.render poisoning`.

A template is Markdown that a person writes; every number in it comes from the results of the study.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bilevel._util.atomic_files import write_whole
from bilevel_studies.statistics import Numbers
from bilevel_studies.study import RESULTS, Kept, read

PAGES = RESULTS.parents[1] / "docs" / "results"
# The module of each page; its function `page` returns the names that the template uses.
STUDIES = {"poisoning": "bilevel_studies.poisoning.tables", "field": "bilevel_studies.field.tables"}


def render(name: str, kept: Sequence[Kept]) -> str:
    """Return the page of a study. A name that the template uses and the study lacks is an error."""
    environment = Environment(
        loader=PackageLoader("bilevel_studies", "pages"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fixed": fixed, "signed": signed, "interval": interval, "count": count}
    return environment.get_template(f"{name}.md.j2").render(import_module(STUDIES[name]).page(kept))


def fixed(value: float, digits: int = 2) -> str:
    """Return a number with a fixed number of digits after the point."""
    return f"{value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Return a number with its sign."""
    return f"{value:+.{digits}f}"


def count(value: int) -> str:
    """Return a number with commas at the thousands."""
    return f"{value:,}"


def interval(found: Numbers) -> str:
    """Return the 95% interval of a mean."""
    low, high = found.interval or (found.mean, found.mean)
    return f"{low:+.1f} to {high:+.1f}"


def write(name: str, kept: Sequence[Kept], folder: Path = PAGES) -> Path:
    """Write the page of a study into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.md", render(name, kept))
    return folder / f"{name}.md"


def main() -> None:
    names = sys.argv[1:] or list(STUDIES)
    if unknown := [name for name in names if name not in STUDIES]:
        sys.exit(f"No template for {', '.join(unknown)}. There are: {', '.join(STUDIES)}.")
    for name in names:
        print(write(name, read(RESULTS / f"{name}.json")))


if __name__ == "__main__":
    main()
