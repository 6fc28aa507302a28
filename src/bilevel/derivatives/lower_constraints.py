"""Turn a lower level with constraints into one without: its KKT conditions replace the slope.

With c <= 0 the lower inequalities, d = 0 the lower equalities, and L = g + <alpha, c> + <beta, d>, the conditions are

    s = grad_v L = 0,   d = 0,   phi_t(a, b) = a + b - sqrt(a^2 + b^2 + 2 t^2) = 0   (Fischer-Burmeister, smoothed)

alpha and beta are variables next to u, L replaces g, and d and phi_t are ordinary equalities: F and its derivatives do
not change. a = alpha / k and b = -c / |J_c| with k = |g_vv| / |J_c| have the unit of v, as has beta / k.
phi_t = 0 means a b = t^2 and a, b > 0; t falls with the rounds. Once t is small, pieces replace phi_t:

    active:  b = 0, a >= 0         inactive:  a = 0, b >= 0

These constraints have no kinks and give full accuracy. If a piece ends at a = b = 0 and the multiplier says that f
falls in the neighbouring piece, the run moves there.

The conditions also hold at points that are not lower solutions. Cuts keep v away from these: for each w that was found
to be better than v, g(u, v) <= g(u, w) wherever w meets the lower constraints. They belong to the upper level.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import copy_state
from bilevel._util.random_state import keeping
from bilevel._util.tensor_lists import gradient, norm
from bilevel.problem import Objective, Problem, Variable

# Constraints of up to this many numbers are measured number by number; larger ones share one size.
ROWS = 200
TINY = 1e-12


class Extended(Variable):
    """u together with the scaled multipliers of the lower level, or only these. `value` is the user's u."""

    def __init__(self, u: Variable, more: Sequence[Tensor], *, alone: bool = False) -> None:
        self.value, self.name, self.modules = u.value, u.name, u.modules
        self._dense_rows, self.shards = [], []
        self.rows, self.row_names = ([], []) if alone else (list(u.rows), list(u.row_names))
        self.names = [*(() if alone else u.names), *(f"lower multiplier {i}" for i in range(len(more)))]
        self.leaves = [*(() if alone else u.leaves), *more]
        self._projection = {} if alone else u._projection


