"""The Gram form against the plain one, against F as written and against a closed form; where it steps aside."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync import NoHostReadErrors
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bilevel import Box, OptionError, Penalty, Problem, ProblemError, Rows, solve
from bilevel.derivatives.gram import layers
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.methods.penalty.minibatch import PenaltyMinibatchRun
from bilevel.problem.variables import Variable

Forward = Callable[[nn.Module, Tensor], Tensor]
EXAMPLES, CLASSES = 12, 3


# -- problems ---------------------------------------------------------------------------------------------------------


def network(
    *widths: int,
    bias: bool = True,
    activation: type[nn.Module] = nn.Tanh,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pairs = [(nn.Linear(m, k, bias=bias, dtype=dtype), activation()) for m, k in itertools.pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def make(u: str, dtype: torch.dtype) -> Any:
    """Importances of the examples, as Rows or as a tensor, or one hyperparameter of the loss."""
    values = torch.linspace(-1, 1, EXAMPLES, dtype=dtype)
    if u == "rows":
        return Rows(EXAMPLES, init=values)
    return (values if u == "tensor" else values[:1]).clone().requires_grad_()


def classify(forward: Forward = lambda v, x: v(x), *, decay: float = 0.0) -> Problem:
    def losses(v: nn.Module, batch: Any) -> Tensor:
        scores = forward(v, batch[0])
        return nnf.cross_entropy(scores.flatten(0, -2), batch[1].flatten(), reduction="none").unflatten(
            0, scores.shape[:-1]
        )

    def upper(u: Any, v: nn.Module, batch: Any) -> Tensor:
        return losses(v, batch).mean()

    def lower(u: Any, v: nn.Module, batch: Any) -> Tensor:
        each = losses(v, batch)
        w = torch.sigmoid(u) if isinstance(u, Tensor) and u.numel() == 1 else torch.sigmoid(u[batch[2]])
        total = (w * each.reshape(len(each), -1).mean(1)).mean()
        if decay:
            total = total + decay * sum(p.square().sum() for p in v.parameters())
        return total

    return Problem(upper, lower)


def batch(n: int, features: int, *, time: int = 0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shape = (n, time) if time else (n,)
    x = torch.randn(*shape, features, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, shape, generator=generator)
    return x, y, torch.randint(EXAMPLES, (n,), generator=generator)  # rows may come twice


def free(v: nn.Module, gamma: float = 0.7) -> Prices:
    """Prices without multipliers."""
    leaves = list(v.parameters())
    nu = [torch.zeros_like(p, requires_grad=False) for p in leaves]
    return Prices(gamma=torch.tensor(gamma, dtype=leaves[0].dtype), nu=nu, multipliers=False)


def evaluate(
    problem: Problem, u: Any, v: nn.Module, pair: Any, curvature: str = "gram", **options: Any
) -> tuple[Gradients, int]:
    """The derivative of F and the number of layers in Gram form; random draws from one seed, v not moved."""
    v = copy.deepcopy(v)
    d = PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v", problem.project_lower), curvature)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = d.penalised([pair], options.pop("prices", free(v)), **options)
    return found, d.gram_layers


def same(a: Gradients, b: Gradients, tolerance: float) -> None:
    """Equal, each tensor relative to the size of its own."""
    for name in ("v", "u", "slope", "residual"):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert len(mine) == len(theirs), name
        for x, y in zip(mine, theirs, strict=True):
            assert not x.requires_grad
            assert (x - y).norm() <= tolerance * (1e-3 + y.norm()), name
    for mine, theirs in zip(a.rows, b.rows, strict=True):
        for (index, x), (other, y) in zip(mine, theirs, strict=True):
            assert torch.equal(index, other)
            assert (x - y).norm() <= tolerance * y.norm()
    torch.testing.assert_close(a.f, b.f)
    torch.testing.assert_close(a.g, b.g)


def agrees(
    problem: Problem,
    v: nn.Module,
    pair: Any,
    *,
    used: int,
    u: str = "tensor",
    tolerance: float = 1e-10,
    curvature: str = "gram",
    **options: Any,
) -> None:
    """The Gram form is that of `exact` in the upper step and in the lower one, with this many layers in it."""
    for with_u in (True, False):
        variable = make(u, next(v.parameters()).dtype)
        found, count = evaluate(problem, variable, v, pair, curvature, with_u=with_u, **options)
        plain, none = evaluate(problem, variable, v, pair, "exact", with_u=with_u, **options)
        assert (count, none) == (used, 0)
        same(found, plain, tolerance)
    lam = torch.tensor(0.3, dtype=next(v.parameters()).dtype)
    lowered, count = evaluate(problem, variable, v, pair, curvature, with_u=False, lam=lam, **options)
    assert count == used
    for x, y, s in zip(lowered.v, plain.v, plain.slope, strict=True):
        assert (x - y - lam * s).norm() <= tolerance * (1e-3 + y.norm())


# -- the same derivative ----------------------------------------------------------------------------------------------

cases = {
    "seed": st.integers(0, 10**6),
    "n": st.integers(1, 9),
    "time": st.sampled_from([0, 1, 4]),
    "bias": st.booleans(),
    "activation": st.sampled_from([nn.Tanh, nn.ReLU, partial(nn.ReLU, inplace=True), nn.Softplus]),
    "u": st.sampled_from(["rows", "tensor", "hyperparameter"]),
    "widths": st.sampled_from([(5,), (5, 7), (5, 4, 6)]),
}


def case(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    n: int,
    time: int,
    bias: bool,
    activation: Any,
    u: str,
    widths: tuple[int, ...],
) -> None:
    v = network(*widths, CLASSES, bias=bias, activation=activation, dtype=dtype, seed=seed)
    pair = tuple(batch(n, widths[0], time=time, dtype=dtype, seed=seed + i) for i in (1, 2))
    agrees(classify(), v, pair, used=len(widths), u=u, tolerance=tolerance)


@settings(deadline=None, max_examples=60)
@given(**cases)
def test_gram_form_has_the_derivatives_of_the_plain_form(**options):
    # Sums of a few dozen products of size one lose some 1e-14; 1e-10 is what is promised.
    case(torch.float64, 1e-10, **options)


@settings(deadline=None, max_examples=30)
@given(**cases)
def test_gram_form_in_float32_is_that_of_the_plain_form_to_a_millionth(**options):
    # The rounding of float32 is 6e-8, in sums of at most 36 terms, in both forms; 1e-6 is what is promised.
    case(torch.float32, 1e-6, **options)


def test_gram_form_of_one_layer_is_the_closed_form():
    """g = |x W' - y|^2 / 2: s = (x W' - y)' x and the penalty's derivative is gamma s x'x."""
    x, y = (torch.randn(4, k, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (6, 5))
    v = network(6, 5, bias=False)
    problem = Problem(lambda u, v, _: u.sum(), lambda u, v, _: (v(x) * 1.0 - u * y).square().sum() / 2)
    u = torch.ones((), dtype=torch.float64, requires_grad=True)
    found, count = evaluate(problem, u, v, (None, None), with_u=True)
    W = v[0].weight.detach()
    s = (x @ W.T - y).T @ x
    assert count == 1
    near = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # the same sums in another order
    near(found.slope[0], s)
    near(found.v[0], 0.7 * s @ x.T @ x)
    near(found.u[0], 1 - 0.7 * torch.sum(s * (y.T @ x)))


def test_gram_form_is_the_derivative_of_F_as_written():  # noqa: N802
    v, u = network(5, 7, 4, CLASSES), make("tensor", torch.float64)
    first, second = batch(4, 5, seed=1), batch(6, 5, seed=2)
    problem = classify()
    found, count = evaluate(problem, u, v, (first, second), with_u=True)
    s = torch.autograd.grad(problem.lower(u, v, second), list(v.parameters()), create_graph=True)
    F = problem.upper(u, v, first) + 0.7 / 2 * sum(x.square().sum() for x in s)
    written = torch.autograd.grad(F, [u, *v.parameters()])
    assert count == 3
    for mine, theirs in zip([*found.u, *found.v], written, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_dropout_is_drawn_once_and_the_same():
    v = nn.Sequential(nn.Dropout(0.3), *network(5, 8, CLASSES)[:2], nn.Dropout(0.4), network(8, CLASSES)[0])
    agrees(classify(), v, (batch(4, 5), batch(4, 5, seed=1)), used=2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda v, x: torch.func.functional_call(v, dict(v.named_parameters()), (x,)),
        lambda v, x: torch.addmm(v[2].bias, torch.tanh(x @ v[0].weight.t() + v[0].bias), v[2].weight.T),
        lambda v, x: torch.func.vmap(v)(x),
        lambda v, x: checkpoint(v, x, use_reentrant=False),
        # Where no derivative flows, a use is none.
        lambda v, x: v(x) + v(x).detach() + 0 * v[0].weight.detach().sum(),
    ],
    ids=["functional", "by hand", "vmap", "checkpoint", "detached"],
)
def test_layers_are_found_however_g_is_written(forward):
    agrees(classify(forward), network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1)), used=2)


