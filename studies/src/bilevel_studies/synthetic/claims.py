"""What the paper says of its synthetic study, and what was found. Every sentence's numbers come from the results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bilevel.applications.comparison.synthetic_problems import examples, nth
from bilevel_studies.synthetic import wall_clock
from bilevel_studies.synthetic.results import Results
from bilevel_studies.synthetic.study import (
    DIMENSION,
    LAMS,
    LOWER_RATE,
    LOWER_STEPS,
    METHODS,
    NUMBERS,
    PAIRS,
    PROBLEMS,
    RUNS,
)

SIMILAR, SMALL = 2.0, 0.1
"""Errors are much the same if the largest is at most so many times the smallest, or all are small beside the start's
13."""


@dataclass(frozen=True)
class Claim:
    where: str
    says: str
    found: str
    holds: bool


def claims(results: Results) -> list[Claim]:
    """All claims, in the order of the paper."""
    return [
        _alternating(results),
        _unrolled(results),
        _unrolled_far(results),
        _two_converge(results),
        _penalty_at_one(results),
        _approx_needs_ten(results),
        _more_steps_help(results),
        _singular(results),
        _adam_like_cg(results),
        _slower_with_more(results),
        _faster(results),
        _fastest(results),
        _lam(results),
        _nu(results),
        _gamma(results),
        *(_factor(results, option) for option in FACTORS),
        _solution_set(),
    ]


def converges(results: Results, problem: str, name: str, T: int) -> bool:
    """Whether every trial does."""
    return results.converged(problem, name, T) == results.scale.trials


def _counts(results: Results, problems: Sequence[str], name: str, steps: Sequence[int]) -> str:
    """How many trials converged, as text."""
    parts = []
    for problem in problems:
        each = ", ".join(f"{results.converged(problem, name, T)} (T={T})" for T in steps)
        parts.append(f"Example {NUMBERS[problem]}: {each}")
    return f"trials of {results.scale.trials} that converged: " + "; ".join(parts)


def _alternating(results: Results) -> Claim:
    bad = not any(results.converged(p, "GD", T) for p in PROBLEMS for T in LOWER_STEPS)
    least = min(float(results.ends(p, "GD", T).min()) for p in PROBLEMS for T in LOWER_STEPS)
    return Claim(
        "Section 3.1, Figures 1 and 2",
        "GD converges to non-solution points.",
        f"{_counts(results, PROBLEMS, 'GD', LOWER_STEPS)}. The smallest error of all is {least:.2g}.",
        bad,
    )


def _unrolled(results: Results) -> Claim:
    bad = not any(results.converged(p, "RMD", T) for p in PROBLEMS for T in LOWER_STEPS)
    return Claim(
        "Section 3.1",
        "RMD converges to non-solution points with T = 1, 5, 10.",
        _counts(results, PROBLEMS, "RMD", LOWER_STEPS) + ".",
        bad,
    )


def _unrolled_far(results: Results) -> Claim:
    plain = PAIRS["plain"]
    steps = results.run("sum", "RMD", 100)["steps"][-1]
    share = 1 - (1 - 2 * LOWER_RATE) ** 100
    means = ", ".join(f"{results.ends(p, 'RMD', 100).mean():.2g}" for p in plain)
    return Claim(
        "Section 3.1",
        "A large T (100) makes RMD converge, too.",
        f"{_counts(results, PROBLEMS, 'RMD', [100])}, after {steps:,} upper steps; mean errors {means} on Examples 1 "
        f"and 2. At the paper's rate of {LOWER_RATE:g}, 100 steps of gradient descent on a g with g_vv = 2I go "
        f"{share:.1%} of the way to the lower solution, and RMD sees no more than that of the hypergradient's second "
        "term.",
        all(converges(results, p, "RMD", 100) for p in plain),
    )


def _two_converge(results: Results) -> Claim:
    plain = PAIRS["plain"]
    good = all(converges(results, p, name, 10) for p in plain for name in ("ApproxGrad", "Penalty"))
    others = any(converges(results, p, name, 10) for p in plain for name in ("GD", "RMD"))
    text = "; ".join(f"{name}: {_counts(results, plain, name, [10])}" for name in ("Penalty", "ApproxGrad"))
    return Claim(
        "Section 3.1, Figure 1",
        "Only Penalty and ApproxGrad converge to the solution of Examples 1 and 2.",
        text + ".",
        good and not others,
    )


def _penalty_at_one(results: Results) -> Claim:
    plain = PAIRS["plain"]
    reach, more = LOWER_RATE * results.scale.steps, results.scale.more_steps
    later = [results.converged(p, "Penalty", 1, steps=more) for p in plain]
    means = ", ".join(f"{results.ends(p, 'Penalty', 1).mean():.2g}" for p in plain)
    return Claim(
        "Section 3.1, Figure 1(b)",
        "Penalty converges even with T = 1.",
        f"{_counts(results, plain, 'Penalty', [1])}; mean errors {means}. With T = 1, Adam at {LOWER_RATE:g} moves a "
        f"coordinate of v by about {reach:g} at most in {results.scale.steps:,} steps; the starts are up to 5 from 0. "
        f"With {more:,} steps: {', '.join(f'{n} of {results.scale.trials}' for n in later)}.",
        all(converges(results, p, "Penalty", 1) for p in plain),
    )


def _approx_needs_ten(results: Results) -> Claim:
    ok = [converges(results, "difference", "ApproxGrad", T) for T in LOWER_STEPS]
    means = ", ".join(f"{results.ends('difference', 'ApproxGrad', T).mean():.2g} (T={T})" for T in LOWER_STEPS)
    return Claim(
        "Section 3.1, Figure 1(b)",
        "ApproxGrad requires at least T = 10 on Example 2.",
        f"{_counts(results, ['difference'], 'ApproxGrad', LOWER_STEPS)}; mean errors {means}.",
        ok == [False, False, True],
    )


def _more_steps_help(results: Results) -> Claim:
    worse = []
    for name in METHODS[1:]:
        for problem in PROBLEMS:
            means = [float(results.ends(problem, name, T).mean()) for T in LOWER_STEPS]
            if any(b > max(a * 1.05, 0.01) for a, b in itertools.pairwise(means)):
                worse.append(f"{name} on Example {NUMBERS[problem]} ({', '.join(f'{m:.2g}' for m in means)})")
    found = "mean errors fall or stay with T everywhere" if not worse else "the mean error rises with T: "
    return Claim(
        "Section 3.1",
        "Increasing T makes all algorithms, except GD, better.",
        found + "; ".join(worse) + ".",
        not worse,
    )


def _singular(results: Results) -> Claim:
    singular = PAIRS["singular"]
    good = all(converges(results, p, "Penalty", 10) for p in singular)
    others = [
        f"{name} (T={T})"
        for name, T in RUNS
        if name != "Penalty" and all(converges(results, p, name, T) for p in singular)
    ]
    means = "; ".join(
        f"{name}: {', '.join(f'{results.ends(p, name, 10).mean():.2g}' for p in singular)}" for name in METHODS
    )
    also = f" {', '.join(others)} converge on both, too." if others else ""
    return Claim(
        "Section 3.1, Figure 2",
        "With a singular g_vv only Penalty converges to the true solution.",
        f"Penalty: {_counts(results, singular, 'Penalty', LOWER_STEPS)}. ApproxGrad: "
        f"{_counts(results, singular, 'ApproxGrad', LOWER_STEPS)}. Mean errors at T = 10: {means}.{also}",
        good and not others,
    )


def _adam_like_cg(results: Results) -> Claim:
    pairs = [
        (
            float(results.ends(p, "ApproxGrad", 10).mean()),
            float(results.ends(p, "ApproxGrad", 10, linear_solver="cg", linear_rate=None).mean()),
        )
        for p in PROBLEMS
    ]
    text = ", ".join(f"{adam:.2g} and {cg:.2g}" for adam, cg in pairs)
    return Claim(
        "Section 3.1",
        "In ApproxGrad, Adam does like conjugate gradients with enough iterations.",
        f"mean errors with Adam and with conjugate gradients, T = 10, Examples 1 to 4: {text}.",
        all(_similar(pair) for pair in pairs),
    )


def _slower_with_more(results: Results) -> Claim:
    growth = {}
    for name in METHODS:
        clocks = [results.clock(p, name) for p in PROBLEMS]
        growth[name] = float(np.mean([clock[10][0] / clock[1][0] for clock in clocks]))
    text = ", ".join(f"{name} {value:.1f}" for name, value in growth.items())
    return Claim(
        "Section 3.1, Table 4",
        "All methods get slower as T grows.",
        f"seconds at T = 10 over those at T = 1, mean of the four problems: {text}.",
        all(value > 1 for value in growth.values()),
    )


def _faster(results: Results) -> Claim:
    wins = dict.fromkeys(LOWER_STEPS, 0)
    for T in LOWER_STEPS:
        for problem in PROBLEMS:
            seconds = wall_clock.seconds(results, problem, T)
            wins[T] += seconds["Penalty"] <= min(seconds["RMD"], seconds["ApproxGrad"])
    counted = {name: results.gradients[name, 10] for name in METHODS}
    text = ", ".join(f"{n} of 4 problems at T = {T}" for T, n in wins.items())
    costs = ", ".join(f"{name} {value:g}" for name, value in counted.items())
    return Claim(
        "Section 3.1, Table 4",
        "Penalty is faster than RMD and ApproxGrad (in its table, for T = 5 and 10).",
        f"Penalty is the fastest of the three, eager, on {text}. Counted, a step at T = 10 is worth this many "
        f"gradients of g: {costs}.",
        all(wins[T] == len(PROBLEMS) for T in LOWER_STEPS if T > 1),
    )


def _fastest(results: Results) -> Claim:
    clocks = [wall_clock.seconds(results, p, T) for p in PROBLEMS for T in LOWER_STEPS]
    wins, total = sum(seconds["GD"] == min(seconds.values()) for seconds in clocks), len(clocks)
    return Claim(
        "Section 3.1, Table 4", "GD is the fastest.", f"in {wins} of {total} cells of the table.", wins == total
    )


def _lam(results: Results) -> Claim:
    parts, good = [], True
    for T in LOWER_STEPS:
        ends = results.ablated(T, True)[1][-1]
        good = good and _similar(ends)
        parts.append(f"T = {T}: " + ", ".join(f"{end:.2g}" for end in ends))
    lams = ", ".join(f"{lam:g}" for lam in LAMS)
    return Claim(
        "Appendix D.4, Figure 7",
        "The first lam does not influence the results much, nor does its absence.",
        f"mean errors on Example 1 for lam = {lams}, with nu: {'; '.join(parts)}.",
        good,
    )


def _nu(results: Results) -> Claim:
    parts, good = [], True
    for T in LOWER_STEPS:
        with_nu, without = (results.ablated(T, on)[1][-1] for on in (True, False))
        good = good and all(_similar(pair) for pair in zip(with_nu, without, strict=True))
        parts.append(f"T = {T}: {with_nu.mean():.2g} with, {without.mean():.2g} without")
    return Claim(
        "Appendix D.4, Figure 7",
        "The multipliers nu bring no significant gain on these problems.",
        f"mean errors on Example 1 over all lam: {'; '.join(parts)}.",
        good,
    )


FACTORS = {"gamma_factor": "c_gamma", "epsilon_factor": "c_epsilon", "epsilon": "epsilon_0"}


def _gamma(results: Results) -> Claim:
    found = results.varied("gamma")
    return Claim(
        "Appendix D.4",
        "The first gamma does influence the results.",
        _listed("gamma_0", found) + ".",
        not _all_similar(found),
    )


def _factor(results: Results, option: str) -> Claim:
    """Judged on the values next to the paper's: it names no range."""
    found = results.varied(option)
    inner = {problem: rows[1:-1] for problem, rows in found.items()}
    values = [f"{value:g}" for value, _ in inner["sum"]]
    wide = "" if _all_similar(found) else " Not over the wider range."
    return Claim(
        "Appendix D.4",
        f"Within certain ranges, {FACTORS[option]} does not change the results much.",
        f"{_listed(FACTORS[option], found)}. Judged from {values[0]} to {values[-1]}.{wide}",
        _all_similar(inner),
    )


