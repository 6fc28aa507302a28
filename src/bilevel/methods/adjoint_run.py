"""The run of the methods that keep an estimate of the adjoint q, the solution of g_vv q = f_v.

F = f - <q, grad_v g> with q held fixed has the derivatives f_v - g_vv q and f_u - g_uv q: the residual of the system,
and the hypergradient that q gives. One evaluation of f and of g gives both.
"""

from __future__ import annotations

from torch import Tensor

from bilevel._util.random_state import keeping
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.measures.batch_scales import largest_curvature
from bilevel.methods.minibatch_run import MinibatchRun


class AdjointRun(MinibatchRun):
    """A run of upper iterations with an estimate of the adjoint, which changes in place."""

    q: list[Tensor]

    def _shortest(self) -> float:
        """Return 1 over the largest curvature of g on the first batches, a safe rate for v and for q."""
        with keeping([*self.v.buffers(), *self.u.buffers()]):
            pairs = self.derivatives.prepare(self._sample(), graph=False)
            return 1.0 / largest_curvature(self.derivatives, pairs, self.context.generator).amax().item()

    def _move_u(self, found: Gradients, left: Tensor) -> Tensor:
        """Move u along the derivative of F; return the record."""
        d = self.derivatives
        found.rows = d.all_rows(found.rows)
        self.upper.step(found.u, found.rows, left)
        return self._record(found.f, found.g, found, d.norm(found.v), d.norm(found.slope), left, True)

    def prices(self) -> Prices:
        """Return `Prices` with nu = -q, which give the derivatives of F."""
        return self._adjoint_prices([q.detach() for q in self.q])
