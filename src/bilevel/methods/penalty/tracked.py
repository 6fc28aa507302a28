"""The penalty method with tracked multipliers: v, nu and u take one step each on the same pair of batches.

With s = grad_v g and F = f + <nu, s>, a step moves

    v    along   grad_v g                        as plain training does: v never sees f
    nu   along   grad_v F = f_v + g_vv nu        which is zero at nu = -q, g_vv q = f_v
    u    along   grad_u F = f_u + g_uv nu        which is the hypergradient at this nu and at the minimum v of g

The multipliers come from earlier batches. So the mean of g_uv nu over a batch is unbiased, unlike the derivative of
|s|^2, which has the variance of s in it. This is SOBA (Dagréou et al., "A framework for bilevel optimization that
enables stochastic and global variance reduction algorithms", NeurIPS 2022), reached from the penalty: the limit in
which the multipliers do all the work of gamma.

No formula needs the number of steps. Until v has been trained roughly, u stays: gradients of successive batches agree
as long as v has a way to go. The rate of u is such that v* moves by about `PACE` of the size of v in a step. v is far
from its size then, so the rate is measured again, ever more rarely. The largest size of v and the largest response of
these later measurements count: otherwise u would go faster and faster if it runs to a point to which v* does not
respond. All rates fall like the root of the number of steps. A step of u is shortened so that the change of f that it
promises is at most `TRUST` of f; the next batch measures it, so the noise of a batch does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping, random_state, set_random_state
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.errors import CheckpointError
from bilevel.methods.base import RECORD, RunContext
from bilevel.methods.minibatch_run import Draw, MinibatchRun
from bilevel.methods.penalty.options import PenaltyOptions
from bilevel.optim.linear_solvers import conjugate_gradients
from bilevel.optim.variable_optimizer import VariableOptimizer, adam

# A step of u moves v* by about this share of v. A coordinate that only a share c of the batches reads moves by
# c^-(1 + RARE) of it at a visit: the moves of different steps are of different coordinates, and partly cancel.
PACE, RARE = 0.003, 0.25
# A step of u changes f by at most about this share.
TRUST = 0.01
# The largest step of a coordinate of u, and the largest move of one that is visited rarely.
LARGEST, REACH = 0.1, 5.0
# A step of nu, relative to the size of its entries.
SHARE = 0.03
# Rates have fallen by the root of 2 after so many steps of u.
HALF = 500
# The first look at whether v is trained; the next ones are at twice as many steps each.
FIRST_LOOK = 10
# The rate of u is measured again so many steps after u began to move, and each time that these have grown by a factor.
AGAIN, RARER = 30, 4
# v is trained roughly if successive gradients agree to less than this, or have fallen to this share.
AGREEMENT, FALLEN = 0.3, 0.1
BETAS, TINY = (0.9, 0.999), 1e-12


class Multipliers:
    """nu and its Adam, whose rate is relative to the size of nu."""

    def __init__(self, like: Sequence[Tensor], size: float) -> None:
        def zeros() -> list[Tensor]:
            return [torch.zeros_like(leaf, requires_grad=False) for leaf in like]

        self.nu, self.mean, self.square = zeros(), zeros(), zeros()
        self.count = torch.zeros((), dtype=torch.float64, device=like[0].device)
        # The least size of an entry that sets the rate: nu starts at zero.
        self.least = torch.full((), size, dtype=like[0].dtype, device=like[0].device)

    @torch.no_grad()
    def step(self, slope: list[Tensor], size: Tensor, left: Tensor) -> None:
        """Move nu against `slope`. `size` is the root mean square of its entries, and `left` multiplies the rate."""
        self.count += 1
        torch._foreach_lerp_(self.mean, slope, 1 - BETAS[0])
        torch._foreach_lerp_(self.square, torch._foreach_mul(slope, slope), 1 - BETAS[1])
        one, two = (1 - torch.as_tensor(beta) ** self.count for beta in BETAS)
        rate = SHARE * left * torch.maximum(size, self.least) * two.sqrt() / one
        for nu, mean, square in zip(self.nu, self.mean, self.square, strict=True):
            nu.sub_(rate.to(nu.dtype) * mean / (square.sqrt() + TINY))

    def tensors(self) -> dict[str, Any]:
        return {"nu": self.nu, "mean": self.mean, "square": self.square, "count": self.count, "least": self.least}


class TrackedRun(MinibatchRun):
    """A run of the penalty method with tracked multipliers. Each of the T + 1 gradients evaluates f and g once."""

    like_v = (*MinibatchRun.like_v, "earlier", *(f"multipliers/{name}" for name in ("nu", "mean", "square")))

    def __init__(self, options: PenaltyOptions, context: RunContext) -> None:
        self.options = options
        super().__init__(
            context,
            lower_steps=options.lower_steps or 0,
            curvature=options.curvature,
            shared=options.lower_batches == "shared",
            decay="linear" if options.decay == "linear" else "constant",  # "root" begins when u begins to move
        )
        # The number of steps before u can move: the user's, or at the next look at whether v is trained.
        self.fixed = options.warm_up is not None
        self.look_at = round((options.warm_up or 0.0) * context.max_steps) if self.fixed else FIRST_LOOK
        self.warm_up = context.max_steps + 1
        self.taken = 0
        measured = self._measured()
        size = measured.gamma * measured.sizes[1] / math.sqrt(self.v.size)
        self.multipliers = Multipliers(self.v.leaves, size)
        zero = torch.zeros((), dtype=self.v.dtype, device=self.v.device)
        self._prices = Prices(gamma=zero, nu=self.multipliers.nu)
        self.coverage = measured.coverage
        self.lower = self._lower_descent(options.lower_optimizer, measured.lower_rate(measured.lam))
        factory = options.upper_optimizer or adam(self.u, LARGEST)
        self.upper = VariableOptimizer(self.u, factory, "upper_optimizer")
        device = self.v.device
        # s of the last batch, and running means of <s, s of the last batch> and |s|^2, with the largest of the latter.
        self.earlier = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.v.leaves]
        self.agreement = torch.zeros(3, dtype=torch.float64, device=device)
        # The last move of u (without Rows), and running means of |f| and of the change of f by a move at full rate.
        self.moved = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.u.leaves]
        self.expected = torch.zeros(2, dtype=torch.float64, device=device)
        # The step at which u began to move, and what the rate of u has grown by since.
        self.began = 0
        self.growth = torch.ones((), dtype=self.v.dtype, device=device)
        # The largest |v| and response of v* after the first measurement, and the share of u that a batch reads.
        self.largest, self.read = [0.0, 0.0], 1.0
        self._ready()
        self.ended()

    # -- when u moves, and how fast --------------------------------------------------------------------------------

    def ended(self) -> None:
        """Let u move if it is time, and set its rate. This is not in a step, because it reads values on the host."""
        if self.taken < self.look_at:
            return
        if not self.moving and not self.fixed and not self._trained():
            self.look_at *= 2
            return
        if not self.moving:
            self.moving, self.began = True, self.taken
        if self.options.upper_optimizer is None:
            self._set_upper_rate(first=self.taken == self.began)
        self.look_at = self.began + max(AGAIN, RARER * (self.taken - self.began))

    def _begin(self, k: int) -> tuple[Any, Tensor]:
        self.taken = k + 1
        draws, left = super()._begin(k)
        if self.options.decay == "root" and self.moving:
            left = left / math.sqrt(1 + (k - self.began) / HALF)
        return draws, left

    def _trained(self) -> bool:
        """Return whether v is trained roughly."""
        agreed, square, largest = self.agreement.tolist()
        return bool(agreed <= max(AGREEMENT * square, FALLEN**2 * largest))

    def _set_upper_rate(self, *, first: bool) -> None:
        """Set the default rates of u, or later the factor on them."""
        response, read = self._response()
        length = self.derivatives.norm([leaf.detach() for leaf in self.v.leaves]).item()
        if not first and math.isfinite(response) and math.isfinite(length):
            self.largest = [max(pair) for pair in zip(self.largest, (length, response), strict=True)]
            length, response = self.largest
        rate = min(PACE * length / response, LARGEST) if 0 < response < math.inf and 0 < length < math.inf else LARGEST
        if first:
            self.read = read
        visit, row = (min(rate / share ** (1 + RARE), REACH) for share in (self.read, self.coverage))
        # Adam enlarges a gradient that is mostly zero by about 1 / sqrt(coverage); RowAdam does not.
        rates = [visit * math.sqrt(self.read), row]
        if first:
            self._write_upper_rate(rates)
            return
        # A recorded step has the first rates as numbers in it; the factor is a tensor.
        before = [base for _, base in self.upper.rates[:1]], [self.upper.row_rate] * bool(self.u.rows)
        self.growth.fill_(min(new / old for new, some in zip(rates, before, strict=True) for old in some))

    def _response(self) -> tuple[float, float]:
        """Return how far v* moves if u takes a step of 1 along its signs, and the share of u that a batch reads."""
        d = self.derivatives
        counts = d.lower_evaluations, d.upper_evaluations
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            raw = self._sample()
            pairs = d.prepare(raw, graph=True)
            exact = d.curvature != "difference"
            each = map(self._pull, pairs) if exact else map(self._pull_by_differences, raw)
            pulls, coverage = zip(*each, strict=True)
            pull = d.mean_over_ranks([torch.stack(parts).mean(0) for parts in zip(*pulls, strict=True)])

            def product(x: list[Tensor]) -> list[Tensor]:
                return d.hessian_product(pairs, x, with_u=False)

            moved, _ = conjugate_gradients(product, pull, d.dot, steps=10, accuracy=0.1)
        d.lower_evaluations, d.upper_evaluations = counts
        return d.norm(moved).item(), max(sum(coverage) / len(coverage), 1e-12)

    def _write_upper_rate(self, rates: Sequence[float]) -> None:
        self.upper.rates = [(rate, rates[0]) for rate, _ in self.upper.rates]
        self.upper.row_rate = rates[1]

    def _pull(self, pair: Pair) -> tuple[list[Tensor], float]:
        """Return g_vu d for the direction d of entries 1 or -1 that u would take, and the share of these entries."""
        d, leaves = self.derivatives, self.v.leaves
        with d.differentiating_u(True) as inputs:
            g, f = d.lower(pair[1]), d.upper(pair[0])
            s = d.gradient(g, leaves, keep_graph=True)
            wrt = inputs()
            found = d.gradient([f, *s], wrt, cotangent=[None, *self.multipliers.nu], retain=True)
            count = len(self.u.leaves)  # a rank can read another part of u than the others
            signs = [part.sign() for part in [*d.mean_over_ranks(found[:count]), *found[count:]]]
            # g_vu d as the derivative of <g_u, d> in v: no operator needs a third derivative.
            pull = d.gradient(d.gradient(g, wrt, keep_graph=True), leaves, cotangent=signs)
        return pull, self._share(signs)

    def _pull_by_differences(self, raw: Pair) -> tuple[list[Tensor], float]:
        """Return the same by a difference of grad_v g at two values of u."""
        d, u = self.derivatives, self.u
        found = d.penalised(d.prepare([raw], graph=True), self._prices, with_u=True)
        signs = [part.sign() for part in found.u]
        moved, shifts = [*u.leaves, *(rows.values for rows in u.rows)], list(signs)
        for rows, parts in zip(u.rows, found.rows, strict=True):
            shifts.append(torch.zeros_like(rows.values))
            for index, part in parts:
                shifts[-1].index_add_(0, index, part.reshape(-1, *rows.values.shape[1:]))
            shifts[-1].sign_()
        size = max((x.detach().square().mean().sqrt().item() for x in moved), default=0.0)
        step = torch.finfo(self.v.dtype).eps ** (1 / 3) * (1 + size)
        state, sides = random_state(self.v.device), []
        for sign in (1.0, -1.0):
            with keeping(moved):
                with torch.no_grad():
                    for x, shift in zip(moved, shifts, strict=True):
                        x.add_(shift, alpha=sign * step)
                set_random_state(state, self.v.device)
                (pair,) = d.prepare([raw], graph=False)
                with d.differentiating_u(False):
                    sides.append(d.gradient(d.lower(pair[1]), self.v.leaves))
        return [(a - b) / (2 * step) for a, b in zip(*sides, strict=True)], self._share(signs)

    def _share(self, signs: list[Tensor]) -> float:
        """Return the share of the entries of u (without Rows) whose sign is not zero."""
        static = signs[: len(self.u.leaves)]
        entries = sum(part.numel() for part in static)
        return sum(part.abs().sum().item() for part in static) / entries if entries else 1.0

    # -- one step ----------------------------------------------------------------------------------------------------

    def _lower_step(self, draw: Draw, left: Tensor, moving: bool) -> None:
        self._move_lower(self.derivatives.penalised(draw, self._prices, with_u=False), left)

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        """Move v and nu (unless `joint` is False) and, if `moving`, u; return the record of the step."""
        d = self.derivatives
        found = d.penalised(draw, self._prices, with_u=True)
        if self.options.joint:
            self._move_lower(found, left)
        found.rows = d.all_rows(found.rows)
        if moving:
            self._move_upper(found, left)
        else:
            self._note(found.slope)
        record = self._record(found.f, found.g, found, d.norm(found.v), d.norm(found.residual), left, moving)
        record[RECORD.index("upper_rate")].mul_(self.growth)
        return record

    def _move_lower(self, found: Gradients, left: Tensor) -> None:
        """Move v against s, and nu against grad_v F."""
        held = self.multipliers
        size = self.derivatives.norm(held.nu) / math.sqrt(self.v.size)
        self.lower.step(found.slope, (), left)
        held.step(found.v, size, left)

    @torch.no_grad()
    def _move_upper(self, gradients: Gradients, left: Tensor) -> None:
        """Move u; with the default optimizer, by a step that promises no large change of f."""
        left = left * self.growth
        if not self.moved:
            self.upper.step(gradients.u, gradients.rows, left)
            return
        if self.options.upper_optimizer is None:
            d, expected = self.derivatives, self.expected
            now = torch.stack([gradients.f.abs(), d.dot(gradients.u, self.moved)]).to(expected)
            expected.lerp_(now, 0.1)
            change = expected[1].abs() * left
            share = (TRUST * expected[0] / change.clamp(min=1e-300)).clamp(max=1.0).to(left.dtype)
            left = left * torch.where(expected[0] > 0, share, 1.0)  # of an f of zero, no share is known
        torch._foreach_copy_(self.moved, self.u.leaves)
        self.upper.step(gradients.u, gradients.rows, left)
        torch._foreach_sub_(self.moved, self.u.leaves)
        torch._foreach_div_(self.moved, -left.clamp(min=torch.finfo(left.dtype).tiny))

    @torch.no_grad()
    def _note(self, slope: list[Tensor]) -> None:
        """Note how far the gradients of successive batches agree."""
        d = self.derivatives
        now = torch.stack([d.dot(slope, self.earlier), d.square(slope)]).detach().to(self.agreement)
        self.agreement[:2].lerp_(now, 0.1)
        self.agreement[2:].copy_(torch.maximum(self.agreement[2:], self.agreement[1:2]))
        torch._foreach_copy_(self.earlier, slope)

    # -- what solve asks -----------------------------------------------------------------------------------------------

    def prices(self) -> Prices:
        return self._prices

    def _tensors(self) -> dict[str, Any]:
        return {
            "multipliers": self.multipliers.tensors(),
            "earlier": self.earlier,
            "agreement": self.agreement,
            "moved": self.moved,
            "expected": self.expected,
            "growth": self.growth,
        }

    def state_dict(self) -> dict[str, Any]:
        rates = [self.upper.rate, self.upper.row_rate]
        counts, measured = [self.look_at, self.began, self.taken], [*self.largest, self.read]
        return super().state_dict() | {"counts": counts, "upper_rates": rates, "measured": measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "multipliers" not in state:
            raise CheckpointError(
                "the checkpoint is of a Penalty() before version 0.2, whose multipliers were not tracked. Start again, "
                "or resume it with that version."
            )
        super().load_state_dict(state)
        self.look_at, self.began, self.taken = state["counts"]
        *self.largest, self.read = state["measured"]
        if self.options.upper_optimizer is None:
            self._write_upper_rate(state["upper_rates"])
