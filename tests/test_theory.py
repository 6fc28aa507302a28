"""What the paper proves, on problems whose solution is known in closed form.

Lemma 3 and Appendix C.1 (the hypergradient), Theorem 2 (constrained problems), Appendix C.3 (lower solutions that are
not unique), the slack of an inequality, lower stationary points that are no minimisers, sets, and `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bilevel import Ball, Box, Penalty, Problem, Simplex, Solution, Status, solve
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.problem.variables import Variable

P, Q = 3, 4


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def definite(generator: torch.Generator, size: int) -> Tensor:
    """A random symmetric matrix with eigenvalues from 0.5 to about 5."""
    a = normal(generator, size, size)
    return a @ a.T / size + 0.5 * torch.eye(size, dtype=torch.float64)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


# -- Lemma 3 and Appendix C.1: the hypergradient ----------------------------------------------------------------------


@dataclass
class Smooth:
    """f and g as functions of (u, v), g strongly convex in v."""

    f: Callable[[Tensor, Tensor], Tensor]
    g: Callable[[Tensor, Tensor], Tensor]
    u: Tensor

    def slope(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.func.grad(self.g, 1)(u, v)

    def hypergradient(self, u: Tensor, v: Tensor, damping: float = 0.0) -> tuple[Tensor, Tensor]:
        """(f_u - g_uv q, q) with (g_vv + damping I) q = f_v, all at (u, v)."""
        H = torch.func.jacrev(self.slope, 1)(u, v)
        J = torch.func.jacrev(self.slope, 0)(u, v)
        f_u, f_v = torch.func.grad(self.f, (0, 1))(u, v)
        q = torch.linalg.solve(H + damping * torch.eye(len(v), dtype=v.dtype), f_v)
        return f_u - J.T @ q, q


def smooth(seed: int, *, quadratic: bool) -> Smooth:
    generator = torch.Generator().manual_seed(seed)
    H, C, c = definite(generator, Q), normal(generator, Q, P), normal(generator, Q)
    a, b, w = normal(generator, Q), normal(generator, P), normal(generator, 2, P + Q)

    def f(u, v):
        return ((v - a) ** 2).sum() / 2 + 0.3 * ((u - b) ** 2).sum() + torch.tanh(w @ torch.cat([u, v])).sum()

    def g(u, v):
        bent = torch.log(torch.cosh(v + C @ u)).sum() + torch.logsumexp(v * (1 + torch.tanh(C @ u)), 0)
        return v @ H @ v / 2 - v @ (C @ u + c) + (0.0 if quadratic else 1.0) * bent

    return Smooth(f, g, normal(generator, P))


def newton(function: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The stationary point of a scalar function near v, to machine precision."""
    gradient, hessian = torch.func.grad(function), torch.func.jacrev(torch.func.grad(function))
    for _ in range(60):
        step = torch.linalg.solve(hessian(v), gradient(v))
        v = v - step * min(1.0, 1.0 / max(step.norm().item(), 1e-300))
        if step.norm() <= 1e-15 * (1 + v.norm()):
            break
    assert torch.linalg.eigvalsh(hessian(v)).min() > 0
    return v


