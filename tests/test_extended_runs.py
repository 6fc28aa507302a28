"""A run that a second call extends, with the tensors that the first call left."""

import pytest
import torch
from quadratic import Quadratic

from bilevel import F2SA, SOBA, SRBA, ApproxGrad, Penalty, Problem, Status, solve

METHODS = {
    "penalty": Penalty(),
    "soba": SOBA(),
    "srba": SRBA(),
    "f2sa": F2SA(),
    "amigo": ApproxGrad(linear_solver="sgd", decay="root"),
    "weights": Penalty(cotangent="same", decay="root"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_second_call_with_the_same_tensors_takes_the_steps_of_one_long_run(name, tmp_path):
    """What a run measures before its first step is in its checkpoint: at the end of the first call it would differ."""
    problem, method = Quadratic(), METHODS[name]

    def run(u, v, steps, **options):
        solve(problem.problem, method, u, v, problem.data(), max_steps=steps, seed=5, hypergradient=False, **options)
        return u, v

    long = run(*problem.start(), 60)
    u, v = run(*problem.start(), 20, checkpoint=tmp_path)
    extended = run(u, v, 60, checkpoint=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(long, extended, strict=True))


def test_the_schedule_of_a_linear_run_spans_the_new_number_of_steps(tmp_path):
    problem = Quadratic()
    method = Penalty(cotangent="same", decay="linear", warm_up=0.0, gamma=1.0)

    def run(steps, **options):
        u, v = problem.start()
        solution = solve(problem.problem, method, u, v, problem.data(), max_steps=steps, seed=5, log_every=1, **options)
        return solution.history["gamma"][-1]

    straight = run(200)
    run(20, checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="max_steps=20"):
        resumed = run(200, checkpoint=tmp_path, resume=True)
    # 20 advances in the first call, and at most 20 in the rest; with the old interval it would be 200.
    assert resumed <= straight * 1.1**20 * 1.001


def test_an_f_of_zero_on_the_first_batches_does_not_diverge():
    u, v = (torch.zeros(1, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, b: torch.relu(v - 5).sum() + 0 * b.sum(), lambda u, v, b: ((v - u - b) ** 2).mean())
    data = [torch.randn(4, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    solution = solve(problem, Penalty(), u, v, (data, data), max_steps=60, seed=0)
    assert solution.status is Status.MAX_STEPS
    assert u.isfinite().all()


def test_objectives_that_use_transforms_of_torch_func_are_solved_without_data():
    def quadratic(v, u):
        return ((v - u) ** 2).sum()

    def lower(u, v, _):
        return torch.func.grad_and_value(quadratic)(v, u)[1] + 0.1 * (v**2).sum()

    u, v = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    solution = solve(Problem(lambda u, v, _: ((v - 1) ** 2).sum(), lower), Penalty(), u, v, max_steps=100, seed=0)
    assert solution.status is Status.CONVERGED
    assert torch.allclose(u, torch.full_like(u, 1.1), rtol=1e-8)  # v* = u / 1.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_solving_a_softmax_again_from_its_answer_keeps_exact_multipliers(dtype):
    """At the answer s is only rounding, which has a part along the constant on all scores that g does not see."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=draw).to(dtype), torch.randint(0, 2, (60,), generator=draw)
    u, v = torch.full((4,), -2.0, dtype=dtype).requires_grad_(), torch.zeros(5, 2, dtype=dtype, requires_grad=True)

    def scores(v, rows):
        return torch.cat([x, torch.ones(60, 1, dtype=dtype)], 1)[rows] @ v

    def loss(v, rows):
        return torch.nn.functional.cross_entropy(scores(v, rows), y[rows])

    problem = Problem(
        lambda u, v, _: loss(v, slice(0, 30)) + 1e-3 * (u**2).sum(),
        lambda u, v, _: loss(v, slice(30, 60)) + (u.exp()[:, None] * v[:-1] ** 2).sum(),
    )
    for _ in range(2):
        solution = solve(problem, Penalty(), u, v, max_steps=300, seed=0, tolerance=1e-3)
        assert set(solution.history["solver"]) == {"exact multipliers"}
        assert solution.status is Status.CONVERGED
