"""ApproxGrad: its hypergradient is that of the closed form, and its linear solvers cannot fail silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import Each, Once, leaf
from quadratic import Quadratic
from test_contract import Case, Counter
from test_contract import run as run_case
from test_engine import ENGINES, device  # noqa: F401
from test_sync import classify
from torch import Tensor

from bilevel import BilevelWarning, Box, OptionError, Problem, Solution, solve
from bilevel._util.tensor_lists import dot
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.optim.linear_solvers import ConjugateGradients, LeastSquares, LinearSolver, Neumann

ADAM = partial(torch.optim.Adam, lr=0.05)
STILL, ONE = partial(torch.optim.SGD, lr=0.0), partial(torch.optim.SGD, lr=1.0)
SOLVERS = ("cg", "neumann", "adam")
each_solver = pytest.mark.parametrize("linear_solver", SOLVERS)
CASES = [
    # The learning rates fall to zero; what is left is how far Adam, at 0.05, brings u and v in 200 steps.
    Case(
        f"{name}{' with data' * data}",
        ApproxGrad(linear_solver=name, lower_steps=3, lower_optimizer=ADAM, upper_optimizer=ADAM),  # type: ignore[arg-type]
        data,
        200,
        0.005 if data else 1e-3,
    )
    for name in SOLVERS
    for data in (False, True)
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))


def estimate(problem: Problem, u: Tensor, v: Tensor, *, steps: int = 1, **options: Any) -> tuple[Tensor, Solution]:
    """The step on u of the last of some upper steps, the ones before it at a rate of zero; v is held."""
    fixed: dict[str, Any] = {"warm_up": 0.0, "lower_optimizer": STILL}
    before = u.detach().clone()
    moves = []

    class Last(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            moves.append(u.grad.clone())

    solution = solve(
        problem, ApproxGrad(upper_optimizer=partial(Last, lr=0.0), **(fixed | options)), u, v, max_steps=steps, seed=0
    )
    assert torch.equal(u, before)
    return moves[-1], solution


def closed_form(quadratic: Quadratic, u: Tensor, v: Tensor, damping: float = 0.0) -> tuple[Tensor, Tensor]:
    """The hypergradient and q, at any u and v: the curvature is the same everywhere."""
    H = quadratic.H + damping * torch.eye(2, dtype=torch.float64)
    q = torch.linalg.solve(H, (v - quadratic.a).detach())
    return quadratic.alpha * (u.detach() - quadratic.b) + quadratic.C.T @ q, q


# -- the hypergradient -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize(
    ("linear_solver", "linear_steps", "steps"),
    [
        ("cg", 2, 1),  # as many steps as v has numbers
        ("cg", 1, 60),  # restarted from its q, one step is one of steepest descent
        ("neumann", 60, 1),  # its rate is 1 - 1 / (1.25 * 2)
        ("neumann", 2, 60),
        ("adam", 20, 200),
    ],
)
def test_step_on_u_tends_to_the_closed_form(quadratic, linear_solver, linear_steps, steps, damping):
    u, v = leaf(0.3, -0.2, 0.7), leaf(0.5, 0.9)
    exact, q = closed_form(quadratic, u, v, damping)
    found, solution = estimate(
        quadratic.problem, u, v, steps=steps, linear_solver=linear_solver, linear_steps=linear_steps, damping=damping
    )
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(solution.adjoint[0], q, rtol=1e-8, atol=1e-8)
    if damping == 0.0:
        assert solution.certificate.hypergradient_error < 1e-8
        assert solution.history["grad_v"][-1] < 1e-7  # the residual of the linear system


@each_solver
def test_without_warm_start_every_upper_step_solves_from_zero(quadratic, linear_solver):
    options = {"linear_solver": linear_solver, "linear_steps": 1, "decay": "constant"}
    (first, _), (cold, _), (warm, _) = (
        estimate(quadratic.problem, leaf(0.3, -0.2, 0.7), leaf(0.5, 0.9), steps=steps, warm_start=warm, **options)
        for steps, warm in ((1, True), (9, False), (9, True))
    )
    assert torch.equal(first, cold)
    assert (warm - cold).norm() > 1e-3


def test_difference_gives_the_hypergradient_where_an_operator_has_no_double_backward(quadratic):
    def problem(square: Callable[[Tensor], Tensor]) -> Problem:
        return Problem(quadratic.upper, lambda u, v, _: quadratic.lower(u, v, None) + square(v).sum() ** 2 / 8)

    exact, _ = estimate(problem(lambda v: v * v), leaf(0.3, -0.2, 0.7), leaf(0.5, 0.9), linear_steps=3)
    with pytest.warns(BilevelWarning, match="once_differentiable has no double backward"):
        found, _ = estimate(problem(Once.apply), leaf(0.3, -0.2, 0.7), leaf(0.5, 0.9), linear_steps=3)
    # A central difference, with a step of 1e-5 times the size of v.
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-7)
    assert (exact - closed_form(quadratic, leaf(0.3, -0.2, 0.7), leaf(0.5, 0.9))[0]).norm() > 0.1


# -- the linear solvers ------------------------------------------------------------------------------------------------


def spd(n: int, condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -torch.tensor(condition).log10().item(), n).double()) @ basis.T


def by(A: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda p: [A @ p[0]]


LEFT = torch.ones((), dtype=torch.float64)


def solver(kind: type[LinearSolver], n: int, steps: int, **options: Any) -> LinearSolver:
    like = [torch.zeros(n, dtype=torch.float64)]
    return kind(like, steps, dot, **({"warm_start": True} | options))


def test_solved_system_stays_solved_and_zero_stays_zero():
    A, b = spd(4, 10.0), torch.arange(1.0, 5.0, dtype=torch.float64)
    exact = torch.linalg.solve(A, b)
    for kind, options in ((ConjugateGradients, {}), (Neumann, {}), (LeastSquares, {"rate": 0.1})):
        found = solver(kind, 4, 5000, **options)
        for _ in range(3):
            found.solve(by(A), [b], LEFT)
            # Adam at a rate that does not fall keeps to a neighbourhood.
            torch.testing.assert_close(found.q[0], exact, rtol=1e-6, atol=1e-6)
        still = solver(kind, 4, 5, **options)
        assert not still.solve(by(A), [torch.zeros_like(b)], LEFT)[0].any()


def test_curvature_that_is_not_positive_leaves_the_trial_where_it_is():
    b = torch.ones(3, dtype=torch.float64)
    for A in (-torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)):
        for kind in (ConjugateGradients, Neumann):
            found = solver(kind, 3, 5)
            found.solve(by(A), [b], LEFT)
            assert not found.q[0].any()
    saddle = torch.diag(torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64))
    cg, neumann = solver(ConjugateGradients, 3, 50), solver(Neumann, 3, 50)
    for _ in range(5):
        assert torch.isfinite(cg.solve(by(saddle), [b], LEFT)[0]).all()
        assert (saddle @ neumann.solve(by(saddle), [b], LEFT)[0] - b).norm() <= b.norm()


@pytest.mark.parametrize("growth", [1e3, 1e6])
def test_neumann_does_not_diverge_where_the_curvature_is_far_larger_than_first_seen(growth):
    A, b = spd(6, 5.0), torch.ones(6, dtype=torch.float64)
    found = solver(Neumann, 6, 30)
    found.solve(by(A), [b], LEFT)
    top = torch.linalg.eigh(A)[1][:, :1]
    # The new curvature is along one direction, which the estimate has not turned to.
    A = A + growth * top @ top.T
    sizes = []
    for _ in range(30):
        found.solve(by(A), [b], LEFT)
        sizes.append((b - A @ found.q[0]).norm().item())
    # But for rounding, which the curvature multiplies.
    assert all(after <= before + 1e-14 * growth for before, after in pairwise(sizes))
    assert sizes[-1] < 1e-3


def test_neumann_without_its_bound_would_diverge_there(monkeypatch):
    """What the test above is of: the estimate alone is not enough."""
    b = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    A = torch.diag(torch.tensor([1.0, 1e3], dtype=torch.float64))  # b hardly sees the second direction
    kept, free = solver(Neumann, 2, 20), solver(Neumann, 2, 20)
    kept.solve(by(A), [b], LEFT)
    assert (b - A @ kept.q[0]).norm() <= b.norm()
    monkeypatch.setattr(torch, "minimum", lambda longest, least: longest)
    free.solve(by(A), [b], LEFT)
    assert (b - A @ free.q[0]).norm() > 1e6


# -- evaluations -------------------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize(
    ("options", "accumulate", "each_product"),
    [({}, 1, 0), ({"curvature": "difference"}, 1, 2), ({}, 3, 3), ({"curvature": "difference"}, 2, 4)],
    ids=["one-graph", "difference", "accumulate", "difference-accumulate"],
)
def test_evaluations_are_the_stated_ones(quadratic, linear_solver, warm_start, options, accumulate, each_product):
    method = ApproxGrad(
        linear_solver=linear_solver, lower_steps=4, linear_steps=3, warm_up=0.5, warm_start=warm_start, **options
    )
    counter = Counter(quadratic.problem)
    solution = run_case(
        quadratic,
        Case("", method, True, 6, 0.0),
        problem=counter.problem,
        callbacks=[counter],
        log_every=1,
        accumulate=accumulate,
    )
    products = {"cg": 4 + warm_start, "neumann": 5 + warm_start, "adam": 7}[linear_solver]
    plain = 5 * accumulate
    assert counter.each_step("lower") == [plain] * 3 + [plain + products * each_product] * 3
    assert counter.each_step("upper") == [accumulate] * 6
    recorded = solution.history["evaluations"]
    assert [b - a for a, b in pairwise(recorded)] == counter.each_step("lower")[1:]


# -- what u and the problem may be -------------------------------------------------------------------------------------


def weighted(u: Any, v: Tensor, row: Tensor) -> Tensor:
    target = torch.arange(6, dtype=torch.float64)[row]
    return (torch.sigmoid(u[row]) * (v - target) ** 2).sum() + 0.1 * v.square().sum()


@each_solver
@pytest.mark.parametrize("accumulate", [1, 2])
def test_prepare_gives_the_path_of_the_problem_without(linear_solver, accumulate):
    data = ([1.0, 2.0], [0.5, 1.5, 2.5])
    ends = []
    for prepared in (True, False):
        u, v = leaf(0.5), leaf(0.0)
        method = ApproxGrad(
            linear_solver=linear_solver,
            warm_up=0.0,
            lower_optimizer=ADAM,
            upper_optimizer=ADAM,
            lower_batches="shared",
            linear_rate=0.1 if linear_solver == "adam" else None,
        )
        if prepared:
            problem = Problem(
                lambda u, v, made: torch.sum((v - made[1]) ** 2) + made[0].square().sum() + 0.3 * u.square().sum(),
                lambda u, v, made: torch.sum((v - made[0]) ** 2),
                prepare=lambda u, batches: (torch.tanh(u) * sum(batches), batches[0]),
            )
        else:
            pairs = [(data[0][i % 2], data[1][i % 3]) for i in range(6)]
            problem = Problem(
                lambda u, v, pair: (
                    torch.sum((v - pair[0]) ** 2) + (torch.tanh(u) * sum(pair)).square().sum() + 0.3 * u.square().sum()
                ),
                lambda u, v, pair: torch.sum((v - torch.tanh(u) * sum(pair)) ** 2),
            )
        solve(problem, method, u, v, data if prepared else (pairs, pairs), max_steps=6, seed=0, accumulate=accumulate)
        ends.append((u.item(), v.item()))
    # The same products in another order.
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert ends[0][0] != 0.5


@each_solver
def test_every_episode_starts_q_afresh(linear_solver):
    """With u held and one episode, every upper step then repeats the first one bit for bit."""

    def adjoints(start_lower: bool) -> list[float]:
        problem = Problem(
            lambda u, v, _: torch.sum((v - 1) ** 2),
            lambda u, v, _: torch.sum((v - u) ** 4) + torch.sum(v**2),
            start_lower=(lambda v, _: v.fill_(0.1)) if start_lower else None,
        )
        method = ApproxGrad(
            linear_solver=linear_solver,
            linear_steps=1,
            lower_steps=2,
            warm_up=0.0,
            decay="constant",
            lower_optimizer=ADAM,
            upper_optimizer=STILL,
        )
        solution = solve(problem, method, leaf(0.5, 0.3), leaf(0.1, 0.1), max_steps=6, seed=0)
        return solution.history["grad_u"]

    assert len(set(adjoints(True))) == 1
    assert len(set(adjoints(False))) == 6


@each_solver
def test_trials_take_the_path_of_separate_runs(linear_solver):
    """Curvatures of 1, 30 and -1: a number that trials shared would be wrong for two of them."""
    bends = torch.tensor([1.0, 30.0, -1.0], dtype=torch.float64)
    starts = torch.tensor([[0.5, 0.1], [-0.3, 0.4], [0.2, 0.2]], dtype=torch.float64)

    def problem(bend: Tensor, trials: int | None) -> Problem:
        ramp = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return Problem(
            lambda u, v, _: ((v - 1) ** 2).sum(-1) / 2,
            lambda u, v, _: bend * (ramp * (v - u) ** 2).sum(-1) / 2,
            trials=trials,
        )

    slow = partial(torch.optim.SGD, lr=0.01)
    method = ApproxGrad(
        linear_solver=linear_solver,
        linear_steps=3,
        warm_up=0.0,
        lower_optimizer=slow,
        upper_optimizer=slow,
        linear_rate=0.05 if linear_solver == "adam" else None,
    )
    u, v = starts.clone().requires_grad_(), (2 * starts).requires_grad_()
    solve(problem(bends, 3), method, u, v, max_steps=12, seed=0, hypergradient=False)
    for i in range(3):
        one_u, one_v = starts[i].clone().requires_grad_(), (2 * starts[i]).requires_grad_()
        solve(problem(bends[i], None), method, one_u, one_v, max_steps=12, seed=0, hypergradient=False)
        torch.testing.assert_close(u[i], one_u, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(v[i], one_v, rtol=1e-10, atol=1e-12)


# -- engines -----------------------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
def test_engine_takes_the_path_of_eager(engine, device, linear_solver):  # noqa: F811
    ends = []
    for name in (engine, "eager"):
        problem, u, v, data = classify(device)
        v, u.values = v.double(), u.values.double()
        data = tuple([tuple(t.double() if t.is_floating_point() else t for t in b) for b in s] for s in data)
        method = ApproxGrad(linear_solver=linear_solver, damping=1.0, warm_up=0.3, upper_optimizer=ADAM)
        solution = solve(problem, method, u, v, data, max_steps=6, seed=1, engine=name, hypergradient=False)
        assert solution.engine == name
        history = [solution.history[c] for c in ("upper", "lower", "grad_u", "grad_v", "evaluations")]
        ends.append((history, u.values, [p.detach() for p in v.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("linear_solver", "gmres"),
        ("linear_steps", 0),
        ("linear_steps", 1.5),
        ("linear_rate", -1.0),
        ("linear_rate", 0.0),
        ("warm_start", "no"),
        ("damping", -0.1),
        ("damping", float("nan")),
        ("curvature", "gram"),
        ("lower_steps", 0),
        ("lower_optimizer", 1),
    ],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(OptionError, match=name) as caught:
        ApproxGrad(**{name: value})
    assert repr(value) in str(caught.value)


def test_rate_of_another_solver_is_refused():
    with pytest.raises(OptionError, match="linear_rate is only used with linear_solver='adam' or 'sgd'; got"):
        ApproxGrad(linear_rate=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inequalities": lambda u, v, _: u.sum()}, "ApproxGrad has no multipliers"),
        ({"project_lower": Box(0.0, 1.0)}, "ApproxGrad differentiates through grad_v g = 0"),
    ],
)
def test_constraints_and_lower_projections_are_refused(quadratic, options, message):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=message):
        solve(Problem(quadratic.upper, quadratic.lower, **options), ApproxGrad(), u, v, max_steps=1)


def test_upper_projection_is_kept(quadratic):
    u, v = quadratic.start()
    seen = []
    watch = Each(lambda run: seen.append(u.detach().clone()) and None)
    problem = Problem(quadratic.upper, quadratic.lower, project_upper=Box(-0.1, 0.1))
    solve(problem, replace(CASES[0].method), u, v, max_steps=30, seed=0, callbacks=[watch], log_every=1)
    assert max(x.abs().max() for x in seen) <= 0.1
    assert u.abs().max() == 0.1
