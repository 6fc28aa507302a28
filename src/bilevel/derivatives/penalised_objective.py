"""The penalised objective, its derivative, and products with the second derivatives of g.

With s = grad_v g, and r = s, or r = v - P(v - s) if the lower variable is projected, the penalised objective is

    F(u, v) = f + <nu, r> + gamma/2 |r|^2
                + <mu, h> + gamma_h/2 |h|^2                                          (equalities)
                + gamma_h/2 |max(0, h + mu/gamma_h)|^2 - |mu|^2 / (2 gamma_h)        (inequalities)

Its derivative needs g once: a first backward that keeps the graph gives s, and one second backward with the cotangent
nu + gamma r, held fixed, gives the derivatives in u and in v together. `curvature="difference"` replaces the second
backward by a central difference of grad g along the cotangent: three evaluations of g instead of one, first order only.
Linear layers use their Gram form if it is cheaper (see `bilevel.derivatives.gram`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping, random_state, set_random_state
from bilevel._util.tensor_lists import broadcast_trials, summed
from bilevel.derivatives.double_backward import missing_double_backward, refuse_once_differentiable
from bilevel.derivatives.evaluator import Evaluator
from bilevel.derivatives.gram import LEAST, Layer, layers, terms
from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.prices import Gradients, Prices, added, constraint_pull
from bilevel.errors import ProblemError
from bilevel.problem import Problem, Variable

if TYPE_CHECKING:
    from bilevel.derivatives.lower_constraints import KKT

T = TypeVar("T")
Curvature = Literal["auto", "exact", "gram", "difference"]


@dataclass(frozen=True)
class Part:
    """One of several batches: its share of the mean, and the means over all batches, which give its cotangents."""

    share: float
    slope: Sequence[Tensor]
    constraints: Sequence[Tensor]
    # The state of the random generators in which f is evaluated.
    upper_state: Any


class PenalisedObjective(Evaluator):
    """Derivatives of the penalised objective, and products with second derivatives of g."""

    def __init__(
        self,
        problem: Problem,
        u: Variable,
        v: Variable,
        curvature: Curvature = "auto",
        precision: Precision | None = None,
    ) -> None:
        super().__init__(problem, u, v, precision)
        self.curvature: Curvature = curvature
        # The number of linear layers in Gram form in the last evaluation of F.
        self.gram_layers = 0
        # The KKT conditions that replace the lower level's constraints; `problem` then has no lower constraints.
        self.kkt: KKT | None = None
        self._proved = False  # whether an exact evaluation has succeeded

    # -- the derivative of F -------------------------------------------------------------------------------------

    def penalised(
        self,
        batches: Sequence[Pair],
        prices: Prices,
        *,
        with_u: bool,
        slope: Sequence[Tensor] | None = None,
        lam: Tensor | None = None,
    ) -> Gradients:
        """Return the derivative of F in v, and in u if `with_u`.

        `lam`, which is for v only, adds lam g to F. `slope` replaces s in the cotangent (see `Penalty.cotangent`).
        Over several batches, F is made of the mean objectives.
        """
        if with_u and lam is not None:
            raise ProblemError("lam must be None with with_u=True: u descends F, without lam g.")
        if len(batches) != 1:
            return self._several(batches, prices, with_u, lam, slope)
        if self._proved:
            return self._one(batches[0], prices, with_u, lam, slope)
        return self._guarded(lambda: self._one(batches[0], prices, with_u, lam, slope))

    def _several(
        self,
        batches: Sequence[Pair],
        prices: Prices,
        with_u: bool,
        lam: Tensor | None,
        slope: Sequence[Tensor] | None,
    ) -> Gradients:
        """Average s and h over the batches first, then differentiate each batch with the mean cotangents."""
        share = 1.0 / len(batches)
        states: list[Any] = []
        mean: list[Tensor] = []
        with self.differentiating_u(False), keeping(self.v.buffers() + self.u.buffers()):
            for batch in batches:
                states.append(random_state(self.v.device))
                s = self.gradient(self.lower(batch[1]) * share, self.v.leaves)
                with torch.no_grad():
                    found = s + [h * share for h in self.constraints(batch[0])]
                    mean = summed([mean, found]) if mean else found
        count, mean = len(self.v.leaves), self.mean_over_ranks(mean)
        pulled = mean[:count] if slope is None else list(slope)

        # g and h are evaluated again with the draws that they had; f continues from the state after the last batch.
        onward = random_state(self.v.device)
        total: Gradients | None = None  # a running sum: memory does not grow with the number of batches
        for batch, state in zip(batches, states, strict=True):
            part = Part(share, pulled, mean[count:], onward)

            def one(batch: Pair = batch, state: Any = state, part: Part = part) -> Gradients:
                set_random_state(state, self.v.device)
                return self._one(batch, prices, with_u, lam, pulled, part)

            of_batch: Gradients = self._guarded(one)
            total = of_batch if total is None else added(total, of_batch)
            onward = random_state(self.v.device)
        if total is None:
            raise ProblemError("penalised needs at least one batch; got none.")
        total.slope, total.constraints, total.residual = mean[:count], mean[count:], self.residual(mean[:count])
        return total

    def _one(
        self,
        batch: Pair,
        prices: Prices,
        with_u: bool,
        lam: Tensor | None,
        given: Sequence[Tensor] | None,
        part: Part | None = None,
    ) -> Gradients:
        """Differentiate F on one pair of batches; `given` replaces s in the cotangent."""
        exact, leaves = self.curvature != "difference", self.v.leaves
        state = None if exact else random_state(self.v.device)
        with self.differentiating_u(with_u) as inputs:
            g = self.lower(batch[1])
            s, slope, pull = self._first_backward(g, prices, with_u, lam, plain=given is not None)
            # Ranks average s while f is evaluated. With several batches it has been averaged before.
            mean_slope = self.mean_over_ranks_async(slope) if part is None else None
            h = self.constraints(batch[0])
            if part is not None:
                set_random_state(part.upper_state, self.v.device)
            f = self.upper(batch[0])
            slope = slope if mean_slope is None else mean_slope()
            direct: list[Tensor] | None = None
            if pull is None:
                direct, pull = self.cotangent(slope if given is None else given, prices)
            values = self.mean_over_ranks([x.detach() for x in h]) if part is None else list(part.constraints)
            pull_h = self.constraint_cotangents(values, prices)
            wrt = [*leaves, *inputs()]
            if exact:
                if not self._proved:
                    refuse_once_differentiable(s)
                # lam g joins the second backward, so that each product is formed once.
                first, weights = ([f], [None]) if lam is None else ([f, g], [None, lam.to(g.dtype)])
                found = self.gradient([*first, *s, *h], wrt, cotangent=[*weights, *pull, *pull_h])
            else:
                found = self.gradient([f, *h], wrt, cotangent=[None, *pull_h], retain=with_u)
                found = summed([found, self._difference(batch[1], wrt, pull, state, random_state(self.v.device))])
                if lam is not None:
                    found = summed([found, [broadcast_trials(lam, x) * x for x in slope]])
            # Never in place: autograd can return one tensor for two inputs.
            if direct is not None:
                found[: len(leaves)] = torch._foreach_add(found[: len(leaves)], direct)
            share = 1.0 if part is None else part.share
            if share != 1.0:
                found = list(torch._foreach_mul(found, share))
            return self.to_gradients(f, g, slope, values, found, share, len(leaves))

    def _first_backward(
        self, g: Tensor, prices: Prices, with_u: bool, lam: Tensor | None, *, plain: bool
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
        """Return s with its graph, its value, and the cotangent of s if the Gram form fixes it."""
        with_slope = lam is None
        # The Gram form has no cotangent other than nu + gamma s of one batch in one process.
        plain = plain or self.v.projected or self.problem.trials is not None or self.shared
        found = [] if plain else self._gram(g, with_slope=with_slope, with_nu=prices.multipliers)
        self.gram_layers = len(found)
        if found:
            nu = prices.nu if prices.multipliers else None
            s, pull, slope = terms(g, self.v.leaves, found, prices.gamma, nu, with_slope=with_slope)
            return s, slope, pull
        s = self.gradient(g, self.v.leaves, keep_graph=self.curvature != "difference", retain=with_u)
        return s, [x.detach() for x in s], None

    def _gram(self, g: Tensor, *, with_slope: bool, with_nu: bool) -> list[Layer]:
        """Return the layers of g to use in Gram form: those for which it is cheaper, or all with `curvature="gram"`."""
        if self.curvature == "gram":
            return layers(g, self.v.leaves)
        # With s and nu the Gram form never wins, so the graph of g is not searched.
        search = self.curvature == "auto" and not (with_slope and with_nu)
        found = layers(g, self.v.leaves, LEAST) if search else []
        return [layer for layer in found if layer.wins(with_slope=with_slope, with_nu=with_nu)]

    def cotangent(self, slope: Sequence[Tensor], prices: Prices) -> tuple[list[Tensor] | None, list[Tensor]]:
        """Return (a, w) with d(<nu, r> + gamma/2 |r|^2) = <a, dv> + <w, ds>; a is None without a projection.

        With r = v - P(v - s) and p = nu + gamma r, w is p pulled back through P, and a = p - w.
        """
        if not self.v.projected:
            return None, [
                (broadcast_trials(prices.gamma, x) * x).add_(n) for n, x in zip(prices.nu, slope, strict=True)
            ]
        points = [(v - s).detach().requires_grad_() for v, s in zip(self.v.leaves, slope, strict=True)]
        with torch.enable_grad():
            moved = self.v.project_leaves(points)
        pull = [
            n + prices.gamma * (v.detach() - m.detach())
            for n, v, m in zip(prices.nu, self.v.leaves, moved, strict=True)
        ]
        back = self.gradient(moved, points, cotangent=pull)
        return [p - w for p, w in zip(pull, back, strict=True)], back

    def constraint_cotangents(self, values: Sequence[Tensor], prices: Prices) -> list[Tensor]:
        """Return the cotangent of each constraint (`constraint_pull`); refuse a shape unlike its multiplier's."""
        for i, (m, h) in enumerate(zip(prices.mu, values, strict=True)):
            if m.shape != h.shape:
                raise ProblemError(
                    f"constraint {i} must return the same shape for every batch; it returned {tuple(m.shape)} first "
                    f"and {tuple(h.shape)} now. Return a mean or a sum over the batch."
                )
        return constraint_pull(values, prices, len(self.problem.equalities))

    # -- products for scales and certificates --------------------------------------------------------------------

    def hessian_product(self, batches: Sequence[Pair], direction: Sequence[Tensor], *, with_u: bool) -> list[Tensor]:
        """Return g_vv d, followed by g_uv d with `with_u`, by the present kind of curvature.

        Then `self.row_reads` says which rows of u the last entries belong to.
        """
        share = 1.0 / len(batches)

        def one(batch: Any) -> list[Tensor]:
            with self.differentiating_u(with_u) as inputs:
                if self.curvature == "difference":
                    state = random_state(self.v.device)
                    if with_u and self.u.rows:
                        self.lower(batch)  # notes the rows that are read, whose leaves are differentiated
                    return self._difference(batch, [*self.v.leaves, *inputs()], direction, state)
                s = self.gradient(self.lower(batch), self.v.leaves, keep_graph=True)
                if not self._proved:
                    refuse_once_differentiable(s)
                return self.gradient(
                    s, [*self.v.leaves, *inputs()], cotangent=list(direction), retain=self.problem.prepare is not None
                )

        return summed([[d * share for d in self._guarded(lambda: one(b))] for _, b in batches])  # noqa: B023

    def _guarded(self, evaluate: Callable[[], T]) -> T:
        """Run an exact evaluation. Under `auto`, fall back to differences if an operator has no double backward."""
        if self._proved or self.curvature == "difference":
            return evaluate()
        state = random_state(self.v.device)
        buffers = [*self.v.buffers(), *self.u.buffers()]
        saved = [buffer.clone() for buffer in buffers]
        try:
            found = evaluate()
        except RuntimeError as error:
            if (operator := missing_double_backward(error)) is None:
                raise
            if self.curvature != "auto":
                raise ProblemError(
                    f"{operator} has no double backward, which curvature={self.curvature!r} needs. Use "
                    "curvature='difference', or replace the operator (for attention: "
                    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH))."
                ) from error
            warn_user(
                f"{operator} has no double backward: the curvature is approximated by finite differences "
                "(curvature='difference') from here on."
            )
            self.curvature = "difference"
            set_random_state(state, self.v.device)
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.data.copy_(value)
            return evaluate()
        self._proved = True
        return found

    def _difference(
        self, batch: Any, wrt: Sequence[Tensor], pull: Sequence[Tensor], state: Any, after: Any = None
    ) -> list[Tensor]:
        """Return d<pull, s> as a central difference of grad g along `pull`, with random draws that start at `state`.

        The generators end at `after`, or at the state after one evaluation.
        """
        leaves = self.v.leaves
        held = [leaf.detach().clone() for leaf in leaves]
        eps = torch.finfo(leaves[0].dtype).eps ** (1 / 3)
        size = self.norm(pull)
        step = eps * (1 + self.norm(held)) / torch.where(size > 0, size, torch.ones_like(size))
        sides = []
        with keeping([*leaves, *self.v.buffers(), *self.u.buffers()]):
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for leaf, value, direction in zip(leaves, held, pull, strict=True):
                        leaf.copy_(value + sign * broadcast_trials(step, value) * direction)
                set_random_state(state, self.v.device)
                for rows in self.u.rows:
                    rows.replay()
                value = self.lower(batch)
                after = random_state(self.v.device) if after is None else after
                sides.append(self.gradient(value, wrt, retain=True))
        set_random_state(after, self.v.device)
        return [(a - b) / (2 * broadcast_trials(step, a)) for a, b in zip(*sides, strict=True)]