def test_weights_that_are_not_transposed_are_found_too():
    net = network(5, 7, CLASSES)
    v = {key: net[i].weight.detach().T.contiguous().requires_grad_() for key, i in (("a", 0), ("b", 2))}

    def lower(u, v, x):
        return nnf.softplus(torch.tanh(x @ v["a"]) @ v["b"] * u).sum()

    u, x = torch.ones(3, dtype=torch.float64, requires_grad=True), batch(4, 5)[0]
    found = {}
    for curvature in ("gram", "exact"):
        d = PenalisedObjective(Problem(lower, lower), Variable(u, "u"), Variable(v, "v"), curvature)
        prices = Prices(torch.ones((), dtype=torch.float64), [torch.zeros_like(p) for p in v.values()])
        prices.multipliers = False
        found[curvature] = d.penalised([(x, x)], prices, with_u=True)
        assert d.gram_layers == (2 if curvature == "gram" else 0)
    same(found["gram"], found["exact"], 1e-10)


# -- where it steps aside ---------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Linear layers a and b; which of them is used twice, and how, is up to `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = network(5, 5)[0], network(5, 5, seed=1)[0], network(5, CLASSES)[0]
        self.how = how
        if how == "tied":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        match self.how:
            case "twice":
                first = torch.tanh(self.a(first))
            case "transposed once":
                W = self.a.weight.t()
                first = torch.tanh(x @ W + torch.sin(x @ W))
            case "function":
                first = first + Square.apply(self.a.weight).sum()
            case "scaled":
                first = torch.tanh(torch.addmm(self.a.bias, x, self.a.weight.t(), alpha=2))
            case "permuted":
                first = torch.tanh(x @ self.a.weight.permute(-2, -1))
            case "view":
                first = torch.tanh(nnf.linear(x, self.a.weight.view(5, 5)))
        return self.c(torch.tanh(self.b(first)))


