"""Box, Ball, Simplex: the nearest point of the set, with a derivative that is finite everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bilevel import Ball, Box, OptionError, Simplex

# Sums over a few entries of size up to `reach` lose a few units of the last place of `reach`.
ROUNDING = 1e-13


def points(seed: int, *shape: int, reach: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return reach * torch.randn(shape, generator=generator, dtype=torch.float64)


def inside(seed: int, convex: Box | Ball | Simplex, shape: tuple[int, ...]) -> Tensor:
    """A random member of the set, made without its projection."""
    x = points(seed, *shape)
    match convex:
        case Box(low, high):
            low = -10.0 if low is None else low
            high = 10.0 if high is None else high
            return low + (high - low) * torch.sigmoid(x)
        case Ball(radius, center, dim):
            size = x.norm() if dim is None else x.norm(dim=dim, keepdim=True)
            share = torch.sigmoid(points(seed + 1, *size.shape))
            return center + radius * share * x / size
        case Simplex(total, dim):
            return total * torch.softmax(3 * x, dim)


def violation(convex: Box | Ball | Simplex, x: Tensor) -> float:
    match convex:
        case Box(low, high):
            below = 0.0 if low is None else (low - x).max().item()
            above = 0.0 if high is None else (x - high).max().item()
            return max(below, above, 0.0)
        case Ball(radius, center, dim):
            offset = x - center
            size = offset.norm() if dim is None else offset.norm(dim=dim)
            return max((size - radius).max().item(), 0.0)
        case Simplex(total, dim):
            return max((x.sum(dim) - total).abs().max().item(), (-x).max().item())


@st.composite
def sets(draw: st.DrawFn) -> Box | Ball | Simplex:
    size = draw(st.sampled_from([0.1, 1.0, 7.5]))
    center = torch.tensor([[0.3], [-1.0], [2.0]], dtype=torch.float64)
    return draw(
        st.sampled_from(
            [
                Box(-size, size),
                Box(low=-size),
                Box(high=size),
                Box(center - size, center + size),
                Box(size, size),
                Ball(size),
                Ball(size, center=1.5),
                Ball(size, center=center),
                Ball(size, dim=0),
                Ball(size, dim=-1),
                Ball(size, dim=(0, 1)),
                Simplex(size),
                Simplex(size, dim=0),
                Simplex(),
            ]
        )
    )


@settings(deadline=None, max_examples=150)
@given(convex=sets(), seed=st.integers(0, 10**6), reach=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
def test_projection_is_feasible_idempotent_and_nearest(convex, seed, reach):
    x = points(seed, 3, 4, reach=reach)
    p = convex(x)
    assert p.shape == x.shape
    slack = ROUNDING * (1 + reach)
    assert violation(convex, p) <= slack
    torch.testing.assert_close(convex(p), p, rtol=0, atol=slack)
    # P(x) is the nearest point of a convex set exactly where <x - P(x), y - P(x)> <= 0 for every y of the set.
    for k in range(5):
        y = inside(seed + 10 * k, convex, (3, 4))
        assert ((x - p) * (y - p)).sum().item() <= slack * (1 + (y - p).norm().item()) * (1 + x.norm().item())


@settings(deadline=None, max_examples=50)
@given(convex=sets(), seed=st.integers(0, 10**6))
def test_projection_leaves_a_member_where_it_is(convex, seed):
    x = inside(seed, convex, (3, 4))
    # Rounding of the member itself: softmax sums to one within a unit of the last place or two.
    torch.testing.assert_close(convex(x), x, rtol=0, atol=1e-13)


@settings(deadline=None, max_examples=80)
@given(convex=sets(), seed=st.integers(0, 10**6), reach=st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
def test_derivative_of_a_projection_is_finite_everywhere(convex, seed, reach):
    for x in (points(seed, 3, 4, reach=reach), inside(seed, convex, (3, 4)), convex(points(seed, 3, 4, reach=30.0))):
        x = x.requires_grad_()
        (d,) = torch.autograd.grad(convex(x), x, points(seed + 1, 3, 4))
        assert torch.isfinite(d).all()


@pytest.mark.parametrize("convex", [Ball(2.0), Ball(2.0, center=1.0), Ball(2.0, center=1.0, dim=-1)])
def test_derivative_at_the_centre_of_the_ball_is_the_identity(convex):
    x = torch.full((3, 4), float(convex.center), dtype=torch.float64, requires_grad=True)
    pull = points(3, 3, 4)
    (d,) = torch.autograd.grad(convex(x), x, pull)
    # radius / sqrt(radius^2) is one within a unit of the last place.
    torch.testing.assert_close(d, pull, rtol=1e-15, atol=1e-15)


@settings(deadline=None, max_examples=60)
@given(convex=sets(), seed=st.integers(0, 10**6))
def test_derivative_of_a_projection_is_that_of_its_differences(convex, seed):
    x = points(seed, 3, 4, reach=3.0)
    along = points(seed + 1, 3, 4)
    step = 1e-6
    ahead, behind = convex(x + step * along), convex(x - step * along)
    # Where a kink lies in between, the derivative jumps.
    assume(all(torch.equal(piece(convex, x), piece(convex, x + sign * step * along)) for sign in (1, -1)))
    _, found = torch.autograd.functional.jvp(convex, x, along)
    # Central difference in float64: 1e-12 of curvature, 1e-16 / 1e-6 of rounding, times a reach of a few.
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-8)


def piece(convex: Box | Ball | Simplex, x: Tensor) -> Tensor:
    """Which smooth piece of the projection x lies on."""
    match convex:
        case Ball(radius, center, dim):
            offset = x - center
            return (offset.norm() if dim is None else offset.norm(dim=dim)) <= radius
        case Box():
            return convex(x) == x
        case Simplex():
            return convex(x) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e9, 1e18])
def test_simplex_stays_feasible_for_entries_far_larger_than_its_total(dtype, size):
    x = torch.tensor([size, 0.0, -size], dtype=dtype)
    assert Simplex()(x).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("convex", [Box(-1.0, 1.0), Ball(1.0), Simplex()])
def test_projection_of_a_point_that_is_not_finite_raises_nothing(convex):
    """A run that diverges must get to say so; an index error on the way hides it."""
    x = torch.tensor([float("nan"), 0.0, 1.0], dtype=torch.float64)
    assert not torch.isfinite(convex(x)).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Box(), "low, high or both"),
        (lambda: Box(1.0, 0.0), "low <= high; got low=1.0, high=0.0"),
        (lambda: Box(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0])), "low <= high"),
        (lambda: Box(float("nan"), 1.0), "low <= high"),
        (lambda: Box(low=float("nan")), "low"),
        (lambda: Ball(0.0), "radius must be positive and finite; got 0.0"),
        (lambda: Ball(-1.0), "radius must be positive and finite; got -1.0"),
        (lambda: Ball(float("nan")), "radius must be positive and finite; got nan"),
        (lambda: Ball(float("inf")), "radius must"),
        (lambda: Simplex(0.0), "total must be positive and finite; got 0.0"),
        (lambda: Simplex(-2.0), "total must be positive and finite; got -2.0"),
        (lambda: Simplex(float("nan")), "total must be positive and finite; got nan"),
        (lambda: Simplex(float("inf")), "total must"),
    ],
)
def test_options_that_describe_no_set_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()
