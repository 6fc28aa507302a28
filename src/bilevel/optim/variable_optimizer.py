"""Moves a variable along a gradient: any torch optimizer for its tensors, `RowAdam` for its Rows.

Learning rates are tensors, so that they can follow gamma without a host read: each group's own rate times a factor.

`RowAdam` has moments and bias correction row by row. With m, w the running means of a row's gradient and of its square,
and t the number of times that this row was visited, a visit moves the row by

    rate * (m / (1 - beta1^t)) / (sqrt(w / (1 - beta2^t)) + tiny)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import OptionError
from bilevel.problem import Parts, Projection, Rows, Variable

# `partial(torch.optim.Adam, lr=1e-3)`, or any function from parameters to an optimizer; its groups are kept.
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


def adam(variable: Variable, rate: float, decay: float = 0.0) -> OptimizerFactory:
    """Adam, by the kernel that is fastest on the variable's device: on a CPU the fused one, a third of the time."""
    fused = variable.device.type == "cpu" or None
    if decay:
        return partial(torch.optim.AdamW, lr=rate, weight_decay=decay, fused=fused)
    return partial(torch.optim.Adam, lr=rate, fused=fused)


class VariableOptimizer:
    """`row_rate` is the learning rate of Rows if the factory is not the user's.

    A user's optimizer can define two attributes. `state_starts_at_zero = True` says that all its state is tensors that
    start at zero: engines can then record its steps. `gradient_length(gradient)` is the length by which it scales a
    gradient; by default the root mean square of all entries. It is used only for a variable with a projection.
    """

    def __init__(
        self, variable: Variable, factory: OptimizerFactory, option: str, *, row_rate: float | None = None
    ) -> None:
        self.variable = variable
        self.optimizer = _build(factory, variable.leaves, option) if variable.leaves else None
        self.rates: list[tuple[Tensor, float]] = []
        device = variable.device
        for group in self.optimizer.param_groups if self.optimizer else ():
            base = float(group["lr"])
            # The fused kernel of a GPU reads the rate as float32.
            narrow = device.type == "cuda" and group.get("fused")
            rate = torch.full((), base, dtype=torch.float32 if narrow else variable.dtype, device=device)
            group["lr"] = rate
            if device.type == "cuda" and "capturable" in group:
                group["capturable"] = True
            elif group.get("foreach"):
                group["foreach"] = False  # which refuses a rate that is a tensor
            self.rates.append((rate, base))
        self.row_rate, self.row_optimizers = 0.0, []
        if variable.rows:
            model = _build(factory, [torch.zeros(1, requires_grad=True)], option)
            if not isinstance(model, torch.optim.Adam) or isinstance(model, torch.optim.AdamW):
                raise OptionError(
                    f"{option} must be torch.optim.Adam if the variable holds Rows, which have their own Adam; "
                    f"got {type(model).__name__}."
                )
            group = model.param_groups[0]
            for name in ("weight_decay", "amsgrad", "maximize"):
                if group[name]:
                    raise OptionError(f"{option} must not set {name} if the variable holds Rows; got {group[name]}.")
            self.row_rate = float(group["lr"]) if row_rate is None else row_rate
            self.row_optimizers = [
                RowAdam(rows, betas=tuple(group["betas"]), tiny=group["eps"]) for rows in variable.rows
            ]

    @property
    def rate(self) -> float:
        """The base learning rate: the first group's, or the rate of the Rows."""
        return self.rates[0][1] if self.rates else self.row_rate

    def set_rates(self, rate: float, row_rate: float | None = None) -> None:
        """Set the base learning rate of all groups, and that of the Rows."""
        self.rates = [(held, rate) for held, _ in self.rates]
        self.row_rate = self.row_rate if row_rate is None else row_rate

    @property
    def base_rates(self) -> list[float]:
        """The base learning rate of each group, and that of the Rows."""
        return [*(base for _, base in self.rates), self.row_rate]

    @base_rates.setter
    def base_rates(self, found: Sequence[float]) -> None:
        *bases, self.row_rate = found
        self.rates = [(held, base) for (held, _), base in zip(self.rates, bases, strict=True)]

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], rows: Sequence[Sequence[tuple[Tensor, Tensor]]], factor: Tensor
    ) -> None:
        """Move by one step; `factor` scales every learning rate."""
        if self.optimizer is not None:
            for rate, base in self.rates:
                rate.copy_(factor * base)
            for name, leaf, d in zip(self.variable.names, self.variable.leaves, gradients, strict=True):
                if (projection := self.variable.projection(name)) is not None:
                    length = getattr(self.optimizer, "gradient_length", _root_mean_square)
                    d = _inside(projection, leaf, d, factor * self.rate, length(d))
                # Fused optimizers read the gradient in the parameter's own layout.
                leaf.grad = d if d.stride() == leaf.stride() else torch.empty_like(leaf).copy_(d)
            if not self.optimizer.state:
                self._make_state()
            self._move(self.optimizer)
            for leaf in self.variable.leaves:
                leaf.grad = None
            self.variable.project()
        names = self.variable.row_names
        for name, optimizer, parts in zip(names, self.row_optimizers, rows, strict=False):
            if not parts:
                continue
            values = optimizer.rows.values
            index, d = optimizer.joined(parts)
            projection = self.variable.projection(name)
            if projection is not None:
                d = _inside(projection, values[index], d, factor * self.row_rate, optimizer.length(index, d))
            optimizer.move(index, d, factor.to(values.dtype) * self.row_rate)
            if projection is not None:
                values[index] = projection(values[index])

    def _move(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step. torch's SGD reads a rate that is a tensor on the host, which a GPU would wait for."""
        if not (self._stateless and self.variable.device.type == "cuda"):
            optimizer.step()
            return
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                leaf.addcmul_(leaf.grad, group["lr"], value=-1)

    def row_squares(self, rows: Parts) -> list[Tensor]:
        """Return |gradient|^2 of each Rows with rows that were read."""
        pairs = zip(self.row_optimizers, rows, strict=False)
        return [optimizer.norm_square(parts) for optimizer, parts in pairs if parts]

    def _make_state(self) -> None:
        """Have Adam make its moments before the first step, so that it counts in float64 from there on."""
        if self.optimizer is not None and self.restarts_in_place and not self._stateless:
            held = [leaf.detach().clone() for leaf in self.variable.leaves]
            self.optimizer.step()
            for leaf, value in zip(self.variable.leaves, held, strict=True):
                leaf.copy_(value)
            self.restart()
            self._widen_counters()

    def _widen_counters(self) -> None:
        """Count in float64: computed with on the device, 1 - 0.999^t in float32 is off by 6e-5 at the first steps."""
        for group in self.optimizer.param_groups if self.optimizer else ():
            for state in (self.optimizer.state.get(leaf, {}) for leaf in group["params"]):  # type: ignore[union-attr]
                if not (group.get("fused") and self.variable.device.type == "cuda") and "step" in state:
                    state["step"] = state["step"].double()

    @property
    def restarts_in_place(self) -> bool:
        """Whether an optimizer with zero moments equals a new one."""
        known = type(self.optimizer) in (torch.optim.Adam, _Adam, torch.optim.AdamW) or self._stateless
        return known or getattr(self.optimizer, "state_starts_at_zero", False)

    @property
    def _stateless(self) -> bool:
        """Whether the optimizer is plain gradient descent, which remembers nothing."""
        if type(self.optimizer) is not torch.optim.SGD:
            return False
        return not any(g["momentum"] or g["weight_decay"] or g["maximize"] for g in self.optimizer.param_groups)

    @property
    def recordable(self) -> bool:
        """Whether all that the optimizer's step changes are tensors that start at zero: what an engine can undo."""
        match self.optimizer:
            case None:
                return True
            case torch.optim.SGD():
                return all(group["dampening"] == 0 for group in self.optimizer.param_groups)
            case _:
                others = (torch.optim.RMSprop, torch.optim.Adagrad)
                return self.restarts_in_place or type(self.optimizer) in others

    def restart(self) -> None:
        """Forget the moments."""
        if self.restarts_in_place:
            for tensor in (t for state in self.optimizer.state.values() for t in state.values()):  # type: ignore[union-attr]
                tensor.zero_()
        elif self.optimizer is not None:
            self.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rows": [optimizer.state_dict() for optimizer in self.row_optimizers]}
        if self.optimizer is not None:
            packed = self.optimizer.state_dict()["state"]
            state["optimizer"] = {str(i): dict(values) for i, values in packed.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, values in zip(self.row_optimizers, state["rows"], strict=True):
            optimizer.load_state_dict(values)
        if self.optimizer is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            held = [group["lr"] for group in self.optimizer.param_groups]
            leaves = [leaf for group in self.optimizer.param_groups for leaf in group["params"]]
            restored = {
                int(i): {name: _laid_out(value, leaves[int(i)]) for name, value in values.items()}
                for i, values in state["optimizer"].items()
            }
            self.optimizer.load_state_dict({"state": restored, "param_groups": groups})
            for group, rate in zip(self.optimizer.param_groups, held, strict=True):
                group["lr"] = rate
            if self.restarts_in_place:
                self._widen_counters()


def _laid_out(value: Any, leaf: Tensor) -> Any:
    """A moment in the memory format of its leaf, as fused optimizers take it to be: files hold tensors row by row."""
    if isinstance(value, Tensor) and value.shape == leaf.shape and value.stride() != leaf.stride():
        return torch.empty_like(leaf, dtype=value.dtype).copy_(value)
    return value


def _root_mean_square(gradient: Tensor) -> Tensor:
    return gradient.square().mean().sqrt()


def _inside(projection: Projection, x: Tensor, gradient: Tensor, rate: Tensor, length: Tensor) -> Tensor:
    """Return (x - P(x - t gradient)) / t for a step t about as long as the optimizer's; it is zero at a stationary x.

    `length` is the root mean square of the gradient. Adam scales each entry separately. Without this it would stop at a
    point with the scaled gradient, not the gradient itself, normal to the set.
    """
    t = (rate / length).to(x.dtype)
    t = torch.where((length > 0) & (rate > 0), t, torch.ones_like(t))
    return (x - projection(x - t * gradient)) / t


def _plain(name: str) -> Any:
    """Return a method of Adam without its decorator, which imports torch's compiler: a second of a short run."""
    method = getattr(torch.optim.Adam, name)
    return getattr(method, "__wrapped__", method)


class _Adam(torch.optim.Adam):
    """torch's Adam, whose step is only called under `torch.no_grad`."""

    add_param_group, step = _plain("add_param_group"), _plain("step")
    state_dict, load_state_dict = _plain("state_dict"), _plain("load_state_dict")


def _build(factory: OptimizerFactory, leaves: Sequence[Tensor], option: str) -> torch.optim.Optimizer:
    if isinstance(factory, partial) and factory.func is torch.optim.Adam and not factory.keywords.get("differentiable"):
        factory = partial(_Adam, *factory.args, **factory.keywords)
    optimizer = factory(list(leaves))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"{option} must make a torch optimizer from parameters, as partial(torch.optim.Adam, lr=1e-3) does; "
            f"got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise OptionError(
            f"{option} must take dense gradients and no closure; got {type(optimizer).__name__}. Use Adam or SGD; "
            "without data, mode='deterministic' is L-BFGS."
        )
    return optimizer


class RowAdam:
    """Adam with moments and bias correction per row."""

    def __init__(self, rows: Rows, *, betas: tuple[float, float] = (0.9, 0.999), tiny: float = 1e-8) -> None:
        self.rows, self.betas, self.tiny = rows, betas, tiny
        values = rows.values
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)
        self.visits = torch.zeros(len(values), dtype=torch.int32, device=values.device)
        self._sum = torch.zeros_like(values)

    @torch.no_grad()
    def joined(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return one index of all rows in `parts`, and for each entry the whole gradient of its row.

        A row that is named twice has the sum in both places. Equal entries then compute and write the same numbers:
        no sort, no host read, no dependence on the order of writing.
        """
        index = torch.cat([i for i, _ in parts])
        gradient = torch.cat([g.reshape(-1, *self.mean.shape[1:]) for _, g in parts])
        return index, self._summed(index, gradient)

    @torch.no_grad()
    def norm_square(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the squared norm of the sum of the gradients in `parts`."""
        index, gradient = self.joined(parts)
        return (gradient * gradient / self._summed(index, torch.ones_like(gradient))).sum()

    @torch.no_grad()
    def length(self, index: Tensor, gradient: Tensor) -> Tensor:
        """Return the root mean square of the gradients of `joined`; a row that is named twice counts once."""
        share = 1 / self._summed(index, torch.ones_like(gradient))
        return ((gradient * gradient * share).sum() / share.sum()).sqrt()

    def _summed(self, index: Tensor, values: Tensor) -> Tensor:
        """Return for each entry the sum of the values of its row. The scratch tensor is zero before and after."""
        self._sum.index_add_(0, index, values)
        found = self._sum[index]
        self._sum.index_fill_(0, index, 0.0)
        return found

    def step(self, index: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Move the rows at `index`. A row that is named twice is visited once, with the sum of its gradients."""
        self.move(*self.joined([(index, gradient)]), rate)

    @torch.no_grad()
    def move(self, index: Tensor, g: Tensor, rate: Tensor) -> None:
        """Move the rows by the index and gradients that `joined` returned."""
        values = self.rows.values
        b1, b2 = self.betas
        mean = torch.lerp(g, self.mean[index], b1)
        square = torch.lerp(g * g, self.square[index], b2)
        visits = self.visits[index] + 1
        t = visits.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
        move = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt_() + self.tiny)
        self.mean[index], self.square[index], self.visits[index] = mean, square, visits
        values[index] = values[index] - rate * move

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments and the visits of all rows."""
        return {"mean": self.mean, "square": self.square, "visits": self.visits}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])
