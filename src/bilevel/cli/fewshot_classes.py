"""The classes of a few-shot run: a split is drawn from their names, and other names give another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bilevel._util.text import agreeing
from bilevel.data.class_images import ClassSplits, ImageClasses
from bilevel.data.image_folders import some_of
from bilevel.errors import DataError


def classes_of(splits: ClassSplits, data: str) -> dict[str, dict[str, int]] | None:
    """How many images each class of each part has; None of Omniglot's thousands, which are always split alike."""
    return None if data == "omniglot" else _parts(splits)


def _parts(splits: ClassSplits) -> dict[str, dict[str, int]]:
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: dict(zip(part.names, part.counts, strict=True)) for name, part in parts.items() if part is not None}


def unseen(
    before: Mapping[str, Any] | None, splits: ClassSplits, data: str, *, other: bool
) -> tuple[ImageClasses, list[str]]:
    """The classes of data that a run is to be tried on, with notes.

    Those that it was tried on before, where they are there, whatever was added; of data that the run does not know a
    class of, all, if a seed alone would say which are for the test; else those of their test. Refuses classes that it
    has learnt from. `before` are the classes of the run, None of Omniglot; `other` is whether it was run on other data.
    """
    now = _parts(splits)
    old, new = ({name for part in (parts or {}).values() for name in part} for parts in (before, now))
    if other and splits.drawn and not old & new:
        return splits.joined(), []
    tried = (before or {}).get("test", {})
    if tried and tried.keys() <= new and (splits.drawn or not other):
        found = splits.joined().named(list(tried))
        changed = [name for name, count in zip(found.names, found.counts, strict=True) if count != tried[name]]
        were = f"{some_of(changed)} {agreeing(len(changed), 'has', 'have')} other numbers of images than then"
        return found, [f"The classes are those of the run; {were}."] * bool(changed)
    if before and not other:
        raise DataError(
            f"{data} is not as it was when the run began{_others(before, now)}: classes that the run was tried on are "
            "not there. Bring them back."
        )
    learnt = [name for name in now["test"] if name in (before or {}).get("train", ())]
    if learnt:
        raise DataError(
            f"the run has learnt from {some_of(learnt)}, which {data} has for its test. Give data without such classes."
        )
    return splits.test, []


def refuse_changed_classes(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, data: str) -> None:
    """Refuse to go on with a run on data that are not what they were."""
    if before != now:
        other = _others(before or {}, now or {}) or " (numbers of images)"
        raise DataError(f"{data} is not as it was when the run began{other}. Bring it back, or give another --out.")


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which classes are gone, and which are new."""
    old, new = ({name for part in parts.values() for name in part} for parts in (before, now))
    changes = {"without": old - new, "with": new - old}
    said = [f"{word} {some_of(sorted(names))}" for word, names in changes.items() if names]
    return f" ({' and '.join(said)})" if said else ""
