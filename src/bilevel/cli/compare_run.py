"""What `bilevel compare` does: run the methods that are not finished, show a table, draw a plot."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from bilevel import OptionError, Problem
from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import counted, did_you_mean, in_range
from bilevel.applications.comparison.compare import (
    METHODS,
    PRESETS,
    Budget,
    Start,
    Subject,
    compare,
    steps_of,
    synthetic,
)
from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel.cli.option_values import described, is_file, known, load, path_and_name
from bilevel.cli.progress import Bar, show_table
from bilevel.cli.run_folder import RESULT, RunFolder, Stopped, refuse_if, report_result
from bilevel.methods.base import Method
from bilevel.running.run_many import ONCE, Found, ResultFolder, RunItem, Settings, one_thread, run_items

NAMES = [example.name for example in examples()]
RATES = {"upper_rate", "lower_rate"}
FORMATS = (".png", ".svg", ".pdf")
# The default budget.
EVALUATIONS = 5_000
# What the file of a problem defines.
NEEDED = ("problem", "u", "v")


def run(
    problem: str,
    methods: str,
    budgets: Mapping[str, float | None],
    trials: int,
    seed: int,
    out: Path,
    plot: Path | None,
    json: bool,
) -> None:
    """Compare the methods and show how they end."""
    budget = _budget(budgets)
    if problem not in NAMES and not is_file(problem):
        known("PROBLEM", problem, NAMES, ", or a Python file")
    subject = synthetic(problem, trials, seed) if problem in NAMES else problem_of(problem, trials, seed)
    chosen = {text: method_of(text) for text in map(str.strip, methods.split(",")) if text}
    image = out / "compare.png" if plot is None else plot
    refuse_if(
        {
            f"--methods must name at least one of {', '.join(METHODS)}; got {methods!r}.": not chosen,
            f"--plot must end in {', '.join(FORMATS)}; got {image}.": image.suffix.lower() not in FORMATS,
        }
    )
    folder = RunFolder(out)
    RunFolder(image.parent, "--plot")
    for name, method in chosen.items():
        try:  # a method can refuse the problem before another one runs
            steps_of(subject.starts(method)[0], method, Budget("steps", 1))
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from error
    settings = {
        "problem": problem,
        "file": "" if problem in NAMES else hashlib.sha256(path_and_name(problem)[0].read_bytes()).hexdigest(),
        budget.unit: budget.most,
        "trials": trials,
        "seed": seed,
    }
    # Several threads would wait for each other on the small tensors of the four problems.
    with one_thread() if problem in NAMES else nullcontext():
        rows = _rows(chosen, subject, settings, ResultFolder(out / "cells"), budget, seed)
    complete = len(rows) == len(chosen)
    result = {
        "command": "compare",
        "status": "done" if complete else "stopped",
        "seed": seed,
        "problem": problem,
        "trials": trials,
        "budget": {budget.unit: budget.most},
        "measure": "error" if rows and rows[0]["error"] is not None else "f",
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        "methods": rows,
    }
    folder.write_json(RESULT, result)
    if rows:
        draw(result, image)
    report_result(result, {"plot": image}, show, json=json)
    if not complete:
        raise Stopped(
            f"Stopped by Ctrl-C: {len(rows)} of {len(chosen)} methods are finished and kept; the same command "
            "continues with the others."
        )


# -- options -----------------------------------------------------------------------------------------------------------


def _budget(budgets: Mapping[str, float | None]) -> Budget:
    given = {unit: most for unit, most in budgets.items() if most is not None} or {"evaluations": EVALUATIONS}
    if len(given) > 1:
        options = " and ".join(f"--{unit}" for unit in given)
        raise OptionError(f"{options} are different ways to set the budget; give one of them.")
    ((unit, most),) = given.items()
    return Budget(unit, most)  # type: ignore[arg-type]


def method_of(text: str) -> Method:
    """Return the method that `name` or `name:option=value:option=value` describes.

    A learning rate becomes an Adam, except in methods that have such an option.
    """
    name, *parts = text.split(":")
    known("--methods", name, METHODS)
    options = dict(_option(name, part) for part in parts)
    # A preset takes its options, the options of the first preset and the options of `Penalty`.
    sources = (name, PRESETS[0], "penalty") if name in PRESETS else (name,)
    allowed = dict.fromkeys(each for source in sources for each in inspect.signature(METHODS[source]).parameters)
    for key in RATES & options.keys():
        in_range(f"--methods: {key} of {name}", options[key], above=0)
        if key not in allowed:
            options[key.replace("rate", "optimizer")] = partial(torch.optim.Adam, lr=options.pop(key))
    for key in options:
        if key not in allowed or key == "options":
            near, names = did_you_mean(key, allowed), ", ".join(each for each in allowed if each != "options")
            raise OptionError(f"--methods: {name} has no option {key!r}.{near} It has {names}.")
    return METHODS[name](**options)


def _option(name: str, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--methods: an option of {name} is written option=value; got {text!r}.")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


# -- a problem from a file --------------------------------------------------------------------------------------------


def problem_of(text: str, trials: int, seed: int) -> Subject:
    """Return the problem that a file defines, with a start for each trial."""
    path, found = load(text, "PROBLEM must be a synthetic problem or a Python file")
    takes_seed = callable(found) and "seed" in inspect.signature(found).parameters
    if trials > 1 and not takes_seed:
        raise OptionError(
            f"--trials {trials} needs `{path.name}:name` with a function name(seed) that returns problem, u and v for "
            "each start; this file has one start."
        )
    return Subject(text, [_start(path, found, {"seed": nth(seed, k)} if takes_seed else {}) for k in range(trials)])


def _start(path: Path, found: Any, seed: Mapping[str, int]) -> Start:
    if callable(found) and not isinstance(found, type):
        try:
            found = found(**seed)
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {described(error)}") from error
    if isinstance(found, (tuple, list)):
        if len(found) not in (3, 4):
            raise OptionError(f"{path} must give (problem, u, v) or (problem, u, v, data); got {len(found)} values.")
        found = dict(zip((*NEEDED, "data"), found, strict=False))
    values = found if isinstance(found, Mapping) else {key: getattr(found, key, None) for key in (*NEEDED, "data")}
    for key in NEEDED:
        if values.get(key) is None:
            raise OptionError(f"{path} must define {key!r}: a Problem `problem` and its variables `u` and `v`.")
    if not isinstance(values["problem"], Problem):
        raise OptionError(f"problem in {path} must be a bilevel.Problem; got {type(values['problem']).__name__}.")
    return Start(values["problem"], values["u"], values["v"], values.get("data"))


# -- the runs ----------------------------------------------------------------------------------------------------------


def _rows(
    chosen: Mapping[str, Method], subject: Subject, settings: Settings, store: ResultFolder, budget: Budget, seed: int
) -> list[dict[str, Any]]:
    """Return a row for each method that is finished; there are fewer after Ctrl-C."""
    items = [RunItem({"method": name, **settings}, weight=1) for name in chosen]

    def compared(settings: Settings) -> Found | None:
        found = compare(subject, chosen[settings["method"]], budget, seed=seed)
        return None if found is None else asdict(found)

    with Bar("methods") as bar:
        task = bar.add_task("comparing", total=len(items))
        run_items(items, store, compared, where=ONCE, on_progress=lambda _: bar.update(task, advance=1))
    rows = zip(chosen, map(store.get, items), strict=True)
    return [{"method": name, **found} for name, found in rows if found is not None]


# -- the result --------------------------------------------------------------------------------------------------------


def show(result: Mapping[str, Any]) -> None:
    """Print a row for each method."""
    ((unit, most),) = result["budget"].items()
    means = "; means over the starts" if result["trials"] > 1 else ""
    print(f"{result['problem']}, {counted(result['trials'], 'start')}, {most:,} {unit}{means}")
    rows = [
        (
            row["method"],
            *([] if row["error"] is None else [f"{row['error']:.1e}"]),
            *(f"{row['upper']:.4g}", f"{row['residual']:.1e}", row["status"]),
            *(f"{row['evaluations']:,.0f}", f"{row['steps']:,.0f}", f"{row['seconds']:.1f}"),
        )
        for row in result["methods"]
    ]
    error = ["error"] if result["measure"] == "error" else []
    show_table(("method", *error, "f", "|grad_v g|", "ended", "evaluations", "steps", "seconds"), rows)


def draw(result: Mapping[str, Any], image: Path) -> None:
    """Plot the error, or f, of every method against evaluations of g."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for row in result["methods"]:
        x, y = zip(*row["curve"], strict=True)
        axes.plot(x, y, label=row["method"], marker="o" if len(x) < 3 else None, ms=3)
    if result["measure"] == "error":
        axes.set_yscale("log")
    axes.set(xlabel="evaluations of g", ylabel=result["measure"], title=result["problem"])
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with atomic_write(image) as temporary:
        figure.savefig(temporary, dpi=110, format=image.suffix[1:])
