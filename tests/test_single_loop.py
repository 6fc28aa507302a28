"""SOBA, SRBA, F2SA, SAMA and the solver "sgd": each against its recursion as written, with the same batches."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from common import Once, leaf
from test_contract import Case, Counter
from test_contract import run as run_case
from torch import Tensor, nn

from bilevel import F2SA, SAMA, SOBA, SRBA, ApproxGrad, DataError, OptionError, Problem, Rows, solve

SGD, ONE = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=1.0)
UPPER, LOWER = [0.7, -0.4], [1.5, 0.8, 1.1]
STEPS = 12


def curved(**more: Any) -> Problem:
    """f = (v - b)^2 / 2 + u^2 / 4 and g = exp(v - u) + b v^2 / 2, whose second derivatives change with u, v and b."""
    return Problem(
        lambda u, v, b: ((v - b) ** 2).sum() / 2 + (u**2).sum() / 4,
        lambda u, v, b: torch.exp(v - u).sum() + b * (v**2).sum() / 2,
        **more,
    )


def ends(method: Any, steps: int = STEPS) -> tuple[float, float, float]:
    u, v = leaf(0.5), leaf(-0.2)
    solution = solve(curved(), method, u, v, (UPPER, LOWER), max_steps=steps, seed=0, hypergradient=False)
    return v.item(), solution.state["q"][0].item(), u.item()


def directions(v: float, q: float, u: float, b: float, c: float) -> np.ndarray:
    """(g_v, g_vv q - f_v, f_u - g_uv q) with b the upper and c the lower batch."""
    e = np.exp(v - u)
    return np.array([e + c * v, (e + c) * q - (v - b), u / 2 + e * q])


# -- SOBA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["root", "constant", "linear"])
def test_soba_follows_the_recursion_as_written_on_the_same_batches(decay):
    z, rates = np.array([-0.2, 0.0, 0.5]), np.array([0.2, 0.2, 0.5])
    for t in range(STEPS):
        factor = {"root": (t + 1) ** -0.5, "constant": 1.0, "linear": 1 - t / STEPS}[decay]
        z = z - factor * rates * directions(*z, UPPER[t % 2], LOWER[t % 3])
    # Sums of a few numbers of size 1.
    assert ends(SOBA(lower_rate=0.2, upper_rate=0.5, decay=decay)) == pytest.approx(z, rel=1e-12)


def test_soba_with_root_decay_does_not_depend_on_the_number_of_steps(quadratic):
    ended = []
    for most in (10, 1000):
        stop = Case("", SOBA(), True, 10, 0.0)
        ended.append(run_case(quadratic, stop, max_steps=most, callbacks=[_Stop()] if most > 10 else []))
    assert torch.equal(ended[0].u, ended[1].u)
    assert ended[0].steps == ended[1].steps == 10


class _Stop(Counter):
    def __init__(self) -> None: ...

    def start(self, run: Any) -> None: ...

    def log(self, run: Any) -> bool:
        return run.step >= 10


def test_default_lower_rate_is_one_over_the_largest_curvature(quadratic):
    solution = run_case(quadratic, Case("", SOBA(decay="constant"), True, 3, 0.0))
    top = torch.linalg.eigvalsh(quadratic.H).amax().item()
    # Ten power iterations leave (0.86 / 1.64)^20 of the error.
    assert solution.history["lower_rate"] == pytest.approx([1 / top] * 3, rel=1e-4)


# -- SRBA --------------------------------------------------------------------------------------------------------------


def test_srba_follows_the_recursion_as_written_on_the_same_batches():
    z, rates, drawn = np.array([-0.2, 0.0, 0.5]), np.array([0.2, 0.2, 0.5]), 0
    before = z
    for t in range(STEPS):
        if t % 4 == 0:
            d = np.mean([directions(*z, b, c) for b in UPPER for c in LOWER], axis=0)
        else:
            b, c = UPPER[drawn % 2], LOWER[drawn % 3]
            d, drawn = d + directions(*z, b, c) - directions(*before, b, c), drawn + 1
        before, z = z, z - rates * d
    assert ends(SRBA(lower_rate=0.2, upper_rate=0.5, period=4)) == pytest.approx(z, rel=1e-12)


def test_srba_passes_over_all_data_every_period_and_evaluates_twice_otherwise(quadratic):
    counter = Counter(quadratic.problem)
    case = Case("", SRBA(), True, 13, 0.0)
    run_case(quadratic, case, problem=counter.problem, callbacks=[counter], log_every=1)
    # Two upper and four lower batches; a pass evaluates g twice on each.
    assert counter.each_step("lower") == [8, *[2] * 5] * 2 + [8]
    assert counter.each_step("upper") == [2, *[2] * 5] * 2 + [2]


def test_srba_keeps_no_noise_where_soba_keeps_some(quadratic):
    errors = []
    for kind in (SRBA, SOBA):
        case = Case("", kind(upper_rate=0.3, decay="constant"), True, 200, 0.0)
        solution = run_case(quadratic, case)
        errors.append(quadratic.error(solution.u, solution.v))
    assert errors[0] < 1e-6 < 1e-3 < errors[1]


class Endless:
    def __iter__(self):
        while True:
            yield 1.0


def test_srba_refuses_data_without_a_length_rows_and_prepare():
    u, v = leaf(0.5), leaf(-0.2)
    with pytest.raises(DataError, match=r"the lower data must have a length.*got Endless"):
        solve(curved(), SRBA(), u, v, ([1.0], Endless()), max_steps=1)
    with pytest.raises(OptionError, match="SRBA cannot use prepare"):
        solve(curved(prepare=lambda u, pair: pair[0]), SRBA(), u, v, (UPPER, LOWER), max_steps=1)
    rows = Problem(lambda u, v, b: (v**2).sum(), lambda u, v, b: ((v - u[torch.arange(2)]) ** 2).sum())
    with pytest.raises(OptionError, match="SRBA cannot use Rows"):
        solve(rows, SRBA(), Rows(2, dtype=torch.float64), v, (UPPER, LOWER), max_steps=1)


# -- F2SA --------------------------------------------------------------------------------------------------------------


def test_f2sa_follows_two_lower_variables_as_written():
    plus, minus, u, drawn = -0.2, -0.2, 0.5, 0
    for t in range(STEPS):
        h, factor = 0.2 * (t + 1) ** (-1 / 7), (t + 1) ** -0.5
        # The run keeps q = (minus - plus) / (2h) while h falls.
        middle, q = (plus + minus) / 2, 0.0 if t == 0 else (minus - plus) / (2 * 0.2 * t ** (-1 / 7))
        plus, minus = middle - h * q, middle + h * q
        turn = int(t * (5**0.5 - 1) / 2 % 1.0 * 3)
        batches = [(UPPER[(drawn + i) % 2], LOWER[(drawn + i) % 3]) for i in range(3)]
        drawn += 3
        for b, c in batches[:turn] + batches[turn + 1 :]:  # the upper step has the other
            plus -= factor * 0.1 * (np.exp(plus - u) + c * plus + h * (plus - b))
            minus -= factor * 0.1 * (np.exp(minus - u) + c * minus - h * (minus - b))
        u -= factor * 0.5 * (u / 2 + (np.exp(minus - u) - np.exp(plus - u)) / (2 * h))
    v, q, found = ends(F2SA(lower_steps=2, lower_rate=0.1, upper_rate=0.5, weight=0.2))
    assert [v - h * q, v + h * q, found] == pytest.approx([plus, minus, u], rel=1e-10)


def test_f2sa_has_an_error_of_the_order_of_h_squared():
    """g_vv = exp(v - u) + b changes with v; both lower variables are at their minima before the step on u."""
    u = torch.tensor([0.5], dtype=torch.float64)
    v = leaf(-0.2)
    problem, data = curved(), ([0.7], [1.5])
    for _ in range(50):  # Newton steps to the minimum of g
        e = torch.exp(v.detach() - u)
        v.data -= (e + 1.5 * v.detach()) / (e + 1.5)
    e = torch.exp(v.detach() - u)
    exact = u / 2 + e * (v.detach() - 0.7) / (e + 1.5)
    errors = []
    for h in (0.4, 0.2, 0.1, 0.05):
        moved = u.clone().requires_grad_()
        method = F2SA(lower_steps=300, lower_rate=0.4, upper_rate=1.0, weight=h, weight_power=0.0, decay="constant")
        solve(problem, method, moved, leaf(v.item()), data, max_steps=1, seed=0, hypergradient=False)
        errors.append((u - moved.detach() - exact).abs().item())
    rates = [a / b for a, b in pairwise(errors)]
    assert rates == pytest.approx([4.0] * 3, rel=0.15), errors
    assert errors[-1] < 1e-3


# -- SAMA and the solver "sgd" -----------------------------------------------------------------------------------------


def test_q_of_sama_is_f_v_scaled_as_adam_scales_a_gradient():
    """After one step of Adam from zero moments, the running mean is the squared gradient."""
    method = SAMA(
        lower_steps=1,
        warm_up=0.0,
        lower_optimizer=partial(torch.optim.Adam, lr=0.1),
        upper_optimizer=ONE,
        decay="constant",
        lower_batches="shared",
    )
    v, q, u = ends(method, steps=1)
    slope = np.exp(-0.7) + 1.5 * -0.2
    assert v == pytest.approx(-0.2 - 0.1 * np.sign(slope), rel=1e-6)
    assert q == pytest.approx(0.1 * (v - 0.7) / abs(slope), rel=1e-12)
    # A central difference in float64 is off by about 1e-10.
    assert u == pytest.approx(0.5 - (0.25 + np.exp(v - 0.5) * q), abs=1e-8)


def test_q_without_a_warm_start_is_the_neumann_series(quadratic):
    method = ApproxGrad(
        linear_solver="sgd",
        linear_rate=0.3,
        linear_steps=6,
        lower_steps=2,
        warm_start=False,
        warm_up=0.0,
        lower_optimizer=SGD,
        upper_optimizer=SGD,
    )
    adjoint = run_case(quadratic, Case("", method, False, 5, 0.0)).adjoint[0]
    # f_v is that of the last v, which the steps on q do not change.
    solution = run_case(quadratic, Case("", method, False, 5, 0.0))
    f_v = solution.v.detach() - quadratic.a
    step = torch.eye(2, dtype=torch.float64) - 0.3 * quadratic.H
    series = 0.3 * sum(torch.linalg.matrix_power(step, k) @ f_v for k in range(6))
    torch.testing.assert_close(adjoint, series, rtol=0, atol=1e-12)


def test_amigo_and_stocbio_differ_only_in_where_q_starts(quadratic):
    """With many steps on q both solve the system."""
    found = []
    for warm in (True, False):
        method = ApproxGrad(
            linear_solver="sgd",
            linear_steps=60,
            lower_steps=2,
            warm_start=warm,
            decay="constant",
            lower_optimizer=SGD,
            upper_optimizer=SGD,
        )
        found.append(run_case(quadratic, Case("", method, False, 5, 0.0)).adjoint[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


# -- what they share ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [F2SA, SAMA])
def test_first_order_methods_take_no_second_derivative(kind):
    torch.manual_seed(0)
    v = nn.Linear(2, 1).double()
    x = torch.randn(6, 2, dtype=torch.float64)

    def lower(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        return Once.apply(v(x)).square().mean() + u.exp().sum() * v.weight.square().sum()

    problem = Problem(lambda u, v, _: (v(x) - 1).square().mean(), lower)
    before = v.weight.detach().clone()
    solve(problem, kind(), leaf(0.0), v, max_steps=3, seed=0, hypergradient=False)
    assert not torch.equal(before, v.weight)


@pytest.mark.parametrize("kind", [SOBA, SRBA, F2SA])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lower_rate": 0.0}, "lower_rate must be above 0; got 0.0"),
        ({"decay": "cosine"}, "decay must be one of 'constant', 'linear', 'root'; got 'cosine'"),
        ({"lower_rate": 0.1, "lower_optimizer": SGD}, "lower_rate is the rate of plain gradient steps"),
        ({"upper_rate": 0.1, "upper_optimizer": SGD}, "upper_rate is the rate of plain gradient steps"),
        ({"upper_optimizer": "adam"}, "upper_optimizer must be a factory"),
    ],
)
def test_bad_options_are_refused(kind, options, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        kind(**options)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SRBA, "period", 0),
        (F2SA, "weight", 0.0),
        (F2SA, "weight_power", -1),
        (F2SA, "lower_steps", 0),
        (SOBA, "curvature", "gram"),
    ],
)
def test_option_out_of_range_is_refused_with_its_name(kind, name, value):
    with pytest.raises(OptionError, match=f"{name} must be"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", [SOBA, SRBA, F2SA])
def test_problems_that_a_single_loop_cannot_run_are_refused(kind):
    u, v = leaf(0.5), leaf(-0.2)
    for more, words in (
        ({"start_lower": lambda v, batch: v.zero_()}, "cannot use start_lower"),
        ({"project_lower": lambda v: v.clamp(min=0)}, "which project_lower changes"),
        ({"equalities": [lambda u, v, b: u]}, "has no multipliers"),
    ):
        with pytest.raises(OptionError, match=words):
            solve(curved(**more), kind(), u, v, (UPPER, LOWER), max_steps=1)
    rows = Problem(lambda u, v, b: (v**2).sum(), lambda u, v, b: ((v - u[torch.arange(2)]) ** 2).sum())
    with pytest.raises(OptionError, match="upper_rate must be left out with Rows"):
        solve(rows, kind(upper_rate=0.1), Rows(2, dtype=torch.float64), v, max_steps=1)
