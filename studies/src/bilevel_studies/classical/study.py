"""The study of the classical cases: each solved with default options and several starts, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bilevel import Penalty
from bilevel_studies.classical.case import Case, cases, judge, named, run
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings, table

STARTS = 8
MAX_STEPS = 2000
SECONDS = 30.0
SHARE = 0.9
QUICK = ("clark-westerberg-1990-a", "bard-1984-b", "mirrlees-1999")


def cells(*, quick: bool = False, seed: int = 0) -> list[RunItem]:
    """Return one cell per case."""
    return [
        RunItem({"case": case.name, "starts": STARTS, "max_steps": MAX_STEPS, "seed": seed}, weight=len(case.v))
        for case in cases()
        if not quick or case.name in QUICK
    ]


def run_cell(settings: Settings) -> Found | None:
    """Solve a case and judge the answer; return None after Ctrl-C."""
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


def report(kept: Sequence[Kept], folder: Path) -> Report:
    """Return the tables of the cases; results with other settings are left out."""
    known = {case.name: case for case in cases()}
    present = [cell.settings for cell in cells()]
    found = {settings["case"]: one for settings, one in kept if settings in present}
    rows = [(case, found[name]) for name, case in known.items() if name in found]
    missed = [(case, one) for case, one in rows if not one["solved"]]
    false = [case.name for case, one in missed if one["status"] == "CONVERGED"]
    slow = [case.name for case, one in rows if one["seconds"] > SECONDS]
    slowest, solved = max((one["seconds"] for _, one in rows), default=0.0), len(rows) - len(missed)
    claims = [
        [f"at least {SHARE:.0%} solved", f"{solved} of {len(rows)}", str(solved >= SHARE * len(rows))],
        [f"each within {SECONDS:g} s on one core", f"{len(rows) - len(slow)} of {len(rows)}", str(not slow)],
        ["no failure is called converged", f"{len(false)} are", str(not false)],
    ]
    summary = {
        "cases": len(rows),
        "of": len(known),
        "papers": len({case.paper for case, _ in rows}),
        "solved": solved,
        "converged_but_not_solved": false,
        "slowest": slowest,
    }
    tables = {"Summary": table(["claim", "found", "holds"], claims), "Cases": case_table(rows)}
    return Report(summary, tables, f"{solved} of {len(rows)} cases are solved; the slowest took {slowest} s.")


def case_table(rows: Sequence[tuple[Case, Found]]) -> str:
    lines = [
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
        for case, found in rows
    ]
    heads = ["case", "lower level", "size of u, v", "best known", "f", "violation", "gap", "status", "solved", "s"]
    return table(heads, lines)