def _all_similar(found: dict[str, list[tuple[float, float]]]) -> bool:
    return all(_similar([end for _, end in rows]) for rows in found.values())


def _listed(name: str, found: dict[str, list[tuple[float, float]]]) -> str:
    parts = [
        f"Example {NUMBERS[problem]}: " + ", ".join(f"{end:.2g} ({value:g})" for value, end in rows)
        for problem, rows in found.items()
    ]
    return f"mean errors by {name}, T = 5: " + "; ".join(parts)


def _solution_set() -> Claim:
    example = examples(DIMENSION, nth(0, 0))[2]
    u, v = example.start(0)
    half = u.detach() * 0 + 0.5
    best = example.nearest(u, v)
    named, least = (example.problem.upper(*point, None).item() for point in ((half, half), best))
    return Claim(
        "Appendix E.1",
        "The solutions of Example 3 are u = v = 1/2 + p for any p with Ap = 0.",
        f"all of these solve the lower problem, but f depends on p: with our first matrix f = {named:.3g} at p = 0 and "
        f"{least:.3g} at u = v = P(1/2), the only solution. The paper's error measure does not see the difference.",
        not least < named,
    )


def _similar(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    least, most = float(min(values)), float(max(values))
    return most <= SMALL or most <= SIMILAR * least
