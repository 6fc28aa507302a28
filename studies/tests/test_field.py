"""The study of the field's problems: exact values, the clock of a run, cells, tables and the page."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from bilevel_studies.field import problems, runs, study, tables
from bilevel_studies.render import render
from bilevel_studies.study import RESULTS, key_of, read

from bilevel.cli.main import main


@pytest.fixture
def small(monkeypatch):
    """Quadratics of six numbers in place of every problem."""
    field = problems.Quadratics(seed=0, count=128, size=6)
    monkeypatch.setattr(runs, "problem", cache(lambda name: field))
    return field


def test_batches_are_consecutive_examples_and_the_last_one_overlaps():
    loader = problems.batches([torch.arange(150), torch.arange(150.0)])
    firsts = sorted(int(index[0, 0]) for index, _ in loader)
    assert firsts == [0, 64, 86]
    for index, value in loader:
        assert torch.equal(index[0], torch.arange(index[0, 0].item(), index[0, 0].item() + 64))
        assert torch.equal(index[0].float(), value[0])


def test_value_of_the_quadratics_is_f_at_the_minimum_of_g(small):
    u, v = small.start(0)
    u = u + torch.randn(6, generator=torch.Generator().manual_seed(1))
    leaf = small.lower_solution(u, v).requires_grad_()
    (slope,) = torch.autograd.grad(small.g(u, leaf, small.lower_rows), leaf)
    assert slope.norm() < 1e-5  # single precision
    assert small.value(u, v)[0] == pytest.approx(small.f(u, leaf, small.upper_rows).item(), rel=1e-5)
    assert small.least() < small.value(u, v)[0]
    # Means over batches are means over all examples.
    stated, (above, _) = small.on_batches()
    mean = np.mean([stated.upper(u, leaf, batch).item() for batch in above])
    assert mean == pytest.approx(small.f(u, leaf, small.upper_rows).item(), rel=1e-5)


def test_cells_are_distinct_and_only_penalty_has_no_step_sizes():
    first = [cell.settings for cell in study.cells()]
    rest = [cell.settings for cell in study.cells(factors=study.best_factors([]))]
    assert len({key_of(settings) for settings in first + rest}) == len(first + rest)
    shown = [settings for settings in first + rest if settings["part"] == study.RUN]
    assert len(shown) == len(study.PROBLEMS) * len(study.METHODS) * study.SEEDS
    assert all(("lower_rate" in settings) == (settings["method"] != "penalty") for settings in shown)


def test_grid_gives_the_factors_of_the_lowest_last_value():
    kept = []
    for cell in study.cells(["quadratics"], ["soba"], 1):
        if cell.settings["part"] == study.CHOICE:
            lower, upper = study.TUNED["quadratics"]["soba"]
            factor = cell.settings["lower_rate"] / lower, cell.settings["upper_rate"] / upper
            value = math.nan if factor == study.FACTORS[0] else abs(factor[0] - 4)
            kept.append((cell.settings, {"values": [value], "status": "stopped"}))
    assert study.best_factors(kept)["quadratics", "soba"] == study.FACTORS[2]
    assert study.best_factors(kept)["ijcnn1", "soba"] == study.FACTORS[0]  # nothing was run


@pytest.mark.parametrize("method", study.METHODS)
def test_a_small_cell_runs_and_f_falls(small, method):
    own = {} if method == "penalty" else {"lower_rate": 0.1, "upper_rate": 0.1, "period": 8}
    settings = {"part": study.RUN, "problem": "quadratics", "method": method, "seed": 0, "seconds": 0.5} | own
    found = json.loads(json.dumps(runs.run(settings)))
    assert found["status"] == "stopped"
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] >= 0.5
    assert found["steps"][-1] % runs.EVERY == 0
    assert small.least() - 1e-6 <= found["values"][-1] < found["start"]


def test_best_value_of_the_quadratics_is_exact_and_others_come_from_all_data(small):
    assert runs.run({"part": study.BEST, "problem": "quadratics"}) == {"value": small.least(), "status": "exact"}

    class Other(problems.FieldProblem):
        upper_rows, lower_rows, f, g = small.upper_rows, small.lower_rows, small.f, small.g
        start, lower_solution = small.start, small.lower_solution

    assert runs.best(Other())["value"] == pytest.approx(small.least(), rel=1e-4)


def run_of(name, method, seed, values, status="stopped"):
    settings = {"part": study.RUN, "problem": name, "method": method, "seed": seed, "seconds": 20.0}
    seconds = [1.0, 5.0, 20.0][: len(values)]
    return settings, {"start": 10.0, "status": status, "seconds": seconds, "values": values, "steps": [1, 2, 3]}


def test_tables_have_the_numbers_of_the_results(tmp_path):
    name = study.CLEANING[0]
    kept = [run_of(name, "penalty", seed, [1.2, 1.04, 1.0 + seed / 250]) for seed in range(3)]
    kept += [run_of(name, "soba", 0, [1.5], "diverged")]
    kept += [run_of("ijcnn1", "penalty", 0, [5.5, 1.9, 1.0])]
    assert tables.until(kept, name, "penalty", 0.05) == [5.0] * 3
    assert tables.until(kept, name, "soba", 0.05) == [math.inf]
    assert tables.at(kept, name, "penalty", 20.0) == pytest.approx([0.0, 0.004, 0.008])
    assert tables.at(kept, "ijcnn1", "penalty", 10.0) == pytest.approx([0.1])
    found = tables.report(kept, tmp_path)
    assert (tmp_path / "field.png").stat().st_size > 1000
    body = found.tables["Data cleaning"]
    assert "| p = 0.5 | Penalty() | 5.0 | 20.0 | 4.00% | 0.40% (0.00% to 0.80%) |" in body
    assert "diverged; 1 of 3 seeds" in body
    assert "| ijcnn1 | Penalty() | 1.0e-01; 1 of 3 seeds |" in found.tables["ijcnn1 and quadratics"]
    assert found.summary["best"] == {name: 1.0, "ijcnn1": 1.0}
    assert found.summary["held"] == {"runs": 3, "2% in 15 s": 0, "1% in 20 s": 3}


def test_command_runs_cells_and_writes_the_page(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(study.CHOICE_SECONDS, "quadratics", 0.1)
    names = ["--problems", "quadratics", "--methods", "penalty,soba", "--seeds", "1", "--seconds", "0.2"]
    assert main(["reproduce", "field", "--out", str(tmp_path), "--page", str(tmp_path), *names]) == 0
    assert "| quadratics | SOBA |" in capsys.readouterr().out
    assert "quadratics" in (tmp_path / "field.md").read_text()


def test_the_page_is_what_its_template_makes_of_the_results():
    page = RESULTS.parents[1] / "docs" / "results" / "field.md"
    assert page.read_text() == render("field", read(RESULTS / "field.json"))
