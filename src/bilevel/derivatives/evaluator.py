"""Evaluate the objectives and constraints of a problem at the current u and v, with their first derivatives.

This module calls the user's functions: in the chosen precision, counted, and with u in the graph only if its derivative
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair, each_tensor
from bilevel._util.tensor_lists import broadcast_trials, dot, gradient, norm, summed
from bilevel.derivatives.mixed_precision import Precision, reduced, widened
from bilevel.derivatives.prices import Gradients, added
from bilevel.errors import ProblemError
from bilevel.problem import Objective, Parts, Problem, Variable


class Evaluator:
    """Evaluates a problem at the current u and v, which it reads in place."""

    def __init__(self, problem: Problem, u: Variable, v: Variable, precision: Precision | None = None) -> None:
        self.problem, self.u, self.v = problem, u, v
        self.precision: Precision | None = precision
        self.lower_evaluations = 0
        self.upper_evaluations = 0
        # The rows of u that the last evaluation read, with their leaves.
        self.row_reads: list[list[tuple[Tensor, Tensor]]] = []
        # The tensors that `prepare` made, each with the leaf that replaces it (see `detach_prepared`).
        self.prepared_leaves: list[tuple[Tensor, Tensor]] = []

    # -- hooks for ranks (see `bilevel.distributed.derivatives`); one process averages nothing

    # The derivative of outputs in leaves: see `bilevel._util.tensor_lists`
    gradient = staticmethod(gradient)
    # Whether each batch is this rank's share of a larger batch.
    shared = False
    # The number of ranks.
    rank_count = 1

    def mean_over_ranks(self, tensors: list[Tensor]) -> list[Tensor]:
        """Average over ranks."""
        return tensors

    def mean_dense_over_ranks(self, found: list[Tensor]) -> list[Tensor]:
        """Average the gradients of the leaves of v and u over ranks. The row gradients that follow stay local."""
        return found

    def mean_gradients_over_ranks(self, found: Gradients) -> Gradients:
        """Average f, g and their derivatives over ranks. Row gradients stay local: see `all_rows`."""
        return found

    def all_rows(self, parts: Parts) -> Parts:
        """Return the rows that any rank read, with their mean gradients."""
        return parts

    def size(self, found: list[Tensor]) -> Tensor:
        """Return the norm of gradients averaged by `mean_dense_over_ranks`, rows included."""
        return norm(found)

    def square(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of tensors shaped like u and then v; with trials, one sum for each trial."""
        return self.dot(tensors, tensors)

    def whole(self, part: Tensor) -> Tensor:
        """Return the sum over the shards of v, if v is divided among ranks."""
        return part

    def mean_over_ranks_async(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Start averaging over ranks; return a function that waits for the result."""
        return lambda: tensors

    # -- values --------------------------------------------------------------------------------------------------

    def lower(self, batch: Any) -> Tensor:
        """Return g, and count the evaluation."""
        self.lower_evaluations += 1
        with self.calling(batch) as given:
            value = self.problem.lower(self.u.value, self.v.value, given)
        return self._scalar(self.returned(value, batch), "lower")

    def upper(self, batch: Any) -> Tensor:
        """Return f, and count the evaluation."""
        self.upper_evaluations += 1
        with self.calling(batch) as given:
            value = self.problem.upper(self.u.value, self.v.value, given)
        return self._scalar(self.returned(value, batch), "upper")

    def calling(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context in which a user's function is called; it yields the batch to pass."""
        return nullcontext(batch) if self.precision is None else reduced(self.precision, self.v.device, batch)

    def returned(self, value: Any, batch: Any) -> Any:
        """Return the value of a user's function in a precision to differentiate in: float32 for half precision."""
        return value if self.precision is None else widened(value)

    def _scalar(self, value: Any, name: str) -> Tensor:
        """Check that an objective returned one number, or one for each trial, and return it."""
        if not isinstance(value, Tensor):
            raise ProblemError(f"{name} must return a tensor; got {type(value).__name__}.")
        if (trials := self.problem.trials) is not None:
            if value.shape != (trials,):
                raise ProblemError(
                    f"{name} must return {trials} numbers, one for each trial; got a tensor of shape "
                    f"{tuple(value.shape)}."
                )
            return value
        if value.numel() != 1:
            raise ProblemError(
                f"{name} must return one number; got a tensor of shape {tuple(value.shape)}. Take its mean or its sum."
            )
        return value.reshape(())

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """Return <a, b>; with trials, one for each trial. Every tensor is shaped like one of u or v."""
        return dot(a, b, trials=self.problem.trials is not None)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm over all tensors; with trials, one for each trial."""
        if self.problem.trials is None:
            return norm(tensors)
        return self.dot(tensors, tensors).detach().sqrt()

    def constraints(self, batch: Any) -> list[Tensor]:
        """Return the values of the upper level's constraints, equalities first."""
        return self._values([*self.problem.equalities, *self.problem.inequalities], batch)

    def lower_constraints(self, batch: Any) -> list[Tensor]:
        """Return the values of the lower level's constraints, equalities first."""
        return self._values([*self.problem.lower_equalities, *self.problem.lower_inequalities], batch)

    def _values(self, functions: Sequence[Objective], batch: Any) -> list[Tensor]:
        found = []
        for function in functions:
            with self.calling(batch) as given:
                value = function(self.u.value, self.v.value, given)
            found.append(self.returned(value, batch))
        return found

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Evaluate in the precision of the variables inside this context."""
        held, self.precision = self.precision, None
        try:
            yield
        finally:
            self.precision = held

    def slope(self, batches: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
        """Return g and s = grad_v g over the batches, without a graph."""
        share = 1.0 / len(batches)
        total: list[Tensor] = []
        with self.differentiating_u(False):
            for _, batch in batches:
                g = self.lower(batch) * share
                part = [g.detach(), *self.gradient(g, self.v.leaves)]
                total = summed([total, part]) if total else part
        return total[0], total[1:]

    def first_order(self, batches: Sequence[Pair], lam: Tensor | None) -> Gradients:
        """Return f, g, h, grad_v f and s over the batches, without curvature; with `lam`, grad_v of f + lam g."""
        share, count = 1.0 / len(batches), len(self.v.leaves)
        h: list[Tensor] = []
        total: list[Tensor] = []
        with self.differentiating_u(False), torch.enable_grad():
            for upper_batch, lower_batch in batches:
                g, f = self.lower(lower_batch) * share, self.upper(upper_batch) * share
                part = [g.detach(), f.detach(), *self.gradient(g, self.v.leaves), *self.gradient(f, self.v.leaves)]
                total = summed([total, part]) if total else part
                with torch.no_grad():
                    values = [x * share for x in self.constraints(upper_batch)]
                h = summed([h, values]) if h else values
        slope, v = total[2 : 2 + count], total[2 + count :]
        if lam is not None:
            v = [x + broadcast_trials(lam, s) * s for x, s in zip(v, slope, strict=True)]
        return Gradients(f=total[1], g=total[0], slope=slope, residual=self.residual(slope), constraints=h, v=v)

    def direct(self, batches: Sequence[Pair], *, with_v: bool = True, lower: bool = False) -> Gradients:
        """Return f, grad_u f and, with `with_v`, grad_v f over the batches; with `lower`, the same of g, not of f."""
        share, count = 1.0 / len(batches), len(self.v.leaves) if with_v else 0

        def part(pair: Pair) -> Gradients:
            with self.differentiating_u(True) as inputs:
                value = (self.lower(pair[1]) if lower else self.upper(pair[0])) * share
                leaves = [*self.v.leaves[:count], *inputs()]
                slopes = self.gradient(value, leaves, retain=self.problem.prepare is not None)
                other = torch.zeros_like(value)
                f, g = (other, value) if lower else (value, other)
                return self.to_gradients(f, g, [], [], slopes, 1.0, count)

        return reduce(added, map(part, batches))

    def residual(self, slope: Sequence[Tensor]) -> list[Tensor]:
        """Return r, given s."""
        if not self.v.projected:
            return list(slope)
        with torch.no_grad():
            moved = self.v.project_leaves([v - s for v, s in zip(self.v.leaves, slope, strict=True)])
            return [v - p for v, p in zip(self.v.leaves, moved, strict=True)]

    def prepare(self, batches: Sequence[Pair], *, graph: bool) -> list[Pair]:
        """Return the batches as `prepare` makes them, with the graph if `graph`."""
        self.prepared_leaves = []
        if self.problem.prepare is None:
            return list(batches)
        with torch.set_grad_enabled(graph), reduced(self.precision, self.v.device):
            made = [
                self.problem.prepare(self.u.value, None if pair[0] is None and pair[1] is None else pair)
                for pair in batches
            ]
        if self.precision is not None:
            made = widened(made)
        return [(item, item) for item in made]

    def detach_prepared(self, batches: Sequence[Pair]) -> list[Pair]:
        """Return the batches with new leaves in place of the tensors that `prepare` made from u.

        Derivatives in u are then followed by derivatives in these leaves. They are summed over all uses, and
        `backward_through_prepare` takes the sum through `prepare`, which can be a large network, once. Tensors that are
        not in a tuple, list or dict stay as they are, and each use goes through `prepare` again.
        """
        if self.problem.prepare is None:
            return list(batches)
        leaves: dict[int, Tensor] = {}

        def leaf(made: Tensor) -> Tensor:
            if not made.requires_grad:
                return made
            if id(made) not in leaves:
                leaves[id(made)] = made.detach().requires_grad_()
                self.prepared_leaves.append((made, leaves[id(made)]))
            return leaves[id(made)]

        return [each_tensor(leaf, pair) for pair in batches]

    def backward_through_prepare(self, found: list[Tensor]) -> list[Tensor]:
        """Return the derivative in u, given the derivatives in the leaves of u and of `detach_prepared`."""
        count, made = len(self.u.leaves), [tensor for tensor, _ in self.prepared_leaves]
        self.prepared_leaves = []
        if not made:
            return found
        through = self.gradient(made, self.u.leaves, cotangent=found[count:])
        return summed([found[:count], self.mean_over_ranks(through)])

    def to_gradients(
        self, f: Tensor, g: Tensor, slope: list[Tensor], h: list[Tensor], found: list[Tensor], share: float, count: int
    ) -> Gradients:
        """Return `Gradients` from derivatives in `count` leaves of v, the leaves of u and of `prepare`, and rows."""
        static = len(self.u.leaves) + len(self.prepared_leaves) if len(found) > count else 0
        rest = iter(found[count + static :])
        rows = [[(index, next(rest)) for index, _ in tape] for tape in self.row_reads] if len(found) > count else []
        return Gradients(
            f=f.detach() * share,
            g=g.detach() * share,
            slope=slope,
            residual=self.residual(slope) if slope else [],
            constraints=h,
            v=found[:count],
            u=found[count : count + static],
            rows=rows,
        )

    @contextmanager
    def differentiating_u(self, with_u: bool) -> Iterator[Callable[[], list[Tensor]]]:
        """Put u in the graph only if `with_u`. Yields a function that lists its leaves after they were read."""
        self.row_reads = []
        if with_u:
            for rows in self.u.rows:
                rows.start_tape()

            def inputs() -> list[Tensor]:
                self.row_reads = [rows.tape() for rows in self.u.rows]
                read = (leaf for tape in self.row_reads for _, leaf in tape)
                return [*self.u.leaves, *(leaf for _, leaf in self.prepared_leaves), *read]

            try:
                yield inputs
            finally:
                for rows in self.u.rows:
                    rows.stop_tape()
        else:
            for leaf in self.u.leaves:
                leaf.requires_grad_(False)
            try:
                yield list
            finally:
                for leaf in self.u.leaves:
                    leaf.requires_grad_(True)
