"""Rows and RowAdam: one row for each example, moments and bias correction of its own, O(batch) a step."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    Alternating,
    ApproxGrad,
    Box,
    OptionError,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    ValueFunction,
    ValueGap,
    VariableError,
    solve,
)
from bilevel.batches.sources import Sources
from bilevel.measures.problem_check import variables
from bilevel.methods.base import RunContext
from bilevel.optim.variable_optimizer import RowAdam

RATE = torch.tensor(0.05, dtype=torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batches(seed: int, n: int, count: int, size: int) -> list[Tensor]:
    """`count` batches of `size` row numbers, with repetitions inside a batch."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(n, (size,), generator=generator) for _ in range(count)]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    count=st.integers(1, 12),
    size=st.integers(1, 6),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.8), (0.0, 0.99)]),
    tiny=st.sampled_from([1e-8, 1e-3]),
)
def test_row_adam_equals_an_adam_of_its_own_for_each_row(seed, shape, count, size, betas, tiny):
    n = 7
    rows = Rows(n, init=normal(seed, n, *shape))
    adam = RowAdam(rows, betas=betas, tiny=tiny)
    singles = [row.clone().requires_grad_() for row in rows.values]
    optimizers = [torch.optim.Adam([row], lr=RATE.item(), betas=betas, eps=tiny) for row in singles]
    for k, index in enumerate(batches(seed, n, count, size)):
        d = normal(seed + 1 + k, size, *shape)
        adam.step(index, d, RATE)
        for i in set(index.tolist()):
            singles[i].grad = d[index == i].sum(0)
            optimizers[i].step()
    # The same formula in another order: a few units of the last place a step, on numbers of size one.
    torch.testing.assert_close(rows.values, torch.stack(singles).detach(), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(), (3,)]), count=st.integers(1, 5))
def test_rows_outside_the_batch_keep_their_values_and_moments_bit_for_bit(seed, shape, count):
    n = 9
    rows = Rows(n, init=normal(seed, n, *shape))
    adam = RowAdam(rows)
    adam.step(torch.arange(n), normal(seed + 1, n, *shape), RATE)
    for k, index in enumerate(batches(seed, n, count, 4)):
        before = [t.clone() for t in (rows.values, *adam.state_dict().values())]
        adam.step(index, normal(seed + 2 + k, 4, *shape), RATE)
        outside = torch.ones(n, dtype=torch.bool).index_fill(0, index, False)
        for old, new in zip(before, (rows.values, *adam.state_dict().values()), strict=True):
            assert torch.equal(old[outside], new[outside])
            assert not torch.equal(old[~outside], new[~outside])


def test_row_named_twice_is_visited_once_with_the_sum_of_its_gradients():
    once, twice = (Rows(4, dtype=torch.float64) for _ in range(2))
    a, b = RowAdam(once), RowAdam(twice)
    for _ in range(3):
        a.step(torch.tensor([2, 0]), torch.tensor([0.75, -1.0], dtype=torch.float64), RATE)
        b.step(torch.tensor([2, 0, 2]), torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64), RATE)
    assert torch.equal(once.values, twice.values)
    assert b.visits.tolist() == [3, 0, 3, 0]
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y)


def test_first_visit_moves_a_row_by_the_rate_however_late_it_comes():
    rows = Rows(2, dtype=torch.float64)
    adam = RowAdam(rows)
    for _ in range(50):
        adam.step(torch.tensor([0]), torch.tensor([1.0], dtype=torch.float64), RATE)
    adam.step(torch.tensor([1]), torch.tensor([-3.0], dtype=torch.float64), RATE)
    # Adam's first step is the rate times the sign, but for tiny / |gradient| = 3e-9.
    torch.testing.assert_close(rows.values[1], RATE, rtol=1e-8, atol=0)


