"""L-BFGS on phi(u) = f(u, v*(u)) for a convex lower level, until phi hardly falls.

phi and its derivative are those of the penalty method with exact multipliers (see
`bilevel.methods.penalty.exact_multipliers`), with the products and the preconditioner of a linear model. A run of
`solve` ends at a stationary point; a descent ends as soon as five steps gain little, which is all that tuning needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel._util.nested import each_tensor
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.errors import ProblemError
from bilevel.measures.lower_minimum import flatten, write
from bilevel.methods.penalty.exact_multipliers import ExactMultipliers
from bilevel.methods.penalty.lower_systems import Curvature
from bilevel.optim.lbfgs import LBFGS
from bilevel.problem import Problem, Variable
from bilevel.running import checkpoints as store
from bilevel.running.run_identity import compare

# Seconds between two checkpoints of a descent.
SAVE_EVERY = 5.0
# Called with the number of steps done and the upper objective.
OnProgress = Callable[[int, float], object]


class Phi(Protocol):
    """phi and its derivative, as a descent calls them.

    `memory` is the number of steps that L-BFGS remembers. `leaves` hold u; a checkpoint also restores `kept`. `finish`
    is called at the end, at the last u.
    """

    evaluations: int
    memory: int

    @property
    def leaves(self) -> Sequence[Tensor]: ...

    @property
    def kept(self) -> Sequence[Tensor]: ...

    def __call__(self, x: Tensor, /) -> tuple[float, Tensor, Any]: ...

    def finish(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Exact(ExactMultipliers):
    """phi of a problem whose lower level is solved by Newton steps."""

    memory = 50

    @property
    def leaves(self) -> Sequence[Tensor]:
        return self.d.u.leaves

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.d.v.leaves

    def finish(self) -> object:
        return self.newton.minimise()


def objective(
    problem: Problem, u: Any, v: Any, curvature: Curvature | None = None, tolerance: float | None = None
) -> _Exact:
    """Return phi and its derivative, for a descent with this tolerance; see `ExactMultipliers` for `curvature`."""
    found = _Exact(PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v")), curvature)
    if tolerance is not None:
        found.adjoint_accuracy = max(1e-5, 0.1 * tolerance)
    return found


def descend(
    exact: Phi,
    *,
    max_steps: int,
    tolerance: float = 1e-5,
    late: Callable[[], bool] = lambda: False,
    on_progress: OnProgress = lambda *_: None,
    begin: Callable[[], object] = lambda: None,
    checkpoint: Path | None = None,
    task: Mapping[str, Any] | None = None,
) -> list[float]:
    """Minimise phi from the present u by L-BFGS, in place; return phi at the start and after each step.

    The descent ends if phi has fallen by less than `tolerance` of itself in five steps, after `max_steps`, or if
    `late()` is true. `begin` is called before each step, `on_progress` after it. The state is saved in the folder
    `checkpoint` every few seconds, and also at the end or if the descent is interrupted. A state in the folder is
    resumed, or refused if its `task` is another.
    """
    search, path, ended = _begun(exact, checkpoint, task or {})
    if ended:
        return path

    def snapshot() -> dict[str, Any]:
        return {
            "task": dict(task or {}),
            "search": search.state_dict(),
            "v": flatten(exact.kept) if exact.kept else None,
            "path": list(path),
            "exact": exact.state_dict(),
            "ended": ended,
        }

    def phi(x: Tensor) -> tuple[float, Tensor, Any]:
        """Return phi and phi'; infinity if it is late, because a line search can take many evaluations."""
        return (math.inf, search.gradient, None) if late() and exact.evaluations > 1 else exact(x)

    state, saved = snapshot(), time.monotonic()
    try:
        while not ended:
            flat = len(path) > 5 and path[-6] - path[-1] <= tolerance * abs(path[-1])
            ended = flat or len(path) > max_steps or (len(path) > 1 and late())
            if not ended:
                begin()
                ended = _hopeless(search, path, 0.1 * tolerance) or not search.iterate(phi)
            if ended:
                write(search.x, exact.leaves)
                exact.finish()
            else:
                path.append(search.value)
            state = snapshot()
            if checkpoint is not None and time.monotonic() - saved >= SAVE_EVERY:
                store.save(checkpoint, state)
                saved = time.monotonic()
            if not ended:
                on_progress(len(path) - 1, search.value)
    finally:
        if checkpoint is not None:
            store.save(checkpoint, state)
    return path


def _hopeless(search: LBFGS, path: Sequence[float], share: float) -> bool:
    """Return True if the predicted decrease is at most this share: below the rounding error no search succeeds.

    The prediction costs a direction: it is made only if the last step gained little.
    """
    value = abs(search.value)
    if len(path) > 1 and path[-2] - path[-1] > 100 * share * value:
        return False
    return -torch.dot(search.gradient, search.direction()).item() <= share * value


def _begun(exact: Phi, checkpoint: Path | None, task: Mapping[str, Any]) -> tuple[LBFGS, list[float], bool]:
    """Return a search, its path and whether it has ended: from the checkpoint if there is one, else a new one."""
    device = exact.leaves[0].device
    if checkpoint is None or not store.exists(checkpoint):
        search = LBFGS.start(exact, flatten(exact.leaves), memory=exact.memory)
        if not search.value == search.value or not bool(torch.isfinite(search.gradient).all()):
            raise ProblemError("the validation loss is not finite at the start. Scale the inputs.")
        size = search.gradient.norm().item()
        search.metric = torch.full_like(search.x, 1.0 / max(size, 1e-12)) if size > 0 else None  # the first move is 1
        return search, [search.value], False
    state = store.load(checkpoint)
    with store.understood(checkpoint):
        compare(state["task"], task, checkpoint)
        state = each_tensor(lambda t: t.to(device), state)
        exact.load_state_dict(state["exact"])
        search = LBFGS(**state["search"])
        write(search.x, exact.leaves)
        if exact.kept:
            write(state["v"], exact.kept)
        return search, list(state["path"]), bool(state["ended"])