def at_minimum(s: Smooth, gamma: float, *, lam: float = 0.0, nu: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(v-hat, grad_u F, -gamma s - nu) at the minimiser over v of F + lam g."""
    nu = torch.zeros(Q, dtype=torch.float64) if nu is None else nu

    def penalised(v: Tensor) -> Tensor:
        r = s.slope(s.u, v)
        return (s.f(s.u, v) + nu @ r + gamma / 2 * r @ r + lam * s.g(s.u, v)) / (1 + gamma)

    v = newton(penalised, newton(lambda v: s.g(s.u, v), torch.zeros(Q, dtype=torch.float64)))
    problem = Problem(lambda u, v, _: s.f(u, v), lambda u, v, _: s.g(u, v))
    d = PenalisedObjective(problem, Variable(leaf(s.u), "u"), Variable(leaf(v), "v"), "exact")
    prices = Prices(gamma=torch.tensor(gamma, dtype=torch.float64), nu=[nu])
    found = d.penalised([(None, None)], prices, with_u=True)
    return v, found.u[0], -gamma * found.slope[0] - nu


def slope_of(xs: list[float], ys: list[float]) -> float:
    """Of log y against log x, by least squares."""
    x, y = (torch.tensor(t, dtype=torch.float64).log() for t in (xs, ys))
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10**6), gamma=st.sampled_from([30.0, 1e3, 1e5]), quadratic=st.booleans(), prices=st.booleans()
)
def test_gradient_in_u_at_the_minimiser_over_v_is_the_implicit_hypergradient_there(seed, gamma, quadratic, prices):
    s = smooth(seed, quadratic=quadratic)
    # With multipliers the same holds: f_v + g_vv (nu + gamma s) = 0 at the minimiser.
    nu = 0.1 * normal(torch.Generator().manual_seed(seed + 1), Q) if prices else None
    v, found, adjoint = at_minimum(s, gamma, nu=nu)
    exact, q = s.hypergradient(s.u, v)
    # Newton leaves grad_v F at rounding, gamma * 1e-16 = 1e-11 at the most; 1e-8 is what is promised.
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(adjoint, q, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("quadratic", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_in_u_tends_to_the_hypergradient_at_the_lower_solution_like_one_over_gamma(quadratic, seed):
    s = smooth(seed, quadratic=quadratic)
    best = newton(lambda v: s.g(s.u, v), torch.zeros(Q, dtype=torch.float64))
    exact, q = s.hypergradient(s.u, best)
    gammas = [1e3, 1e4, 1e5, 1e6]
    errors, adjoints = [], []
    for gamma in gammas:
        _, found, adjoint = at_minimum(s, gamma)
        errors.append((found - exact).norm().item())
        adjoints.append((adjoint - q).norm().item())
    # The next term is 1/gamma smaller: a thousandth at the first gamma; 2% is what is promised.
    assert slope_of(gammas, errors) == pytest.approx(-1, abs=0.02)
    assert slope_of(gammas, adjoints) == pytest.approx(-1, abs=0.02)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), lam=st.sampled_from([0.1, 3.0, 50.0]), quadratic=st.booleans())
def test_regularisation_damps_the_inverse_in_the_hypergradient_by_lam_over_gamma(seed, lam, quadratic):
    s = smooth(seed, quadratic=quadratic)
    gamma = 100.0
    v, found, adjoint = at_minimum(s, gamma, lam=lam)
    exact, q = s.hypergradient(s.u, v, damping=lam / gamma)
    # As above; and far from the undamped one, so that the damping is what is seen.
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(adjoint, q, rtol=1e-8, atol=1e-8)
    assert (found - s.hypergradient(s.u, v)[0]).norm() > 1e-5 * lam


@pytest.mark.parametrize("quadratic", [True, False])
def test_adjoint_of_a_solution_is_the_inverse_lower_hessian_times_the_upper_slope(quadratic):
    s = smooth(0, quadratic=quadratic)
    u, v = leaf(s.u), leaf(torch.zeros(Q, dtype=torch.float64))
    problem = Problem(lambda u, v, _: s.f(u, v), lambda u, v, _: s.g(u, v))
    solution = solve(problem, Penalty(), u, v, max_steps=1000, seed=0)
    assert solution.status is Status.CONVERGED
    hyper, q = s.hypergradient(u.detach(), v.detach())
    # The run ends at a relative 1e-9; conditions of a few tens lie between it and q.
    torch.testing.assert_close(solution.adjoint[0], q, rtol=0, atol=1e-6)
    torch.testing.assert_close(solution.multipliers["nu"][0], -q, rtol=0, atol=1e-6)
    torch.testing.assert_close(hyper, torch.zeros_like(hyper), rtol=0, atol=1e-6)


# -- Theorem 2: constrained quadratics --------------------------------------------------------------------------------


@dataclass
class Constrained:
    """min f(z) over z = (u, v) with S z = c0 (v minimises g), and rows of A z - b that are = 0, or <= 0."""

    problem: Problem
    z: Tensor
    nu: Tensor
    mu: Tensor


def constrained(seed: int, kinds: str, *, coupling: bool) -> Constrained:
    """A random quadratic whose constraints are, letter by letter: = equality, < active, > inactive inequality.

    The point z and the multipliers are drawn, and the linear terms made to fit; the KKT system is then solved for them
    anew. f is strictly convex, so a point that meets the conditions is the only solution.
    """
    generator = torch.Generator().manual_seed(seed)
    H, C = definite(generator, Q), normal(generator, Q, P)
    M = definite(generator, P + Q)
    S = torch.cat([-C, H], 1)
    rows = len(kinds)
    A = normal(generator, rows, P + Q)
    if not coupling:
        A[:, P:] = 0  # on u alone
    z = normal(generator, P + Q)
    nu = normal(generator, Q)
    mu = normal(generator, rows)
    signs = torch.tensor([1.0 if k == "=" else 0.0 for k in kinds], dtype=torch.float64)
    active = torch.tensor([k != ">" for k in kinds])
    mu = torch.where(active, signs * mu + (1 - signs) * (mu.abs() + 0.2), 0.0)
    slack = torch.where(active, 0.0, normal(generator, rows).abs() + 0.3)
    c = -(M @ z + S.T @ nu + A.T @ mu)
    c0, b = S @ z, A @ z + slack

    def zz(u, v):
        return torch.cat([u, v])

    def f(u, v, _):
        return zz(u, v) @ M @ zz(u, v) / 2 + c @ zz(u, v)

    def g(u, v, _):
        return v @ H @ v / 2 - v @ (C @ u + c0)

    equal = [i for i, k in enumerate(kinds) if k == "="]
    less = [i for i, k in enumerate(kinds) if k != "="]
    equalities = [lambda u, v, _, i=i: A[i] @ zz(u, v) - b[i] for i in equal]
    inequalities = [lambda u, v, _: A[less] @ zz(u, v) - b[less]] if less else []
    # The KKT system of the constraints that bind.
    E = torch.cat([S, A[active]])
    zero = torch.zeros(len(E), len(E), dtype=torch.float64)
    K = torch.cat([torch.cat([M, E.T], 1), torch.cat([E, zero], 1)])
    solved = torch.linalg.solve(K, torch.cat([-c, c0, b[active]]))
    multipliers = torch.zeros(rows, dtype=torch.float64)
    multipliers[active] = solved[P + 2 * Q :]
    order = torch.tensor([*equal, *less], dtype=torch.int64)
    return Constrained(
        Problem(f, g, equalities=equalities, inequalities=inequalities),
        solved[: P + Q],
        solved[P + Q : P + 2 * Q],
        multipliers[order],
    )


def solved(problem: Problem, *, max_steps: int = 3000, seed: int = 0) -> tuple[Solution, Tensor]:
    u, v = (torch.zeros(k, dtype=torch.float64, requires_grad=True) for k in (P, Q))
    solution = solve(problem, Penalty(), u, v, max_steps=max_steps, seed=seed)
    return solution, torch.cat([u, v]).detach()


@pytest.mark.parametrize("coupling", [True, False], ids=["coupled", "upper_only"])
@pytest.mark.parametrize("kinds", ["=", "<", ">", "==", "<>", "=<>"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_constrained_quadratic_ends_at_its_kkt_point_with_multipliers(seed, kinds, coupling):
    c = constrained(seed, kinds, coupling=coupling)
    solution, z = solved(c.problem)
    assert solution.status is Status.CONVERGED
    # Promised to 1e-4, on solutions of size one.
    near = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(z, c.z, **near)
    torch.testing.assert_close(solution.multipliers["nu"][0], c.nu, **near)
    mu = solution.multipliers["equalities"] + solution.multipliers["inequalities"]
    torch.testing.assert_close(torch.cat([m.reshape(-1) for m in mu]), c.mu, **near)
    for m in solution.multipliers["inequalities"]:
        assert (m >= 0).all()
    assert solution.certificate.violation <= 1e-6


def test_curved_constraint_that_couples_both_levels_is_met():
    """v = u, |v|^2 = 1: the nearest point of the circle to a, at which mu follows from a = (1 + 2 mu) u."""
    a = torch.tensor([3.0, -4.0], dtype=torch.float64)
    problem = Problem(
        lambda u, v, _: ((v - a) ** 2).sum() / 2,
        lambda u, v, _: ((v - u) ** 2).sum() / 2,
        equalities=lambda u, v, _: u @ v - 1,
    )
    u, v = (torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True) for _ in range(2))
    solution = solve(problem, Penalty(), u, v, max_steps=1000, seed=0)
    assert solution.status is Status.CONVERGED
    # Converged to a relative 1e-9.
    torch.testing.assert_close(v.detach(), a / 5, rtol=0, atol=1e-6)
    torch.testing.assert_close(solution.multipliers["equalities"][0].item(), 2.0, rtol=0, atol=1e-5)


# -- slack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["<", ">"])
@pytest.mark.parametrize("seed", [0, 1])
def test_explicit_slack_and_eliminated_slack_have_the_same_minimum(kind, seed):
    c = constrained(seed, kind, coupling=True)
    eliminated, z = solved(c.problem)
    (h,) = c.problem.inequalities
    explicit = Problem(
        lambda u, v, _: c.problem.upper(u["x"], v, _),
        lambda u, v, _: c.problem.lower(u["x"], v, _),
        equalities=lambda u, v, _: h(u["x"], v, _) + u["t"] ** 2,
    )
    u = {
        "x": torch.zeros(P, dtype=torch.float64, requires_grad=True),
        "t": torch.ones(1, dtype=torch.float64, requires_grad=True),
    }
    v = torch.zeros(Q, dtype=torch.float64, requires_grad=True)
    solution = solve(explicit, Penalty(), u, v, max_steps=3000, seed=0)
    # t is found to the square root of the precision where the constraint binds, so 1e-4 on z; both are KKT points.
    torch.testing.assert_close(torch.cat([u["x"], v]).detach(), z, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        solution.multipliers["equalities"][0], eliminated.multipliers["inequalities"][0], rtol=0, atol=1e-4
    )
    slack = -h(u["x"], v, None).item()
    assert u["t"].item() ** 2 == pytest.approx(slack, abs=1e-6)
    assert (slack > 0.2) == (kind == ">")


# -- lower solutions that are not unique ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("power", [1, 2])
def test_continuum_of_lower_solutions_ends_at_the_optimistic_one(seed, power):
    """g vanishes on the plane a'v = b'u: the optimistic solution minimises f on it."""
    generator = torch.Generator().manual_seed(seed)
    a, b = normal(generator, Q), normal(generator, P)
    w, d = normal(generator, Q), normal(generator, P)
    alpha = 0.4

    def lower(u, v, _):
        gap = (a @ v - b @ u) ** 2
        return gap / 2 if power == 1 else torch.log1p(gap)

    problem = Problem(lambda u, v, _: ((v - w) ** 2).sum() / 2 + alpha * ((u - d) ** 2).sum() / 2, lower)
    # v = w - k a, u = d + k b / alpha with a'v = b'u.
    k = (a @ w - b @ d) / (a @ a + b @ b / alpha)
    solution, z = solved(problem)
    assert solution.status is Status.CONVERGED
    # Converged to a relative 1e-9, in directions whose curvature is that of f.
    torch.testing.assert_close(z, torch.cat([d + k * b / alpha, w - k * a]), rtol=0, atol=1e-6)


# -- stationary points of g that are no minimisers --------------------------------------------------------------------


def well(v: Tensor) -> Tensor:
    return v**4 / 4 - v**2 / 2


def ends_well(solution: Solution, lower: Callable[[Tensor], Tensor], v: float) -> None:
    """v minimises g over the line, or the status says that it does not."""
    grid = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    lowest = lower(grid).min().item()
    if lower(torch.tensor(v, dtype=torch.float64)).item() <= lowest + 1e-6:  # a grid of 1e-4 and curvatures below 10
        return
    assert solution.status is Status.STATIONARY
    assert solution.certificate.lower_minimiser is False


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("start_u", "start_v", "tilt", "wish"),
    [
        (0.0, 0.0, 0.0, 0.0),  # at the maximum of g, which f likes best
        (0.0, 0.0, 0.0, 0.3),
        (0.1, 0.0, 0.0, 0.0),
        (0.0, 0.9, 0.2, 0.9),  # in the worse of two minima, which f likes best
        (0.3, 1.0, 0.1, 1.0),
    ],
)
def test_run_from_a_point_that_is_no_lower_minimiser_ends_at_one_or_says_that_it_does_not(
    seed, start_u, start_v, tilt, wish
):
    def lower(u, v, _):
        return (well(v) + tilt * v + 0.05 * u * v).sum()

    problem = Problem(lambda u, v, _: ((v - wish) ** 2).sum() + ((u - start_u) ** 2).sum(), lower)
    u, v = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (start_u, start_v))
    solution = solve(problem, Penalty(), u, v, max_steps=400, seed=seed)
    assert solution.status in (Status.CONVERGED, Status.STATIONARY)
    ends_well(solution, lambda x: well(x) + tilt * x + 0.05 * u.item() * x, v.item())


@pytest.mark.parametrize("pull", [0.05, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_saddle_of_the_lower_objective_is_left_or_named(seed, pull):
    """A minimum of g along v[1], a maximum along v[0], which no gradient at the start shows and f likes best."""

    def lower(u, v, _):
        return well(v[0]) + 0.2 * v[0] ** 3 / 3 + (v[1] - u[0]) ** 2 / 2

    # g has its minima over v[0] where v^2 + 0.2 v - 1 = 0; the lower one is at the negative root.
    best = -0.1 - (0.01 + 1) ** 0.5
    problem = Problem(lambda u, v, _: pull * v[0] ** 2 / 2 + v[1] ** 2 / 2 + (u[0] - 1) ** 2 / 2, lower)
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    solution = solve(problem, Penalty(), u, v, max_steps=400, seed=seed)
    # v[1] = u[0] halfway between 0 and 1. Converged to a relative 1e-9.
    torch.testing.assert_close([u.item(), v[1].item()], [0.5, 0.5], rtol=0, atol=1e-6)
    if solution.status is Status.CONVERGED:
        assert solution.certificate.lower_minimiser is True
        assert v[0].item() == pytest.approx(best, abs=1e-6)
    else:
        assert pull == 1.0  # a weak pull does not draw the run back over the ridge
        assert solution.status is Status.STATIONARY
        assert solution.certificate.lower_minimiser is False


# -- sets -------------------------------------------------------------------------------------------------------------

STOCHASTIC_STEPS = 300
MODES = {
    # Converged to a relative 1e-9; kinks of the projection and its multiplier cost some digits.
    "deterministic": (lambda: Penalty(), 3000, 1e-5),
    # Adam with a rate that falls to zero, prices that end at seven times their start: a few hundredths.
    "stochastic": (lambda: Penalty(mode="stochastic", cotangent="same"), STOCHASTIC_STEPS, 0.05),
}
SETS = {"box": Box(-0.5, 0.7), "ball": Ball(0.8), "simplex": Simplex(1.0)}
A = torch.tensor([1.3, -0.2, -1.1], dtype=torch.float64)
B = torch.tensor([0.6, 0.4, -0.3], dtype=torch.float64)
ALPHA = 0.5


def three() -> Tensor:
    return torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETS)
def test_upper_variable_ends_at_the_solution_inside_its_set(name, mode):
    """v = u, so f is a distance to a mean of a and b: the solution is its projection."""
    method, steps, tolerance = MODES[mode]
    problem = Problem(
        lambda u, v, _: ((v - A) ** 2).sum() / 2 + ALPHA * ((u - B) ** 2).sum() / 2,
        lambda u, v, _: ((v - u) ** 2).sum() / 2,
        project_upper=SETS[name],
    )
    u, v = three(), three()
    solution = solve(problem, method(), u, v, max_steps=steps, seed=0)
    best = SETS[name]((A + ALPHA * B) / (1 + ALPHA))
    assert solution.mode == mode
    assert solution.status is (Status.CONVERGED if mode == "deterministic" else Status.MAX_STEPS)
    assert (best - (A + ALPHA * B) / (1 + ALPHA)).norm() > 0.1  # the set matters
    torch.testing.assert_close(u.detach(), best, rtol=0, atol=tolerance)
    torch.testing.assert_close(v.detach(), best, rtol=0, atol=tolerance)
    # In the set to the last place or two.
    torch.testing.assert_close(SETS[name](u.detach()), u.detach(), rtol=0, atol=1e-14)


def reduced_solution(convex: Any, a: Tensor, b: Tensor) -> Tensor:
    """The minimiser u of f(u, P(u)), by gradient descent through the projection from three starts."""
    ends = []
    for start in (a, b, three()):
        u = leaf(start)
        for _ in range(300):
            f = ((convex(u) - a) ** 2).sum() / 2 + ALPHA * ((u - b) ** 2).sum() / 2
            (d,) = torch.autograd.grad(f, u)
            with torch.no_grad():
                u -= 0.5 * d
        assert d.norm() < 1e-12
        ends.append((f.item(), u.detach()))
    return min(ends, key=lambda end: end[0])[1]


@pytest.mark.parametrize(
    ("mode", "inside"),
    [("deterministic", False), ("deterministic", True), ("stochastic", False)],
    ids=["deterministic-active", "deterministic-inactive", "stochastic-active"],
)
@pytest.mark.parametrize("name", SETS)
def test_lower_variable_ends_at_the_solution_inside_its_set(name, mode, inside):
    """v is the projection of u; f pulls v to a and u to b."""
    method, steps, tolerance = MODES[mode]
    convex = SETS[name]
    a, b = (convex(0.3 * A), 0.3 * B) if inside else (B, A)
    problem = Problem(
        lambda u, v, _: ((v - a) ** 2).sum() / 2 + ALPHA * ((u - b) ** 2).sum() / 2,
        lambda u, v, _: ((v - u) ** 2).sum() / 2,
        project_lower=convex,
    )
    best = reduced_solution(convex, a, b)
    if name != "simplex":  # whose plane is never met by accident
        assert ((convex(best) - best).norm() < 1e-12) == inside
    u, v = three(), three()
    solution = solve(problem, method(), u, v, max_steps=steps, seed=0)
    torch.testing.assert_close(u.detach(), best, rtol=0, atol=tolerance)
    torch.testing.assert_close(v.detach(), convex(best), rtol=0, atol=tolerance)
    # In the set to the last place or two.
    torch.testing.assert_close(convex(v.detach()), v.detach(), rtol=0, atol=1e-14)
    assert solution.status is (Status.CONVERGED if mode == "deterministic" else Status.MAX_STEPS)


def test_projection_by_name_leaves_the_other_tensors_free():
    problem = Problem(
        lambda u, v, _: ((v - 2) ** 2).sum() + ((u["b"] - 3) ** 2).sum(),
        lambda u, v, _: ((v - u["a"]) ** 2).sum() + 0 * u["b"].sum(),
        project_upper={"a": Box(high=1.0)},
    )
    u = {"a": three(), "b": three()}
    v = three()
    solution = solve(problem, Penalty(), u, v, max_steps=1000, seed=0)
    assert solution.status is Status.CONVERGED
    # Converged to a relative 1e-9.
    torch.testing.assert_close(u["a"].tolist(), [1.0] * 3, rtol=0, atol=1e-6)
    torch.testing.assert_close(u["b"].tolist(), [3.0] * 3, rtol=0, atol=1e-6)


# -- prepare ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_prepare_in_deterministic_mode_gives_the_same_answer_as_without(seed):
    generator = torch.Generator().manual_seed(seed)
    W, a, y = normal(generator, Q, P), normal(generator, Q), normal(generator, P)

    def features(u):
        return torch.tanh(W @ u)

    def upper(x, v):
        return ((v - a) ** 2).sum() / 2 + (x**2).sum()

    def lower(x, v):
        return ((v - x) ** 2).sum() / 2 + (v**4).sum() / 4

    def regular(u):
        return 0.1 * ((u - y) ** 2).sum()

    calls = []

    def prepare(u, batch):
        assert batch is None
        calls.append(1)
        return features(u), regular(u)

    plain = Problem(lambda u, v, _: upper(features(u), v) + regular(u), lambda u, v, _: lower(features(u), v))
    prepared = Problem(
        lambda u, v, made: upper(made[0], v) + made[1], lambda u, v, made: lower(made[0], v), prepare=prepare
    )
    ends = []
    for problem in (plain, prepared):
        solution, z = solved(problem)
        assert solution.status is Status.CONVERGED
        ends.append(z)
    assert calls
    # The same function, converged twice to a relative 1e-9.
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)
