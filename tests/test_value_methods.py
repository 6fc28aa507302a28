"""ValueGap and ValueFunction: first order only, with a second lower variable beside the user's."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import Once, leaf
from test_contract import Case, Counter
from test_contract import run as run_case
from test_engine import ENGINES, device  # noqa: F401
from test_sync import classify
from torch import Tensor, nn

from bilevel import Box, OptionError, Problem, Status, solve
from bilevel.methods.value_function import ValueFunction, barrier_slope
from bilevel.methods.value_gap import ValueGap

ADAM = partial(torch.optim.Adam, lr=0.05)
SGD, ONE = partial(torch.optim.SGD, lr=0.4), partial(torch.optim.SGD, lr=1.0)
METHODS = (ValueGap, ValueFunction)
both = pytest.mark.parametrize("kind", METHODS)
CASES = [
    # The last price is 400, and the error of the hypergradient about its reciprocal; Adam's last steps are smaller.
    Case(
        f"{kind.__name__}{' with data' * data}",
        kind(lower_steps=3, lower_optimizer=ADAM, upper_optimizer=ADAM),
        data,
        200,
        0.005,
    )
    for kind in METHODS
    for data in (False, True)
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))


# -- the hypergradient -------------------------------------------------------------------------------------------------


def step_on_u(problem: Problem, u: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """What the first step takes from u, with v and w at their minima before it."""
    before = u.detach().clone()
    method = ValueGap(
        lower_steps=400, warm_up=0.0, decay="constant", lower_optimizer=SGD, upper_optimizer=ONE, **options
    )
    solution = solve(problem, method, u, v, max_steps=1, seed=0)
    return before - u.detach(), solution


def test_step_on_u_tends_to_the_hypergradient_like_one_over_gamma(quadratic):
    u = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64)
    v = torch.linalg.solve(quadratic.H, quadratic.C @ u + quadratic.c)
    q = torch.linalg.solve(quadratic.H, v - quadratic.a)
    exact = quadratic.alpha * (u - quadratic.b) + quadratic.C.T @ q
    errors, adjoints = [], []
    for gamma in (1e1, 1e2, 1e3, 1e4):
        found, solution = step_on_u(quadratic.problem, u.clone().requires_grad_(), leaf(0.0, 0.0), gamma=gamma)
        errors.append((found - exact).norm().item())
        adjoints.append((solution.adjoint[0] - q).norm().item())
        torch.testing.assert_close(solution.v.detach(), v, rtol=0, atol=1e-12)  # the user's v is the lower solution
    for sizes in (errors, adjoints):
        rates = [a / b for a, b in pairwise(sizes)]
        assert rates == pytest.approx([10.0] * 3, rel=0.15), sizes
    assert errors[-1] < 1e-3


def test_step_on_u_is_the_gradient_of_the_penalty_as_written(quadratic):
    """d/du of min_w f + gamma (g(u, w) - min_v g(u, v)), by autograd through both minima, in closed form."""
    gamma, eye = 3.0, torch.eye(2, dtype=torch.float64)
    u = leaf(0.3, -0.2, 0.7)
    pull = quadratic.C @ u + quadratic.c
    v = torch.linalg.solve(quadratic.H, pull)
    w = torch.linalg.solve(eye + gamma * quadratic.H, quadratic.a + gamma * pull)
    F = quadratic.upper(u, w, None) + gamma * (quadratic.lower(u, w, None) - quadratic.lower(u, v, None))
    (exact,) = torch.autograd.grad(F, u)
    found, _ = step_on_u(quadratic.problem, leaf(0.3, -0.2, 0.7), leaf(0.0, 0.0), gamma=gamma)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_gamma_grows_from_its_first_value_to_its_multiple(quadratic):
    method = ValueGap(gamma=2.0, gamma_growth=50.0, warm_up=0.5)
    gamma = run_case(quadratic, Case("", method, False, 20, 0.0)).history["gamma"]
    assert gamma[:10] == [0.0] * 10  # the warm-up
    assert gamma[10] == 2.0
    assert gamma[-1] == pytest.approx(100.0)
    rates = [b / a for a, b in pairwise(gamma[10:])]
    assert rates == pytest.approx([50.0 ** (1 / 9)] * 9)


# -- the barrier -------------------------------------------------------------------------------------------------------


def test_barrier_is_the_logarithm_inside_and_its_tangent_outside():
    tau, delta = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    slack = torch.tensor([3.0, 0.6, 0.5, 0.4, 0.0, -10.0], dtype=torch.float64)

    def barrier(x: Tensor) -> Tensor:
        inside = -tau * x.clamp(min=delta).log()
        outside = tau / 2 * (((x - 2 * delta) / delta) ** 2 - 1) - tau * delta.log()
        return torch.where(x > delta, inside, outside)

    x = slack.clone().requires_grad_()
    (slope,) = torch.autograd.grad(barrier(x).sum(), x)
    torch.testing.assert_close(barrier_slope(slack, tau, delta), -slope)
    near = torch.tensor([0.5 - 1e-9, 0.5 + 1e-9], dtype=torch.float64)
    torch.testing.assert_close(*barrier(near), rtol=0, atol=1e-8)
    torch.testing.assert_close(*barrier_slope(near, tau, delta), rtol=0, atol=1e-8)


def test_w_outside_of_the_barrier_is_pulled_back_without_a_nan(quadratic):
    """The margin is far below the gap that f asks for at first."""
    method = ValueFunction(margin=1e-6, barrier=1e-6, lower_steps=3, lower_optimizer=ADAM, upper_optimizer=ADAM)
    solution = run_case(quadratic, Case("", method, False, 200, 0.0))
    assert solution.status is Status.MAX_STEPS
    w, v = solution.state["w"][0].detach(), solution.v.detach()
    assert 0 <= (w - v) @ quadratic.H @ (w - v) / 2 < 1e-6


def test_value_function_finds_the_lower_solution_that_is_best_for_f():
    """g leaves v free along a line, and f is zero at one point of it: u must become its sum."""
    a = torch.tensor([1.0, -0.5], dtype=torch.float64)
    problem = Problem(lambda u, v, _: ((v - a) ** 2).sum() / 2, lambda u, v, _: (v.sum() - u[0]) ** 2 / 2)
    u, v = leaf(2.0), leaf(0.0, 0.0)
    method = ValueFunction(lower_steps=3, lower_optimizer=ADAM, upper_optimizer=ADAM)
    solution = solve(problem, method, u, v, max_steps=1000, seed=0)
    # The learning rates end at zero; those of the last tenth of the steps are below 0.005.
    torch.testing.assert_close(u.detach(), a.sum().reshape(1), rtol=0, atol=1e-3)
    torch.testing.assert_close(solution.state["w"][0].detach(), a, rtol=0, atol=1e-3)
    assert (v.sum() - u[0]).abs() < 1e-6


# -- evaluations -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("accumulate", [1, 3])
def test_evaluations_are_the_stated_ones(quadratic, kind, accumulate):
    counter = Counter(quadratic.problem)
    solution = run_case(
        quadratic,
        Case("", kind(lower_steps=4, warm_up=0.5), True, 6, 0.0),
        problem=counter.problem,
        callbacks=[counter],
        log_every=1,
        accumulate=accumulate,
    )
    assert counter.each_step("lower") == [5 * accumulate] * 3 + [10 * accumulate] * 3
    assert counter.each_step("upper") == [accumulate] * 3 + [5 * accumulate] * 3
    recorded = solution.history["evaluations"]
    assert [b - a for a, b in pairwise(recorded)] == counter.each_step("lower")[1:]


# -- what u, v and the problem may be ----------------------------------------------------------------------------------


@both
def test_operators_without_double_backward_run_without_a_warning(quadratic, kind):
    problem = Problem(quadratic.upper, lambda u, v, _: quadratic.lower(u, v, None) + Once.apply(v).sum() ** 2 / 8)
    plain = Problem(quadratic.upper, lambda u, v, _: quadratic.lower(u, v, None) + (v * v).sum() ** 2 / 8)
    ends = []
    for one in (problem, plain):
        u, v = quadratic.start()
        solve(one, kind(lower_optimizer=ADAM, upper_optimizer=ADAM), u, v, max_steps=20, seed=0)
        ends.append((u.detach(), v.detach()))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-10)


@both
@pytest.mark.parametrize("accumulate", [1, 2])
def test_prepare_gives_the_path_of_the_problem_without(kind, accumulate):
    data = ([1.0, 2.0], [0.5, 1.5, 2.5])
    prices = {"gamma": 2.0} if kind is ValueGap else {"margin": 0.1, "barrier": 0.2}
    ends = []
    for prepared in (True, False):
        u, v = leaf(0.5), leaf(0.0)
        method = kind(warm_up=0.0, lower_optimizer=ADAM, upper_optimizer=ADAM, lower_batches="shared", **prices)
        if prepared:
            problem = Problem(
                lambda u, v, made: torch.sum((v - made[1]) ** 2) + made[0].square().sum(),
                lambda u, v, made: torch.sum((v - made[0]) ** 2),
                prepare=lambda u, batches: (torch.tanh(u) * sum(batches), batches[0]),
            )
        else:
            pairs = [(data[0][i % 2], data[1][i % 3]) for i in range(6)]
            problem = Problem(
                lambda u, v, pair: torch.sum((v - pair[0]) ** 2) + (torch.tanh(u) * sum(pair)).square().sum(),
                lambda u, v, pair: torch.sum((v - torch.tanh(u) * sum(pair)) ** 2),
            )
        solve(problem, method, u, v, data if prepared else (pairs, pairs), max_steps=6, seed=0, accumulate=accumulate)
        ends.append((u.item(), v.item()))
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert ends[0][0] != 0.5


@both
def test_every_episode_starts_w_and_its_optimizer_afresh(kind):
    """With u held and one price, every upper step then repeats the first one bit for bit."""
    held = {"gamma_growth": 1.0} if kind is ValueGap else {"shrink": 1.0}

    def sizes(start_lower: bool) -> list[float]:
        problem = Problem(
            lambda u, v, _: torch.sum((v - 1) ** 2),
            lambda u, v, _: torch.sum((v - u) ** 2),
            start_lower=(lambda v, _: v.fill_(0.1)) if start_lower else None,
        )
        method = kind(
            lower_steps=2,
            warm_up=0.0,
            decay="constant",
            lower_optimizer=ADAM,
            upper_optimizer=partial(torch.optim.SGD, lr=0.0),
            **held,
        )
        return solve(problem, method, leaf(0.5), leaf(0.1), max_steps=6, seed=0).history["grad_u"]

    assert len(set(sizes(True))) == 1
    assert len(set(sizes(False))) == 6


@both
def test_trials_take_the_path_of_separate_runs(kind):
    bends = torch.tensor([1.0, 10.0], dtype=torch.float64)
    starts = torch.tensor([[0.5, 0.1], [-0.3, 0.4]], dtype=torch.float64)

    def problem(bend: Tensor, trials: int | None) -> Problem:
        return Problem(
            lambda u, v, _: ((v - 1) ** 2).sum(-1) / 2, lambda u, v, _: bend * ((v - u) ** 2).sum(-1) / 2, trials=trials
        )

    prices: dict[str, Any] = (
        {"gamma": 2.0}
        if kind is ValueGap
        else {
            "margin": 0.1,
            "barrier": 0.2,
        }
    )
    method = kind(warm_up=0.0, lower_optimizer=ADAM, upper_optimizer=ADAM, **prices)
    u, v = starts.clone().requires_grad_(), (2 * starts).requires_grad_()
    solve(problem(bends, 2), method, u, v, max_steps=12, seed=0, hypergradient=False)
    for i in range(2):
        one_u, one_v = starts[i].clone().requires_grad_(), (2 * starts[i]).requires_grad_()
        solve(problem(bends[i], None), method, one_u, one_v, max_steps=12, seed=0, hypergradient=False)
        torch.testing.assert_close(u[i], one_u, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(v[i], one_v, rtol=1e-10, atol=1e-12)


@both
def test_lower_projection_is_kept_and_its_answer_reached(kind):
    """v is the projection of u onto a box, and f wants v outside of it: the best v is on the border."""
    problem = Problem(
        lambda u, v, _: (((v - 2) ** 2).sum() + ((u - 0.3) ** 2).sum()) / 2,
        lambda u, v, _: ((v - u) ** 2).sum() / 2,
        project_lower=Box(-1.0, 1.0),
    )
    u, v = leaf(0.0, 0.0), leaf(0.0, 0.0)
    solve(problem, kind(lower_optimizer=ADAM, upper_optimizer=ADAM), u, v, max_steps=400, seed=0)
    # (v - 2)^2/2 + (u - 0.3)^2/2 with v = u is least at 1.15, outside of the box.
    assert v.max() <= 1.0
    torch.testing.assert_close(v.detach(), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-2)


@both
def test_statistics_of_batch_norm_are_those_of_v_alone(kind):
    """v is held: its statistics are those of as many evaluations as it has in the steps."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, dtype=torch.float64)
    v = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    other.load_state_dict(v.state_dict())
    problem = Problem(
        lambda u, net, _: net[2].weight.square().sum() + u.sum(), lambda u, net, _: (net(x) - u).square().mean()
    )
    sgd = partial(torch.optim.SGD, lr=0.0)
    method = kind(warm_up=0.0, lower_steps=1, lower_optimizer=sgd)
    solve(problem, method, leaf(0.0), v, ([0.0], [0.0]), max_steps=4, seed=0, hypergradient=False)
    for _ in range(4 * 2):  # one lower and one upper step each
        other(x)
    for mine, expected in zip(v.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, expected)


