"""`bilevel demo`: the paper's four synthetic problems, each from many random starts."""

from __future__ import annotations

import csv
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bilevel import Penalty
from bilevel._util.atomic_files import atomic_write, write_whole
from bilevel.applications.comparison.synthetic_problems import Example, examples, nth
from bilevel.report.figures import ACCENT, INK, Html, drawn
from bilevel.report.page import Card, Report, render
from bilevel.report.page import Table as ReportTable
from bilevel.results import COLUMNS
from bilevel_studies.study import INTERRUPTED, make_folder
from bilevel_studies.synthetic.attempts import DESCRIPTIONS, Attempt, attempt

GOAL = 1e-6
GOAL_TEXT = "1e-6"
DIMENSION = 10
MAX_STEPS = 3000
# The value at which an exact zero is drawn on a logarithmic axis.
FLOOR = 1e-17
HEADINGS = ("Problem", "Solved", "Median error", "Median steps", "Seconds")
# The finished attempts at each problem, by its name.
Results = dict[str, list[Attempt]]


def command(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo-synthetic"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the starts and the matrices.")] = 0,
    starts: Annotated[int, typer.Option(min=1, help="Random starts for each problem.")] = 20,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Solve the paper's four synthetic problems from random starts and show how they converge."""
    make_folder(out)
    method = Penalty()
    config = {
        "command": "demo",
        "seed": seed,
        "starts": starts,
        "dimension": DIMENSION,
        "goal": GOAL,
        "max_steps": MAX_STEPS,
        "method": "Penalty",
        "options": method.describe(),
        "versions": {name: version(name) for name in ("bilevel", "torch", "numpy")}
        | {"python": platform.python_version()},
    }
    began = time.perf_counter()
    results: Results = {}
    complete = _solve(method, seed, starts, results)
    result = _result(results, complete, seed, starts, time.perf_counter() - began)
    for name, content in (("config", config), ("result", result)):
        write_whole(out / f"{name}.json", json.dumps(content, indent=2, default=str) + "\n")
    with atomic_write(out / "history.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["problem", "start", "error", *COLUMNS])
        writer.writeheader()
        writer.writerows(_history(results))
    write_whole(out / "report.html", render(_report(results, result, config)))
    if json_:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(result)
        typer.echo(f"{result['message']}\nreport: {out / 'report.html'}")
    if result["status"] != "converged":
        print(f"bilevel: {result['message']}", file=sys.stderr)
        raise typer.Exit(1 if complete else INTERRUPTED)


def _solve(method: Penalty, seed: int, starts: int, results: Results) -> bool:
    """Fill in the results; return False after Ctrl-C. Each start has its own matrix A, as in the paper."""
    count = len(examples(DIMENSION))
    try:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=count * starts)
            for i in range(count):
                for k in range(starts):
                    example = examples(DIMENSION, seed=nth(seed, k))[i]
                    bar.update(task, description=DESCRIPTIONS[example.name].title)
                    found = attempt(example, method, nth(seed, k), max_steps=MAX_STEPS)
                    if found.solution.interrupted:
                        return False
                    results.setdefault(example.name, []).append(found)
                    bar.advance(task)
    except KeyboardInterrupt:
        return False
    return True


def _result(results: Results, complete: bool, seed: int, starts: int, seconds: float) -> dict[str, Any]:
    problems = [_summary(name, attempts) for name, attempts in results.items()]
    done, solved = (sum(problem[key] for problem in problems) for key in ("starts", "solved"))
    if not complete:
        status = "stopped"
        message = (
            f"Stopped by Ctrl-C: {done} of {starts * len(examples(DIMENSION))} runs were finished, and they are kept."
        )
    elif solved < done:
        status = "unsolved"
        message = f"{done - solved} of {done} runs ended further than {GOAL_TEXT} from a solution."
    else:
        status = "converged"
        message = f"All {done} runs ended within {GOAL_TEXT} of a solution."
    return {
        "command": "demo",
        "method": "Penalty",
        "status": status,
        "message": message,
        "seed": seed,
        "starts": starts,
        "goal": GOAL,
        "solved": solved,
        "seconds": round(seconds, 3),
        "problems": problems,
    }