class Square(torch.autograd.Function):
    """The square: a function of the user's own, which no mode of torch sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, d):
        return 2 * d * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    ("how", "used"),
    [
        ("once", 3),
        ("twice", 2),
        ("tied", 1),
        ("transposed once", 2),
        ("function", 2),
        ("scaled", 2),
        ("view", 2),
        ("permuted", 2),
    ],
)
def test_layer_with_another_use_keeps_the_plain_form_and_the_others_do_not(how, used):
    agrees(classify(), Shared(how), (batch(4, 5), batch(4, 5, seed=1)), used=used)


def test_weight_decay_in_g_keeps_the_plain_form():
    agrees(classify(decay=0.1), network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1)), used=0)


def test_weight_decay_on_one_layer_leaves_the_other_in_gram_form():
    plain, v = classify(), network(5, 7, CLASSES)
    problem = Problem(plain.upper, lambda u, v, b: plain.lower(u, v, b) + 0.1 * v[0].weight.square().sum())
    agrees(problem, v, (batch(4, 5), batch(4, 5, seed=1)), used=1)


def test_frozen_weights_are_no_part_of_the_slope():
    v = network(5, 7, 6, CLASSES)
    v[2].weight.requires_grad_(False)
    pair = (batch(4, 5), batch(4, 5, seed=1))
    prices = Prices(
        gamma=torch.tensor(0.7, dtype=torch.float64),
        multipliers=False,
        nu=[torch.zeros_like(p, requires_grad=False) for p in v.parameters() if p.requires_grad],
    )
    agrees(classify(), v, pair, used=2, prices=prices)


def test_hook_on_a_weight_sees_its_gradient():
    v, pair = network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1))
    v[0].weight.register_hook(lambda d: 2 * d)
    found = layers(classify().lower(make("tensor", torch.float64), v, pair[1]), list(v.parameters()))
    assert [layer.position for layer in found] == [2]


def test_weight_that_is_in_v_twice_keeps_the_plain_form():
    W = network(5, CLASSES)[0].weight
    g = nnf.linear(batch(4, 5)[0], W).square().sum()
    assert len(layers(g, [W])) == 1
    assert layers(g, [W, W]) == []


@pytest.mark.parametrize("bias", [True, False])
def test_multipliers_are_part_of_the_gram_form(bias):
    v = network(5, 7, CLASSES, bias=bias)
    prices = free(v)
    prices.multipliers = True
    for n in prices.nu:
        n.normal_(generator=torch.Generator().manual_seed(0))
    agrees(classify(), v, (batch(4, 5), batch(4, 5, seed=1)), used=2, prices=prices)


def test_multipliers_of_a_weight_that_is_not_transposed_are_part_of_the_gram_form():
    W = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    x = batch(4, 5)[0]
    u = torch.ones((), dtype=torch.float64, requires_grad=True)
    problem = Problem(lambda u, v, _: v.sum(), lambda u, v, _: (u * (x @ v)).exp().sum())
    nu = [torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]
    prices = Prices(gamma=torch.tensor(0.7, dtype=torch.float64), nu=nu)
    found = {}
    for curvature in ("gram", "exact"):
        d = PenalisedObjective(problem, Variable(u, "u"), Variable(W, "v"), curvature)
        found[curvature] = d.penalised([(None, None)], prices, with_u=True)
    same(found["gram"], found["exact"], 1e-10)


def test_given_slope_and_projection_keep_the_plain_form():
    v, pair = network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1))
    slope = [torch.full_like(p, 0.2, requires_grad=False) for p in v.parameters()]
    agrees(classify(), v, pair, used=0, slope=slope)
    plain = classify()
    agrees(Problem(plain.upper, plain.lower, project_lower=Box(-0.2, 0.2)), v, pair, used=0)


def test_rounded_products_keep_the_plain_form():
    """Under autocast dz and x are bfloat16, and s is not their product in float32."""
    v, pair = network(5, 7, CLASSES, dtype=torch.float32), tuple(batch(4, 5, dtype=torch.float32) for _ in range(2))
    d = PenalisedObjective(classify(), Variable(make("tensor", torch.float32), "u"), Variable(v, "v"), "gram", "bf16")
    d.penalised([pair], free(v), with_u=True)
    assert d.gram_layers == 0


def test_cotangent_averaged_over_ranks_keeps_the_plain_form(monkeypatch):
    """s of all ranks is not the product of one rank's dz and x."""
    v, pair = network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1))
    monkeypatch.setattr(PenalisedObjective, "shared", True)
    agrees(classify(), v, pair, used=0)


