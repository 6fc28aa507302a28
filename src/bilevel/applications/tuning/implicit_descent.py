"""L-BFGS on phi(u) = f(u, v*(u)) for a convex lower level, until phi hardly falls.

phi and its derivative are those of the penalty method with exact multipliers (see
`bilevel.methods.penalty.exact_multipliers`), with the products and the preconditioner of a linear model. A run of
`solve` ends at a stationary point; a descent ends as soon as five steps gain little, which is all that tuning needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def objective(problem: Problem, u: Any, v: Any, curvature: Curvature | None = None) -> ExactMultipliers:
    """Return phi and its derivative; see `ExactMultipliers` for the last argument."""
    return ExactMultipliers(PenalisedObjective(problem, Variable(u, "u"), Variable(v, "v")), curvature)


def descend(
    problem: Problem,
    u: Any,
    v: Any,
    *,
    max_steps: int,
    tolerance: float = 1e-5,
    late: Callable[[], bool] = lambda: False,
    on_progress: OnProgress = lambda *_: None,
    curvature: Curvature | None = None,
    begin: Callable[[], object] = lambda: None,
    checkpoint: Path | None = None,
    task: Mapping[str, Any] | None = None,
) -> list[float]:
    """Minimise phi from the present u by L-BFGS, in place; return phi at the start and after each step.

    The descent ends if phi has fallen by less than `tolerance` of itself in five steps, after `max_steps`, or if
    `late()` is true. `begin` is called before each step, `on_progress` after it. `curvature` is passed to
    `objective`. The state is saved in the folder `checkpoint` every few seconds, and also at the end or if the
    descent is interrupted. A state in the folder is resumed, or refused if its `task` is another.
    """
    exact = objective(problem, u, v, curvature)
    exact.adjoint_accuracy = max(1e-5, 0.1 * tolerance)
    search, path, ended = _begun(exact, checkpoint, task or {})
    if ended:
        return path

    def snapshot() -> dict[str, Any]:
        return {
            "task": dict(task or {}),
            "search": search.state_dict(),
            "v": flatten(exact.d.v.leaves),
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
                # If the predicted decrease is below the rounding error, a search cannot succeed.
                promised = -torch.dot(search.gradient, search.direction()).item()
                ended = promised <= 0.1 * tolerance * abs(search.value) or not search.iterate(phi)
            if ended:
                write(search.x, exact.d.u.leaves)
                exact.newton.minimise()
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


def _begun(
    exact: ExactMultipliers, checkpoint: Path | None, task: Mapping[str, Any]
) -> tuple[LBFGS, list[float], bool]:
    """Return a search, its path and whether it has ended: from the checkpoint if there is one, else a new one."""
    device = exact.d.u.device
    if checkpoint is None or not store.exists(checkpoint):
        search = LBFGS.start(exact, flatten(exact.d.u.leaves), memory=50)
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
        write(search.x, exact.d.u.leaves)
        write(state["v"], exact.d.v.leaves)
        return search, list(state["path"]), bool(state["ended"])
