"""The derivative of F against F as written; the finite-difference curvature; what one evaluation costs."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from common import Once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bilevel import Ball, BilevelWarning, Box, Penalty, Problem, ProblemError, Rows, Simplex, solve
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.problem.variables import Variable

P, Q = 5, 4
"""Sizes of u and of v, all their tensors together."""
KINDS = ("tensor", "dict", "list", "module")
PROJECTIONS = (None, Box(-0.4, 0.6), Ball(0.5), Simplex(1.5))


# -- random smooth problems -------------------------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(values[:2].clone())
        self.rest = nn.Parameter(values[2:].clone())


def make(kind: str, values: Tensor) -> Any:
    """A variable of this kind with these values."""
    parts = [values[:2].clone().requires_grad_(), values[2:].clone().requires_grad_()]
    match kind:
        case "tensor":
            return values.clone().requires_grad_()
        case "dict":
            return {"first": parts[0], "rest": parts[1]}
        case "list":
            return parts
        case "module":
            return Holder(values)
        case _:
            return Rows(len(values), init=values)


def flat(x: Any) -> Tensor:
    match x:
        case Tensor():
            return x
        case dict():
            return torch.cat([x["first"], x["rest"]])
        case list():
            return torch.cat(x)
        case _:
            return torch.cat([x.first, x.rest])


def read(u: Any, index: Tensor) -> Tensor:
    return u[index] if isinstance(u, Rows) else flat(u)[index]


@dataclass
class Case:
    problem: Problem
    batches: list[tuple[Any, Any]]
    prices: Prices
    u: Tensor
    v: Tensor


def case(
    seed: int,
    *,
    count: int = 1,
    equalities: bool = False,
    inequalities: bool = False,
    multipliers: bool = True,
    projection: Any = None,
    v_kind: str = "tensor",
    dtype: torch.dtype = torch.float64,
) -> Case:
    """tanh networks and log-sum-exp of u (some rows of it, repeated) and v, different in every batch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def rows() -> Tensor:
        return torch.randint(P, (6,), generator=generator)

    def lower(u, v, batch):
        (A, B, w), index = batch
        u, v = read(u, index), flat(v)
        hidden = torch.tanh(A @ torch.cat([u, v]))
        return torch.logsumexp(B @ hidden + 0.5 * (B @ hidden) ** 2, 0) + (w * v**4).sum() / 4 + (u[:Q] * v**2).sum()

    def upper(u, v, batch):
        (A, _, w), index = batch
        u, v = read(u, index), flat(v)
        return torch.log(torch.cosh(A @ torch.cat([u, v]))).sum() + torch.sin(w * v).sum() + (u**3).sum() / 6

    def equality(u, v, batch):
        (A, _, _), index = batch
        return torch.tanh(A[:2] @ torch.cat([read(u, index), flat(v)]))

    def inequality(u, v, batch):
        (A, B, _), index = batch
        return torch.outer(torch.sin(A @ torch.cat([read(u, index), flat(v)])), B[:2, 0])

    def scalar(u, v, batch):
        (_, B, w), index = batch
        return (read(u, index)[0] * w * flat(v)).sum() - B[0, 0]

    def batch() -> Any:
        return (normal(3, 6 + Q) / 2, normal(4, 3) / 2, normal(Q).abs()), rows()

    problem = Problem(
        upper,
        lower,
        equalities=[equality, scalar] if equalities else [],
        inequalities=[inequality, scalar] if inequalities else [],
        project_lower=projection,
    )
    v = normal(Q) / 2
    pieces = [v] if v_kind == "tensor" else [v[:2], v[2:]]
    shapes = [(2,), ()] * equalities + [(3, 2), ()] * inequalities
    on = 1.0 if multipliers else 0.0
    mu = [on * normal(*shape) for shape in shapes]
    first = 2 if equalities else 0
    mu = mu[:first] + [m.abs() for m in mu[first:]]
    prices = Prices(
        gamma=normal().abs() + 0.3,
        nu=[on * normal(*piece.shape) for piece in pieces],
        gamma_h=[normal().abs() + 0.3 for _ in shapes],
        mu=mu,
    )
    return Case(problem, [(batch(), batch()) for _ in range(count)], prices, normal(P) / 2, v)