def test_several_batches_keep_the_plain_form():
    v, u = network(5, 7, CLASSES), make("tensor", torch.float64)
    pairs = [(batch(4, 5, seed=i), batch(4, 5, seed=i + 9)) for i in range(3)]
    found = {}
    for curvature in ("gram", "exact"):
        d = PenalisedObjective(classify(), Variable(u, "u"), Variable(v, "v"), curvature)
        found[curvature] = d.penalised(pairs, free(v), with_u=True)
        assert d.gram_layers == 0
    same(found["gram"], found["exact"], 1e-10)


def test_operator_without_double_backward_is_refused_by_gram_and_falls_back_under_auto():
    def forward(v, x):
        q = v(x)[None, None]
        return nnf.scaled_dot_product_attention(q, q, q)[0, 0]

    v, pair = network(5, 7, CLASSES), (batch(4, 5), batch(4, 5, seed=1))
    with pytest.raises(ProblemError, match="curvature='gram' needs"):
        evaluate(classify(forward), make("tensor", torch.float64), v, pair, with_u=True)
    with pytest.warns(UserWarning, match="attention"):
        _, used = evaluate(classify(forward), make("tensor", torch.float64), v, pair, "auto", with_u=True)
    assert used == 0


# -- when it is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "width", "used"),
    [
        (32, 256, 1),
        (127, 256, 1),  # n (m + k) < m k
        (129, 256, 0),
        (300, 256, 0),
        (8, 64, 0),  # too small a weight: looking for it costs more than it saves
    ],
)
def test_auto_takes_the_gram_form_where_the_batch_is_small_against_the_width(n, width, used):
    v, u = network(width, width, CLASSES, dtype=torch.float32), make("tensor", torch.float32)
    pair = (batch(2, width, dtype=torch.float32), batch(n, width, dtype=torch.float32, seed=1))
    assert evaluate(classify(), u, v, pair, "auto", with_u=True)[1] == used
    assert evaluate(classify(), u, v, pair, "exact", with_u=True)[1] == 0
    assert evaluate(classify(), u, v, pair, "difference", with_u=True)[1] == 0


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 60),
    m=st.integers(1, 40),
    k=st.integers(2, 40),
    moving=st.booleans(),
    lowered=st.booleans(),
    priced=st.booleans(),
)
def test_layer_is_said_to_win_where_the_multiplications_counted_are_fewer(n, m, k, moving, lowered, priced):
    """`moving`: x depends on v; `lowered`: a lower step, which does not need s itself; `priced`: with nu."""
    x = torch.randn(n, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = network(m, k, bias=False)
    v.shift = nn.Parameter(torch.zeros(m, dtype=torch.float64))

    def lower(u, v, _):
        return (v[0](x + v.shift if moving else x) * u).exp().sum()

    u = torch.ones((), dtype=torch.float64, requires_grad=True)
    problem = Problem(lambda u, v, _: v.shift.sum(), lower)
    lam = torch.ones((), dtype=torch.float64) if lowered else None
    counts = {}
    prices = free(v)
    prices.multipliers = priced
    for curvature in ("gram", "exact"):
        with FlopCounterMode(display=False) as counter:
            evaluate(problem, u, v, (None, None), curvature, with_u=False, lam=lam, prices=prices)
        counts[curvature] = counter.get_total_flops()
    (layer,) = layers(lower(u, v, None), list(v.parameters()))
    assert layer.wins(with_slope=not lowered, with_nu=priced) == (counts["gram"] < counts["exact"])


# -- lam g ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("curvature", ["exact", "gram", "difference"])
def test_gradient_with_lam_is_that_of_F_and_lam_times_the_slope(curvature, count):  # noqa: N802
    v, u, lam = network(5, 7, CLASSES), make("tensor", torch.float64), torch.tensor(0.3, dtype=torch.float64)
    pairs = [(batch(4, 5, seed=i), batch(4, 5, seed=i + 9)) for i in range(count)]
    d = PenalisedObjective(classify(), Variable(u, "u"), Variable(v, "v"), curvature)
    apart, joined = (d.penalised(pairs, free(v), with_u=False, lam=x) for x in (None, lam))
    for x, y, s in zip(joined.v, apart.v, apart.slope, strict=True):
        torch.testing.assert_close(x, y + lam * s, rtol=1e-10, atol=1e-12)
    with pytest.raises(ProblemError, match="lam must be None"):
        d.penalised(pairs, free(v), with_u=True, lam=lam)


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_evaluation_is_recorded_and_reads_nothing_on_the_host():
    v, u, first, second = network(5, 7, CLASSES), make("tensor", torch.float64), batch(4, 5), batch(4, 5, seed=1)
    d = PenalisedObjective(classify(), Variable(u, "u"), Variable(v, "v"), "gram")
    prices, lam = free(v), torch.tensor(0.3, dtype=torch.float64)

    def step(x: Tensor) -> list[Tensor]:
        return d.penalised([(first, (x, *second[1:]))], prices, with_u=False, lam=lam).v

    with NoHostReadErrors():
        step(second[0])
    recorded = make_fx(step)(second[0])
    other = batch(4, 5, seed=5)[0]
    for mine, theirs in zip(recorded(other), step(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert d.gram_layers == 2


def run(curvature: str, **options: Any) -> tuple[Any, nn.Module]:
    v, u = network(5, 8, CLASSES), Rows(EXAMPLES, dtype=torch.float64)
    data = [batch(4, 5, seed=i) for i in range(3)], [batch(4, 5, seed=i) for i in range(5, 10)]
    method = Penalty(curvature=curvature, **options)
    return solve(classify(), method, u, v, data, max_steps=12, seed=0, hypergradient=False), v


@pytest.mark.parametrize("multipliers", [True, False])
def test_run_in_gram_form_takes_the_path_of_the_exact_run(monkeypatch, multipliers):
    used = set()
    plain = PenaltyMinibatchRun.step

    def step(self: PenaltyMinibatchRun, k: int) -> Tensor:
        record = plain(self, k)
        used.add(self.derivatives.gram_layers)
        return record

    monkeypatch.setattr(PenaltyMinibatchRun, "step", step)
    (gram, v), (exact, w) = (run(curvature, multipliers=multipliers) for curvature in ("gram", "exact"))
    assert used == {0, 2}
    for name in ("upper", "lower", "residual", "grad_u", "grad_v"):
        assert gram.history[name] == pytest.approx(exact.history[name], rel=1e-8), name
    for mine, theirs in zip(v.parameters(), w.parameters(), strict=True):
        # Adam divides by the size of a gradient: rounding of 1e-14 grows where that is near zero.
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_gram_is_refused_where_the_cotangent_is_not_of_the_batch():
    with pytest.raises(OptionError, match="curvature='gram' cannot be used with cotangent='running'"):
        run("gram", cotangent="running")


def test_gram_is_refused_with_projection_accumulation_reduced_precision_and_without_data():
    v, u = network(5, 8, CLASSES, dtype=torch.float32), make("tensor", torch.float32)
    data = ([batch(4, 5, dtype=torch.float32)], [batch(4, 5, dtype=torch.float32)])
    plain, method = classify(), Penalty(curvature="gram")
    projected = Problem(plain.upper, plain.lower, project_lower=Box(-1.0, 1.0))
    with pytest.raises(OptionError, match="project_lower"):
        solve(projected, method, u, v, data, max_steps=1)
    with pytest.raises(OptionError, match="accumulate=2"):
        solve(plain, method, u, v, data, max_steps=1, accumulate=2)
    with pytest.raises(OptionError, match="precision='bf16'"):
        solve(plain, method, u, v, data, max_steps=1, precision="bf16")
    still = Problem(lambda u, v, _: plain.upper(u, v, data[0][0]), lambda u, v, _: plain.lower(u, v, data[1][0]))
    with pytest.raises(OptionError, match="deterministic"):
        solve(still, Penalty(curvature="gram"), u, v, max_steps=1)


def test_auto_looks_at_nothing_in_a_compiled_module():
    """Its products are not in the graph: it falls back on differences as ever."""
    torch._dynamo.reset()
    v = torch.compile(network(256, 256, CLASSES, dtype=torch.float32), backend="aot_eager")
    pair = tuple(batch(4, 256, dtype=torch.float32) for _ in range(2))
    d = PenalisedObjective(classify(), Variable(make("tensor", torch.float32), "u"), Variable(v, "v"), "auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        d.penalised([pair], free(v), with_u=True)
    assert (d.gram_layers, d.curvature) == (0, "difference")
    assert any("torch.compile" in str(w.message) for w in caught)
