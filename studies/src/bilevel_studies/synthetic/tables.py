"""The tables of the synthetic study, and whether the paper's claims hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel_studies.study import Kept, Report, table
from bilevel_studies.synthetic import plots, sizes
from bilevel_studies.synthetic.results import Results
from bilevel_studies.synthetic.study import (
    DIMENSION,
    LAMS,
    LOWER_STEPS,
    METHODS,
    NUMBERS,
    OTHERS,
    PAIRS,
    PROBLEMS,
    QUICK,
    RUNS,
    SENSITIVITY,
    Scale,
)

# Errors are similar if the largest is at most twice the smallest, or all are small; the start has 13.
SIMILAR, SMALL = 2.0, 0.1
DEFAULT_GOAL = 1e-6
HEADS = [f"Example {NUMBERS[problem]}" for problem in PROBLEMS]


def report(scale: Scale, kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figures and return the tables."""
    results = Results(scale, kept)
    plots.convergence(results, "plain", folder / "synthetic-figure-1.png")
    plots.convergence(results, "singular", folder / "synthetic-figure-2.png")
    plots.ablation(results, folder / "synthetic-figure-7.png")
    plots.sensitivity(results, folder / "synthetic-sensitivity.png")
    plots.budget(results, folder / "synthetic-budget.png")
    found = claims(results)
    held = sum(claim["holds"] for claim in found)
    tables = {
        "Claims of the paper": table(["where", "claim", "holds"], [list(map(str, claim.values())) for claim in found]),
        "Penalty() without options": default_table(results),
        "Mean errors at the end, and converged trials": ends_table(results),
        "Mean errors after the same number of gradients": budget_table(results),
        "Table 4: seconds for 10,000 upper steps, the paper / ours": table(
            ["Example", "T", *METHODS], clock_rows(results)
        ),
        "Figure 7: mean errors on Example 1": ablation_table(results),
        "Appendix D.4: mean errors": sensitivity_table(results),
        "Table 7: sizes of u and v": sizes_table(),
    }
    message = f"{held} of {len(found)} claims of the paper hold."
    if scale == QUICK:
        message = f"A quick run of {scale.steps} steps. It says nothing about the paper's claims."
    return Report(summary(results, found), tables, message)


