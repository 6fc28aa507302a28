"""Classifiers under constraints: the parity gap, its projection baseline, a last layer on the simplex, the study."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from bilevel_studies.fairness import study as fairness
from bilevel_studies.fairness.parity import People, measured, projected, soft_gap, train_fairly
from bilevel_studies.fairness.simplex_layer import (
    LAST,
    Batches,
    layer_problem,
    network,
    off_simplex,
    put_on_simplex,
    scores,
    train_layer,
)
from common import needs

from bilevel import OptionError, Penalty, solve
from bilevel.cli.main import main


def draw(count: int, seed: int) -> People:
    """Two features; the label follows the first, which is larger in group 1, and a little the group."""
    generator = torch.Generator().manual_seed(seed)
    group = (torch.rand(count, generator=generator) < 0.4).double()
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    x[:, 0] += 1.5 * group
    y = (x[:, 0] + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64) > 0.6).double()
    return People(torch.cat([x, group[:, None], torch.ones(count, 1, dtype=torch.float64)], 1), y, group)


def test_gap_is_the_difference_of_the_groups_shares():
    people = People(
        torch.zeros(6, 1, dtype=torch.float64),
        torch.tensor([1.0, 0, 1, 0, 0, 1]).double(),
        torch.tensor([1.0, 1, 0, 0, 0, 0]).double(),
    )
    found = measured(torch.tensor([1.0, 2.0, 1.0, -1.0, -1.0, -1.0]), people)
    assert found.gap == pytest.approx(1.0 - 0.25)
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.error == pytest.approx((0.25 * 0.75 / 4) ** 0.5)
    with pytest.raises(OptionError, match="group 0 has none"):
        measured(torch.ones(2), People(torch.ones(2, 1), torch.ones(2), torch.ones(2)))


def test_bound_on_the_gap_is_met_by_weights_alone():
    train, valid, test = draw(600, 0), draw(600, 1), draw(4000, 2)
    _, free, _ = train_fairly(train, valid, None, max_steps=200)
    u, v, solution = train_fairly(train, valid, 0.1, max_steps=200)
    assert abs(soft_gap(free, valid).item()) > 0.25
    assert abs(soft_gap(v, valid).item()) <= 0.1 + 1e-3
    assert solution.certificate.lower_residual < 1e-3  # trained as any other, on weighted rows
    assert u.max() - u.min() > 0.5
    loose, tight = measured(test.x @ free, test), measured(test.x @ v, test)
    assert tight.gap < loose.gap / 2
    assert tight.accuracy > 0.7
    with pytest.raises(OptionError, match="bound must be positive"):
        train_fairly(train, valid, -0.1)


def test_projection_is_the_nearest_classifier_within_the_bound():
    valid = draw(500, 1)
    v = torch.tensor([2.0, 0.0, 0.5, -1.5], dtype=torch.float64)
    x = projected(v, valid, 0.1)
    assert abs(soft_gap(x, valid).item()) == pytest.approx(0.1, abs=1e-6)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(soft_gap(leaf, valid), leaf)
    move = x - v
    # Nearest: the way there is along the slope of the constraint.
    assert abs(torch.dot(move, slope) / (move.norm() * slope.norm())).item() == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(projected(x * 0, valid, 0.1), x * 0)


def test_last_layer_stays_on_the_simplex_and_still_classifies():
    train, valid, test = draw(600, 0), draw(600, 1), draw(2000, 2)
    inside, _ = train_layer(train, valid, steps=150)
    assert off_simplex(inside) <= 1e-6
    assert measured(scores(inside, test), test).accuracy > 0.8
    outside, _ = train_layer(train, valid, simplex=False, steps=150)
    assert off_simplex(outside) > 1e-3
    assert off_simplex(put_on_simplex(outside)) <= 1e-6


@needs("tabular")
def test_reproduce_fairness_writes_a_page_of_both_parts_and_keeps_its_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fairness, "SIZES", (400, 300))
    arguments = ["reproduce", "fairness", "--quick", "--out", str(tmp_path), "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["cells"] == 2 * len(fairness.WAYS)
    page = (tmp_path / "tables.md").read_text()
    for way in fairness.WAYS.values():
        assert page.count(f"| {way} |") == 2
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert main(arguments) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    kept = json.loads((tmp_path / "fairness.json").read_text())["cells"]
    simplex = {s["way"]: f["off_simplex"] for s, f in kept if s["part"] == "simplex"}
    assert simplex["bilevel"] <= 1e-6 < simplex["unconstrained"]


def test_sampling_error_is_that_of_both_sets_of_rows():
    found = {"test_gap": 0.03, "test_error": 0.003, "valid_error": 0.004}
    assert fairness.met(found)  # 0.02 + 2 * 0.005
    assert not fairness.met(found | {"test_gap": 0.0301})


@pytest.mark.parametrize(("joint", "steps"), [(True, 200), (False, 100)])
def test_last_layer_on_the_simplex_by_constraints_classifies_as_well(joint, steps):
    train, valid, test = draw(600, 0), draw(600, 1), draw(2000, 2)
    v, u = network(train.x.shape[1], 0), torch.zeros(4, requires_grad=True)
    problem = replace(
        layer_problem(simplex=False),
        lower_inequalities=lambda u, v, _: -v.get_parameter(LAST),
        lower_equalities=lambda u, v, _: v.get_parameter(LAST).sum(1) - 1,
    )
    data = (Batches(valid, 0), Batches(train, 1))
    solution = solve(problem, Penalty(joint=joint), u, v, data, max_steps=steps, seed=0, hypergradient=False)
    assert off_simplex(v) <= 0.02
    assert measured(scores(v, test), test).accuracy > 0.8
    assert solution.certificate.lower_violation <= 0.02
