"""The schedule: when each rule fires, what an advance does, and that nothing moves without one."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bilevel.derivatives.prices import Gradients, Prices
from bilevel.methods.penalty.schedule import Schedule
from bilevel.results import REASONS

FACTORS = (1.1, 0.9, 0.8)
SHAPES = ((2,), (3, 2))
CONSTRAINTS = ((2,), (), (3,))
"""One equality, then two inequalities."""


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def schedule(seed: int = 0, *, epsilon=0.5, every=None, multipliers=True, averaged=False) -> Schedule:
    generator = torch.Generator().manual_seed(seed)
    prices = Prices(
        gamma=number(2.0),
        nu=[normal(generator, *shape) for shape in SHAPES],
        gamma_h=[number(c) for c in (0.5, 3.0, 1.5)],
        mu=[normal(generator, *CONSTRAINTS[0])] + [normal(generator, *shape).abs() for shape in CONSTRAINTS[1:]],
    )
    return Schedule(
        prices,
        number(4.0),
        None if epsilon is None else number(epsilon),
        factors=FACTORS,
        every=every,
        multipliers=multipliers,
        averaged=averaged,
        equalities=1,
    )


def gradients(seed: int) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    residual = [normal(generator, *shape) for shape in SHAPES]
    return Gradients(
        f=number(0.0),
        g=number(0.0),
        slope=residual,
        residual=residual,
        v=[],
        constraints=[normal(generator, *shape) for shape in CONSTRAINTS],
    )


def held(s: Schedule) -> list[Tensor]:
    """Everything that an advance moves."""
    return [s.prices.gamma, s.lam, s.epsilon, *s.prices.nu, *s.prices.mu, *s.prices.gamma_h]


def observe(s: Schedule, square: float, seed: int = 0) -> str:
    """One upper step whose gradient has the squared norm `square`."""
    reason = REASONS[int(s.observe(number(square), gradients(seed)).item())]
    return "steps" if s.count() else reason


def test_tolerance_fires_at_epsilon_and_not_above():
    s = schedule(epsilon=0.5)
    assert observe(s, 0.2501) == ""
    assert observe(s, 0.25) == "tolerance"
    # epsilon fell to 0.4
    assert observe(s, 0.17) == ""
    assert observe(s, 0.15) == "tolerance"


def test_schedule_without_rules_never_advances():
    s = schedule(epsilon=None)
    before = copy.deepcopy(held(s))
    assert [observe(s, 1e-30, k) for k in range(50)] == [""] * 50
    assert all(torch.equal(a, b) for a, b in zip(before, held(s), strict=True))


def test_epsilon_of_none_does_not_fire_even_on_a_gradient_of_zero():
    assert observe(schedule(epsilon=None), 0.0) == ""


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("epsilon", [1e-6, None])
def test_steps_fire_after_that_many_upper_steps_since_the_last_advance(every, epsilon):
    s = schedule(epsilon=epsilon, every=every)
    expected = ["steps" if k % every == 0 else "" for k in range(1, 4 * every + 1)]
    assert [observe(s, 1.0) for _ in expected] == expected


@pytest.mark.parametrize("averaged", [True, False])
def test_steps_counted_on_the_host_move_everything_as_those_counted_on_the_device(averaged):
    host, device = (schedule(epsilon=epsilon, every=3, averaged=averaged) for epsilon in (None, 1e-300))
    for k in range(10):
        assert observe(host, 1.0, k) == observe(device, 1.0, k)
        for a, b in zip(held(host), held(device), strict=True):
            assert torch.equal(a, b) or a is host.epsilon


def test_steps_are_counted_anew_after_the_tolerance_fired():
    s = schedule(epsilon=0.5, every=4)
    squares = [1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0]
    assert [observe(s, x) for x in squares] == ["", "", "tolerance", "", "", "", "steps"]


def test_tolerance_is_named_where_several_rules_hold():
    assert observe(schedule(every=1), 0.01) == "tolerance"


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), multipliers=st.booleans())
def test_advance_moves_each_price_by_its_rule(seed, multipliers):
    s = schedule(seed, multipliers=multipliers)
    before, at = copy.deepcopy(s.prices), gradients(seed + 1)
    assert observe(s, 0.0, seed + 1) == "tolerance"
    for old, new, r in zip(before.nu, s.prices.nu, at.residual, strict=True):
        # The product is taken in another order: a unit of the last place.
        torch.testing.assert_close(new, old + 2.0 * r if multipliers else old, rtol=1e-15, atol=1e-15)
    for i, (old, new, h) in enumerate(zip(before.mu, s.prices.mu, at.constraints, strict=True)):
        moved = old + before.gamma_h[i] * h
        assert torch.equal(new, moved if i == 0 else moved.clamp(min=0))
    # One rounding of a product in float64.
    near = partial(pytest.approx, rel=1e-15)
    assert s.prices.gamma.item() == near(2.0 * 1.1)
    assert [c.item() for c in s.prices.gamma_h] == near([0.5 * 1.1, 3.0 * 1.1, 1.5 * 1.1])
    assert s.lam.item() == near(4.0 * 0.9)
    assert s.epsilon.item() == near(0.5 * 0.8)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), squares=st.lists(st.floats(0, 1e6), min_size=1, max_size=30), averaged=st.booleans())
def test_nothing_moves_without_an_advance_and_something_does_with_one(seed, squares, averaged):
    s = schedule(seed, epsilon=3.0, every=5, averaged=averaged)
    for k, square in enumerate(squares):
        before = copy.deepcopy(held(s))
        fired = observe(s, square, seed + k)
        same = [torch.equal(a, b) for a, b in zip(before, held(s), strict=True)]
        assert all(same) if fired == "" else not any(same[:3])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 20), averaged=st.booleans())
def test_multipliers_of_inequalities_are_never_negative(seed, count, averaged):
    s = schedule(seed, every=1, averaged=averaged)
    for k in range(count):
        assert observe(s, 1.0, seed + k) == "steps"
        for m in s.prices.mu[1:]:
            assert (m >= 0).all()


def test_multiplier_of_an_equality_may_be_negative():
    s = schedule(every=1)
    at = gradients(0)
    at.constraints[0].fill_(-100.0)
    s.observe(number(1.0), at)
    assert (s.prices.mu[0] < 0).all()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), every=st.integers(1, 6))
def test_averaged_multipliers_move_by_the_mean_residual_since_the_last_advance(seed, every):
    s = schedule(seed, every=every, averaged=True, epsilon=None)
    for start in (0, every):
        before, gamma = copy.deepcopy(s.prices.nu), s.prices.gamma.item()
        for k in range(every):
            observe(s, 1.0, seed + start + k)
        seen = [gradients(seed + start + k).residual for k in range(every)]
        for i, (old, new) in enumerate(zip(before, s.prices.nu, strict=True)):
            mean = torch.stack([r[i] for r in seen]).mean(0)
            # A running mean of a few numbers of size one, times gamma of about two.
            torch.testing.assert_close(new, old + gamma * mean, rtol=0, atol=1e-13)


def test_growth_of_gamma_is_measured_from_its_first_value():
    s = schedule(every=1)
    for _ in range(5):
        observe(s, 1.0)
    # Five roundings of a product.
    assert s.gamma_growth().item() == pytest.approx(1.1**5, rel=1e-14)


def test_multipliers_restart_at_their_first_value():
    s = schedule(every=1)
    first = copy.deepcopy(s.prices.nu)
    observe(s, 1.0)
    assert not torch.equal(s.prices.nu[0], first[0])
    s.restart_multipliers()
    assert all(torch.equal(a, b) for a, b in zip(first, s.prices.nu, strict=True))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), stop=st.integers(0, 12))
def test_state_dict_round_trip_continues_bit_for_bit(seed, stop):
    options = {"epsilon": 1.2, "every": 5, "averaged": True}
    generator = torch.Generator().manual_seed(seed)
    squares = (2 * torch.rand(25, generator=generator, dtype=torch.float64)).tolist()
    straight = schedule(seed, **options)
    for k in range(stop):
        observe(straight, squares[k], seed + k)
    resumed = schedule(seed + 1, **options)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for k in range(stop, 25):
        assert observe(straight, squares[k], seed + k) == observe(resumed, squares[k], seed + k)
        assert all(torch.equal(a, b) for a, b in zip(held(straight), held(resumed), strict=True))


def test_decisions_are_not_read_on_the_host():
    """On the meta device there is nothing to read: a host read raises."""
    new = lambda shape: torch.zeros(shape, device="meta", dtype=torch.float64)  # noqa: E731
    prices = Prices(gamma=new(()), nu=[new((2,))], gamma_h=[new(()), new(())], mu=[new((2,)), new(())])
    s = Schedule(
        prices,
        new(()),
        new(()),
        factors=FACTORS,
        every=3,
        multipliers=True,
        averaged=True,
        equalities=1,
    )
    at = Gradients(new(()), new(()), [new((2,))], [new((2,))], [new((2,)), new(())], [new((2,))])
    assert s.observe(new(()), at).device.type == "meta"
