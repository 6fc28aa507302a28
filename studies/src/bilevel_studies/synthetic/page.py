"""The page of the synthetic study: Markdown, with every number taken from the results."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel_studies import figures
from bilevel_studies.markdown import table
from bilevel_studies.synthetic import sizes, wall_clock
from bilevel_studies.synthetic.claims import claims, converges
from bilevel_studies.synthetic.results import GOAL, Results
from bilevel_studies.synthetic.study import (
    DAMPING,
    FULL,
    LOWER_STEPS,
    METHODS,
    NUMBERS,
    OTHERS,
    PROBLEMS,
    RUNS,
    VARIED_STEPS,
)

DEFAULT_GOAL = 1e-6


def write(results: Results, folder: Path) -> dict[str, Any]:
    """Write the figures and the page into a folder; returns the summary."""
    figures.convergence(results, "plain", folder / "synthetic-figure-1.png")
    figures.convergence(results, "singular", folder / "synthetic-figure-2.png")
    figures.ablation(results, folder / "synthetic-figure-7.png")
    figures.sensitivity(results, folder / "synthetic-sensitivity.png")
    figures.budget(results, folder / "synthetic-budget.png")
    summary = summarise(results)
    write_whole(folder / "synthetic.md", page(results, summary))
    return summary


def summarise(results: Results) -> dict[str, Any]:
    """What the study found, as plain data."""
    return {
        "trials": results.scale.trials,
        "steps": results.scale.steps,
        "claims": [{"where": c.where, "says": c.says, "found": c.found, "holds": c.holds} for c in claims(results)],
        "protocol": [
            {
                "problem": problem,
                "method": name,
                "lower_steps": T,
                "mean_error": float(ends.mean()),
                "converged": results.converged(problem, name, T),
                "mean_error_at_budget": float(results.at_budget(problem, name, T).mean()),
            }
            for problem in PROBLEMS
            for name, T in RUNS
            for ends in [results.ends(problem, name, T)]
        ],
        "others": [
            {
                "problem": problem,
                "method": name,
                "lower_steps": T,
                "mean_error_at_budget": float(results.at_budget(problem, name, T).mean()),
            }
            for problem in PROBLEMS
            for name, T in OTHERS
        ],
        "default": [_default(results, problem) for problem in PROBLEMS],
        "budget": results.budget,
        "seconds": round(results.session.seconds, 3),
        "resumed": results.session.kept > 0,
    }


def _default(results: Results, problem: str) -> dict[str, Any]:
    found = results.default(problem)
    return {
        "problem": problem,
        "solved": sum(errors[-1] < DEFAULT_GOAL for errors in found["errors"]),
        "solved_by_distance": sum(distance < DEFAULT_GOAL for distance in found["distances"]),
        "median_steps": median(found["steps"]),
        "most_steps": max(found["steps"]),
        "median_evaluations": median(e[-1] for e in found["evaluations"]),
        "worst_error": max(errors[-1] for errors in found["errors"]),
    }


def page(results: Results, summary: dict[str, Any]) -> str:
    scale = results.scale
    held = sum(claim["holds"] for claim in summary["claims"])
    longest = results.run("sum", "RMD", 100)["steps"][-1]
    least, most = wall_clock.compiled(results)
    parts = [
        "# The synthetic study of the paper, reproduced",
        f"Written by `bilevel reproduce synthetic{'' if scale.steps == FULL.steps else ' --quick'}`. Mehra and Hamm, "
        "*Penalty Method for Inversion-Free Deep Bilevel Optimization*, ACML 2021: Section 3.1, Appendices B, D.3, D.4 "
        "and E.1.",
        _bold_if_quick(results),
        f"Protocol: Adam, learning rates 1e-3 above and 1e-4 below (RMD: plain gradient descent below), gamma 1, lam "
        f"10, epsilon 1, K = {scale.steps:,} upper steps, T = 1, 5, 10, {scale.trials} trials from starts uniform in "
        f"[-5, 5]^10, a matrix A for each, float64. ApproxGrad solves its linear system by T steps of Adam with "
        f"{DAMPING:g} on the diagonal, as the paper gives no value. RMD with T = 100 runs for {longest:,} upper steps. "
        f"The error is the paper's; a start is about 13 from a solution. A trial has *converged* if its last error "
        f"is at most {GOAL:.0%} of its first. The paper gives |u_i| <= 5 as the domain, and does not say that iterates "
        "are kept in it; here they are not, so that u can run away on Examples 2 and 4, where f is not bounded below.",
        f"## The paper's claims: {held} of {len(summary['claims'])} hold",
        table(
            ["where", "the paper says", "here", "found"],
            [
                [c["where"], c["says"], "holds" if c["holds"] else "**does not hold**", c["found"]]
                for c in summary["claims"]
            ],
        ),
        "## Beyond the paper",
        f"`Penalty()` with no option (deterministic mode), one start after another, at most {scale.default_steps} "
        "steps:",
        table(
            [
                "problem",
                f"error below {DEFAULT_GOAL:g}",
                "nearest solution within it",
                "steps, median (most)",
                "evaluations of g, median",
                "worst error",
            ],
            [
                [
                    _title(d["problem"]),
                    f"{d['solved']} of {scale.trials}",
                    f"{d['solved_by_distance']} of {scale.trials}",
                    f"{d['median_steps']:g} ({d['most_steps']})",
                    f"{d['median_evaluations']:g}",
                    f"{d['worst_error']:.1e}",
                ]
                for d in summary["default"]
            ],
        ),
        _algorithm_2(results),
        "## Errors at the end",
        f"Mean over {scale.trials} trials, and how many of them converged.",
        _ends(results),
        "![Examples 1 and 2: error against upper steps](synthetic-figure-1.png)",
        "*The paper's Figure 1. Mean (thick) on top of the trials (thin).*",
        "![Examples 3 and 4: error against upper steps](synthetic-figure-2.png)",
        "*The paper's Figure 2, with a singular lower Hessian.*",
        "## The same budget of gradients",
        "An upper step costs, in gradients of g (products with its Hessian count as gradients; counted): "
        + ", ".join(f"{name} {results.gradients[name, 10]:g}" for name in (*METHODS, *(name for name, _ in OTHERS)))
        + f" at T = 10. After {results.budget:,.0f} gradients, which every run took, the mean errors are below. FMD "
        "(forward mode), ValueGap and ValueFunction, which the paper does not run here, have the learning rates of the "
        "protocol and end with the budget: for the latter two, their prices have then reached their last values.",
        _budget(results),
        "![Error against gradients of g](synthetic-budget.png)",
        "*All runs to their ends; the dotted line is the common budget. `Penalty()` counts two gradients for each of "
        "its evaluations.*",
        "## Table 4: seconds for 10,000 upper iterations",
        f"The paper's / ours, one run as it is written (eager), one thread: mean and deviation over blocks of "
        f"{scale.clock_steps // 5} steps, scaled up from {scale.clock_steps}. Ours are seconds of the process, which "
        "other work on the machine does not lengthen. Compiled, "
        f"{2 * scale.trials} trials of two problems at once, 10,000 iterations took from {least:.1f} to {most:.1f} "
        "seconds of the clock, compilation aside.",
        table(["Example", "T", *METHODS], wall_clock.rows(results)),
        "## Figure 7: lam and nu",
        "![Penalty on Example 1 for four values of lam, with and without nu](synthetic-figure-7.png)",
        f"*Means of {scale.ablation_trials} trials, as in the paper.*",
        "## Appendix D.4: other constants",
        "![Last mean error against gamma, epsilon and their factors](synthetic-sensitivity.png)",
        f"*T = {VARIED_STEPS}, means of {scale.ablation_trials} trials on Examples 1 and 2. The paper names no values: "
        "these are ours.*",
        "## Table 7: sizes of the variables",
        _sizes(),
        "## To run it again",
        "```bash\nbilevel reproduce synthetic --out runs/synthetic --page docs/results\n```",
        "A run that was stopped goes on from its finished cells.",
        _clock(results, summary["seconds"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bold_if_quick(results: Results) -> str:
    if results.scale.steps == FULL.steps:
        return ""
    return f"**This is the quick version: {results.scale.steps} upper steps, which say nothing of the claims.**"


def _algorithm_2(results: Results) -> str:
    bad = [
        f"Example {NUMBERS[p]} with T = {T} ({results.converged(p, 'Penalty', T)} of {results.scale.trials}, mean "
        f"error {results.ends(p, 'Penalty', T).mean():.2g})"
        for p in PROBLEMS
        for T in LOWER_STEPS
        if not converges(results, p, "Penalty", T)
    ]
    total = len(PROBLEMS) * len(LOWER_STEPS)
    text = f"The paper's Algorithm 2 as a preset, under its own protocol, converges in {total - len(bad)} of {total} "
    return text + "cases." + (f" It does not, in all trials, on {'; '.join(bad)}." if bad else "")


def _ends(results: Results) -> str:
    rows = []
    for name, T in RUNS:
        cells = [f"{results.ends(p, name, T).mean():.2g} ({results.converged(p, name, T)})" for p in PROBLEMS]
        rows.append([name, f"{T}", *cells])
    return table(["method", "T", *(f"Example {NUMBERS[p]}" for p in PROBLEMS)], rows)


def _budget(results: Results) -> str:
    rows = [
        [name, f"{T}", f"{cost:g}", *(f"{results.at_budget(p, name, T).mean():.2g}" for p in PROBLEMS)]
        for (name, T), cost in results.gradients.items()
    ]
    ends = [max(errors[-1] for errors in results.default(p)["errors"]) for p in PROBLEMS]
    used = max(2 * e[-1] for p in PROBLEMS for e in results.default(p)["evaluations"])
    rows.append([f"`Penalty()`, at most {used:,} gradients, worst trial", "", "", *(f"{end:.1e}" for end in ends)])
    return table(["method", "T", "gradients a step", *(f"Example {NUMBERS[p]}" for p in PROBLEMS)], rows)


def _clock(results: Results, seconds: float) -> str:
    """How long the command took, or that it does not say."""
    session = results.session
    cores = f"{session.workers} process{'es' if session.workers > 1 else ''} of one thread each"
    if not session.kept:
        return f"The whole command took {seconds:,.0f} seconds with {cores}."
    return (
        f"This run was resumed: {session.kept} of {session.kept + session.ran} cells were finished before, so that its "
        f"clock, {seconds:,.0f} seconds with {cores}, is not that of the whole command."
    )


def _sizes() -> str:
    def number(value: int | None) -> str:
        return "not there yet" if value is None else f"{value:,}"

    return table(
        ["experiment", "data", "u, paper", "u, ours", "v, paper", "v, ours", "counted"],
        [[r.experiment, r.data, r.paper_u, number(r.u), r.paper_v, number(r.v), r.how] for r in sizes.table()],
    )


def _title(problem: str) -> str:
    return f"{NUMBERS[problem]}: {problem}"
