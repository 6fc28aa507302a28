"""Clean-label points of many targets in one tensor: attacks, retrained victims, and the smallest epsilons.

The problems of the targets share only their feature map: f and g are sums over targets, and every penalty weight,
schedule and learning rate is fixed in advance, so that targets are independent. A point is u_i = b_i + epsilon_i w_i.

    f = sum_i  l(h(t_i; v_i), wanted_i) + c |r(u_i) - r(t_i)|^2         |w_i|^2 - 1 <= 0, with a multiplier
    g = sum_i  mean over the photographs and u_i of l(h(.; v_i), .)     (Eq. 12, the term squared as in Section 3.4)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from bilevel import Box, OptionError, Penalty, Problem, solve
from bilevel.applications.poisoning.attack import Poison, made
from bilevel.applications.poisoning.goals import Bound, Goal, Within, drawn_back
from bilevel.applications.poisoning.victims import Features, mapped
from bilevel.applications.training import refuse_end
from bilevel.engines.engine import Engines
from bilevel.optim.variable_optimizer import OptimizerFactory, VariableOptimizer, adam
from bilevel.problem.variables import Variable

LOW, HIGH = -1.0, 1.0
# The weight of a bound in units of f at the base, for h of size one.
STIFFNESS = 10.0


@dataclass(frozen=True)
class Targets:
    """Some targets on a device: their features and labels, and the bases where their points start."""

    rows: Tensor
    labels: Tensor
    features: Tensor
    bases: Tensor
    base_rows: Tensor
    wanted: Tensor

    def only(self, which: Tensor | slice) -> Targets:
        """Return some of them."""
        return Targets(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def filled(count: int, multiple: int) -> Tensor:
    """Return 0 to count - 1, with the last one repeated up to a multiple.

    A GPU searches for kernels for each batch size, so there should be few sizes.
    """
    return torch.arange(-(-count // multiple) * multiple).clamp(max=count - 1)


@dataclass(frozen=True)
class Clean:
    """The training of the victims: features and labels of the photographs, first weights, steps and rate."""

    features: Tensor
    labels: Tensor
    # (features, classes)
    weight: Tensor
    bias: Tensor
    steps: int
    rate: float

    @cached_property
    def victim(self) -> tuple[Tensor, Tensor]:
        """The weight and bias of one victim trained on the photographs only, with a leading dimension of one."""
        return trained(self, None, self.labels[:1], 1)


def scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the scores (targets, rows, classes) of rows that all victims see."""
    return x @ weight + bias[:, None]


def own_scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the scores (targets, classes) of one row for each victim."""
    return (x[:, None] @ weight)[:, 0] + bias


def lower_values(clean: Clean, z: Tensor | None, labels: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return g of each victim: the mean loss over the photographs and its point, or only over the photographs."""
    rows, count = len(clean.labels), len(weight)
    of_rows = scores(clean.features, weight, bias)
    losses = cross_entropy(of_rows.flatten(0, 1), clean.labels.repeat(count), reduction="none").view(count, rows).sum(1)
    if z is None:
        return losses / rows
    return (losses + cross_entropy(own_scores(z, weight, bias), labels, reduction="none")) / (rows + 1)


