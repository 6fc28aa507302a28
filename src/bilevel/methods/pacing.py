"""When u begins to move, and how fast, if the number of steps is not known.

u begins to move when v is trained roughly: gradients of successive batches agree as long as v has a way to go. Then the
rate of u is set: its first step is `FIRST`, or shorter, such that the minimum v* of g moves by at most `PACE` of the
size of v. With d the signs of the hypergradient, v* moves by (g_vv)^-1 g_vu d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair, copy_state
from bilevel._util.random_state import keeping, random_state, set_random_state
from bilevel._util.tensor_lists import summed
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.errors import CheckpointError
from bilevel.measures.batch_scales import BatchScales
from bilevel.optim.linear_solvers import conjugate_gradients
from bilevel.optim.variable_optimizer import VariableOptimizer, adam
from bilevel.problem import Variable, together

# The first step of a coordinate of u, unless v* then moves by more than this share of v. A coordinate that only a share
# c of the batches reads moves by c^-RARE of it at a visit.
FIRST, PACE, RARE = 0.03, 0.1, 0.75
# How far a coordinate of u can travel in a known number of steps, at the default rate.
REACH = 5.0
# Rates have fallen by the root of 2 after so many steps of u.
HALF = 100
# The first look at whether v is trained; the next ones are at twice as many steps each.
FIRST_LOOK = 10
# v is trained roughly if successive gradients agree to less than this, or have fallen to this share.
AGREEMENT, FALLEN = 0.3, 0.1
# Products of the conjugate gradients that measure a response, and their accuracy.
PRODUCTS, ACCURACY = 10, 0.1


class Agreement:
    """How far the gradients of successive batches agree: running means of <s, s of the last batch> and |s|^2."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.earlier = [torch.zeros_like(leaf, requires_grad=False) for leaf in like]
        # The two means, and the largest of the second.
        self.means = torch.zeros(3, dtype=torch.float64, device=like[0].device)

    @torch.no_grad()
    def note(self, d: PenalisedObjective, slope: Sequence[Tensor]) -> None:
        """Note grad_v g of a batch. Nothing is read on the host."""
        now = torch.stack([d.dot(slope, self.earlier).sum(), d.square(slope).sum()]).detach().to(self.means)
        self.means[:2].lerp_(now, 0.1)
        self.means[2:].copy_(torch.maximum(self.means[2:], self.means[1:2]))
        torch._foreach_copy_(self.earlier, list(slope))

    def trained(self) -> bool:
        """Return whether v is trained roughly. This reads values on the host."""
        agreed, square, largest = self.means.tolist()
        return bool(agreed <= max(AGREEMENT * square, FALLEN**2 * largest))

    def tensors(self) -> dict[str, Any]:
        return {"earlier": self.earlier, "means": self.means}