def _summary(name: str, attempts: Sequence[Attempt]) -> dict[str, Any]:
    return {
        "name": name,
        "starts": len(attempts),
        "solved": sum(a.distance <= GOAL for a in attempts),
        "median_error": median(a.error for a in attempts),
        "worst_error": max(a.error for a in attempts),
        "worst_distance": max(a.distance for a in attempts),
        "median_steps": median(a.solution.steps for a in attempts),
        "seconds": round(sum(a.seconds for a in attempts), 3),
        "endings": dict(Counter(a.solution.status.name.lower() for a in attempts)),
    }


def _history(results: Results) -> Iterator[dict[str, Any]]:
    for name, attempts in results.items():
        for k, found in enumerate(attempts):
            rows = found.solution.history.rows()
            for row, error in zip(rows, found.errors[1:], strict=False):
                yield {"problem": name, "start": k, "error": error, **row}


def _rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            DESCRIPTIONS[p["name"]].title,
            f"{p['solved']}/{p['starts']}",
            f"{p['median_error']:.1e}",
            f"{p['median_steps']:g}",
            f"{p['seconds']:.1f}",
        )
        for p in result["problems"]
    ]


def _show(result: Mapping[str, Any]) -> None:
    table = Table(title=f"Four synthetic problems, {result['starts']} starts each, solved to {GOAL_TEXT}")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left")
    for row in _rows(result):
        table.add_row(*row)
    Console().print(table)


def _report(results: Results, result: Mapping[str, Any], config: Mapping[str, Any]) -> Report:
    versions = config["versions"]
    return Report(
        title="The paper's four synthetic problems",
        outcome=result["message"],
        good=result["status"] == "converged",
        table=ReportTable(
            f"A start is solved if it ends within {GOAL_TEXT} of a solution. Seconds are of all starts together.",
            HEADINGS,
            _rows(result),
        ),
        legend="Error against step, from every start (thin) and in the median (thick). The dashed line is the goal, "
        f"{GOAL_TEXT}. A step is one L-BFGS iteration on the penalised objective, over u and v together.",
        cards=[_card(example, results[example.name]) for example in examples(DIMENSION) if example.name in results],
        settings=[
            ("Method", "Penalty, deterministic mode, no options"),
            ("Seed", str(config["seed"])),
            ("Starts for each problem", str(config["starts"])),
            ("Dimension of u and of v", str(config["dimension"])),
            ("Most steps", str(config["max_steps"])),
            ("Precision", "float64"),
            ("Seconds", f"{result['seconds']:.1f}"),
            ("bilevel", versions["bilevel"]),
            ("torch", versions["torch"]),
            ("numpy", versions["numpy"]),
            ("Python", versions["python"]),
        ],
        notes=[
            "Problems and error measures: Mehra and Hamm, Penalty Method for Inversion-Free Deep Bilevel Optimization, "
            "ACML 2021, Appendix E.1. Starts are uniform in [-5, 5]; A is normal, 5 by 10, drawn for each start; "
            "P projects on its row space."
        ],
    )


def _card(example: Example, attempts: Sequence[Attempt]) -> Card:
    solved, text = sum(a.distance <= GOAL for a in attempts), DESCRIPTIONS[example.name]
    label = (
        f"{text.title}: error against step on a logarithmic axis. {solved} of {len(attempts)} starts are solved; "
        f"the median start ends at an error of {median(a.error for a in attempts):.1e} after "
        f"{median(a.solution.steps for a in attempts):g} steps."
    )
    figure = convergence(example.name, [a.errors for a in attempts], goal=GOAL, label=label)
    facts = [("f", text.f), ("g", text.g), ("solution", text.solutions), ("error", text.measure)]
    return Card(text.title, figure, facts, note=text.note)


def convergence(name: str, curves: Sequence[Sequence[float]], *, goal: float, label: str) -> Html:
    """Draw error against step on a logarithmic axis: the curves thin, their median thick, the goal dashed.

    A curve that ends early keeps its last value.
    """
    length = max(len(curve) for curve in curves)
    padded = [[*curve, *[curve[-1]] * (length - len(curve))] for curve in curves]
    values = np.maximum(np.array(padded, dtype=float), FLOOR)

    def draw(axes: Any) -> None:
        for curve in curves:
            axes.semilogy(np.maximum(curve, FLOOR), color=ACCENT, linewidth=0.8, alpha=0.35)
        axes.semilogy(np.median(values, axis=0), color=ACCENT, linewidth=2.4)
        axes.axhline(goal, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
        axes.set(xlabel="step", ylabel="error", xlim=(0, max(length - 1, 1)))

    return drawn(name, label, draw, size=(4.4, 3.0), whole="x", legend=False)
