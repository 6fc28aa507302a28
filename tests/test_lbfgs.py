"""The L-BFGS iteration of the deterministic mode."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bilevel.optim.lbfgs import LBFGS


def with_gradient(function):
    """x -> (value, gradient, None), as LBFGS wants it."""

    def evaluate(x: Tensor):
        z = x.detach().clone().requires_grad_()
        value = function(z)
        (d,) = torch.autograd.grad(value, z)
        return value.item(), d, None

    return evaluate


def run(search: LBFGS, function, *, most: int, goal: float) -> int:
    """Iterate until the gradient is at the goal; the number of iterations."""
    for k in range(most):
        if search.gradient.norm().item() <= goal:
            return k
        if not search.iterate(function):
            return k
    return most


def metric(size: int, first: float) -> Tensor:
    """The expected inverse curvature of each coordinate: the length of the first trial step along -gradient."""
    return torch.full((size,), first, dtype=torch.float64)


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def quadratic(seed: int, size: int, condition: float):
    """A random convex quadratic as (function, minimiser)."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    eigenvalues = condition ** torch.linspace(-0.5, 0.5, size, dtype=torch.float64)
    H = q @ torch.diag(eigenvalues) @ q.T
    best = torch.randn(size, generator=generator, dtype=torch.float64)
    return (lambda x: (x - best) @ H @ (x - best) / 2), best


@pytest.mark.parametrize("start", [(-1.2, 1.0), (0.0, 0.0), (2.0, -3.0), (-1.5, 2.0, -0.5, 3.0)])
@pytest.mark.parametrize("memory", [3, 50])
def test_minimises_rosenbrock(start, memory):
    f = with_gradient(rosenbrock)
    search = LBFGS.start(f, torch.tensor(start, dtype=torch.float64), memory=memory, metric=metric(len(start), 1e-3))
    taken = run(search, f, most=200, goal=1e-9)
    assert taken < 200
    # |x - 1| <= |gradient| / (smallest eigenvalue, 0.4) = 2.5e-9 at the minimum.
    torch.testing.assert_close(search.x, torch.ones_like(search.x), rtol=0, atol=1e-8)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 20),
    condition=st.sampled_from([1.0, 100.0, 1e4]),
    first=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_minimises_random_convex_quadratics(seed, size, condition, first):
    function, best = quadratic(seed, size, condition)
    f = with_gradient(function)
    search = LBFGS.start(f, torch.zeros(size, dtype=torch.float64), metric=metric(size, first))
    run(search, f, most=400, goal=1e-10)
    # Along the flattest direction (curvature condition^-1/2) values stop changing at a distance of
    # sqrt(eps * value / curvature), some 1e-7; from there the gradient decides, and 1e-5 is far from failing.
    torch.testing.assert_close(search.x, best, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 10))
def test_every_iteration_lowers_the_value_and_keeps_value_and_gradient_of_its_point(seed, size):
    function, _ = quadratic(seed, size, 1e3)
    f = with_gradient(function)
    search = LBFGS.start(f, torch.zeros(size, dtype=torch.float64))
    for _ in range(15):
        before = search.value
        if not search.iterate(f):
            break
        # The search allows a rise of ten units of the last place: the noise of the value itself.
        assert search.value <= before + 10 * torch.finfo(torch.float64).eps * abs(before)
        value, gradient, _ = f(search.x)
        assert search.value == value
        assert torch.equal(search.gradient, gradient)


def test_metric_that_knows_the_curvature_solves_a_badly_scaled_quadratic_in_one_iteration():
    curvature = torch.tensor([1e-4, 1.0, 1e4], dtype=torch.float64)
    f = with_gradient(lambda x: (curvature * (x - 1) ** 2).sum() / 2)
    search = LBFGS.start(f, torch.zeros(3, dtype=torch.float64), metric=1 / curvature)
    assert search.iterate(f)
    # A Newton step: one up to the rounding of a division and a product.
    torch.testing.assert_close(search.x, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-14)


