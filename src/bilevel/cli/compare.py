"""`bilevel compare`: methods side by side on one problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel._util.optional import require
from bilevel.cli.options import JsonOption, SeedOption

PROBLEMS = "sum, difference, sum-singular, difference-singular"
METHODS = (
    "penalty, algorithm-1, algorithm-2, alternating, reverse-mode, forward-mode, approx-grad, value-function, value-gap"
)
SHOWN = "penalty,approx-grad,reverse-mode,alternating"


def command(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM",
            help=f"{PROBLEMS}; or a Python file: `path.py` with `problem`, `u`, `v` (and `data`, if any) at its top "
            "level, or `path.py:name`, where name is an object with these attributes, a dict or tuple of them, or a "
            "function that returns one. A function name(seed) gives each trial its start.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas: {METHODS}. Options follow colons: reverse-mode:lower_steps=20:upper_rate=0.01. "
            "upper_rate and lower_rate are rates of Adam; for reverse-mode and forward-mode, lower_rate is the rate of "
            "gradient descent."
        ),
    ] = SHOWN,
    evaluations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The budget of each method in one trial: evaluations of g. A step-wise method takes as many upper "
            "steps as it pays for; penalty, without data, ends with the step that spends it. By default 5,000.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The budget in upper steps instead.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="The budget in seconds instead. The first few steps show how many fit."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Starts, the same for every method.")] = 1,
    seed: SeedOption = 0,
    out: Annotated[
        Path, typer.Option(help="The folder to write to; methods that are finished in it are not run again.")
    ] = Path("runs/compare"),
    plot: Annotated[Path | None, typer.Option(help="The image. By default compare.png in --out.")] = None,
    json: JsonOption = False,
) -> None:
    """Run methods on one problem, from the same starts and with the same budget, and show how they end."""
    require("matplotlib", extra="apps")
    from bilevel.cli import compare_run

    budget = {"evaluations": evaluations, "steps": steps, "seconds": seconds}
    compare_run.run(problem, methods, budget, trials, seed, out, plot, json)
