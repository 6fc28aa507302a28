"""Problem and the variable types. This module never differentiates.

min_u f(u, v*)   subject to   equalities(u, v*) = 0,   inequalities(u, v*) <= 0,
    v* = argmin_v g(u, v)   subject to   lower_equalities(u, v) = 0,   lower_inequalities(u, v) <= 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ProblemError, VariableError
from .rows import Home, Rows

Objective = Callable[[Any, Any, Any], Tensor]
"""(u, v, batch) -> Tensor. u and v arrive as they were passed to `solve`; batch is None without data."""
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A bilevel problem: two objectives, and optionally constraints, projections and episodes.

    `upper` (f) and `lower` (g) return one number each. Constraint functions return a tensor of any shape and receive
    the upper batch; `inequalities` mean <= 0. Those of the lower level are part of v's own problem, and with data
    functions of u and v alone: their batch is None. A projection maps a tensor to the nearest point of a convex set; it
    is applied to each tensor of the variable, or, given as a dict, to the tensors it names.

    `prepare(u, batches)` returns what depends on u alone for a pair (upper batch, lower batch); `upper`, `lower` and
    the constraints then receive that in place of their batch. `start_lower(v, prepared)` puts v in place at its start
    before each upper step.

    `trials=n` declares n problems in one: every tensor of u and v has a leading dimension n, and the objectives return
    n numbers, one a trial, which depend on that trial's part of u and v alone.
    """

    upper: Objective
    lower: Objective
    equalities: Sequence[Objective] = ()
    inequalities: Sequence[Objective] = ()
    lower_equalities: Sequence[Objective] = ()
    lower_inequalities: Sequence[Objective] = ()
    project_upper: Projection | Mapping[str, Projection] | None = None
    project_lower: Projection | Mapping[str, Projection] | None = None
    prepare: Callable[[Any, Any], Any] | None = None
    start_lower: Callable[[Any, Any], None] | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise ProblemError(f"{name} must be a function (u, v, batch) -> Tensor; got {getattr(self, name)!r}.")
        for name in ("equalities", "inequalities", "lower_equalities", "lower_inequalities"):
            value = getattr(self, name)
            if not callable(value) and not isinstance(value, (list, tuple)):
                raise ProblemError(f"{name} must be a function or a list of functions; got {value!r}.")
            functions = (value,) if callable(value) else tuple(value)
            for function in functions:
                if not callable(function):
                    raise ProblemError(f"{name} must hold functions (u, v, batch) -> Tensor; got {function!r}.")
            object.__setattr__(self, name, functions)
            if name.startswith("lower_") and functions and self.project_lower is not None:
                raise ProblemError(
                    f"{name} cannot be used with project_lower. State the set of v as lower inequalities, too."
                )
        if self.trials is not None:
            self._refuse_trials(self.trials)

    @property
    def constrained_below(self) -> bool:
        """Whether the lower level has constraints."""
        return bool(self.lower_equalities or self.lower_inequalities)

    def _refuse_trials(self, trials: object) -> None:
        if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
            raise ProblemError(f"trials must be a whole number of at least 1; got {trials!r}.")
        for name in (
            "equalities", "inequalities", "lower_equalities", "lower_inequalities", "project_upper", "project_lower",
            "prepare", "start_lower",
        ):  # fmt: skip
            if getattr(self, name):
                raise ProblemError(f"trials cannot be used with {name}. Leave trials out, and solve them one by one.")