def summary(results: Results, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the study as plain data."""
    runs = []
    for problem, (name, T) in itertools.product(PROBLEMS, [*RUNS, *OTHERS]):
        one = {"problem": problem, "method": name, "lower_steps": T}
        one["mean_error_at_budget"] = float(results.at_budget(problem, name, T).mean())
        if (name, T) in RUNS:
            one["mean_error"] = float(results.ends(problem, name, T).mean())
            one["converged"] = results.converged(problem, name, T)
        runs.append(one)
    return {
        "trials": results.scale.trials,
        "steps": results.scale.steps,
        "claims": found,
        "runs": runs,
        "budget": results.budget,
    }


def default_table(results: Results) -> str:
    rows = []
    for problem in PROBLEMS:
        found, trials = results.default(problem), results.scale.trials
        ends = [errors[-1] for errors in found["errors"]]
        rows.append(
            [
                f"{NUMBERS[problem]}: {problem}",
                f"{sum(end < DEFAULT_GOAL for end in ends)} of {trials}",
                f"{sum(distance < DEFAULT_GOAL for distance in found['distances'])} of {trials}",
                f"{median(found['steps']):g} ({max(found['steps'])})",
                f"{median(e[-1] for e in found['evaluations']):g}",
                f"{max(ends):.1e}",
            ]
        )
    solved = [f"error below {DEFAULT_GOAL:g}", "nearest solution within it"]
    return table(["problem", *solved, "steps, median (most)", "evaluations of g, median", "worst error"], rows)


def ends_table(results: Results) -> str:
    rows = [
        [name, f"{T}", *(f"{results.ends(p, name, T).mean():.2g} ({results.converged(p, name, T)})" for p in PROBLEMS)]
        for name, T in RUNS
    ]
    return table(["method", "T", *HEADS], rows)


def budget_table(results: Results) -> str:
    rows = [
        [name, f"{T}", f"{cost:g}", *(f"{results.at_budget(p, name, T).mean():.2g}" for p in PROBLEMS)]
        for (name, T), cost in results.gradients.items()
    ]
    ends = [max(errors[-1] for errors in results.default(p)["errors"]) for p in PROBLEMS]
    used = max(2 * e[-1] for p in PROBLEMS for e in results.default(p)["evaluations"])
    rows.append([f"`Penalty()`, at most {used:,} gradients, worst trial", "", "", *(f"{end:.1e}" for end in ends)])
    return table(["method", "T", "gradients a step", *HEADS], rows)


def ablation_table(results: Results) -> str:
    rows = [
        [str(T), "with" if nu else "without", *(f"{end:.2g}" for end in results.ablated(T, nu)[1][-1])]
        for T, nu in itertools.product(LOWER_STEPS, (True, False))
    ]
    return table(["T", "nu", *(f"lam = {lam:g}" for lam in LAMS)], rows)


def sensitivity_table(results: Results) -> str:
    rows = [
        [option, str(NUMBERS[problem]), ", ".join(f"{end:.2g} ({value:g})" for value, end in found)]
        for option in SENSITIVITY
        for problem, found in results.varied(option).items()
    ]
    return table(["option", "Example", "mean error (value)"], rows)


def sizes_table() -> str:
    rows = [[r.experiment, r.data, r.paper_u, f"{r.u:,}", r.paper_v, f"{r.v:,}", r.how] for r in sizes.table()]
    return table(["experiment", "data", "u, paper", "u, ours", "v, paper", "v, ours", "counted"], rows)


def _all_converge(results: Results, problems: Sequence[str], names: Sequence[str], T: int) -> bool:
    return all(results.converged(p, name, T) == results.scale.trials for p in problems for name in names)


def _none(results: Results, name: str) -> bool:
    return not any(results.converged(p, name, T) for p in PROBLEMS for T in LOWER_STEPS)


def _more_steps_help(results: Results) -> bool:
    for name, problem in itertools.product(METHODS[1:], PROBLEMS):
        means = [float(results.ends(problem, name, T).mean()) for T in LOWER_STEPS]
        if any(b > max(a * 1.05, 0.01) for a, b in itertools.pairwise(means)):
            return False
    return True


def _adam_like_cg(results: Results) -> bool:
    solvers: list[dict[str, Any]] = [{}, {"linear_solver": "cg", "linear_rate": None}]
    return all(
        _similar([float(results.ends(p, "ApproxGrad", 10, **options).mean()) for options in solvers]) for p in PROBLEMS
    )


def _slower_with_more(results: Results) -> bool:
    clocks = [[results.clock(p, name) for p in PROBLEMS] for name in METHODS]
    return all(np.mean([clock[10][0] / clock[1][0] for clock in own]) > 1 for own in clocks)


def _clocks(results: Results, holds: Callable[[dict[str, float], int], bool]) -> bool:
    """Return whether the claim holds for the seconds of the methods, with each problem and T."""
    return all(
        holds({name: results.clock(p, name)[T][0] for name in METHODS}, T) for p in PROBLEMS for T in LOWER_STEPS
    )


def _nu_is_idle(results: Results) -> bool:
    ends = [(results.ablated(T, True)[1][-1], results.ablated(T, False)[1][-1]) for T in LOWER_STEPS]
    return all(_similar(pair) for both in ends for pair in zip(*both, strict=True))


def _steady(results: Results, option: str, some: slice) -> bool:
    return all(_similar([end for _, end in rows[some]]) for rows in results.varied(option).values())


def _every_shift_is_a_solution(results: Results) -> bool:
    """All these points solve the lower problem, but f depends on p."""
    example = examples(DIMENSION, nth(0, 0))[2]
    u, v = example.start(0)
    half = u.detach() * 0 + 0.5
    named, least = (example.problem.upper(*point, None).item() for point in ((half, half), example.nearest(u, v)))
    return not least < named


def _similar(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    least, most = float(min(values)), float(max(values))
    return most <= SMALL or most <= SIMILAR * least


def _only_two_converge(results: Results) -> bool:
    plain = PAIRS["plain"]
    others = any(_all_converge(results, [p], [name], 10) for p in plain for name in ("GD", "RMD"))
    return _all_converge(results, plain, ["ApproxGrad", "Penalty"], 10) and not others


def _only_penalty_converges(results: Results) -> bool:
    singular = PAIRS["singular"]
    others = any(_all_converge(results, singular, [name], T) for name, T in RUNS if name != "Penalty")
    return _all_converge(results, singular, ["Penalty"], 10) and not others


TEXT, SPEED, CONSTANTS = "Section 3.1", "Section 3.1, Table 4", "Appendix D.4, Figure 7"
FACTORS = {"gamma_factor": "c_gamma", "epsilon_factor": "c_epsilon", "epsilon": "epsilon_0"}
# The place in the paper, its words, and the check. The paper names no ranges: we take the values next to its own.
CLAIMS: list[tuple[str, str, Callable[[Results], bool]]] = [
    (f"{TEXT}, Figures 1 and 2", "GD converges to non-solution points.", lambda r: _none(r, "GD")),
    (TEXT, "RMD converges to non-solution points with T = 1, 5, 10.", lambda r: _none(r, "RMD")),
    (TEXT, "A large T (100) makes RMD converge as well.", lambda r: _all_converge(r, PAIRS["plain"], ["RMD"], 100)),
    (
        f"{TEXT}, Figure 1",
        "Only Penalty and ApproxGrad converge to the solution of Examples 1 and 2.",
        _only_two_converge,
    ),
    (
        f"{TEXT}, Figure 1(b)",
        "Penalty converges even with T = 1.",
        lambda r: _all_converge(r, PAIRS["plain"], ["Penalty"], 1),
    ),
    (
        f"{TEXT}, Figure 1(b)",
        "ApproxGrad requires at least T = 10 on Example 2.",
        lambda r: [_all_converge(r, ["difference"], ["ApproxGrad"], T) for T in LOWER_STEPS] == [False, False, True],
    ),
    (TEXT, "Increasing T makes all algorithms, except GD, better.", _more_steps_help),
    (
        f"{TEXT}, Figure 2",
        "With a singular g_vv only Penalty converges to the true solution.",
        _only_penalty_converges,
    ),
    (TEXT, "In ApproxGrad, Adam does like conjugate gradients with enough iterations.", _adam_like_cg),
    (SPEED, "All methods get slower as T grows.", _slower_with_more),
    (
        SPEED,
        "Penalty is faster than RMD and ApproxGrad (in its table, for T = 5 and 10).",
        lambda r: _clocks(r, lambda s, T: T == 1 or s["Penalty"] <= min(s["RMD"], s["ApproxGrad"])),
    ),
    (SPEED, "GD is the fastest.", lambda r: _clocks(r, lambda s, T: s["GD"] == min(s.values()))),
    (
        CONSTANTS,
        "The first lam does not influence the results much, nor does its absence.",
        lambda r: all(_similar(r.ablated(T, True)[1][-1]) for T in LOWER_STEPS),
    ),
    (CONSTANTS, "The multipliers nu bring no significant gain on these problems.", _nu_is_idle),
    (
        "Appendix D.4",
        "The first gamma does influence the results.",
        lambda r: not _steady(r, "gamma", slice(None)),
    ),
    *(
        (
            "Appendix D.4",
            f"Within certain ranges, {name} does not change the results much.",
            lambda r, option=option: _steady(r, option, slice(1, -1)),
        )
        for option, name in FACTORS.items()
    ),
    (
        "Appendix E.1",
        "The solutions of Example 3 are u = v = 1/2 + p for any p with Ap = 0.",
        _every_shift_is_a_solution,
    ),
]


def claims(results: Results) -> list[dict[str, Any]]:
    """Check all claims, in the order of the paper: the place of each, its words, and whether it holds."""
    return [{"where": where, "says": says, "holds": holds(results)} for where, says, holds in CLAIMS]


# -- Table 4: seconds for 10,000 upper iterations on the four problems -----------------------------------------------

# The paper's mean seconds on the authors' machine, by problem and T, in the order of METHODS.
PAPER_SECONDS = {
    "sum": {1: (7.4, 15.0, 17.4, 17.2), 5: (14.3, 51.4, 39.3, 34.3), 10: (23.2, 95.4, 60.9, 57.0)},
    "difference": {1: (7.7, 18.5, 17.2, 17.4), 5: (17.3, 62.7, 37.9, 35.0), 10: (22.4, 115.0, 64.2, 52.7)},
    "sum-singular": {1: (8.2, 18.8, 19.8, 19.1), 5: (17.4, 72.4, 47.1, 38.6), 10: (28.7, 125.0, 80.6, 62.7)},
    "difference-singular": {1: (7.9, 19.5, 20.4, 19.6), 5: (16.9, 72.8, 48.4, 40.2), 10: (28.3, 138.0, 81.2, 58.0)},
}


def clock_rows(results: Results) -> list[list[str]]:
    """Return the rows of Table 4: for each method the paper's seconds and ours of one eager run."""
    out = []
    for (problem, number), T in itertools.product(NUMBERS.items(), LOWER_STEPS):
        clocks = zip(PAPER_SECONDS[problem][T], (results.clock(problem, name)[T] for name in METHODS), strict=True)
        out.append([f"{number}", f"{T}", *(f"{paper:g} / {mean:.1f}±{spread:.1f}" for paper, (mean, spread) in clocks)])
    return out
