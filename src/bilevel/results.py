"""What comes back from a run: Status, History, Solution, with a `Certificate`."""

from __future__ import annotations

import csv
import enum
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, overload

from torch import Tensor
from typing_extensions import TypeVar

from bilevel._util.atomic_files import atomic_write
from bilevel._util.checks import did_you_mean
from bilevel.certificates import LARGE, Certificate

U = TypeVar("U", default=Any)
V = TypeVar("V", default=Any)

COLUMNS = (
    "step",
    "seconds",
    "upper",
    "lower",
    "grad_u",
    "grad_v",
    "residual",
    "violation",
    "gamma",
    "lam",
    "epsilon",
    "upper_rate",
    "lower_rate",
    "evaluations",
    "advanced",
    "solver",
)
# Other names of columns.
ALIASES = {"f": "upper", "g": "lower"}
# Why the schedule advanced after a step; the history stores the position in this tuple.
REASONS = ("", "tolerance", "smoothed", "steps")
# Which algorithm took a step without data; the history stores the position in this tuple.
SOLVERS = ("", "exact multipliers", "augmented Lagrangian")
# The columns that are stored as positions.
CODED = {"advanced": REASONS, "solver": SOLVERS}


class Status(enum.Enum):
    """How a run ended. The value is the sentence shown to users.

    >>> print(Status.CONVERGED)
    Converged: the certificate is within the tolerance.
    """

    CONVERGED = "Converged: the certificate is within the tolerance."
    STATIONARY = "Stationary, but v does not minimise the lower objective: try other starting points."
    INFEASIBLE = "Stationary, but a constraint is violated: perhaps no point near here is feasible."
    STALLED = "No further progress from here: the certificate says how close the run came."
    MAX_STEPS = "The step budget is spent: see the certificate."
    STOPPED = "Stopped before the end: the state is kept, and the checkpoint, if requested, is written."
    DIVERGED = (
        "Diverged: a value is not finite, or f falls without bound. The last finite state that was kept is restored."
    )

    def __str__(self) -> str:
        return self.value


# What a user can do after each status.
NEXT = {
    Status.CONVERGED: "use u and v, which were updated in place.",
    Status.STATIONARY: "pass starts=4, or start v near a minimum of g.",
    Status.INFEASIBLE: "check the constraints, or pass starts=4 to look for a feasible point.",
    Status.STALLED: "see .certificate; bounds on u (project_upper), starts=4, or more precision can help.",
    Status.MAX_STEPS: "see .certificate and .history; raise max_steps if f or the residual still falls.",
    Status.STOPPED: "call solve again with checkpoint= and resume=True to continue, if a checkpoint was written.",
    Status.DIVERGED: "look at .history before the last step; with data, lower the learning rates; without, bound u.",
}
# The same with data, if it differs.
NEXT_WITH_DATA = {
    Status.STALLED: "see .certificate and .history; raise max_steps, or lower the learning rates.",
    Status.DIVERGED: "look at .history before the last step, and lower the learning rates.",
}
# The same for a run that ended before u began to move.
STILL = "u has not moved, because v was still being trained: raise max_steps, or pass warm_up=0 to the method."


