"""SRBA, the stochastic recursive bilevel algorithm: the steps of SOBA along directions without the noise of a batch.

    every `period` steps:  d = D(z) on all data            otherwise:  d <- d + D(z) - D(z of the step before)
    z <- z - (rho, rho, sigma) d       for z = (v, q, u) and D = (grad_v g, g_vv q - f_v, f_u - g_uv q)

Dagréou, Moreau, Vaiter and Ablin, *A lower bound and a near-optimal algorithm for bilevel empirical risk minimization*,
2023. Both D in the second line are on the same pair of batches, so that d varies less the less z moves, and the rates
can stay constant. SABA, of the same authors, needs no pass over all data, but a gradient in v, q and u for each batch,
of batches that never change; shuffled batches do, and 300 batches would need 300 times the memory of u and v. SRBA
keeps two copies of u, v and q. The two D have different dropout masks: do not use dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import check_counts
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import difference, summed
from bilevel.batches.sources import Source, known_length
from bilevel.derivatives.prices import Gradients
from bilevel.errors import DataError, OptionError
from bilevel.measures.batch_scales import BatchScales
from bilevel.methods.base import MethodState, RunContext, copy_state
from bilevel.methods.minibatch_run import Draw
from bilevel.methods.options import Decay
from bilevel.methods.single_loop import SingleLoopOptions, SingleLoopRun


@dataclass(frozen=True, kw_only=True, repr=False)
class SRBA(SingleLoopOptions):
    """SRBA: the steps of SOBA with variance reduction, for data that can be read again and again.

    A step evaluates f and g at two points, so twice each; every `period` steps it takes a pass over all data instead.

    Options:
        lower_rate: First rate rho of the plain gradient steps on v and q. Default: 1 over the largest curvature of g on
            the first batches.
        upper_rate: First rate of plain gradient steps on u. Default: Adam moves u instead (see `upper_optimizer`).
        decay: "constant" (default): the rates stay. "root": they are multiplied by t^(-1/2) in step t. "linear": they
            fall to zero over `max_steps`.
        lower_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-3)` for v, and again for q. Default:
            torch.optim.SGD with `lower_rate`.
        upper_optimizer: Factory such as `partial(torch.optim.Adam, lr=1e-2)` for u. Default: SGD with `upper_rate` if
            that is given; otherwise Adam, with a first step of 0.03 or less, or, with decay="root", of 1, or, with
            decay="linear", with a rate that lets each coordinate move by 5.
        period: Number of steps from one pass over all data to the next. Default: the number of batches in both
            sources, so that passes take about a third of the time.

    >>> SRBA(period=500)
    SRBA(period=500)
    """

    decay: Decay = "constant"
    period: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(period=self.period)

    def init(self, context: RunContext) -> MethodState:
        """Start a run; `solve` calls this."""
        return _Run(self, context)


class _Run(SingleLoopRun):
    """A run of `SRBA`.

    A pass over all data evaluates f once on each upper batch, and g twice on each lower batch. Other steps evaluate f
    and g twice.
    """

    options: SRBA
    like_v = (*SingleLoopRun.like_v, *(f"{state}/{name}" for state in ("previous", "direction") for name in ("v", "q")))

    def _start(self, measured: BatchScales) -> None:
        if self.u.rows or self.problem.prepare is not None:
            raise OptionError(
                f"SRBA cannot use {'Rows' if self.u.rows else 'prepare'}, as it keeps the whole derivative of f and of "
                "g in u. Use SOBA."
            )
        counts = [self._count(source) for source in self.context.sources.pair or ()]
        self.period = self.options.period or max(1, sum(counts) // self.context.accumulate)
        z = {"v": self.v.leaves, "q": self.q, "u": self.u.leaves}
        # z of the step before, and d.
        self.previous, self.direction = (
            {name: [torch.zeros_like(x, requires_grad=False) for x in tensors] for name, tensors in z.items()}
            for _ in range(2)
        )
        self.present = z

    def _count(self, source: Source) -> int:
        if (count := known_length(source.items)) is None:
            raise DataError(
                f"SRBA reads all data again every `period` steps, so the {source.name} data must have a length, as a "
                f"list or a DataLoader over a Dataset has; got {type(source.items).__name__}. Use SOBA."
            )
        return count

    def step(self, k: int) -> Tensor:
        if k % self.period:
            return super().step(k)
        _, left = self._begin(k)
        return self._stepped(self._along(self._on_all_data(), left))

    def _on_all_data(self) -> Gradients:
        """Return D as the mean over the batches of a pass."""
        d, count, q = self.derivatives, len(self.v.leaves), [x.detach() for x in self.q]
        if not self.context.sources:
            return d.penalised([(None, None)], self.prices(), with_u=True)

        def of_f(batch: Any) -> list[Tensor]:
            found = d.direct([(batch, None)])
            return [found.f, *found.v, *found.u]

        def of_g(batch: Any) -> list[Tensor]:
            g, slope = d.slope([(None, batch)])
            return [g, *d.hessian_product([(None, batch)], q, with_u=True), *slope]

        upper, lower = self.context.sources.first_passes()
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            f, *slopes = _mean(of_f, upper)
            g, *curved = _mean(of_g, lower)
        slope = curved[len(slopes) :]
        total = difference(slopes, curved[: len(slopes)])
        return Gradients(f=f, g=g, slope=slope, residual=slope, constraints=[], v=total[:count], u=total[count:])

    def _upper_step(self, draw: Draw, left: Tensor, moving: bool) -> Tensor:
        d, direction = self.derivatives, self.direction
        new = d.penalised(draw, self.prices(), with_u=True)
        with self._at(self.previous["v"], self.previous["u"]):
            old = d.penalised(draw, self._adjoint_prices(self.previous["q"]), with_u=True)
        slope = summed([direction["v"], difference(new.slope, old.slope)])
        found = replace(
            new,
            slope=slope,
            residual=slope,
            v=summed([direction["q"], difference(new.v, old.v)]),
            u=summed([direction["u"], difference(new.u, old.u)]),
        )
        return self._along(found, left)

    def _along(self, found: Gradients, left: Tensor) -> Tensor:
        """Keep z and d, and move along d."""
        copy_state(self.direction, {"v": found.slope, "q": found.v, "u": found.u})
        copy_state(self.previous, self.present)
        return self._move(found, left)

    def _tensors(self) -> dict[str, Any]:
        return super()._tensors() | {"previous": self.previous, "direction": self.direction}


def _mean(evaluate: Callable[[Any], list[Tensor]], batches: Iterable[Any]) -> list[Tensor]:
    """Return the mean of lists of tensors over the batches."""
    total: list[Tensor] = []
    count = 0
    for batch in batches:
        found = evaluate(batch)
        total, count = summed([total, found]) if total else found, count + 1
    return [x / count for x in total]
