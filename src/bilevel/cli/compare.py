"""`bilevel compare`: methods side by side on one problem."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bilevel._util.checks import did_you_mean
from bilevel._util.parallel_map import ONCE, one_thread
from bilevel.applications.comparison.compare import (
    METHODS,
    PRESETS,
    UNROLLED,
    Budget,
    Subject,
    compare,
    deterministic,
    rated,
    steps_of,
    synthetic,
)
from bilevel.applications.comparison.synthetic_problems import examples
from bilevel.cli import problem_file, python_file
from bilevel.cli.compare_output import draw, show
from bilevel.cli.folder import Folder
from bilevel.cli.options import JsonOption
from bilevel.cli.progress import Bar
from bilevel.cli.stopped import Stopped
from bilevel.cli.telling import tell
from bilevel.errors import OptionError
from bilevel.methods.base import Method
from bilevel.running.run_many import Cell, Found, Settings, Store, run_cells

NAMES = [example.name for example in examples()]
SHOWN = "penalty,approx-grad,reverse-mode,alternating"
FORMATS = (".png", ".svg", ".pdf")
EVALUATIONS = 5_000
"""The budget, where none is given."""


def command(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM",
            help=f"{', '.join(NAMES)}, or a Python file: `path.py` with `problem`, `u`, `v` (and `data`, if any) at "
            "its top level, or `path.py:name`, where name is an object with these attributes, a dict or tuple of them, "
            "or a function that returns one; a function name(seed) gives each trial its start.",
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas: {', '.join(METHODS)}. Options follow a colon: "
            "reverse-mode:lower_steps=20:upper_rate=0.01."
        ),
    ] = SHOWN,
    evaluations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The budget of each method in one trial: evaluations of g. A step-wise method takes as many upper "
            "steps as it pays for; penalty, without data, ends with the step that spends it. By default "
            f"{EVALUATIONS:,}.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The budget in upper steps instead.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="The budget in seconds instead. The number of steps is estimated from the time of the first few."
        ),
    ] = None,
    upper_rate: Annotated[
        float | None,
        typer.Option(
            help="The learning rate of u (Adam) of step-wise methods that do not set their own (upper_rate=...)."
        ),
    ] = None,
    lower_rate: Annotated[
        float | None,
        typer.Option(help="The learning rate of v: of Adam, or of gradient descent for reverse-mode and forward-mode."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Starts; every method has the same.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="What the starts are drawn from.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to; finished methods in it are not run again.")] = Path(
        "runs/compare"
    ),
    plot: Annotated[Path | None, typer.Option(help="The image. By default compare.png in --out.")] = None,
    json: JsonOption = False,
) -> None:
    """Run methods on one problem, from the same starts and with the same budget, and show how they end."""
    budget = _budget(evaluations, steps, seconds)
    rates = {"upper_rate": _rate("--upper-rate", upper_rate), "lower_rate": _rate("--lower-rate", lower_rate)}
    chosen = {text: _method(text, rates) for text in _listed(methods)}
    subject, text = _subject(problem, trials, seed)
    folder = Folder(out)
    image = _image(out, plot)
    chosen = {name: _rated(name, subject, method, rates) for name, method in chosen.items()}
    for name, method in chosen.items():
        _refuse(name, subject, method)
    settings = {
        "problem": problem,
        "file": hashlib.sha256(text.encode()).hexdigest(),
        budget.unit: budget.most,
        **rates,
        "trials": trials,
        "seed": seed,
    }
    with one_thread() if problem in NAMES else nullcontext():  # several wait for one another on tensors so small
        rows, complete = _rows(chosen, subject, settings, Store(out / "cells"), budget, seed)
    result = {
        "command": "compare",
        "status": "done" if complete else "stopped",
        "seed": seed,
        "problem": problem,
        "trials": trials,
        "budget": {budget.unit: budget.most},
        **rates,
        "measure": "error" if rows and rows[0]["error"] is not None else "f",
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        "methods": rows,
    }
    folder.write_json("result.json", result)
    if rows:
        draw(result, image)
    tell(result, show, json=json, plot=image)
    if not complete:
        raise Stopped(
            f"Stopped by Ctrl-C: {len(rows)} of {len(chosen)} methods are finished and kept; the same command goes on "
            "from there."
        )


def _budget(evaluations: int | None, steps: int | None, seconds: float | None) -> Budget:
    given = {"evaluations": evaluations, "steps": steps, "seconds": seconds}
    named = {unit: value for unit, value in given.items() if value is not None}
    if len(named) > 1:
        options = " and ".join(f"--{unit}" for unit in named)
        raise OptionError(f"{options} are different ways to set the budget; give one of them.")
    unit, most = next(iter(named.items()), ("evaluations", EVALUATIONS))
    return Budget(unit, most)


def _rate(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise OptionError(f"{name} must be a number above 0; got {value!r}.")
    return float(value)


def _listed(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise OptionError(f"--methods must name at least one method of {', '.join(METHODS)}.")
    return names


def _method(text: str, rates: dict[str, float | None]) -> Method:
    """`name` or `name:option=value:option=value`, with the rates it names.

    A preset has rates of its own; the rates of the command replace them.
    """
    name, *parts = text.split(":")
    if name not in METHODS:
        raise OptionError(f"--methods has no {name!r}.{did_you_mean(name, METHODS)} It knows {', '.join(METHODS)}.")
    options: dict[str, Any] = {}
    for part in parts:
        key, mark, value = part.partition("=")
        if not mark:
            raise OptionError(f"--methods: an option of {name} is written option=value; got {part!r}.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    for key, rate in rates.items():
        optimizer = key.replace("rate", "optimizer")
        if key in options:
            options[key] = _rate(f"--methods: {key} of {name}", options[key])
            if name not in PRESETS and (key == "upper_rate" or name not in UNROLLED):
                options[optimizer] = partial(torch.optim.Adam, lr=options.pop(key))
        elif name in PRESETS and rate is not None:
            options[key] = rate
    known = _options_of(name)
    for key in options:
        if key not in known:
            raise OptionError(
                f"--methods: {name} has no option {key!r}.{did_you_mean(key, known)} It has {', '.join(known)}."
            )
    return METHODS[name](**options)


def _options_of(name: str) -> list[str]:
    """The options of a method; a preset takes its own, those of the first preset, and those of `Penalty`."""
    sources = (name, PRESETS[0], "penalty") if name in PRESETS else (name,)
    found = [each for source in sources for each in inspect.signature(METHODS[source]).parameters]
    return [each for each in dict.fromkeys(found) if each != "options"]


def _subject(problem: str, trials: int, seed: int) -> tuple[Subject, str]:
    """The subject, and the text that defines it."""
    if problem in NAMES:
        return synthetic(problem, trials, seed), ""
    if python_file.is_file(problem):
        return problem_file.load(problem, trials, seed), problem_file.source(problem)
    raise OptionError(
        f"PROBLEM has no {problem!r}.{did_you_mean(problem, NAMES)} It is one of {', '.join(NAMES)}, or a Python file."
    )


def _image(out: Path, plot: Path | None) -> Path:
    image = out / "compare.png" if plot is None else plot
    if image.suffix.lower() not in FORMATS:
        raise OptionError(f"--plot must end in {', '.join(FORMATS)}; got {image}.")
    Folder(image.parent, "--plot")
    return image


def _rated(name: str, subject: Subject, method: Any, rates: dict[str, float | None]) -> Method:
    """The method with the rates of the command, where it has learning rates and none of its own."""
    if not deterministic(method, subject.singles[0]):
        return rated(method, rates["upper_rate"], rates["lower_rate"])
    if method.upper_optimizer is not None or method.lower_optimizer is not None:
        raise OptionError(
            f"{name}: without data penalty has no learning rates. Leave them out, or add mode=stochastic."
        )
    unrated: Method = method
    return unrated


def _refuse(name: str, subject: Subject, method: Method) -> None:
    """Let a method refuse the problem before any other has run."""
    try:
        steps_of(subject.starts(method)[0], method, Budget("steps", 1))
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error


def _rows(
    chosen: dict[str, Method],
    subject: Subject,
    settings: dict[str, Any],
    store: Store,
    budget: Budget,
    seed: int,
) -> tuple[list[dict[str, Any]], bool]:
    """A row for each method that is finished; False where Ctrl-C came before the last."""
    rows: list[dict[str, Any]] = []
    with Bar("methods") as bar:
        task = bar.add_task("", total=len(chosen))
        for name, method in chosen.items():
            bar.update(task, description=name)
            cell = Cell({"method": name, **settings}, weight=1)
            if not run_cells([cell], store, partial(_outcome, subject, method, budget, seed), where=ONCE):
                return rows, False
            rows.append({"method": name, **(store.get(cell) or {})})
            bar.advance(task)
    return rows, True


def _outcome(subject: Subject, method: Method, budget: Budget, seed: int, settings: Settings) -> Found | None:
    outcome = compare(subject, method, budget, seed=seed)
    return None if outcome is None else asdict(outcome)
