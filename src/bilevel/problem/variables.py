"""`Variable`: u or v as a list of leaf tensors, with their names and projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import ProblemError, VariableError
from bilevel.problem.problem import Projection
from bilevel.problem.rows import Rows


class Variable:
    """u or v: the user's object, and the tensors of it that are optimised.

    `leaves` are the tensors that autograd differentiates; `rows` the `Rows`, whose leaves exist during an evaluation
    only (or, after `make_dense`, are ordinary leaves).
    """

    def __init__(self, value: Any, name: str, projection: Projection | Mapping[str, Projection] | None = None) -> None:
        self.value, self.name = value, name
        self.modules: list[nn.Module] = []
        self._dense_rows: list[tuple[str, Rows]] = []
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
                    f"{name} must be a tensor, a module, Rows, or a dict or list of such tensors (at least one); "
                    f"got {type(value).__name__}."
                )
        for key, item in found:
            _refuse(item, f"{name}[{key!r}]" if key else name)
        self.names = [key for key, item in found if isinstance(item, Tensor)]
        self.leaves = [item for _, item in found if isinstance(item, Tensor)]
        # If `fully_shard` has divided the tensors among ranks, a step moves this rank's shards.
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
        """Return the projection of each tensor by its name. Projections of Rows act on each row separately."""
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
        """Turn Rows into ordinary leaves, for code that moves or measures all of u at once."""
        for key, rows in zip(self.row_names, self.rows, strict=True):
            self._dense_rows.append((key, rows))
            self.names.append(key)
            self.leaves.append(rows.values.requires_grad_())
        self.rows, self.row_names = [], []

    def release(self) -> None:
        """Undo `make_dense`."""
        for key, rows in self._dense_rows:
            self.names.pop()
            self.leaves.pop().requires_grad_(False)
            self.row_names.append(key)
            self.rows.append(rows)
        self._dense_rows = []

    @property
    def size(self) -> int:
        return sum(leaf.numel() for leaf in self.shards or self.leaves) + sum(r.numel() for r in self.rows)

    @property
    def device(self) -> torch.device:
        return (self.leaves or [self.rows[0].values])[0].device

    @property
    def dtype(self) -> torch.dtype:
        return (self.leaves or [self.rows[0].values])[0].dtype

    @property
    def projected(self) -> bool:
        return bool(self._projection)

    def projection(self, name: str) -> Projection | None:
        return self._projection.get(name)

    def project_leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Project one tensor for each leaf; tensors without a projection are returned unchanged."""
        pairs = zip(map(self._projection.get, self.names), tensors, strict=True)
        return [tensor if projection is None else projection(tensor) for projection, tensor in pairs]

    @torch.no_grad()
    def project(self, *, rows: bool = False) -> None:
        """Project the leaves in place, and all Rows with `rows`; a step projects the rows that it moves."""
        for name, leaf in self.named(rows=rows):
            if (projection := self._projection.get(name)) is not None:
                leaf.copy_(projection(leaf))

    def named(self, *, rows: bool = True) -> list[tuple[str, Tensor]]:
        """Return the leaves with their names, and by default the values of Rows with theirs."""
        values = [(name, r.values) for name, r in zip(self.row_names, self.rows, strict=True)] if rows else []
        return [*zip(self.names, self.leaves, strict=True), *values]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the variable's value by name, frozen parameters and buffers included.

        If v is sharded, these are this rank's shards.
        """
        if self.modules:
            module = self.modules[0]
            return dict(module.state_dict(keep_vars=True)) | dict(module.named_buffers())
        return dict(self.named())

    def buffers(self) -> list[Tensor]:
        """Return the buffers that a forward pass can change, such as BatchNorm's statistics."""
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