class History:
    """What was recorded of a run: one row for each step. `history["f"]` is a list with one value for each step.

    The columns:

    - `step`, `seconds`: the number of the step, and the time since the start.
    - `f` and `g` (or `upper` and `lower`): the two objectives.
    - `grad_u`, `grad_v`: the norms of the penalised gradients.
    - `residual`: the certificate's `lower_residual`, on a batch.
    - `violation`: the largest constraint violation.
    - `gamma`, `lam`, `epsilon`: the penalty weights and the tolerance of the schedule.
    - `upper_rate`, `lower_rate`: the learning rates; the step length in deterministic mode.
    - `evaluations`: the evaluations of the lower objective so far.
    - `advanced`: the rule that moved the schedule after the step: `tolerance`, `smoothed`, `steps` or an empty string.
    - `solver`: without data, the algorithm that took the step: `exact multipliers` or `augmented Lagrangian`.

    >>> history = History()
    >>> history.append({"step": 1, "upper": 0.5})
    >>> history["f"]
    [0.5]
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {name: array("d") for name in COLUMNS}

    def append(self, row: Mapping[str, float]) -> None:
        for name, column in self._columns.items():
            column.append(row.get(name, 0.0 if name in CODED else math.nan))

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, name: Literal["advanced", "solver"]) -> list[str]: ...  # type: ignore[overload-overlap]

    @overload
    def __getitem__(self, name: str) -> list[float]: ...

    def __getitem__(self, name: str) -> list[Any]:
        name = ALIASES.get(name, name)
        if name not in self._columns:
            known = [*ALIASES, *COLUMNS]
            raise KeyError(f"history has no column {name!r}.{did_you_mean(name, known)} It has {', '.join(known)}.")
        values = self._columns[name]
        if name in CODED:
            return [CODED[name][int(code)] for code in values]
        if name in ("step", "evaluations"):
            return [int(value) for value in values]
        return values.tolist()

    def rows(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows from `start` on, each a dict of its columns."""
        for i in range(start, len(self)):
            row: dict[str, Any] = {name: column[i] for name, column in self._columns.items()}
            row["step"], row["evaluations"] = int(row["step"]), int(row["evaluations"])
            row |= {key: words[int(row[key])] for key, words in CODED.items()}
            yield row

    def truncate(self, length: int) -> None:
        """Forget the rows after the first `length`."""
        for column in self._columns.values():
            del column[length:]

    def to_csv(self, path: str | Path) -> None:
        """Write all rows as a CSV file."""
        with atomic_write(Path(path)) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())

    def to_lists(self) -> list[list[float]]:
        return [column.tolist() for column in self._columns.values()]

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[float]]) -> History:
        history = cls()
        # Lists of version 0.1 have no last column.
        rows = [*lists, [0.0] * len(lists[0])] if len(lists) < len(COLUMNS) else lists
        history._columns = {name: array("d", values) for name, values in zip(COLUMNS, rows, strict=True)}
        return history


@dataclass(frozen=True, repr=False)
class Candidate:
    """The end of one of several starts. u and v are copies: lists with one tensor for each tensor of the variable."""

    u: list[Tensor]
    v: list[Tensor]
    upper: float
    lower: float
    status: Status
    certificate: Certificate
    multipliers: dict[str, list[Tensor]]
    # The number of the first start that ended there; 0 is the point that was passed.
    start: int

    def __repr__(self) -> str:
        return f"Candidate(start={self.start}, {self.status.name}, f={self.upper:.6g}, g={self.lower:.6g})"