# -- engines -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
def test_engine_takes_the_path_of_eager(engine, device, kind):  # noqa: F811
    ends = []
    for name in (engine, "eager"):
        problem, u, v, data = classify(device)
        v, u.values = v.double(), u.values.double()
        data = tuple([tuple(t.double() if t.is_floating_point() else t for t in b) for b in s] for s in data)
        method = kind(warm_up=0.3, upper_optimizer=ADAM)
        solution = solve(problem, method, u, v, data, max_steps=6, seed=1, engine=name, hypergradient=False)
        assert solution.engine == name
        history = [solution.history[c] for c in ("upper", "lower", "grad_u", "gamma", "evaluations")]
        ends.append((history, u.values, list(v.state_dict().values())))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ValueGap, "gamma", 0.0),
        (ValueGap, "gamma_growth", 0.9),
        (ValueGap, "lower_optimizer", 0.1),
        (ValueFunction, "barrier", 0.0),
        (ValueFunction, "margin", -1.0),
        (ValueFunction, "shrink", 1.1),
        (ValueFunction, "shrink", float("nan")),
    ],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(kind, name, value):
    with pytest.raises(OptionError, match=name) as caught:
        kind(**{name: value})
    assert repr(value) in str(caught.value)


@both
def test_constraints_are_refused(quadratic, kind):
    u, v = quadratic.start()
    problem = Problem(quadratic.upper, quadratic.lower, equalities=lambda u, v, _: u.sum())
    with pytest.raises(OptionError, match=f"{kind.__name__} has no multipliers"):
        solve(problem, kind(), u, v, max_steps=1)