def residual(V: Variable, s: Sequence[Tensor]) -> list[Tensor]:
    """v - P(v - s); s itself without a projection."""
    moved = V.project_leaves([x - y for x, y in zip(V.leaves, s, strict=True)])
    return [x - p for x, p in zip(V.leaves, moved, strict=True)]


def as_written(case: Case, u: Any, v: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """F built as a scalar, letter by letter from the docstring of autodiff.py; with its derivatives in u and in v."""
    problem, prices = case.problem, case.prices
    U, V = Variable(u, "u"), Variable(v, "v", problem.project_lower)
    count = len(case.batches)
    f = sum(problem.upper(u, v, batch) for batch, _ in case.batches) / count
    g = sum(problem.lower(u, v, batch) for _, batch in case.batches) / count
    s = torch.autograd.grad(g, V.leaves, create_graph=True)
    r = list(s)
    if problem.project_lower is not None:
        r = residual(V, s)
    F = f + sum((n * x).sum() + prices.gamma / 2 * (x * x).sum() for n, x in zip(prices.nu, r, strict=True))
    functions = [*problem.equalities, *problem.inequalities]
    for i, (function, mu, c) in enumerate(zip(functions, prices.mu, prices.gamma_h, strict=True)):
        h = sum(function(u, v, batch) for batch, _ in case.batches) / count
        if i < len(problem.equalities):
            F = F + (mu * h).sum() + c / 2 * (h * h).sum()
        else:
            F = F + c / 2 * (torch.relu(h + mu / c) ** 2).sum() - (mu * mu).sum() / (2 * c)
    found = torch.autograd.grad(F, [*U.leaves, *V.leaves], allow_unused=True)
    found = [torch.zeros_like(x) if d is None else d for d, x in zip(found, [*U.leaves, *V.leaves], strict=True)]
    return F.detach(), found[: len(U.leaves)], found[len(U.leaves) :]


def derivatives(case: Case, u: Any, v: Any, curvature: str = "exact") -> PenalisedObjective:
    return PenalisedObjective(case.problem, Variable(u, "u"), Variable(v, "v", case.problem.project_lower), curvature)


def dense(rows: Rows, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of a whole tensor from those of the rows that were read."""
    total = torch.zeros_like(rows.values)
    for index, d in pairs:
        total.index_add_(0, index, d.reshape(-1, *rows.values.shape[1:]))
    return total


def together(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


cases = {
    "seed": st.integers(0, 10**6),
    "count": st.integers(1, 3),
    "equalities": st.booleans(),
    "inequalities": st.booleans(),
    "multipliers": st.booleans(),
    "projection": st.sampled_from(PROJECTIONS),
    "u_kind": st.sampled_from((*KINDS, "rows")),
    "v_kind": st.sampled_from(KINDS),
}


def compare(
    curvature: str, tolerance: float, u_kind: str, v_kind: str, *, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    c = case(v_kind=v_kind, dtype=dtype, **options)
    u, v = make(u_kind, c.u), make(v_kind, c.v)
    _, in_u, in_v = as_written(c, make("tensor" if u_kind == "rows" else u_kind, c.u), v)
    found = derivatives(c, u, v, curvature).penalised(c.batches, c.prices, with_u=True)
    got = dense(u, found.rows[0]) if u_kind == "rows" else together(found.u)
    in_u, in_v, got_v = together(in_u), together(in_v), together(found.v)
    size = 1 + in_u.norm().item() + in_v.norm().item()
    torch.testing.assert_close(got, in_u, rtol=0, atol=tolerance * size)
    torch.testing.assert_close(got_v, in_v, rtol=0, atol=tolerance * size)


@settings(deadline=None, max_examples=120)
@given(**cases)
def test_gradient_of_F_is_that_of_the_objective_as_written(u_kind, v_kind, **options):  # noqa: N802
    # Sums of a few dozen products of size one lose some 1e-14; 1e-10 is what is promised.
    compare("exact", 1e-10, u_kind, v_kind, **options)


@settings(deadline=None, max_examples=60)
@given(**cases)
def test_difference_curvature_agrees_with_the_objective_as_written(u_kind, v_kind, **options):
    # The step is eps^(1/3) = 6e-6 of the size of v, the error its square times third derivatives of grad g, and
    # rounding eps / 6e-6: 4e-11 each, relative to |gamma s + nu| (1 + |v|); these problems amplify it by less than 100.
    compare("difference", 4e-9, u_kind, v_kind, **options)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_difference_curvature_in_float32_is_good_to_a_thousandth(seed):
    # eps^(1/3) = 5e-3, its square 2.4e-5, amplified by less than 100.
    compare("difference", 2e-3, "tensor", "tensor", dtype=torch.float32, seed=seed)


@settings(deadline=None, max_examples=30)
@given(**cases)
def test_step_on_v_alone_has_the_same_gradient_in_v_and_none_in_u(u_kind, v_kind, **options):
    c = case(v_kind=v_kind, **options)
    u, v = make(u_kind, c.u), make(v_kind, c.v)
    d = derivatives(c, u, v)
    whole = d.penalised(c.batches, c.prices, with_u=True)
    alone = d.penalised(c.batches, c.prices, with_u=False)
    # The same sums with fewer branches: autograd may add in another order.
    torch.testing.assert_close(together(alone.v), together(whole.v), rtol=1e-12, atol=1e-12)
    assert alone.u == []
    assert alone.rows in ([], [[]])
    assert all(leaf.requires_grad for leaf in d.u.leaves)


@settings(deadline=None, max_examples=30)
@given(**cases)
def test_values_that_come_with_the_gradient_are_means_over_the_batches(u_kind, v_kind, **options):
    c = case(v_kind=v_kind, **options)
    u, v = make(u_kind, c.u), make(v_kind, c.v)
    found: Gradients = derivatives(c, u, v).penalised(c.batches, c.prices, with_u=True)
    count = len(c.batches)
    g = sum(c.problem.lower(u, v, batch) for _, batch in c.batches) / count
    f = sum(c.problem.upper(u, v, batch) for batch, _ in c.batches) / count
    V = Variable(v, "v", c.problem.project_lower)
    s = torch.autograd.grad(g, V.leaves)
    near = {"rtol": 1e-12, "atol": 1e-12}  # the same sums in another order
    torch.testing.assert_close(found.f, f.detach(), **near)
    torch.testing.assert_close(found.g, g.detach(), **near)
    torch.testing.assert_close(together(found.slope), together(list(s)), **near)
    torch.testing.assert_close(together(found.residual), together(residual(V, s)).detach(), **near)
    for h, function in zip(found.constraints, [*c.problem.equalities, *c.problem.inequalities], strict=True):
        mean = sum(function(u, v, batch) for batch, _ in c.batches) / count
        torch.testing.assert_close(h, mean.detach(), **near)
    for tensor in itertools.chain([found.f, found.g], found.slope, found.residual, found.constraints, found.v, found.u):
        assert not tensor.requires_grad


def test_penalty_of_several_batches_is_that_of_the_mean_slope_and_not_the_mean_penalty():
    c = case(3, count=2)
    d = derivatives(c, make("tensor", c.u), make("tensor", c.v))
    both = d.penalised(c.batches, c.prices, with_u=False).v[0]
    each = [d.penalised([pair], c.prices, with_u=False).v[0] for pair in c.batches]
    assert (both - (each[0] + each[1]) / 2).norm() > 1e-2


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), projection=st.sampled_from(PROJECTIONS), count=st.integers(1, 2))
def test_given_slope_takes_the_place_of_s_in_the_cotangent(seed, projection, count):
    c = case(seed, projection=projection, count=count)
    u, v = make("tensor", c.u), make("tensor", c.v)
    generator = torch.Generator().manual_seed(seed + 1)
    slope = torch.randn(Q, generator=generator, dtype=torch.float64)
    found = derivatives(c, u, v).penalised(c.batches, c.prices, with_u=True, slope=[slope])
    # d(<p, r>) with r = v - P(v - s), p = nu + gamma r at the slope given, P differentiated there.
    point = (v.detach() - slope).requires_grad_()
    image = point if projection is None else projection(point)
    p = c.prices.nu[0] + c.prices.gamma * (v.detach() - image.detach())
    (w,) = torch.autograd.grad(image, point, p)
    f = sum(c.problem.upper(u, v, batch) for batch, _ in c.batches) / count
    g = sum(c.problem.lower(u, v, batch) for _, batch in c.batches) / count
    (s,) = torch.autograd.grad(g, v, create_graph=True)
    total = f + (w * s).sum() + ((p - w) * v).sum()
    in_u, in_v = torch.autograd.grad(total, (u, v))
    # As above: promised to 1e-10 of the size.
    torch.testing.assert_close(found.u[0], in_u, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.v[0], in_v, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), v_kind=st.sampled_from(KINDS))
def test_hessian_product_is_the_derivative_of_the_slope_along_the_direction(seed, count, v_kind):
    c = case(seed, count=count, v_kind=v_kind)
    u, v = make("tensor", c.u), make(v_kind, c.v)
    V = Variable(v, "v")
    direction = [torch.full_like(x, 0.5, requires_grad=False) + x.detach() for x in V.leaves]
    g = sum(c.problem.lower(u, v, batch) for _, batch in c.batches) / count
    s = torch.autograd.grad(g, V.leaves, create_graph=True)
    exact = together(list(torch.autograd.grad(s, [*V.leaves, u], direction)))
    for curvature, tolerance in (("exact", 1e-10), ("difference", 4e-9)):  # as above
        found = derivatives(c, u, v, curvature).hessian_product(c.batches, direction, with_u=True)
        torch.testing.assert_close(together(found), exact, rtol=0, atol=tolerance * (1 + exact.norm().item()))


def test_difference_curvature_puts_v_back_bit_for_bit():
    c = case(0)
    u, v = make("tensor", c.u), make("module", c.v)
    c.prices.nu = [c.prices.nu[0][:2], c.prices.nu[0][2:]]
    derivatives(c, u, v, "difference").penalised(c.batches, c.prices, with_u=True)
    assert torch.equal(flat(v).detach(), c.v)


def test_difference_curvature_of_a_zero_cotangent_is_zero_and_finite():
    problem = Problem(lambda u, v, _: (u * v).sum(), lambda u, v, _: ((v - u) ** 4).sum())
    u, v = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    prices = Prices(gamma=torch.tensor(2.0, dtype=torch.float64), nu=[torch.zeros(3, dtype=torch.float64)])
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v"), "difference")
    found = d.penalised([(None, None)], prices, with_u=True)
    assert found.u[0].tolist() == found.v[0].tolist() == [1.0, 1.0, 1.0]


# -- randomness and buffers -------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and BatchNorm around a smooth network."""

    def __init__(self, seed: int, dropout: float = 0.5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.a = nn.Linear(3, 8, dtype=torch.float64)
            self.b = nn.Linear(8, 1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.dropout(torch.tanh(self.norm(self.a(x)))))


def noisy(seed: int) -> tuple[Problem, Tensor, Noisy, Prices]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(10, k, generator=generator, dtype=torch.float64) for k in (3, 1))

    def lower(u, v, _):
        return ((torch.sigmoid(u) * (v(x) - y)) ** 2).mean()

    def upper(u, v, _):
        return ((v(x.flip(0)) - y) ** 2).mean() + (u**2).mean()

    u = torch.randn(10, 1, generator=generator, dtype=torch.float64).requires_grad_()
    v = Noisy(seed)
    nu = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in v.parameters()]
    return Problem(upper, lower), u, v, Prices(gamma=torch.tensor(1.5, dtype=torch.float64), nu=nu)


def evaluate(problem: Problem, u: Tensor, v: nn.Module, prices: Prices, curvature: str, count: int = 1):
    """(gradients, state of the generator afterwards), from the same state before."""
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v"), curvature)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        found = d.penalised([(None, None)] * count, prices, with_u=True)
        return found, torch.get_rng_state()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_difference_curvature_replays_the_masks_of_dropout(seed, count):
    problem, u, v, prices = noisy(seed)
    exact, _ = evaluate(problem, u, copy.deepcopy(v), prices, "exact", count)
    near, _ = evaluate(problem, u, copy.deepcopy(v), prices, "difference", count)
    size = 1 + together(exact.v).norm().item()
    # As on the problems without dropout; another mask would be wrong by the size of the gradient itself.
    torch.testing.assert_close(together(near.v), together(exact.v), rtol=0, atol=1e-7 * size)
    torch.testing.assert_close(near.u[0], exact.u[0], rtol=0, atol=1e-7 * size)


@pytest.mark.parametrize("curvature", ["exact", "difference", "auto"])
def test_buffers_and_generator_are_left_as_one_forward_of_each_objective_leaves_them(curvature):
    problem, u, v, prices = noisy(0)
    by_hand = copy.deepcopy(v)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        problem.lower(u, by_hand, None)
        problem.upper(u, by_hand, None)
        expected = torch.get_rng_state()
    _, state = evaluate(problem, u, v, prices, curvature)
    assert torch.equal(state, expected)
    for mine, theirs in zip(v.buffers(), by_hand.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("curvature", ["exact", "difference"])
def test_buffers_see_each_of_several_batches_once(curvature):
    problem, u, v, prices = noisy(0)
    evaluate(problem, u, v, prices, curvature, count=3)
    assert v.norm.num_batches_tracked.item() == 6  # lower and upper, three batches each


def test_fall_back_leaves_buffers_and_generator_as_one_forward_of_each_objective():
    """The attempt that failed must not count: neither its dropout nor its update of BatchNorm."""
    problem, u, v, prices = noisy(0)

    def attended(u, v, _):
        return problem.lower(u, lambda x: nnf.scaled_dot_product_attention(*[v(x)[None, None]] * 3)[0, 0], None)

    by_hand = copy.deepcopy(v)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        attended(u, by_hand, None)
        problem.upper(u, by_hand, None)
        expected = torch.get_rng_state()
    with pytest.warns(BilevelWarning, match="attention"):
        _, state = evaluate(Problem(problem.upper, attended), u, v, prices, "auto")
    assert torch.equal(state, expected)
    assert v.norm.num_batches_tracked.item() == by_hand.norm.num_batches_tracked.item() == 2
    for mine, theirs in zip(v.buffers(), by_hand.buffers(), strict=True):
        assert torch.equal(mine, theirs)


# -- the fall-back ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.project = nn.Linear(4, 12, dtype=torch.float64)
            self.out = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unsqueeze(-3).chunk(3, -1)  # one head: without that dimension the kernel is another
        return self.out(nnf.scaled_dot_product_attention(q, k, v)).squeeze(-3).mean(-2)


class Smooth(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(4, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 1, dtype=torch.float64)
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(-2)


def regression(seed: int) -> tuple[Problem, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 2, 5, 4, generator=generator, dtype=torch.float64).unbind(1)

    def lower(u, v, _):
        return ((v(x) - y.mean((-2, -1))[:, None] - u) ** 2).mean()

    def upper(u, v, _):
        return ((v(y) - x.mean((-2, -1))[:, None]) ** 2).mean() + (u**2).sum()

    return Problem(upper, lower), torch.randn(1, generator=generator, dtype=torch.float64).requires_grad_()


def prices_of(v: nn.Module, seed: int = 0) -> Prices:
    generator = torch.Generator().manual_seed(seed)
    nu = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in v.parameters()]
    return Prices(gamma=torch.tensor(2.0, dtype=torch.float64), nu=nu)


def unsupported(which: str, seed: int) -> tuple[nn.Module, nn.Module, str]:
    """A module whose double backward is missing, the same with one, and what the message must name."""
    if which == "attention":
        return Attention(seed), Attention(seed), "scaled_dot_product_flash_attention_for_cpu_backward"
    torch._dynamo.reset()
    return torch.compile(Smooth(seed), backend="aot_eager"), Smooth(seed), "torch.compile"


@pytest.mark.parametrize("which", ["attention", "compiled"])
def test_auto_falls_back_with_one_warning_that_names_the_operator(which):
    problem, u = regression(0)
    v, reference, name = unsupported(which, 0)
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v"), "auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [d.penalised([(None, None)], prices_of(v), with_u=with_u) for with_u in (True, False, True)]
    ours = [w for w in caught if issubclass(w.category, BilevelWarning)]
    assert len(ours) == 1
    assert name in str(ours[0].message)
    assert d.curvature == "difference"
    with sdpa_kernel(SDPBackend.MATH):
        exact = PenalisedObjective(problem, Variable(u, "u"), Variable(reference, "v"), "exact").penalised(
            [(None, None)], prices_of(reference), with_u=True
        )
    size = 1 + together(exact.v).norm().item()
    for near in found:
        # As on the smooth problems above.
        torch.testing.assert_close(together(near.v), together(exact.v), rtol=0, atol=1e-7 * size)
    torch.testing.assert_close(found[0].u[0], exact.u[0], rtol=0, atol=1e-7 * size)
    torch.testing.assert_close(found[2].u[0], exact.u[0], rtol=0, atol=1e-7 * size)


@pytest.mark.parametrize("which", ["attention", "compiled"])
def test_exact_curvature_is_refused_with_a_sentence_that_names_the_operator(which):
    problem, u = regression(0)
    v, _, name = unsupported(which, 0)
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v"), "exact")
    with pytest.raises(ProblemError, match=f"{name} has no double backward"):
        d.penalised([(None, None)], prices_of(v), with_u=True)


@pytest.mark.parametrize("which", ["attention", "compiled"])
@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
def test_solve_works_through_the_fall_back_with_one_warning(which, mode):
    problem, u = regression(0)
    v, reference, _ = unsupported(which, 0)
    start = u.detach().clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        near = solve(problem, Penalty(mode=mode), u, v, max_steps=8, seed=0)
    assert len([w for w in caught if issubclass(w.category, BilevelWarning)]) == 1
    assert near.steps == 8
    with sdpa_kernel(SDPBackend.MATH):
        exact = solve(problem, Penalty(mode=mode, curvature="exact"), start, reference, max_steps=8, seed=0)
    # Eight steps from one start, with derivatives that agree to 1e-7 of their size: the same path.
    for name in ("upper", "lower", "residual"):
        assert near.history[name] == pytest.approx(exact.history[name], rel=1e-4), name


@pytest.mark.parametrize("curvature", ["exact", "auto"])
def test_function_marked_once_differentiable_gives_no_wrong_derivative_in_silence(curvature):
    """torch.autograd.grad with inputs does not run the node that would raise: what is missing is missing in silence."""

    def lower(u, v, _):
        return (Once.apply(v - u) ** 2).sum()

    u, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.3, -0.2], [1.0, 0.7]))
    d = PenalisedObjective(Problem(lambda u, v, _: (u * v).sum(), lower), Variable(u, "u"), Variable(v, "v"), curvature)
    prices = Prices(gamma=torch.tensor(0.5, dtype=torch.float64), nu=[torch.zeros(2, dtype=torch.float64)])
    if curvature == "exact":
        with pytest.raises(ProblemError, match="once_differentiable"):
            d.penalised([(None, None)], prices, with_u=True)
        return
    with pytest.warns(BilevelWarning, match="once_differentiable"):
        found = d.penalised([(None, None)], prices, with_u=True)
    # g = w^4 with w = v - u: s = 4 w^3, g_vv = 12 w^2, and d(gamma/2 |s|^2) = gamma s g_vv.
    w = (v - u).detach()
    # The accuracy of the difference on smooth problems, as above.
    torch.testing.assert_close(found.v[0], u.detach() + 24 * w**5, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.u[0], v.detach() - 24 * w**5, rtol=1e-8, atol=1e-8)