def test_iteration_keeps_at_most_memory_pairs():
    f = with_gradient(rosenbrock)
    search = LBFGS.start(f, torch.tensor([-1.2, 1.0, 0.5], dtype=torch.float64), memory=4, metric=metric(3, 1e-3))
    for _ in range(10):
        assert search.iterate(f)
    assert len(search.moves) == len(search.bends) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_trial_points_that_are_not_finite_are_survived(bad):
    """x - log x is defined for x > 0 alone, and the first trial steps far beyond."""
    seen = []

    def f(x: Tensor):
        if (x <= 0).any():
            seen.append(x)
            return bad, torch.full_like(x, bad), None
        return (x - x.log()).sum().item(), 1 - 1 / x, None

    search = LBFGS.start(f, torch.tensor([3.0, 5.0], dtype=torch.float64), metric=metric(2, 1e3))
    run(search, f, most=100, goal=1e-9)
    assert seen
    # The curvature at the minimum is one: the point is as near as the gradient is small.
    torch.testing.assert_close(search.x, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-8)


def test_finite_value_with_a_gradient_that_is_not_finite_is_survived():
    def f(x: Tensor):
        if (x < 0).any():
            return -1e3, torch.full_like(x, math.nan), None
        return (x - x.log()).sum().item(), 1 - 1 / x, None

    search = LBFGS.start(f, torch.tensor([3.0], dtype=torch.float64), metric=metric(1, 1e3))
    run(search, f, most=100, goal=1e-9)
    torch.testing.assert_close(search.x, torch.ones(1, dtype=torch.float64), rtol=0, atol=1e-8)


def test_iteration_says_so_where_no_step_lowers_the_value():
    f = with_gradient(lambda x: (x * x).sum())
    search = LBFGS.start(f, torch.zeros(3, dtype=torch.float64))
    assert not search.iterate(f)
    assert search.x.tolist() == [0.0, 0.0, 0.0]

    def lying(x: Tensor):
        """The value rises along -gradient."""
        return -x.sum().item(), torch.ones_like(x), None

    search = LBFGS.start(lying, torch.zeros(2, dtype=torch.float64))
    assert not search.iterate(lying)
    assert search.x.tolist() == [0.0, 0.0]


def test_memory_that_misleads_is_forgotten():
    """After the function has changed, a stored pair gives an ascent direction: it falls back to -gradient."""
    f = with_gradient(lambda x: (x * x).sum() / 2)
    search = LBFGS.start(f, torch.tensor([1.0, -2.0], dtype=torch.float64))
    search.moves = [torch.tensor([1.0, 0.0], dtype=torch.float64)]
    search.bends = [torch.tensor([-1.0, 0.0], dtype=torch.float64)]
    assert search.iterate(f)
    assert search.value < 2.5


@settings(deadline=None, max_examples=10)
@given(stop=st.integers(0, 20), seed=st.integers(0, 10**6))
def test_state_dict_round_trip_continues_bit_for_bit(stop, seed):
    f = with_gradient(rosenbrock)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(4, generator=generator, dtype=torch.float64)
    straight = LBFGS.start(f, start, memory=5, metric=metric(4, 1e-3))
    for _ in range(stop):
        straight.iterate(f)
    saved = {
        key: [t.clone() for t in value]
        if isinstance(value, list)
        else value.clone()
        if torch.is_tensor(value)
        else value
        for key, value in straight.state_dict().items()
    }
    resumed = LBFGS(**saved)
    for _ in range(15):
        assert straight.iterate(f) == resumed.iterate(f)
        assert torch.equal(straight.x, resumed.x)
        assert straight.value == resumed.value
        assert straight.length == resumed.length


def test_state_dict_is_not_changed_by_later_iterations():
    f = with_gradient(rosenbrock)
    search = LBFGS.start(f, torch.tensor([-1.2, 1.0], dtype=torch.float64), metric=metric(2, 1e-3))
    for _ in range(3):
        search.iterate(f)
    state = search.state_dict()
    held = state["x"].clone(), len(state["moves"])
    for _ in range(3):
        search.iterate(f)
    assert torch.equal(state["x"], held[0])
    assert len(state["moves"]) == held[1]
