"""The approximate hypergradient (ApproxGrad in the paper): a linear solver takes a few steps on the adjoint q.

    v <- v - rho grad_v g   (T times),     (g_vv + damping I) q ~ f_v,     u <- u - sigma (f_u - g_uv q)

Domke, *Generic methods for optimization-based modeling*, AISTATS 2012; Pedregosa, *Hyperparameter optimization with
approximate gradient*, ICML 2016. Each upper step starts from the last q, so that a few products are enough if u moves
slowly. The solvers are in `bilevel.optim.linear_solvers`. All products of an upper step use one batch and, apart from
the exceptions below, one graph of g. Only linear_solver="sgd" takes each of its steps on a fresh pair of batches:

    q <- q - eta (g_vv q - f_v)

With `warm_start` this is AmIGO (Arbel and Mairal, *Amortized implicit differentiation for stochastic bilevel
optimization*, ICLR 2022). Without, q is the Neumann series of StocBiO (Ji, Yang and Liang, *Bilevel optimization:
convergence analysis and enhanced design*, ICML 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel._util.checks import check_counts, in_range, one_of, true_or_false
from bilevel._util.nested import Pair, detached
from bilevel._util.random_state import keeping, random_state, set_random_state
from bilevel._util.tensor_lists import difference, gradient
from bilevel.derivatives.prices import Gradients, added
from bilevel.errors import OptionError
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.adjoint_run import AdjointRun
from bilevel.methods.base import MethodState, RunContext
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.options import OptimizerOptions, no_projection
from bilevel.optim.linear_solvers import ConjugateGradients, GradientSteps, LeastSquares, LinearSolver, Neumann, Product
from bilevel.problem import together

# The default learning rate of Adam on q, relative to the size of an entry of q.
LINEAR_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, repr=False)
class ApproxGrad(OptimizerOptions):
    """Approximate hypergradient: solves g_vv q = f_v a few steps at a time, then u descends f_u - g_uv q.

    Options:
        lower_steps: Steps on v before each step on u (T in the paper). Default: 5.
        warm_up: Share of `max_steps` in which only v moves. Default: 0.1 with decay="linear", otherwise until v is
            trained roughly; 0 with `start_lower`.
        decay: "linear" (default): a run spends a known number of steps; the learning rates fall to zero over
            `max_steps`. "root": nothing depends on `max_steps`; they fall like the root of the number of steps.
            "constant": the same, but they stay.
        lower_batches: "fresh" (default): a new pair of batches for every lower step. "shared": one pair for the
            lower steps and the upper step.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: Adam, with a rate that
            lets each coordinate move by 5, or, without decay="linear", with a first step of 0.03 or less.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v. Default: Adam, whose first step
            reduces g by 6% to first order, with a rate between 1e-4 and 3e-2; without data at least the rate of u.
        linear_solver: "cg" (default): conjugate gradients. "adam": Adam on |g_vv q - f_v|^2 / 2, as in the paper, with
            two products a step. "neumann": the Neumann series. "sgd": gradient steps on <q, g_vv q> / 2 - <f_v, q>,
            each on a fresh pair of batches. "adam" needs an invertible g_vv, the others a positive definite one.
        linear_steps: Steps of the linear solver in each upper step. Default: `lower_steps`.
        linear_rate: Learning rate of the solver "adam" (default: a tenth of the size of an entry of q at the start) or
            "sgd" (default: 1 over the largest curvature of g on the first batches).
        damping: Number added to the diagonal of g_vv. Use it if g_vv is singular. Default: 0.
        warm_start: Whether q is kept from one upper step to the next. Default: True. With `start_lower` q starts from
            zero in every step.
        curvature: How to take products with g_vv. "exact": by a second backward pass. "difference": by differences of
            gradients. "auto" (default): exact, by differences if an operator has no double backward.

    `ApproxGrad(linear_solver="sgd", lower_steps=10)` is AmIGO, and StocBiO with `warm_start=False`; both papers take
    plain gradient steps (torch.optim.SGD) on u and v, with decay="constant".

    >>> ApproxGrad(linear_solver="neumann", linear_steps=10)
    ApproxGrad(linear_solver='neumann', linear_steps=10)
    """

    linear_solver: Literal["cg", "adam", "neumann", "sgd"] = "cg"
    linear_steps: int | None = None
    linear_rate: float | None = None
    damping: float = 0.0
    warm_start: bool = True
    curvature: Literal["auto", "exact", "difference"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("linear_solver", self.linear_solver, ("cg", "adam", "neumann", "sgd"))
        check_counts(linear_steps=self.linear_steps)
        in_range("linear_rate", self.linear_rate, above=0)
        true_or_false("warm_start", self.warm_start)
        in_range("damping", self.damping, least=0)
        one_of("curvature", self.curvature, ("auto", "exact", "difference"))
        if self.linear_rate is not None and self.linear_solver not in ("adam", "sgd"):
            raise OptionError(
                f"linear_rate is only used with linear_solver='adam' or 'sgd'; got {self.linear_rate!r} with "
                f"linear_solver={self.linear_solver!r}. Leave it out, or pass linear_solver='adam'."
            )

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        no_projection("ApproxGrad", context.problem)
        return (_FreshRun if self.linear_solver == "sgd" else _Run)(self, context)


class _Run(AdjointRun):
    """A run of `ApproxGrad`.

    Each upper step evaluates g T + 1 times, as all products share the graph of the last evaluation, and f once. Without
    such a graph, each product evaluates g again: once for each batch with `accumulate=k`, twice with
    `curvature="difference"`. The number of products is linear_steps + 2 with `cg` and linear_steps + 3 with `neumann`
    (one less without `warm_start`), 2 linear_steps + 1 with `adam`, and none in the warm-up.
    """

    like_v = (*AdjointRun.like_v, "linear")

    def __init__(self, options: ApproxGrad, context: RunContext) -> None:
        super().__init__(context, curvature=options.curvature, **options.steps(context.problem))
        measured = self._measured()
        self.damping = options.damping
        self.linear: LinearSolver = self._linear(options, measured)
        self.q = self.linear.q
        self.lower = self._lower_descent(options.lower_optimizer, self._lower_rate(measured))
        self.upper = self._upper_descent(options.upper_optimizer, measured)
        self._ready()

    def _linear(self, options: ApproxGrad, measured: BatchScales) -> LinearSolver:
        leaves, steps, dot = self.v.leaves, options.linear_steps or options.lower_steps, self.derivatives.dot
        if options.linear_solver != "adam":
            solver = ConjugateGradients if options.linear_solver == "cg" else Neumann
            return solver(leaves, steps, dot, warm_start=options.warm_start)
        # |q| is about |f_v| / |g_vv|, and |g_vv| is about |g_vv s| / |s|.
        size = measured.gamma * measured.sizes[1] / self.v.size**0.5
        rate = LINEAR_SHARE * size if options.linear_rate is None else options.linear_rate
        return LeastSquares(leaves, steps, dot, warm_start=options.warm_start, rate=rate)

    def _restart(self) -> None:
        self.linear.restart()

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d = self.derivatives
        batches = d.detach_prepared(draw) if moving else draw
        direct = d.direct(batches)
        if not moving:
            direct.rows = d.all_rows(direct.rows)
            g, slope = d.slope(batches)
            return self._record(direct.f, g, direct, d.norm(direct.v), d.norm(slope), left, moving)
        curved = self._curved(batches, direct.v, left)
        total = Gradients(
            f=direct.f,
            g=curved.g,
            slope=curved.slope,
            residual=curved.slope,
            constraints=[],
            v=difference(direct.v, curved.v),
            u=d.backward_through_prepare(difference(direct.u, curved.u)),
            rows=together(direct.rows, [[(i, -x) for i, x in pairs] for pairs in curved.rows]),
        )
        return self._move_u(total, left)

    def _curved(self, batches: list[Pair], f_v: list[Tensor], left: Tensor) -> Gradients:
        """Solve for q; return g and grad_v g, with g_vv q and g_uv q in place of the derivatives of F."""
        if len(batches) > 1 or self.derivatives.curvature == "difference":
            return self._curved_again(batches, f_v, left)
        d, leaves = self.derivatives, self.v.leaves
        with d.differentiating_u(True) as inputs:
            g = d.lower(batches[0][1])
            s = gradient(g, leaves, keep_graph=True)
            wrt = [*leaves, *inputs()]
            q = self._solved(lambda p: d.mean_over_ranks(gradient(s, leaves, cotangent=p, retain=True)), f_v, left)
            found = d.mean_dense_over_ranks(gradient(s, wrt, cotangent=q))
            g, *slope = d.mean_over_ranks([g.detach(), *(x.detach() for x in s)])
            return d.to_gradients(torch.zeros_like(g), g, slope, [], found, 1.0, len(leaves))

    def _curved_again(self, batches: list[Pair], f_v: list[Tensor], left: Tensor) -> Gradients:
        """Do the same with an evaluation of g for each product, which draws the same random numbers each time."""
        d, device = self.derivatives, self.v.device
        still, share = detached(batches), 1.0 / len(batches)
        before = random_state(device)
        g, slope = d.slope(still)
        after = random_state(device)

        def product(p: list[Tensor]) -> list[Tensor]:
            set_random_state(before, device)
            with torch.enable_grad():
                return d.hessian_product(still, p, with_u=False)

        with keeping([*self.v.buffers(), *self.u.buffers()]):
            q = self._solved(product, f_v, left)
            set_random_state(before, device)
            parts = []
            for batch in batches:  # separately, as each batch reads other rows
                found = [x * share for x in d.hessian_product([batch], q, with_u=True)]
                parts.append(d.to_gradients(torch.zeros_like(g), g * share, slope, [], found, 1.0, len(slope)))
        set_random_state(after, device)
        return reduce(added, parts)

    def _solved(self, product: Product, f_v: list[Tensor], left: Tensor) -> list[Tensor]:
        """Return the new q, which solves (g_vv + damping I) q = f_v."""
        damping = self.damping

        def damped(p: list[Tensor]) -> list[Tensor]:
            return [h + damping * x for h, x in zip(product(p), p, strict=True)] if damping else product(p)

        return self.linear.solve(damped, f_v, left)

    # -- what solve asks -----------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        return {"linear": self.linear.state}


class _FreshRun(_Run):
    """A run of `ApproxGrad` with the solver "sgd", which takes N = `linear_steps` steps between those on v and on u.

    Each upper step evaluates g T + N + 1 times and f N + 1 times; in the warm-up T + 1 times and once. With
    `accumulate=k`, g is evaluated k (T + N + 2) times and f k (N + 1) times.
    """

    def __init__(self, options: ApproxGrad, context: RunContext) -> None:
        self.adjoint_steps, self.warm_start = options.linear_steps or options.lower_steps, options.warm_start
        super().__init__(options, context)

    def _linear(self, options: ApproxGrad, measured: BatchScales) -> LinearSolver:
        rate = self._shortest() if options.linear_rate is None else options.linear_rate
        return GradientSteps(self.v.leaves, 1, self.derivatives.dot, warm_start=True, rate=rate)

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        super()._lower_step(draw, left, moving)
        if not self.warm_start:
            self.linear.restart()

    def _adjoint_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        d = self.derivatives

        def product(p: list[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                return d.hessian_product(draw, p, with_u=False)

        if moving:  # a series that starts again in each upper step needs the whole rate
            self._solved(product, d.direct(draw).v, left if self.warm_start else torch.ones_like(left))

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        if not moving:
            return super()._upper_step(draw, left, moving)
        return self._move_u(self.derivatives.penalised(draw, self.prices(), with_u=True), left)