class KKT:
    """The constraints of a lower level, their multipliers, and the problem without constraints that they give."""

    def __init__(self, problem: Problem, u: Variable, v: Variable, batch: Any) -> None:
        self.source, self.v, self.plain_u = problem, v, u
        with torch.no_grad():
            c, d = self.constraints(batch)
        self.a, self.b = (
            [torch.zeros(x.shape, dtype=v.dtype, device=v.device, requires_grad=True) for x in values]
            for values in (c, d)
        )
        self.sizes_c, self.sizes_d = [torch.ones_like(x) for x in c], [torch.ones_like(x) for x in d]
        self.bend = 1.0
        self.t = torch.ones((), dtype=v.dtype, device=v.device)
        self.active: list[Tensor] | None = None
        self.cuts = Cuts(self)
        self.gap: float | None = None
        self.gap_starts = 0
        self._sharing = False
        self._shared: tuple[list[int], tuple[Tensor, list[Tensor], list[Tensor]]] | None = None
        self.u = Extended(u, [*self.a, *self.b])
        self.alone = Extended(u, [*self.a, *self.b], alone=True)

    # -- values ------------------------------------------------------------------------------------------------------

    def parts(self, batch: Any, v: Any = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return g, c and d at the present u and v, or at another v."""
        g = self.source.lower(self.plain_u.value, self.v.value if v is None else v, batch).reshape(())
        return (g, *self.constraints(batch, v))

    def constraints(self, batch: Any, v: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        """Return c and d at the present u and v, or at another v."""
        p, u, at = self.source, self.plain_u.value, self.v.value if v is None else v
        return (
            [function(u, at, batch) for function in p.lower_inequalities],
            [function(u, at, batch) for function in p.lower_equalities],
        )

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Evaluate g, c and d once for one gradient of F, and reuse them.

        This holds only while nothing moves u or v; a difference of gradients moves them.
        """
        self._sharing = True
        try:
            yield
        finally:
            self._sharing, self._shared = False, None

    def _made(self) -> tuple[Tensor, list[Tensor], list[Tensor]] | None:
        """Return the cached (g, c, d), or None if caching is off or u or v changed."""
        return self._shared[1] if self._shared is not None and self._shared[0] == self._versions() else None

    def _versions(self) -> list[int]:
        """Return numbers that change whenever u or v does."""
        return [leaf._version for leaf in (*self.plain_u.leaves, *self.v.leaves)]

    def lower_value(self, batch: Any) -> Tensor:
        """Return g at the present point."""
        made = self._made()
        return self.source.lower(self.plain_u.value, self.v.value, batch).reshape(()) if made is None else made[0]

    @property
    def alpha(self) -> list[Tensor]:
        return [a * self.bend / size for a, size in zip(self.a, self.sizes_c, strict=True)]

    @property
    def beta(self) -> list[Tensor]:
        return [b * self.bend / size for b, size in zip(self.b, self.sizes_d, strict=True)]

    @torch.no_grad()
    def write(self, alpha: Sequence[Tensor], beta: Sequence[Tensor]) -> None:
        """Set the multipliers."""
        copy_state(self.a, [x * size / self.bend for x, size in zip(alpha, self.sizes_c, strict=True)])
        copy_state(self.b, [x * size / self.bend for x, size in zip(beta, self.sizes_d, strict=True)])

    def measure(self, batch: Any, curvature: float) -> None:
        """Set the units at the present point, given |g_vv|; |J| of each constraint is measured."""
        slope = norm(gradient(self.parts(batch)[0], self.v.leaves)).item()
        self.bend = max(curvature, slope / (1 + norm(self.v.leaves).item()), TINY)
        nearby = self._secant(batch)
        if self.bend < 1e-3 * nearby:  # g is flat just here
            self.bend = nearby
        self.measure_rows(batch)

    def measure_rows(self, batch: Any) -> None:
        """Measure |J| of each number of each constraint at the present point."""
        c, d = self.constraints(batch)
        self.sizes_c = [self._row_sizes(x) for x in c]
        self.sizes_d = [self._row_sizes(x) for x in d]

    def _secant(self, batch: Any) -> float:
        """Return how much the slope of g changes over a tenth of the size of v, relative to it; 0 if not finite."""
        held = [leaf.detach().clone() for leaf in self.v.leaves]
        root = sum(leaf.numel() for leaf in held) ** 0.5
        step = 0.1 * (1 + norm(held).item()) / root
        first = gradient(self.parts(batch)[0], self.v.leaves)
        found = 0.0
        with keeping(self.v.leaves):
            for sign in (1, -1):
                copy_state(self.v.leaves, [value + sign * step for value in held])
                moved = gradient(self.parts(batch)[0], self.v.leaves)
                change = norm([a - b for a, b in zip(moved, first, strict=True)]).item()
                found = max(found, change / (step * root) if math.isfinite(change) else 0.0)
        return found

    def _row_sizes(self, h: Tensor) -> Tensor:
        """Return |grad h_i| in v for each number of a constraint, or a thousandth of |grad h_i| in u if larger."""

        def size(weight: Tensor) -> float:
            own = [leaf for leaf in self.plain_u.leaves if leaf.requires_grad]
            found = gradient(h, [*self.v.leaves, *own], cotangent=[weight], retain=True)
            count = len(self.v.leaves)
            return max(norm(found[:count]).item(), 1e-3 * norm(found[count:]).item() if own else 0.0, TINY)

        if h.numel() > ROWS:
            weight = torch.full_like(h, h.numel() ** -0.5)
            return torch.full_like(h, size(weight)).detach()
        found = [size(row.reshape(h.shape)) for row in torch.eye(h.numel(), dtype=h.dtype, device=h.device)]
        return torch.tensor(found, dtype=h.dtype, device=h.device).reshape(h.shape)

    # -- the problem ---------------------------------------------------------------------------------------------------

    def problem(self) -> Problem:
        """Return the problem without lower constraints, for the present phase."""
        source = self.source
        own = [self._equality(j) for j in range(len(self.b))]
        own += [self._complementarity(i) for i in range(len(self.a))]
        signs = [self._signs(i, active) for i, active in enumerate(self.active or ())]
        return replace(
            source,
            lower=self._lagrangian,
            equalities=[*source.equalities, *own],
            inequalities=[*source.inequalities, *signs, *self.cuts.functions],
            lower_equalities=(),
            lower_inequalities=(),
        )

    def _lagrangian(self, u: Any, v: Any, batch: Any) -> Tensor:
        g = self.source.lower(self.plain_u.value, self.v.value, batch).reshape(())
        c, d = self.constraints(batch)
        if self._sharing:
            self._shared = self._versions(), (g, c, d)
        for multiplier, value in zip([*self.alpha, *self.beta], [*c, *d], strict=True):
            g = g + torch.sum(multiplier * value)
        return g

    def _equality(self, j: int) -> Objective:
        def equality(u: Any, v: Any, batch: Any) -> Tensor:
            made = self._made()
            return self.source.lower_equalities[j](u, v, batch) if made is None else made[2][j]

        return equality

    def _slack(self, i: int, batch: Any) -> Tensor:
        """Return b_i = -c / |J_c|."""
        made = self._made()
        c = self.source.lower_inequalities[i](self.plain_u.value, self.v.value, batch) if made is None else made[1][i]
        return -c / self.sizes_c[i]

    def _complementarity(self, i: int) -> Objective:
        def smooth(u: Any, v: Any, batch: Any) -> Tensor:
            a, b = self.a[i], self._slack(i, batch)
            if self.active is not None:
                return torch.where(self.active[i], b, a)
            residual: Tensor = a + b - torch.sqrt(a * a + b * b + 2 * self.t**2)
            return residual

        return smooth

    def _signs(self, i: int, active: Tensor) -> Objective:
        return lambda u, v, batch: torch.where(active, -self.a[i], -self._slack(i, batch))

    # -- phases --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def choose_piece(self, batch: Any) -> None:
        """Take a constraint as active if its multiplier is larger than its slack."""
        self.active = [a > self._slack(i, batch) for i, a in enumerate(self.a)]

    @torch.no_grad()
    def wrong(self, batch: Any, pulls: Sequence[Tensor], near: float) -> list[Tensor]:
        """Return the entries with a = b = 0 within `near` for which f falls in the other piece, by its multiplier."""
        found = []
        first = len(self.source.equalities) + len(self.b)
        for i in range(len(self.a)):
            pull = pulls[first + i]
            both = (self.a[i].abs() <= near) & (self._slack(i, batch).abs() <= near)
            # The piece holds b (if active) or a at zero; the other one lets it grow: df = -pull there.
            found.append(both & (pull > 1e-6 * pull.abs().max()))
        return found

    # -- what a certificate says -----------------------------------------------------------------------------------

    def own(self, values: Sequence[Tensor], pulls: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the values and multipliers of the upper level's own constraints, and the number of equalities."""
        equal, less = len(self.source.equalities), len(self.source.inequalities)
        first = equal + len(self.a) + len(self.b)
        kept = [*range(equal), *range(first, first + less)]
        return [values[i] for i in kept], [pulls[i] for i in kept], equal

    @torch.no_grad()
    def measures(self, batch: Any) -> dict[str, Any]:
        """Return the fields of a certificate that concern lower constraints."""
        c, d = self.constraints(batch)
        slacks = [-x / size for x, size in zip(c, self.sizes_c, strict=True)]
        both = [torch.minimum(a, b).abs().amax().item() for a, b in zip(self.a, slacks, strict=True)]
        outside = [(-b).amax().clamp(min=0).item() for b in slacks]
        outside += [(x / size).abs().amax().item() for x, size in zip(d, self.sizes_d, strict=True)]
        return {
            "lower_violation": max(outside),
            "complementarity": max(both, default=0.0),
            "lower_unit": 1 + norm(self.v.leaves).item(),
            "lower_gap": self.gap,
            "lower_starts": self.gap_starts,
        }

    def multipliers(self) -> dict[str, list[Tensor]]:
        return {
            "lower_equalities": [x.detach().clone() for x in self.beta],
            "lower_inequalities": [x.detach().clamp(min=0) for x in self.alpha],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "a": [x.detach() for x in self.a],
            "b": [x.detach() for x in self.b],
            "t": self.t,
            "bend": self.bend,
            "sizes_c": self.sizes_c,
            "sizes_d": self.sizes_d,
            "cuts": list(self.cuts.points),
            "active": [x.to(torch.uint8) for x in self.active or ()],
            "piece": self.active is not None,
            "gap": self.gap,
            "gap_starts": self.gap_starts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_state([*self.a, *self.b], [*state["a"], *state["b"]])
        self.t, self.bend = state["t"].clone(), state["bend"]
        self.sizes_c, self.sizes_d = list(state["sizes_c"]), list(state["sizes_d"])
        self.active = [x.bool() for x in state["active"]] if state["piece"] else None
        self.gap, self.gap_starts = state["gap"], state["gap_starts"]
        self.cuts = Cuts(self)
        for w in state["cuts"]:
            self.cuts.add(w)


class Cuts:
    """The cuts of a run: inequalities at the upper level, in the unit of v."""

    def __init__(self, kkt: KKT) -> None:
        self.kkt = kkt
        self.points: list[Tensor] = []
        # One inequality for each cut.
        self.functions: list[Objective] = []

    def add(self, w: Tensor) -> None:
        """Require g(u, v) <= g(u, w)."""
        value = other(self.kkt.v, w)
        self.points.append(w.clone())
        self.functions.append(self._cut(value, 1 + w.norm().item(), self._moved_by_u(value)))

    @torch.no_grad()
    def violation(self, batch: Any) -> float:
        """Return the largest violation of a cut at the present point; above 0, one of the w is better than v."""
        return max((cut(None, None, batch).item() for cut in self.functions), default=0.0)

    def _cut(self, w: Any, size: float, moved: list[Tensor]) -> Objective:
        kkt = self.kkt

        def cut(u: Any, v: Any, batch: Any) -> Tensor:
            here = kkt.lower_value(batch)
            there, c, d = kkt.parts(batch, w)
            # The cut is also met if w is not feasible at the lower level. Only constraints that u moves can cause this.
            outside = [x / unit for x, unit in zip(c, kkt.sizes_c, strict=True)]
            outside += [(x / unit).abs() for x, unit in zip(d, kkt.sizes_d, strict=True)]
            outside = [x[rows].amax() for x, rows in zip(outside, moved, strict=True) if bool(rows.any())]
            gap = (here - there) / (kkt.bend * size)
            return torch.minimum(gap, 1e-6 - torch.stack(outside).amax()) if outside else gap

        return cut

    @torch.no_grad()
    def _moved_by_u(self, w: Any) -> list[Tensor]:
        """Return which numbers of the lower constraints at w change with u."""
        kkt, generator = self.kkt, torch.Generator().manual_seed(0)
        held = [leaf.detach().clone() for leaf in kkt.plain_u.leaves]
        prepare = kkt.source.prepare

        def values() -> list[Tensor]:
            _, c, d = kkt.parts(None if prepare is None else prepare(kkt.plain_u.value, None), w)
            return [*c, *d]

        first = values()
        found = [torch.zeros_like(x, dtype=torch.bool) for x in first]
        for _ in range(2):
            for leaf, value in zip(kkt.plain_u.leaves, held, strict=True):
                draw = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
                leaf.copy_(value + 0.1 * (1 + value.abs()) * draw)
            found = [old | ~(x == y) for old, x, y in zip(found, first, values(), strict=True)]
        copy_state(kkt.plain_u.leaves, held)
        return found


def other(v: Variable, w: Tensor) -> Any:
    """Return a copy of the user's v that has the numbers w and requires no gradient."""
    twin = Variable(copy.deepcopy(v.value), "v")
    for leaf, part in zip(twin.leaves, torch.split(w, [leaf.numel() for leaf in twin.leaves]), strict=True):
        leaf.requires_grad_(False).copy_(part.reshape(leaf.shape))
    return twin.value
