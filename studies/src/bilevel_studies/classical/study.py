"""The study of the classical cases: each solved with default options and several starts, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.methods.penalty import Penalty
from bilevel.running.run_many import Found, RunItem, Settings
from bilevel_studies.classical.case import FEASIBLE, OPTIMAL, RESOLVES, WITHIN, Case, cases, judge, named, run
from bilevel_studies.classical.papers import PAPERS
from bilevel_studies.markdown import table

STARTS = 8
MAX_STEPS = 2000
SECONDS = 30.0
SHARE = 0.9
QUICK = ("clark-westerberg-1990-a", "bard-1984-b", "mirrlees-1999")


def cells(*, quick: bool = False, seed: int = 0) -> list[RunItem]:
    """One cell a case."""
    chosen = [case for case in cases() if not quick or case.name in QUICK]
    return [
        RunItem({"case": case.name, "starts": STARTS, "max_steps": MAX_STEPS, "seed": seed}, weight=len(case.v))
        for case in chosen
    ]


def run_cell(settings: Settings) -> Found | None:
    """Solve a case and judge the answer; None where Ctrl-C came."""
    case = named(settings["case"])
    solution, seconds = run(
        case, Penalty(), starts=settings["starts"], max_steps=settings["max_steps"], seed=settings["seed"]
    )
    if solution.interrupted:
        return None
    verdict = judge(case, solution.u, solution.v)
    certificate = solution.certificate
    return {
        "status": solution.status.name,
        "f": verdict.f,
        "best": case.best,
        "violation": verdict.violation,
        "gap": verdict.gap,
        "excess": verdict.excess,
        "solved": verdict.solved,
        "seconds": round(seconds, 2),
        "worst": certificate.worst,
        "lower_minimiser": certificate.lower_minimiser,
        "u": solution.u.tolist(),
        "v": solution.v.tolist(),
        "candidates": len(solution.candidates),
    }


def write(results: Sequence[tuple[Settings, Found]], folder: Path) -> dict[str, Any]:
    """Write the page into a folder; returns the summary."""
    known = {case.name: case for case in cases()}
    present = [cell.settings for cell in cells()]  # not those of other settings that a folder may hold
    rows = [(known[settings["case"]], found) for settings, found in results if settings in present]
    order = {name: i for i, name in enumerate(known)}
    rows.sort(key=lambda row: order[row[0].name])
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "classical.md", page(rows, len(known)))
    false = [case.name for case, found in rows if not found["solved"] and found["status"] == "CONVERGED"]
    solved, slowest = sum(found["solved"] for _, found in rows), max((f["seconds"] for _, f in rows), default=0.0)
    return {
        "message": f"{solved} of {len(rows)} cases are solved; the slowest took {slowest} s.",
        "cases": len(rows),
        "of": len(known),
        "papers": len({case.paper for case, _ in rows}),
        "solved": solved,
        "converged_but_not_solved": false,
        "slowest": slowest,
    }


def page(rows: Sequence[tuple[Case, Found]], total: int) -> str:
    solved = sum(found["solved"] for _, found in rows)
    missed = [(case, found) for case, found in rows if not found["solved"]]
    called = [(case, found) for case, found in missed if found["status"] == "CONVERGED"]
    slow = [case.name for case, found in rows if found["seconds"] > SECONDS]
    share = f"{solved} of {len(rows)}" + (f" (of {total} cases, those that were run)" if len(rows) < total else "")
    claims = [
        ["at least 90% solved", f"{100 * solved / max(1, len(rows)):.0f}%", _held(solved >= SHARE * len(rows))],
        [f"each within {SECONDS:g} s on one core", f"{len(rows) - len(slow)} of {len(rows)}", _held(not slow)],
        ["no failure is called converged", f"{len(called)} are", _held(not called)],
    ]
    parts = [
        "# Classical bilevel problems",
        "Written by `bilevel reproduce classical`. Small problems of the literature with constraints at both levels, "
        f"from {len({case.paper for case, _ in rows})} papers and books, each solved by `solve(problem, Penalty(), u, "
        f"v, max_steps={MAX_STEPS}, starts={STARTS}, seed=0)` from one starting point, options as they are.",
        "A case is solved where the answer is feasible at both levels (violation at most "
        f"{FEASIBLE:g} of 1 + |(u, v)|), v solves the lower problem (SLSQP of SciPy, from {RESOLVES} points, finds no "
        f"g lower by {OPTIMAL:g} of 1 + |g|), and f is no worse than the best known value by {100 * WITHIN:g}% (by "
        f"{WITHIN:g} where that is below 1). Nothing of the run itself is used for the judgement.",
        f"## {share} are solved",
        table(["what should hold", "found", ""], claims),
        _misses(missed, slow),
        "## Each case",
        "Seconds are of processor time, for all starts together.",
        _table(rows),
        "## Notes",
        "\n".join(f"- {case.name}: {case.note}" for case, _ in rows if case.note),
        "## Sources",
        "\n".join(f"- {PAPERS[key]}" for key in sorted({case.paper for case, _ in rows})),
        "Problems and values are also collected in BOLIB (S. Zhou, A. B. Zemkoho, A. Tin, arXiv:1812.00230) and "
        "BASBLib (R. Paulavicius, C. S. Adjiman), by which they were compared. `studies/tests/test_classical.py` "
        "checks that the points given for the best values are feasible and solve the lower problem, and searches a "
        "grid for better ones.",
        "## To run it again",
        "```bash\nbilevel reproduce classical --out runs/classical --page docs/results\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _held(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _misses(missed: Sequence[tuple[Case, Found]], slow: Sequence[str]) -> str:
    lines = []
    for case, found in missed:
        why = (
            "not feasible"
            if found["violation"] > FEASIBLE
            else "v does not solve the lower problem"
            if found["gap"] > OPTIMAL
            else f"f is {found['f']:.6g}, the best known {case.best:.6g}"
        )
        lines.append(f"- {case.name}: {why}; the run ended as {found['status']}.")
    if slow:
        lines.append(f"- Over {SECONDS:g} s: {', '.join(slow)}.")
    return "\n".join(lines)


def _table(rows: Sequence[tuple[Case, Found]]) -> str:
    lines = []
    for case, found in rows:
        lines.append(
            [
                case.name,
                case.kind,
                f"{len(case.u)}, {len(case.v)}",
                f"{case.best:.6g}",
                f"{found['f']:.6g}",
                f"{found['violation']:.0e}",
                f"{found['gap']:.0e}",
                found["status"],
                "yes" if found["solved"] else "no",
                f"{found['seconds']:.1f}",
            ]
        )
    heads = ["case", "lower level", "size of u, v", "best known", "f", "violation", "gap", "status", "solved", "s"]
    return table(heads, lines)
