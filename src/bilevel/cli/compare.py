"""`bilevel compare`: methods side by side on one problem."""

from __future__ import annotations

import ast
import difflib
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..applications.comparison import METHODS, Subject, compare, cost_of, synthetic
from ..applications.synthetic import examples
from ..errors import OptionError
from ..method import Method
from ..paper.cells import Cell, Store
from . import problem_file
from .folder import Folder, to_json

NAMES = [example.name for example in examples()]
SHOWN = "penalty,approx-grad,reverse-mode,alternating"
FORMATS = (".png", ".svg", ".pdf")


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
            help=f"Separated by commas: {', '.join(METHODS)}. Options follow a colon: reverse-mode:lower_steps=20."
        ),
    ] = SHOWN,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="The budget of each method: evaluations of g a trial. By default 5000.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Upper steps instead, the same for all methods.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Starts; every method has the same.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="What the starts are drawn from.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to; finished methods in it are not run again.")] = Path(
        "runs/compare"
    ),
    plot: Annotated[Path | None, typer.Option(help="The image. By default compare.png in --out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run methods on one problem, from the same starts and with the same budget, and show how they end."""
    if evaluations is not None and steps is not None:
        raise OptionError("--evaluations and --steps are two ways to say the budget; give one of them.")
    evaluations = 5000 if evaluations is None and steps is None else evaluations
    chosen = {text: _method(text) for text in _listed(methods)}
    subject, text = _subject(problem, trials, seed)
    folder = Folder(out)
    image = _image(out, plot)
    for name, method in chosen.items():
        _refuse(name, subject, method)
    settings = {
        "problem": problem, "file": hashlib.sha256(text.encode()).hexdigest(), "evaluations": evaluations,
        "steps": steps, "trials": trials, "seed": seed,
    }  # fmt: skip
    rows, complete = _rows(chosen, subject, settings, Store(out / "cells"), evaluations, steps, seed)
    result = {
        "command": "compare", "status": "done" if complete else "stopped", "seed": seed, "problem": problem,
        "trials": trials, "evaluations": evaluations, "steps": steps,
        "measure": "error" if rows and rows[0]["error"] is not None else "f",
        "seconds": round(sum(row["seconds"] for row in rows), 3), "methods": rows,
    }  # fmt: skip
    folder.write_json("result.json", result)
    if rows:
        _draw(result, image)
    if json:
        typer.echo(to_json(result))
    else:
        _show(result)
        typer.echo(f"plot: {image}")
    if not complete:
        print(
            f"bilevel: Stopped by Ctrl-C: {len(rows)} of {len(chosen)} methods are finished and kept; the same command "
            "goes on from there.",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _listed(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise OptionError(f"--methods must name at least one method of {', '.join(METHODS)}.")
    return names


def _method(text: str) -> Method:
    """`name` or `name:option=value:option=value`."""
    name, *parts = text.split(":")
    if name not in METHODS:
        raise OptionError(f"--methods has no {name!r}{_nearest(name, list(METHODS))} It knows {', '.join(METHODS)}.")
    options: dict[str, Any] = {}
    for part in parts:
        key, mark, value = part.partition("=")
        if not mark:
            raise OptionError(f"--methods: an option of {name} is written option=value; got {part!r}.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    try:
        return METHODS[name](**options)
    except TypeError as error:
        raise OptionError(f"--methods: {name} has no such option: {error}.") from None


def _subject(problem: str, trials: int, seed: int) -> tuple[Subject, str]:
    """The subject, and the text that defines it."""
    if problem in NAMES:
        return synthetic(problem, trials, seed), ""
    if problem_file.is_file(problem):
        return problem_file.load(problem, trials, seed), problem_file.source(problem)
    raise OptionError(
        f"PROBLEM has no {problem!r}{_nearest(problem, NAMES)} It is one of {', '.join(NAMES)}, or a Python file."
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {near[0]!r}?" if near else "."


def _image(out: Path, plot: Path | None) -> Path:
    image = out / "compare.png" if plot is None else plot
    if image.suffix.lower() not in FORMATS:
        raise OptionError(f"--plot must end in {', '.join(FORMATS)}; got {image}.")
    Folder(image.parent, "--plot")
    return image


def _refuse(name: str, subject: Subject, method: Method) -> None:
    """Let a method refuse the problem before any other has run."""
    try:
        cost_of(subject.starts(method)[0], method)
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error


def _rows(
    chosen: dict[str, Method],
    subject: Subject,
    settings: dict[str, Any],
    store: Store,
    evaluations: int | None,
    steps: int | None,
    seed: int,
) -> tuple[list[dict[str, Any]], bool]:
    """A row for each method that is finished; False where Ctrl-C came before the last."""
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(chosen))
            for name, method in chosen.items():
                bar.update(task, description=name)
                cell = Cell({"method": name, **settings}, weight=1)
                found = store.get(cell)
                if found is None:
                    outcome = compare(subject, method, evaluations=evaluations, steps=steps, seed=seed)
                    if outcome is None:
                        return rows, False
                    found = asdict(outcome)
                    store.put(cell, found)
                rows.append({"method": name, **found})
                bar.advance(task)
    except KeyboardInterrupt:
        return rows, False
    return rows, True


def _show(result: dict[str, Any]) -> None:
    budget = f"{result['evaluations']:,} evaluations" if result["evaluations"] else f"{result['steps']:,} steps"
    table = Table(title=f"{result['problem']}, {result['trials']} start(s), {budget}; means over the starts")
    known = result["measure"] == "error"
    for i, head in enumerate(
        ["Method", *(["Error"] if known else []), "f", "|grad_v g|", "Evaluations", "Steps", "Seconds", "Peak memory",
         "Ended"]
    ):  # fmt: skip
        table.add_column(head, justify="right" if i else "left")
    for row in result["methods"]:
        error = [f"{row['error']:.1e}"] if known else []
        table.add_row(
            row["method"], *error, f"{row['upper']:.4g}", f"{row['residual']:.1e}", f"{row['evaluations']:,.0f}",
            f"{row['steps']:,.0f}", f"{row['seconds']:.1f}", _bytes(row["memory"]), row["status"],
        )  # fmt: skip
    Console().print(table)


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def _draw(result: dict[str, Any], image: Path) -> None:
    """Error, or f, of every method against evaluations of g."""
    style: dict[Any, Any] = {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for row in result["methods"]:
            x, y = zip(*row["curve"], strict=True)
            axes.plot(x, y, label=row["method"], marker="o" if len(x) < 3 else None, ms=3)
        if result["measure"] == "error":
            axes.set_yscale("log")
        axes.set(xlabel="evaluations of g", ylabel=result["measure"], title=result["problem"])
        axes.legend(frameon=False)
        figure.savefig(image, dpi=110)