def test_other_errors_of_the_objective_pass_through_unchanged():
    def lower(u, v, _):
        raise RuntimeError("the user's own mistake")

    u, v = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    d = PenalisedObjective(Problem(lambda u, v, _: v.sum(), lower), Variable(u, "u"), Variable(v, "v"), "auto")
    prices = Prices(gamma=torch.tensor(1.0, dtype=torch.float64), nu=[torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        d.penalised([(None, None)], prices, with_u=True)
    assert d.curvature == "auto"


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_u", [True, False])
@pytest.mark.parametrize(
    ("curvature", "count", "lower", "upper"),
    [
        ("exact", 1, 1, 1),
        ("auto", 1, 1, 1),
        ("difference", 1, 3, 1),
        # A pass of its own gives the mean slope; then each batch once more, or three times for the difference.
        ("exact", 2, 4, 2),
        ("exact", 5, 10, 5),
        ("difference", 2, 8, 2),
    ],
)
def test_objectives_are_evaluated_as_often_as_stated(curvature, count, lower, upper, with_u):
    c = case(0, count=count, equalities=True, inequalities=True, projection=Box(-0.4, 0.6))
    calls = {"lower": 0, "upper": 0}

    def counted(name):
        def function(*args):
            calls[name] += 1
            return getattr(c.problem, name)(*args)

        return function

    problem = Problem(
        counted("upper"),
        counted("lower"),
        equalities=c.problem.equalities,
        inequalities=c.problem.inequalities,
        project_lower=c.problem.project_lower,
    )
    u, v = make("tensor", c.u), make("tensor", c.v)
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v", problem.project_lower), curvature)
    d.penalised(c.batches, c.prices, with_u=with_u)
    assert calls == {"lower": lower, "upper": upper}
    assert (d.lower_evaluations, d.upper_evaluations) == (lower, upper)


def test_difference_over_several_batches_draws_for_each_what_an_exact_product_draws():
    """g = sum of mask * v^2 / 2 with a mask of dropout: its curvature is the mean of the masks of the batches."""
    u, v = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    drop = torch.nn.Dropout(0.5)
    problem = Problem(
        lambda u, v, batch: v.sum(), lambda u, v, batch: (drop(torch.ones_like(v)) * v.square()).sum() / 2 + 0 * u.sum()
    )
    direction, ends, products = [torch.ones(4, dtype=torch.float64)], [], []
    for curvature in ("exact", "difference"):
        d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v"), curvature)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            products.append(d.hessian_product([(None, None)] * 3, direction, with_u=False)[0])
            ends.append(torch.get_rng_state())
    torch.testing.assert_close(*products, rtol=1e-6, atol=1e-6)
    assert len(products[0].unique()) > 1
    assert torch.equal(*ends)
