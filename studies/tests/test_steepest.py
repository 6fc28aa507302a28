"""Steepest descent in the Euclidean norm: each row separately, by a length that depends only on the rate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bilevel_studies.poisoning.clean_label_batch import Steepest

from bilevel import Box, Callback, Penalty, Problem, solve
from bilevel.optim.variable_optimizer import VariableOptimizer
from bilevel.problem.variables import Variable


def stepped(start, gradients, **options):
    leaf = start.clone().requires_grad_()
    optimizer = Steepest([leaf], **options)
    for gradient in gradients:
        leaf.grad = gradient
        optimizer.step()
    return leaf.detach()


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 5), (3,)])
def test_every_row_moves_by_the_rate_whatever_the_length_of_its_gradient(shape):
    g = torch.randn(shape, dtype=torch.float64) * torch.tensor([1e-4, 1.0, 1e4]).view(3, *[1] * (len(shape) - 1))
    moved = stepped(torch.zeros(shape, dtype=torch.float64), [g], lr=0.1, momentum=0.0)
    assert torch.allclose(moved.reshape(3, -1).square().mean(1).sqrt(), torch.full((3,), 0.1, dtype=torch.float64))
    cosines = torch.cosine_similarity(moved.reshape(3, -1), -g.reshape(3, -1))
    assert torch.allclose(cosines, torch.ones(3, dtype=torch.float64))


def test_momentum_is_the_mean_of_the_last_directions():
    one, two = torch.tensor([[3.0, 4.0]]), torch.tensor([[-8.0, 6.0]])
    moved = stepped(torch.zeros(1, 2), [one, two], lr=1.0, momentum=0.5)
    first, second = (g / g.square().mean().sqrt() for g in (one, two))
    assert torch.allclose(moved, -(0.5 * first) - (0.25 * first + 0.5 * second))


def test_rows_without_a_gradient_stay():
    g = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    moved = stepped(torch.ones(2, 2), [g, g], lr=0.1)
    assert torch.equal(moved[0], torch.ones(2))
    assert bool(torch.isfinite(moved).all())


def test_within_a_ball_it_ends_where_the_slope_points_and_adam_does_not():
    slope = torch.tensor([[1.0, 0.1, 0.0]], dtype=torch.float64)

    def end(factory):
        w = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        descent = VariableOptimizer(Variable(w, "w"), factory, "optimizer")
        for k in range(200):
            descent.step([slope.clone()], (), torch.tensor(1 - k / 200, dtype=torch.float64))
            with torch.no_grad():
                w /= w.norm().clamp(min=1)
        return w.detach()

    best = -slope / slope.norm()
    assert torch.allclose(end(partial(Steepest, lr=0.1)), best, atol=1e-3)
    assert not torch.allclose(end(partial(torch.optim.Adam, lr=0.1)), best, atol=0.1)


def test_within_a_box_each_row_moves_as_it_would_without_the_others():
    target = torch.tensor([[3.0, -0.1, 0.5], [0.01, 0.002, -5.0]], dtype=torch.float64)

    def moved(rows):
        w = torch.zeros_like(rows, requires_grad=True)
        descent = VariableOptimizer(Variable(w, "w", Box(-1.0, 1.0)), partial(Steepest, lr=0.05), "optimizer")
        for _ in range(30):
            descent.step([w.detach() - rows], (), torch.tensor(1.0, dtype=torch.float64))
        return w.detach()

    assert torch.allclose(moved(target), torch.cat([moved(target[:1]), moved(target[1:])]), atol=1e-12)


class StopAt(Callback):
    def log(self, run):
        return run.step >= 5


def test_a_run_goes_on_bit_for_bit(tmp_path):
    def run(name, **options):
        u, v = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        target = torch.arange(6, dtype=torch.float64).view(2, 3)
        problem = Problem(lambda u, v, _: ((v - target) ** 2).sum(), lambda u, v, _: ((v - u) ** 2).sum())
        method = Penalty(mode="stochastic", upper_optimizer=partial(Steepest, lr=0.05))
        solve(problem, method, u, v, max_steps=12, checkpoint=tmp_path / name, hypergradient=False, **options)
        return u.detach()

    straight = run("straight")
    run("halves", callbacks=[StopAt()], log_every=1)
    assert torch.equal(run("halves", resume=True), straight)
    assert not torch.equal(straight, torch.ones(2, 3, dtype=torch.float64))