def trained(clean: Clean, z: Tensor | None, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Train victims from the first weights, each on the photographs and its point.

    Adam takes all rows, and its rate falls to zero, as in `bilevel.applications.training.fit` for one victim.
    """
    weight = clean.weight.expand(count, -1, -1).clone().requires_grad_()
    bias = clean.bias.expand(count, -1).clone().requires_grad_()
    v = Variable([weight, bias], "victims")
    descent = VariableOptimizer(v, adam(v, clean.rate), "optimizer")

    def step(left: Tensor) -> None:
        values = lower_values(clean, z, labels, weight, bias)
        descent.step(torch.autograd.grad(values.sum(), v.leaves), (), left)

    repeat(step, clean.steps, v.leaves, descent)
    return weight.detach(), bias.detach()


class Steepest(torch.optim.Optimizer):
    """Steepest descent in the Euclidean norm: moves each row (the first dimension) along the mean of its gradients.

    The gradients are scaled to the same length, and a row moves by at most `lr` in the root mean square of its entries.
    `momentum` is the share of the mean that a step keeps. Adam gives every entry a step of the same size, so that under
    a bound on the Euclidean length it spends that length on entries that gain little.
    """

    state_starts_at_zero = True  # so that the engines can record it

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is None:
                    continue
                state = self.state[leaf]
                if not state:
                    state["mean"] = torch.zeros_like(leaf)
                even = leaf.grad / row_lengths(leaf.grad).clamp(min=torch.finfo(leaf.dtype).tiny)
                state["mean"].lerp_(even, 1 - group["momentum"])
                leaf.sub_(group["lr"] * state["mean"])

    @staticmethod
    def gradient_length(gradient: Tensor) -> Tensor:
        """Return the length of each row: a variable with a projection moves row by row."""
        return row_lengths(gradient)


def row_lengths(x: Tensor) -> Tensor:
    """Return the root mean square of each row, in a shape that can divide x."""
    return x.square().mean(tuple(range(1, x.ndim)), keepdim=True).sqrt() if x.ndim > 1 else x.abs()


def mover(options: Mapping[str, Any], bases: Tensor) -> OptimizerFactory:
    """Return the optimizer of the points. `rate` is the length of a step for bounds of length one."""
    kind = Steepest if options.get("points") == "steepest" else torch.optim.Adam
    return partial(kind, lr=float(options["rate"]) / bases[0].numel() ** 0.5)


def penalty(
    targets: Targets, clean: Clean, features: Features, epsilons: Tensor, *, steps: int, options: Mapping[str, Any]
) -> Tensor:
    """Return points by the penalty method, not yet projected into their bounds."""
    count = len(targets.labels)
    factor = epsilons.view(-1, 1, 1, 1)
    weight, bias = (leaf.repeat(count, *[1] * (leaf.ndim - 1)).requires_grad_() for leaf in clean.victim)
    collision = float(options["collision"])
    with torch.no_grad():
        apart = ((features(targets.bases) - targets.features) ** 2).sum(1)
        first = cross_entropy(own_scores(targets.features, weight, bias), targets.wanted, reduction="none")
        stiff = (STIFFNESS * (first + collision * apart)).sqrt()
    kept: list[Tensor] = []

    def prepare(w: Tensor, batches: object) -> Tensor:
        if torch.is_grad_enabled():
            return features(targets.bases + factor * w)
        if not kept or not torch.equal(kept[0], w):  # the certificate needs the same points many times
            kept[:] = [w.detach().clone(), features(targets.bases + factor * w)]
        return kept[1]

    def upper(w: Tensor, v: list[Tensor], z: Tensor) -> Tensor:
        wrong = cross_entropy(own_scores(targets.features, *v), targets.wanted, reduction="sum")
        return wrong + collision * ((z - targets.features) ** 2).sum()

    def lower(w: Tensor, v: list[Tensor], z: Tensor) -> Tensor:
        return lower_values(clean, z, targets.wanted, v[0], v[1]).sum()

    def outside(w: Tensor, v: list[Tensor], z: Tensor) -> Tensor:
        return stiff * ((w * w).flatten(1).sum(1) - 1)

    problem = Problem(
        upper,
        lower,
        inequalities=[outside],
        prepare=prepare,
        project_upper=Box((LOW - targets.bases) / factor, (HIGH - targets.bases) / factor),
    )
    method = Penalty(
        mode="stochastic",
        warm_up=0.0,
        lower_steps=int(options["T"]),
        gamma=float(options["gamma"]),
        lam=float(options["lam"]),
        gamma_h=1.0,
        decay="linear",
        lower_batches="shared",
        upper_optimizer=mover(options, targets.bases),
        lower_optimizer=partial(torch.optim.Adam, lr=float(options["lower_rate"])),
    )
    w = torch.zeros_like(targets.bases).requires_grad_()
    found = solve(problem, method, w, [weight, bias], max_steps=steps, log_every=steps, hypergradient=False)
    refuse_end(found, "attack", f". {found.message}")
    return targets.bases + factor * w.detach()


def collision_alone(
    targets: Targets, features: Features, epsilons: Tensor, *, steps: int, options: Mapping[str, Any]
) -> Tensor:
    """Return points by the collision term only, without a lower level.

    The optimizer is Penalty's, with a projection at every step.
    """
    factor = epsilons.view(-1, 1, 1, 1)
    w = torch.zeros_like(targets.bases).requires_grad_()
    descent = VariableOptimizer(Variable(w, "points"), mover(options, targets.bases), "optimizer")
    box = Box((LOW - targets.bases) / factor, (HIGH - targets.bases) / factor)

    def step(left: Tensor) -> None:
        apart = ((features(targets.bases + factor * w) - targets.features) ** 2).sum()
        descent.step(torch.autograd.grad(apart, [w]), (), left)
        with torch.no_grad():
            w.copy_(drawn_back(box(w), torch.zeros_like(w), 1.0))

    repeat(step, steps, [w], descent)
    return targets.bases + factor * w.detach()


def algorithm_1(
    targets: Targets, features: Features, epsilons: Tensor, *, steps: int, rate: float = 0.01, beta: float = 0.1
) -> Tensor:
    """Return points by Algorithm 1 of Shafahi et al., projected into box and bound at every step.

    See `collide` for the formula.
    """
    u = targets.bases.clone()

    def step(_: Tensor) -> None:
        x = u.detach().requires_grad_()
        (slope,) = torch.autograd.grad(((features(x) - targets.features) ** 2).sum(), x)
        with torch.no_grad():
            moved = (u - rate * slope + rate * beta * targets.bases) / (1 + rate * beta)
            u.copy_(drawn_back(moved.clamp(LOW, HIGH), targets.bases, epsilons))

    repeat(step, steps, [u])
    return u


def settled(u: Tensor, bases: Tensor, epsilons: Tensor) -> Tensor:
    """Return the points, moved exactly into box and bound."""
    parts = zip(u, bases, epsilons.tolist(), strict=True)
    return torch.cat([Within(b[None], LOW, HIGH, Bound(epsilon)).settled(point[None]) for point, b, epsilon in parts])


def flipped(targets: Targets, clean: Clean, features: Features, u: Tensor) -> Tensor:
    """Return whether victims, retrained on the photographs and their points, give their targets another class."""
    with torch.no_grad():
        z = features(u)
    victims = trained(clean, z, targets.wanted, len(u))
    return own_scores(targets.features, *victims).argmax(1) != targets.labels


def smallest_of_many(
    count: int, values: tuple[int, ...], flips: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[int | None], list[list[tuple[int, bool]]]]:
    """Return, for each target, the smallest of rising values that flips it, and the values that were tried.

    The bisections of all targets run at the same time: `flips(which, values)` answers for the targets `which`, each
    with its value. Sixteen values take four rounds, and a fifth if the largest does not flip a target.
    """
    low, high = [-1] * count, [len(values)] * count
    tried: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
    while ask := {i: (low[i] + high[i]) // 2 for i in range(count) if high[i] - low[i] > 1}:
        which = torch.tensor(list(ask))
        answers = flips(which, torch.tensor([float(values[k]) for k in ask.values()])).tolist()
        for (i, k), answer in zip(ask.items(), answers, strict=True):
            tried[i].append((values[k], bool(answer)))
            if answer:
                high[i] = k
            else:
                low[i] = k
    return [values[h] if h < len(values) else None for h in high], tried


def collide(
    goal: Goal,
    *,
    features: Features | None = None,
    box: tuple[float | Tensor | None, float | Tensor | None] = (0.0, 1.0),
    bound: Bound | None = None,
    steps: int = 2000,
    rate: float = 0.01,
    beta: float = 0.1,
    device: torch.device | str = "cpu",
) -> Poison:
    """Return points of a clean-label goal by feature collision: they move to the target's features from its bases.

    Forward-backward splitting with base b, target t and features r, without regard to the victim's training:

        u <- u - rate grad |r(u) - r(t)|^2,        u <- (u + rate beta b) / (1 + rate beta)

    Shafahi et al., *Poison frogs! Targeted clean-label poisoning attacks on neural networks*, NeurIPS 2018,
    Algorithm 1. With a bound, a projection follows each step, as in the paper's comparison (Appendix E.4: beta 0.1,
    rate 0.01, 2,000 steps).
    """
    if goal.collide is None:
        raise OptionError(f"feature collision needs a goal with a target, as clean_label makes; got {goal.name!r}.")
    began = time.perf_counter()
    where = torch.device(device)
    base = goal.base.to(where)
    low, high = (edge.to(base) if isinstance(edge, Tensor) else edge for edge in box)
    within = Within(base, low, high, bound)
    project = within.projection(multipliers=False) or (lambda u: u)
    wanted = mapped(features, goal.collide.to(base), where)
    u = base.clone()
    for _ in range(steps):
        u.requires_grad_()
        apart = ((u if features is None else features(u)) - wanted) ** 2
        (slope,) = torch.autograd.grad(apart.sum(), u)
        with torch.no_grad():
            u = project((u - rate * slope + rate * beta * base) / (1 + rate * beta))
    settings: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "beta": beta,
        "epsilon": bound and bound.epsilon,
        "norm": bound and bound.norm,
        "method": "feature collision",
    }
    return made(goal, within.settled(u).cpu(), None, time.perf_counter() - began, settings)


def repeat(
    step: Callable[[Tensor], None], count: int, moved: Sequence[Tensor], descent: VariableOptimizer | None = None
) -> None:
    """Call step(1), step(1 - 1/count), ..., step(1/count). The argument is the factor of a rate that falls to zero.

    A step changes only the tensors `moved`, and the state of `descent` if there is one. It reads no value on the host.
    """
    like = moved[0]
    engines = Engines("graph" if like.is_cuda else "eager", _Host(moved, descent), gradients=count)
    for left in (1 - torch.arange(count, dtype=like.dtype, device=like.device) / count).unbind():
        engines.outer.wrap(step)(left)


def let_go(device: torch.device) -> None:
    """Release the memory of graphs that are no longer used. This is impossible while a graph is captured."""
    if device.type == "cuda":
        gc.collect()  # a run and its graphs refer to each other
        torch.cuda.empty_cache()


class _Host:
    """The interface that an engine needs (see `bilevel.engines.engine`)."""

    def __init__(self, moved: Sequence[Tensor], descent: VariableOptimizer | None) -> None:
        self.moved, self.descent = moved, descent
        device, size = moved[0].device, sum(tensor.numel() for tensor in moved)
        v = SimpleNamespace(device=device, size=size)
        self.derivatives: Any = SimpleNamespace(v=v, lower_evaluations=0, upper_evaluations=0)

    def live(self) -> list[Tensor]:
        held = [] if self.descent is None else pytree.tree_leaves(self.descent.state_dict())
        return [*self.moved, *(tensor for tensor in held if isinstance(tensor, Tensor))]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.descent is None or self.descent.optimizer is None else [self.descent.optimizer]

    def obstacle(self) -> str:
        return ""