@dataclass(frozen=True, repr=False)
class Solution(Generic[U, V]):
    """The end of a run. u and v are the objects that were passed to `solve`, updated in place.

    `print(solution)` shows the status; in a notebook or a shell, the solution shows f, the certificate and what to do
    next.

    Fields:
        u, v: The variables, updated in place.
        status: How the run ended, a `Status`.
        steps: The number of steps.
        mode: `deterministic` or `stochastic`.
        engine: How the steps ran: `eager`, `compile`, `graph` or `compile+graph`.
        history: The recorded columns, such as `history["f"]`.
        certificate: How far the end is from a solution, a `Certificate`.
        multipliers: The multiplier of each condition at the end, by name: `nu` (nu + gamma r, of the lower
            stationarity), `equalities` (mu + gamma_h h) and `inequalities` (max(0, mu + gamma_h h)), the multipliers of
            f + <nu, grad_v g> + <mu, h>. With lower constraints also `lower_equalities` (beta) and
            `lower_inequalities` (alpha >= 0), of grad_v g + <alpha, grad_v c> + <beta, grad_v d> = 0.
        adjoint: -nu - gamma s, the estimate of q = (g_vv)^-1 f_v, one tensor for each tensor of v.
        message: Details that the status does not contain, such as the step and the quantity that diverged. Default:
            empty.
        waiting: The share of the run's time spent waiting for data. Default: 0.
        interrupted: Whether the user pressed Ctrl-C, even if it was too late to stop this run. Default: False.
        ranks: The number of processes that shared the batches. Default: 1.
        bytes_per_step: The bytes that each rank sent to the others, or averaged with them, in a step. Default: 0.
        candidates: With `starts`, the distinct ends of all runs, the best first. Default: none.
        state: The state of the method, to look at. Default: empty.

    >>> import torch
    >>> from bilevel import Penalty, Problem, solve
    >>> u, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> problem = Problem(lambda u, v, _: ((v - 1) ** 2).sum(), lambda u, v, _: ((v - u) ** 2).sum())
    >>> solution = solve(problem, Penalty(), u, v, max_steps=100, seed=0)
    >>> solution.status.name
    'CONVERGED'
    """

    u: U
    v: V
    status: Status
    steps: int
    mode: str
    engine: str
    history: History
    certificate: Certificate
    multipliers: dict[str, list[Tensor]]
    adjoint: list[Tensor]
    message: str = ""
    waiting: float = 0.0
    interrupted: bool = False
    ranks: int = 1
    bytes_per_step: float = 0.0
    candidates: list[Candidate] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return " ".join([self.status.value, *([self.message] if self.message else []), *self._hints()])

    def _hints(self) -> list[str]:
        """Return one or two sentences on what the certificate means for the user."""
        c = self.certificate
        found = []
        if self.status is Status.MAX_STEPS and c.batches:
            found.append(f"With minibatches this is the usual end: f = {c.upper:.4g} on {c.measured_on()}.")
        if self.status in (Status.CONVERGED, Status.DIVERGED):
            return found
        if c.hypergradient_unknown:
            found.append(f"The error of the hypergradient is unknown: {c.hypergradient_unknown}.")
        elif c.hypergradient_error is not None and c.hypergradient_error > LARGE:
            found.append(f"Hypergradient error {c.hypergradient_error:.0%}: {self._cause()}")
        return found

    def _cause(self) -> str:
        """Return the likely reason for a large error of the hypergradient, and what to try."""
        c = self.certificate
        if not c.batches:
            return "v is not at its minimum, or the penalty is low. Try more steps, or ApproxGrad()."
        if (part := c.lower_residual / c.lower_scale) > LARGE:
            return (
                f"v is not at its minimum (|grad_v g| is {part:.0%} of its first size). Try more steps, more "
                "lower_steps, or ApproxGrad()."
            )
        return (
            "the estimate of the adjoint lags behind u, or is noisy. Try more steps, decay='linear', or ApproxGrad()."
        )

    def _ends(self) -> str:
        """Return how many different points the starts ended at, and how far the two best are apart."""
        if len(self.candidates) < 2:
            return "all runs that ended at a solution agree"
        best, other = self.candidates[:2]
        pairs = list(zip((*best.u, *best.v), (*other.u, *other.v), strict=True))
        apart = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs))
        size = math.sqrt(sum(float(a.double().square().sum()) for a, _ in pairs))
        return (
            f"{len(self.candidates)} distinct ends, see .candidates; the two best have f = {best.upper:.6g} and "
            f"{other.upper:.6g}, and differ in (u, v) by {apart / (1 + size):.2g}, relative"
        )

    def __repr__(self) -> str:
        c = self.certificate
        lines = [
            f"Solution: {self.status.name} after {self.steps} steps ({self.mode}, {self.engine})",
            f"  {self}",
            f"  f: {c.upper:.6g}",
            *([f"  measured on: {c.measured_on()}"] if c.batches else []),
            f"  stationarity, relative: {c.relative_stationarity:.2g}",
            f"  lower residual, relative: {c.lower_residual / c.lower_scale:.2g}",
            f"  violation, relative: {c.infeasibility:.2g}",
        ]
        if not c.batches or c.lower_minimiser is not None:  # with data it is not checked
            answer = {None: "not checked", True: "yes", False: "no"}[c.lower_minimiser]
            lines.append(f"  v minimises g: {answer}")
        if c.hypergradient_unknown:
            lines.append(f"  hypergradient error: unknown, {c.hypergradient_unknown}")
        elif c.hypergradient_error is not None:
            fewer = 0 < c.hypergradient_batches < c.batches
            on = f" (on {c.hypergradient_batches} batches)" if fewer else ""
            lines.append(f"  hypergradient error, relative: {c.hypergradient_error:.2g}{on}")
        if self.candidates:
            lines.append(f"  starts: {self._ends()}")
        held = self.mode == "stochastic" and len(self.history) > 0 and max(self.history["upper_rate"]) == 0
        advice = (NEXT | NEXT_WITH_DATA if c.batches else NEXT)[self.status]
        return "\n".join([*lines, f"  Next: {STILL if held else advice}"])