class Variable:
    """u or v: the user's object, and the tensors of it that are optimised.

    `leaves` are the tensors that autograd differentiates; `rows` the `Rows`, whose leaves exist during an evaluation
    only (or, after `make_dense`, are ordinary leaves).
    """

    def __init__(self, value: Any, name: str, projection: Projection | Mapping[str, Projection] | None = None) -> None:
        self.value, self.name = value, name
        self.modules: list[nn.Module] = []
        self._dense_rows: list[tuple[str, Rows, Home | None]] = []
        found: list[tuple[str, Tensor | Rows]] = []
        match value:
            case nn.Module():
                self.modules = [value]
                found = [(key, p) for key, p in value.named_parameters() if p.requires_grad]
                if not found:
                    raise VariableError(
                        f"{name} must have a parameter that requires grad; all parameters of {type(value).__name__} "
                        f"are frozen. Call requires_grad_() on those to be optimised."
                    )
            case Tensor() | Rows():
                found = [("", value)]
            case Mapping() if value:
                found = [(str(key), item) for key, item in value.items()]
            case list() | tuple() if value:
                found = [(str(i), item) for i, item in enumerate(value)]
            case _:
                raise VariableError(
                    f"{name} must be a tensor, a module, Rows, or a dict or list of these tensors (at least one); "
                    f"got {type(value).__name__}."
                )
        for key, item in found:
            _refuse(item, f"{name}[{key!r}]" if key else name)
        self.names = [key for key, item in found if isinstance(item, Tensor)]
        self.leaves = [item for _, item in found if isinstance(item, Tensor)]
        # Of tensors that `fully_shard` has divided among ranks, this rank's shards are what is moved.
        self.shards = [leaf for leaf in self.leaves if hasattr(leaf, "to_local")]
        if self.shards:
            if len(self.shards) < len(self.leaves):
                raise VariableError(f"{name} must be sharded as a whole. Call fully_shard on the whole module.")
            self.leaves = [leaf.detach().to_local().requires_grad_() for leaf in self.shards]  # type: ignore[attr-defined]
        self.row_names = [key for key, item in found if isinstance(item, Rows)]
        self.rows = [item for _, item in found if isinstance(item, Rows)]
        if len({*self.names, *self.row_names}) < len(found):
            raise VariableError(f"{name} must have keys that differ as text; got {[key for key, _ in found]}.")
        self._projection = self._check_projection(projection)

    def _check_projection(self, projection: Projection | Mapping[str, Projection] | None) -> dict[str, Projection]:
        """The projection of each tensor, by its name. Those of Rows act on each row by itself."""
        known = [*self.names, *self.row_names]
        option = {"u": "project_upper", "v": "project_lower"}.get(self.name, "the projection")
        if projection is None:
            return {}
        given = dict(projection) if isinstance(projection, Mapping) else dict.fromkeys(known, projection)
        for key, function in given.items():
            if key not in known:
                has = ", ".join(map(repr, known)) if self.names != [""] else "no names: it is one tensor"
                raise ProblemError(f"{option} names {key!r}, which {self.name} does not have; it has {has}.")
            if not callable(function):
                raise ProblemError(f"{option} must be a function from a tensor to a tensor; got {function!r}.")
        return {key: torch.func.vmap(f) if key in self.row_names else f for key, f in given.items()}

    def make_dense(self) -> None:
        """Turn Rows into ordinary leaves, for what moves or measures all of u at once."""
        for key, rows in zip(self.row_names, self.rows, strict=True):
            self._dense_rows.append((key, rows, rows.gather()))
            self.names.append(key)
            self.leaves.append(rows.values.requires_grad_())
        self.rows, self.row_names = [], []

    def release(self) -> None:
        """Undo `make_dense`."""
        for key, rows, home in self._dense_rows:
            self.names.pop()
            self.leaves.pop().requires_grad_(False)
            if home is not None:  # what was only measured is let go of again
                rows.settle(home)
                rows.let_go()
            self.row_names.append(key)
            self.rows.append(rows)
        self._dense_rows = []

    @property
    def size(self) -> int:
        return sum(leaf.numel() for leaf in self.shards or self.leaves) + sum(r.numel() for r in self.rows)

    @property
    def device(self) -> torch.device:
        return (self.leaves or [self.rows[0].kept])[0].device

    @property
    def dtype(self) -> torch.dtype:
        return (self.leaves or [self.rows[0].kept])[0].dtype

    @property
    def projected(self) -> bool:
        return bool(self._projection)

    def projection(self, name: str) -> Projection | None:
        return self._projection.get(name)

    def project_leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The projection of one tensor for each leaf; those without a projection come back as they are."""
        out = []
        for name, tensor in zip(self.names, tensors, strict=True):
            projection = self._projection.get(name)
            out.append(tensor if projection is None else projection(tensor))
        return out

    @torch.no_grad()
    def project(self, *, rows: bool = False) -> None:
        """Project the leaves in place, and all Rows where asked; a step projects those that it moves."""
        named = list(zip(self.names, self.leaves, strict=True))
        if rows:
            named += [(name, r.kept) for name, r in zip(self.row_names, self.rows, strict=True)]
        for name, leaf in named:
            if (projection := self._projection.get(name)) is not None:
                leaf.copy_(projection(leaf))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that makes up the variable's value, frozen parameters and buffers too, by name.

        Where ranks own rows or v is sharded, this rank's part of it.
        """
        if self.modules:
            module = self.modules[0]
            return dict(module.state_dict(keep_vars=True)) | dict(module.named_buffers())
        named = dict(zip(self.names, self.leaves, strict=True))
        named |= {key: rows.kept for key, rows in zip(self.row_names, self.rows, strict=True)}
        return named

    def buffers(self) -> list[Tensor]:
        """What a forward pass may change besides its result: BatchNorm's statistics."""
        return [buffer for module in self.modules for buffer in module.buffers()]


def _refuse(item: object, where: str) -> None:
    if isinstance(item, Rows):
        return
    if not isinstance(item, Tensor):
        raise VariableError(f"{where} must be a tensor or Rows; got {type(item).__name__}.")
    if item.numel() == 0:
        raise VariableError(f"{where} must hold at least one number; got a tensor of shape {tuple(item.shape)}.")
    if not item.is_floating_point():
        raise VariableError(f"{where} must hold real numbers; got dtype {item.dtype}. Convert it with .float().")
    if not item.requires_grad:
        raise VariableError(
            f"{where} must require grad; got a tensor of shape {tuple(item.shape)} that does not. "
            "Call .requires_grad_() on it first."
        )
    if not item.is_leaf:
        raise VariableError(
            f"{where} must be a leaf tensor; got the result of {item.grad_fn}. Pass .detach().requires_grad_()."
        )