class Pace:
    """When u begins to move, its default rates, and how all rates fall.

    Arguments:
        like: The leaves of v.
        decay: "root" or "constant", or "linear", with which a run spends a known number of steps: the default rate of u
            then lets a coordinate move by `REACH`. Otherwise it is measured.
        warm_up: Share of the steps in which only v moves. None: until v is trained roughly.
        steps: The number of steps, which only "linear" and a given `warm_up` use.
        half: With "root", rates have fallen by the root of 2 after so many steps of u.
    """

    def __init__(
        self, like: Sequence[Tensor], *, decay: str, warm_up: float | None, steps: int, half: float = HALF
    ) -> None:
        self.decay, self.steps, self.half = decay, steps, half
        self.warm_up = round((warm_up or 0.0) * steps)
        self.agreement = Agreement(like) if warm_up is None else None
        # The next look at whether v is trained, and the step at which u began to move.
        self.look_at, self.began = FIRST_LOOK, 0
        # The optimizers whose default rates are set when u begins to move: of u, and of what follows it without data.
        self.upper: VariableOptimizer | None = None
        self.followers: list[VariableOptimizer] = []

    @property
    def spends(self) -> bool:
        """Whether the run spends a known number of steps."""
        return self.decay == "linear"

    @property
    def moving_steps(self) -> int:
        """The number of steps that move u, if the number of all steps counts."""
        return max(1, self.steps - self.warm_up)

    def trained(self, taken: int) -> bool:
        """Return whether u begins to move after `taken` steps because v is trained. This reads values on the host."""
        if self.agreement is None or taken < self.look_at:
            return False
        found = self.agreement.trained()
        self.look_at *= 1 if found else 2
        return found

    def left(self, k: int, *, moving: bool) -> float:
        """Return the factor on the learning rates of step k."""
        if self.spends:
            return 1.0 - k / self.steps
        return (1 + (k - self.began) / self.half) ** -0.5 if self.decay == "root" and moving else 1.0

    def upper_descent(self, u: Variable, coverage: float) -> VariableOptimizer:
        """Return Adam at the default rate of u."""
        if not self.spends:
            self.upper = VariableOptimizer(u, adam(u, FIRST), "upper_optimizer")
            return self.upper
        rate, rows = (2 * REACH / max(1.0, self.moving_steps * share) for share in (1.0, coverage))
        return VariableOptimizer(u, adam(u, rate), "upper_optimizer", row_rate=rows)

    def lower_rate(self, measured: BatchScales, *, data: bool) -> float:
        """Return Adam's default rate for a v that descends only g."""
        if not self.spends:
            return measured.lower_rate(measured.lam)
        return max(measured.lower_rate(None), 0.0 if data else 2 * REACH / self.moving_steps)

    def set_rates(self, d: PenalisedObjective, sample: Sequence[Pair], coverage: float, *, data: bool) -> None:
        """Measure the default rates of u. Without data, v is at least as fast, as it follows u."""
        if self.upper is None:
            return
        self.upper.set_rates(*upper_rates(d, sample, coverage, len(self.upper.variable.leaves)))
        for descent in [] if data else self.followers:
            descent.set_rates(max(descent.rate, self.upper.rate))

    def state_dict(self) -> dict[str, Any]:
        paced = [*([] if self.upper is None else [self.upper]), *self.followers]
        rates = [rate for descent in paced for rate in (descent.rate, descent.row_rate)]
        return {"pace": [self.look_at, self.began, *rates]} | (
            {} if self.agreement is None else {"agreement": self.agreement.tensors()}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "pace" in state:  # not in checkpoints of version 0.1, whose rates all spanned `max_steps`
            self.look_at, self.began, *rates = state["pace"]
            paced = [*([] if self.upper is None else [self.upper]), *self.followers]
            for descent, rate, row_rate in zip(paced, rates[::2], rates[1::2], strict=True):
                descent.set_rates(rate, row_rate)
        if self.agreement is None:
            return
        if "agreement" not in state:
            raise CheckpointError(
                "the checkpoint is of version 0.1, in which u moved after a share of the steps. Start again, or "
                "pass the warm_up of that run."
            )
        copy_state(self.agreement.tensors(), state["agreement"])


def upper_rates(d: PenalisedObjective, sample: Sequence[Pair], coverage: float, count: int) -> tuple[float, float]:
    """Return Adam's default rates for the leaves of u and for its Rows, from batches before `prepare`.

    `coverage` is the share of the Rows that a gradient reads; only the first `count` leaves of u move. The evaluations
    are not counted. This reads values on the host.
    """
    leaves = d.v.leaves
    counts = d.lower_evaluations, d.upper_evaluations
    with keeping([*d.v.buffers(), *d.u.buffers()]):
        pairs = d.prepare(sample, graph=True)

        def solved(target: list[Tensor]) -> list[Tensor]:
            def product(x: list[Tensor]) -> list[Tensor]:
                return d.hessian_product(pairs, x, with_u=False)

            return conjugate_gradients(product, target, d.dot, steps=PRODUCTS, accuracy=ACCURACY)[0]

        # v can be far from its minimum, or zero: a Newton step says how large it will be.
        size = d.norm([leaf.detach() for leaf in leaves]) + d.norm(solved(d.slope(pairs)[1]))
        nu = [-x for x in solved(d.direct(d.prepare(sample, graph=False)).v)]
        pulls, shares = zip(*(_pull(d, pair, nu, count) for pair in sample), strict=True)
        moved = solved(d.mean_over_ranks([torch.stack(parts).mean(0) for parts in zip(*pulls, strict=True)]))
    d.lower_evaluations, d.upper_evaluations = counts
    response = (d.norm(moved) / size.clamp(min=1e-300)).amax().item()
    rate = min(PACE / response, FIRST) if response > 0 and math.isfinite(response) else FIRST
    read = max(sum(shares) / len(shares), 1e-12)
    visit, row = (rate / share**RARE for share in (read, coverage))
    # Adam enlarges a gradient that is mostly zero by about 1 / sqrt(coverage); RowAdam does not.
    return visit * math.sqrt(read), row


def _pull(d: PenalisedObjective, pair: Pair, nu: Sequence[Tensor], count: int) -> tuple[list[Tensor], float]:
    """Return g_vu d for the direction d of entries 1 or -1 that u would take, and the share of these entries.

    It is the difference of grad_v g between u and u - t d, projected: no double backward of g in u is needed.
    """
    (made,) = d.prepare([pair], graph=True)
    direct = d.direct([made])
    curved = d.hessian_product([made], nu, with_u=True)
    through = d.to_gradients(direct.f, direct.f, [], [], curved, 1.0, len(nu))
    static = [x.sign() for x in summed([direct.u[:count], through.u[:count]])]
    entries = sum(x.numel() for x in static)
    share = sum(x.abs().sum().item() for x in static) / entries if entries else 1.0
    moves = [(leaf, sign) for leaf, sign in zip(d.u.leaves, static, strict=False)]
    for rows, parts in zip(d.u.rows, d.all_rows(together(direct.rows, through.rows)) if d.u.rows else [], strict=True):
        total = torch.zeros_like(rows.values)
        for index, gradient in parts:
            total.index_add_(0, index, gradient.reshape(-1, *total.shape[1:]))
        moves.append((rows.values, total.sign()))
    length, state = torch.finfo(d.v.dtype).eps ** (1 / 3), random_state(d.v.device)
    _, before = d.slope(d.prepare([pair], graph=False))
    set_random_state(state, d.v.device)
    with keeping([x for x, _ in moves]):
        with torch.no_grad():
            for x, sign in moves:
                x.sub_(length * sign)
            d.u.project(rows=True)
        _, after = d.slope(d.prepare([pair], graph=False))
    return [(a - b) / length for a, b in zip(before, after, strict=True)], share
