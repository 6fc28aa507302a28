"""The classical cases: their best known values hold, and none nearby is better; the judgement; the study."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from bilevel_studies.classical import case as module
from bilevel_studies.classical import cases, judge, run, study
from bilevel_studies.classical.case import Case, named, resolved
from bilevel_studies.classical.papers import PAPERS
from common import leaf

from bilevel import Penalty
from bilevel.cli.main import main
from bilevel.derivatives.lower_constraints import KKT
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.measures.constrained_lower_minimum import resolve
from bilevel.problem.variables import Variable

ALL = cases()
DIGITS = 2e-3
"""The literature gives its points to two or three digits, so a constraint can be violated by this much."""


def vector(x):
    return torch.tensor(x, dtype=torch.float64)


def test_there_are_enough_of_every_kind():
    assert len(ALL) >= 40
    assert len({case.paper for case in ALL}) >= 10
    assert {case.kind for case in ALL} == {"linear", "quadratic", "convex", "non-convex", "smd"}
    assert len({case.name for case in ALL}) == len(ALL)
    for case in ALL:
        assert case.paper in PAPERS
    assert any(case.d for case in ALL)  # a lower set without interior
    assert any(case.h for case in ALL)


@pytest.mark.parametrize("case", [case for case in ALL if case.at is not None], ids=lambda case: case.name)
def test_point_of_the_literature_is_feasible_solves_the_lower_problem_and_has_the_best_value(case, monkeypatch):
    monkeypatch.setattr(module, "RESOLVES", 4)
    verdict = judge(case, *map(vector, case.at))
    assert verdict.violation <= DIGITS
    assert verdict.gap <= DIGITS
    assert abs(verdict.excess) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ALL if len(c.u) == len(c.v) == 1], ids=lambda case: case.name)
def test_no_point_of_a_fine_grid_is_better_than_the_best_known(case):
    """Enumerate both levels: at each u, find the v of a grid that minimise g to a relative 1e-6, and take the best f.

    If g is quadratic, this tolerance moves v and f by about 1e-3, which is less than the 1% of `solved`.
    """
    (known,), (lower,) = case.at
    low = known - 3 if case.low is None else case.low
    high = known + 3 * (1 + abs(known)) if case.high is None else case.high
    points = torch.cat([torch.linspace(low, high, 401, dtype=torch.float64), vector([known])])
    wide, near = ((-60.0, 60.0, 12001), (lower - 1, lower + 1, 2001))
    v = torch.cat([*(torch.linspace(*ends, dtype=torch.float64) for ends in (wide, near)), vector([lower])])[None]
    best = math.inf
    for point in points:
        u = point.expand(1, v.shape[1])
        inside = torch.stack([x <= 1e-7 for x in case.c(u, v)]).all(0)
        if not inside.any():
            continue
        g = case.g(u, v).where(inside, math.inf)
        kept = g <= g.min() + 1e-6 * (1 + g.min().abs())
        if case.h is not None:
            kept &= torch.stack([x <= 1e-6 for x in case.h(u, v)]).all(0)
        best = min(best, case.f(u, v).where(kept, math.inf).min().item())
    assert best == pytest.approx(case.best, abs=module.WITHIN * max(1.0, abs(case.best)))


def grid(case: Case):
    """Points of u over its bounds, or around the known one."""
    center = np.array(case.at[0] if case.at else case.u)
    low = center - 2 * (1 + abs(center)) if case.low is None else np.broadcast_to(case.low, center.shape)
    high = center + 2 * (1 + abs(center)) if case.high is None else np.broadcast_to(case.high, center.shape)
    count = {1: 41, 2: 11}[len(center)]
    return itertools.product(*(np.linspace(a, b, count) for a, b in zip(low, high, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in ALL if len(c.u) <= 2 and len(c.u) + len(c.v) > 2], ids=lambda case: case.name
)
def test_no_point_of_a_coarse_grid_is_better_than_the_best_known(case, monkeypatch):
    monkeypatch.setattr(module, "RESOLVES", 12)
    better = []
    for point in grid(case):
        u = vector(point)
        _, v = resolved(case, u, vector(case.at[1] if case.at else case.v))
        verdict = judge(case, u, vector(v))
        # A lower solution is exact only to a tolerance, so f can be too small: the margin is the one of `solved`.
        if verdict.violation <= 1e-7 and verdict.gap <= 1e-7 and verdict.excess < -module.WITHIN:
            better.append((point, v.tolist(), verdict))
    assert not better


def test_judgement_refuses_what_is_not_feasible_not_lower_optimal_or_worse():
    case = named("clark-westerberg-1990-a")
    assert judge(case, vector([1.0]), vector([3.0])).solved
    worse = judge(case, vector([3.0]), vector([5.0]))
    assert worse.feasible
    assert worse.optimal
    assert not worse.solved
    low = judge(case, vector([1.0]), vector([2.5]))
    assert low.feasible
    assert not low.optimal
    assert not judge(case, vector([1.0]), vector([3.5])).feasible
    assert not judge(case, vector([-1.0]), vector([0.5])).feasible


@pytest.mark.parametrize("name", ["clark-westerberg-1990-a", "bard-1984-b"])
def test_case_is_solved_from_few_starts(name):
    case = named(name)
    solution, seconds = run(case, Penalty(), starts=3)
    assert judge(case, solution.u, solution.v).solved
    assert seconds > 0


def test_reproduce_classical_writes_a_page_and_does_not_run_finished_cells_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "QUICK", ("bard-1984-b",))
    monkeypatch.setattr(study, "STARTS", 2)
    arguments = ["reproduce", "classical", "--quick", "--workers", "1", "--json"]
    arguments += ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["solved"], result["cases"], result["converged_but_not_solved"]) == (1, 1, [])
    assert result["message"] == f"1 of 1 cases are solved; the slowest took {result['slowest']} s."
    page = (tmp_path / "out" / "tables.md").read_text()
    assert "| bard-1984-b | linear | 1, 1 | -37.6 | -37.6 |" in page
    assert "1 of 1" in page
    monkeypatch.setattr(study, "run_cell", None)  # nothing is left to run
    assert main(arguments) == 0
    assert (tmp_path / "out" / "tables.md").read_text() == page
    assert len(json.loads((tmp_path / "results" / "classical.json").read_text())["cells"]) == 1
    monkeypatch.setattr(study, "STARTS", 3)  # the stored cells now have other settings than requested
    capsys.readouterr()
    assert main([*arguments, "--no-run"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"] == 0
    assert main(["reproduce", "classical", "--no-run", "--out", str(tmp_path / "new")]) == 2
    assert "--no-run needs results" in capsys.readouterr().err
    assert not (tmp_path / "new" / "tables.md").exists()


def test_lower_problem_solved_again_finds_the_lowest_of_many_valleys():
    """At v = (0, 0.951, 0) Rastrigin's function has a minimum, but not its least."""
    case = named("smd4")
    u, v = Variable(leaf(0.0, 0.0), "u"), Variable(leaf(0.0, 0.951051, 0.0), "v")
    kkt = KKT(case.problem(), u, v, None)
    kkt.measure(None, 40.0)
    for seed in range(3):
        found = resolve(PenalisedObjective(case.problem(), u, v), kkt, torch.Generator().manual_seed(seed), 1e-8, 1e-6)
        assert found.better is not None
        assert found.better.value == pytest.approx(0.0, abs=1e-6)
    assert v.leaves[0].tolist() == [0.0, 0.951051, 0.0]