def test_state_dict_round_trip_continues_bit_for_bit():
    n = 6
    rows = Rows(n, init=normal(0, n, 2))
    adam = RowAdam(rows)
    drawn = batches(1, n, 8, 4)
    for k, index in enumerate(drawn[:4]):
        adam.step(index, normal(k, 4, 2), RATE)
    other = Rows(n, init=rows.values)
    resumed = RowAdam(other)
    resumed.load_state_dict({key: value.clone() for key, value in adam.state_dict().items()})
    for k, index in enumerate(drawn[4:]):
        adam.step(index, normal(10 + k, 4, 2), RATE)
        resumed.step(index, normal(10 + k, 4, 2), RATE)
    assert torch.equal(rows.values, other.values)


class LargestNew(TorchDispatchMode):
    """The size of the largest tensor that an operator makes in storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


def test_step_of_row_adam_makes_nothing_larger_than_the_batch():
    n, size = 100_000, 16
    rows = Rows(n, shape=(3,), dtype=torch.float64)
    adam = RowAdam(rows)
    with LargestNew() as watch:
        adam.step(torch.arange(0, 5 * size, 5), normal(0, size, 3), RATE)
    assert 0 < watch.largest <= size * 3 * 8


def test_stochastic_step_with_rows_makes_nothing_of_the_size_of_the_data():
    n, size = 100_000, 16
    u = Rows(n, dtype=torch.float64)
    v = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    x, y = normal(0, n, 4), normal(1, n)

    def lower(u, v, row):
        return (torch.sigmoid(u[row]) * (x[row] @ v - y[row]) ** 2).mean()

    def upper(u, v, row):
        return ((x[row] @ v - y[row]) ** 2).mean()

    data = ([torch.arange(i, i + size) for i in range(0, 64, size)],) * 2
    problem = Problem(upper, lower)
    upper_variable, lower_variable = variables(problem, u, v)
    sources = Sources(data, 0, lower_variable.device)
    generator = torch.Generator().manual_seed(0)
    variables_of_run = {"u": upper_variable, "v": lower_variable, "sources": sources, "generator": generator}
    context = RunContext(problem=problem, max_steps=10, tolerance=None, **variables_of_run)
    state = Penalty(warm_up=0.0).init(context)
    state.step(0)
    with LargestNew() as watch:
        state.step(1)
    assert 0 < watch.largest < n  # bytes: an eighth of a float64 vector of n
    assert (u.values != 0).sum().item() <= 3 * size  # rows were moved, and only those of the batches drawn


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([4, 1, 4]),
        torch.tensor([[0, 1], [1, 2]]),
        [3, 3, 0],
        slice(1, 4),
        slice(None),
        2,
        torch.tensor([True, False, True, False, True]),
        torch.tensor(3),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (2,)])
def test_reading_rows_gives_the_same_values_whether_or_not_a_gradient_is_wanted(index, shape):
    rows = Rows(5, init=normal(0, 5, *shape))
    plain = rows[index]
    rows.start_tape()
    leaf = rows[index]
    tape = rows.tape()
    rows.stop_tape()
    assert torch.equal(plain, leaf.detach())
    assert leaf.requires_grad
    assert tape[0][1] is leaf
    # What the tape notes is where the gradient belongs.
    dense = torch.zeros_like(rows.values)
    dense.index_add_(0, tape[0][0], torch.ones_like(leaf).reshape(-1, *shape))
    counted = torch.zeros_like(rows.values).requires_grad_()
    counted[index].sum().backward()
    assert torch.equal(dense, counted.grad)


def test_negative_row_numbers_count_from_the_end_in_a_step_too():
    rows = Rows(5, init=normal(0, 5))
    before = rows.values.clone()
    rows.start_tape()
    leaf = rows[torch.tensor([-1, 4, 0])]
    ((index, _),) = rows.tape()
    rows.stop_tape()
    RowAdam(rows).step(index, torch.ones_like(leaf), RATE)
    # A first visit moves by the rate, but for tiny / |gradient| = 1e-8.
    torch.testing.assert_close(
        before - rows.values, RATE * torch.tensor([1.0, 0, 0, 0, 1], dtype=torch.float64), rtol=1e-7, atol=1e-15
    )


def test_replay_hands_out_the_leaves_of_the_tape_again_in_order():
    rows = Rows(5, init=normal(0, 5))
    rows.start_tape()
    first = [rows[torch.tensor([0, 1])], rows[torch.tensor([3])]]
    rows.replay()
    assert rows[torch.tensor([0, 1])] is first[0]
    assert rows[torch.tensor([3])] is first[1]
    assert len(rows.tape()) == 2
    rows.stop_tape()
    assert not rows[torch.tensor([0])].requires_grad


def weighted(n: int, seed: int):
    """Least squares with one weight a row; rows from 20 on carry wrong targets."""
    x = normal(seed, n, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    wrong = y.clone()
    wrong[20:] += 5.0

    def lower(u, v, row):
        return (torch.sigmoid(u[row]) * (x[row] @ v - wrong[row]) ** 2).mean()

    def upper(u, v, row):
        return ((x[row] @ v - y[row]) ** 2).mean()

    trusted = [torch.arange(10)]
    noisy = [torch.arange(i, i + 5) for i in range(0, n, 5)]
    return Problem(upper, lower), (trusted, noisy)


def test_rows_work_in_solve_without_more_than_being_declared():
    problem, data = weighted(35, seed=0)
    u = Rows(35, dtype=torch.float64)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    method = Penalty(lower_optimizer=partial(torch.optim.Adam, lr=0.03), cotangent="same")  # so that 150 steps suffice
    solution = solve(problem, method, u, v, data, max_steps=150, seed=0)
    assert solution.u is u
    # As groups: a single right one is dispensable, and a single wrong one may happen to help.
    assert u.values[:20].mean() - u.values[20:].mean() > 1
    assert not u.values.requires_grad


@pytest.mark.parametrize("lower_steps", [0, 1, 2, 3, 5, 7])
def test_every_row_is_reached_whatever_the_number_of_batches_that_are_not_shuffled(lower_steps):
    """Six draws an upper step (T = 5) out of eight batches in a fixed order must not single out the same four."""
    problem, data = weighted(40, seed=0)
    u = Rows(40, dtype=torch.float64)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    solve(problem, Penalty(lower_steps=lower_steps), u, v, data, max_steps=100, seed=0)
    assert (u.values != 0).all()


@pytest.mark.parametrize("curvature", ["exact", "difference"])
def test_rows_in_a_dict_move_as_alone(curvature):
    problem, data = weighted(40, seed=0)
    renamed = Problem(
        lambda u, v, row: problem.upper(u["w"], v, row), lambda u, v, row: problem.lower(u["w"], v, row) + 0 * u["a"]
    )
    found = []
    for wrapped in (False, True):
        u = Rows(40, dtype=torch.float64)
        v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        extra = torch.zeros((), dtype=torch.float64, requires_grad=True)
        solve(
            renamed if wrapped else problem,
            Penalty(curvature=curvature, warm_up=0.0),
            {"a": extra, "w": u} if wrapped else u,
            v,
            data,
            max_steps=30,
            seed=0,
        )
        found.append(u.values)
    # Adding 0 * a changes no number, so the two runs make the same ones in the same order.
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.zeros(40, dtype=torch.float64))


def test_rows_reach_the_same_solution_as_a_tensor_in_deterministic_mode():
    x, y = normal(0, 12, 2), normal(1, 12)

    def lower(u, v, _):
        return (torch.nn.functional.softplus(u[:]) * (x @ v - y) ** 2).mean() + 0.05 * v @ v

    def upper(u, v, _):
        return ((x[:4] @ v - y[:4]) ** 2).mean() + 0.01 * (u[:] ** 2).sum()

    ends = []
    for u in (Rows(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64, requires_grad=True)):
        v = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        solution = solve(Problem(upper, lower), Penalty(), u, v, max_steps=500, seed=0)
        ends.append(u.values if isinstance(u, Rows) else u.detach())
        assert solution.mode == "deterministic"
    assert torch.equal(*ends)  # dense in this mode: the same arithmetic
    assert ends[0].abs().max() > 1e-3


def test_projection_keeps_the_rows_that_moved_in_their_set():
    problem, data = weighted(40, seed=0)
    problem = Problem(problem.upper, problem.lower, project_upper=Box(-0.25, 0.25))
    u = Rows(40, dtype=torch.float64)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    solve(problem, Penalty(), u, v, data, max_steps=100, seed=0)
    assert u.values.abs().max().item() == 0.25


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Rows(0), OptionError, "at least one row; got n=0"),
        (lambda: Rows(-3), OptionError, "got n=-3"),
        (lambda: Rows(3, init=torch.zeros(4)), OptionError, r"n=3 rows; got a tensor of shape \(4,\)"),
        (lambda: Rows(3, init=torch.zeros(())), OptionError, "n=3 rows"),
        (lambda: Rows(3, init=torch.zeros(3, dtype=torch.int64)), VariableError, "dtype torch.int64"),
        (lambda: Rows(3, dtype=torch.int32), VariableError, "dtype torch.int32"),
    ],
)
def test_arguments_that_make_no_rows_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_rows_are_refused_as_the_lower_variable():
    problem = Problem(lambda u, v, _: (v[:] ** 2).sum(), lambda u, v, _: ((v[:] - u) ** 2).sum())
    u = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(OptionError, match="v cannot hold Rows"):
        solve(problem, Penalty(), u, Rows(3, dtype=torch.float64), max_steps=1)


def test_optimizer_other_than_adam_is_refused_for_rows():
    problem, data = weighted(40, seed=0)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(OptionError, match=r"upper_optimizer must be torch\.optim\.Adam .* got SGD"):
        solve(
            problem,
            Penalty(upper_optimizer=partial(torch.optim.SGD, lr=0.1)),
            Rows(40, dtype=torch.float64),
            v,
            data,
            max_steps=1,
        )


def test_adam_options_that_rows_cannot_follow_are_refused():
    problem, data = weighted(40, seed=0)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    factory = partial(torch.optim.Adam, lr=0.1, weight_decay=0.5)
    with pytest.raises(OptionError, match="weight_decay"):
        solve(problem, Penalty(upper_optimizer=factory), Rows(40, dtype=torch.float64), v, data, max_steps=1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("projection", [None, Box(-0.02, 0.02)], ids=["free", "projected"])
@pytest.mark.parametrize(
    "kind", [Penalty, Alternating, ApproxGrad, ReverseMode, ValueGap, ValueFunction, SOBA, F2SA, SAMA]
)
def test_rows_move_as_a_tensor_does_and_their_gradient_has_its_norm(kind, projection, accumulate):
    """Every row is read in every step, by f and by g: its gradient comes in parts, of which no part alone is right."""
    target = torch.arange(6, dtype=torch.float64)

    def upper(u: Any, v: Tensor, x: float) -> Tensor:
        return ((v - x) ** 2).sum() + 0.1 * ((u[torch.arange(6)] - 0.3) ** 2).sum()

    def lower(u: Any, v: Tensor, row: Tensor) -> Tensor:
        return (torch.sigmoid(u[row]) * (v - target[row]) ** 2).sum() + 0.1 * v.square().sum()

    order = [torch.arange(6), torch.arange(6).flip(0)]
    found = []
    for u in (Rows(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64, requires_grad=True)):
        v = torch.full((1,), 0.5, dtype=torch.float64, requires_grad=True)
        known = {field.name for field in fields(kind)}
        options = {name: value for name, value in {"lower_steps": 2, "warm_up": 0.0}.items() if name in known}
        method = kind(**options, upper_optimizer=partial(torch.optim.Adam, lr=0.01))
        solution = solve(
            Problem(upper, lower, project_upper=projection),
            method,
            u,
            v,
            ([1.0, 2.0], order),
            max_steps=8,
            seed=0,
            accumulate=accumulate,
            hypergradient=False,
        )
        values = u.values if isinstance(u, Rows) else u.detach()
        found.append((values.clone(), v.detach(), torch.tensor(solution.history["grad_u"])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)
    assert found[0][0].abs().min() > 1e-3
