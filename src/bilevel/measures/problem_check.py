"""Evaluates a problem once without training: for `solve` before its first step, and for users by `bilevel.check`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.nested import Pair
from bilevel._util.random_state import keeping, undisturbed
from bilevel._util.tensor_lists import gradient
from bilevel.batches.sources import Sources
from bilevel.derivatives.double_backward import missing_double_backward, refuse_once_differentiable
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.errors import BilevelError, OptionError, ProblemError
from bilevel.problem import Problem, Projection, Variable


@dataclass(frozen=True)
class Check:
    """The results of `bilevel.check`.

    Fields:
        upper, lower: The values of f and g.
        upper_size, lower_size: How many numbers u and v have.
        upper_depends_on_v: Whether f depends on v.
        coupled: Whether g or the constraints depend on u. If not, u cannot influence v.
        double_backward: "yes", or the operator without one (`curvature="auto"` then uses differences).
        seconds_gradient: The time of one first-order gradient of f and g in v.
        seconds_step: The time of one gradient of the penalised objective in v.

    `bilevel.check` returns one; its example shows how.

    >>> Check(1.0, 2.0, 1, 1, True, True, "yes", 0.01, 0.02).coupled
    True
    """

    upper: float
    lower: float
    upper_size: int
    lower_size: int
    upper_depends_on_v: bool
    coupled: bool
    double_backward: str
    seconds_gradient: float
    seconds_step: float

    def __str__(self) -> str:
        rows = [
            ("upper objective", f"{self.upper:.6g}"),
            ("lower objective", f"{self.lower:.6g}"),
            ("size of u, of v", f"{self.upper_size:,}, {self.lower_size:,}"),
            ("upper depends on v", "yes" if self.upper_depends_on_v else "no: v cannot influence f"),
            ("lower depends on u", "yes" if self.coupled else "no: u cannot influence v"),
            ("double backward", self.double_backward),
            ("a first-order gradient", f"{1e3 * self.seconds_gradient:.2f} ms"),
            ("a penalised gradient", f"{1e3 * self.seconds_step:.2f} ms"),
        ]
        return "\n".join(f"{name:<24}{value}" for name, value in rows)


def check(problem: Problem, u: Any, v: Any, data: object = None) -> Check:
    """Evaluate a problem once without training; print and return its sizes, gradients and the cost of a step.

    Arguments:
        problem: The `Problem`.
        u: The upper variable, as for `solve`.
        v: The lower variable, as for `solve`.
        data: The data, as for `solve`. Default: no data.

    >>> import torch
    >>> from bilevel import Problem
    >>> u, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> problem = Problem(lambda u, v, _: ((v - 1) ** 2).sum(), lambda u, v, _: ((v - u) ** 2).sum())
    >>> check(problem, u, v).coupled  # doctest: +ELLIPSIS
    upper objective         1
    ...
    True
    """
    upper, lower = variables(problem, u, v)
    sources = Sources(data, 0, lower.device)
    d = PenalisedObjective(problem, upper, lower, "auto")
    with undisturbed(lower.device, lower.buffers() + upper.buffers()):
        pairs = sources.first_pairs(1)
        f, g, depends, coupled = _evaluate(d, pairs)
        double = "yes"
        started = time.perf_counter()
        batches = d.prepare(pairs, graph=False)
        d.slope(batches)
        gradient(d.upper(batches[0][0]), d.v.leaves)
        first = time.perf_counter() - started
        started = time.perf_counter()
        try:
            s = gradient(d.lower(batches[0][1]), d.v.leaves, keep_graph=True)
            refuse_once_differentiable(s)
            gradient(s, d.v.leaves, cotangent=[x.detach() for x in s])
        except RuntimeError as error:
            if (operator := missing_double_backward(error)) is None:
                raise
            double = f"no: {operator} has none; curvature falls back to differences"
        gradient(d.upper(batches[0][0]), d.v.leaves)
        second = time.perf_counter() - started
    found = Check(f.mean().item(), g.mean().item(), d.u.size, d.v.size, depends, coupled, double, first, second)
    print(found)
    return found


def variables(problem: Problem, u: Any, v: Any) -> tuple[Variable, Variable]:
    """Return u and v as variables; refuse those that `solve` cannot use."""
    upper = Variable(u, "u", problem.project_upper)
    lower = Variable(v, "v", problem.project_lower)
    if lower.rows:
        raise OptionError("v cannot hold Rows, because every step moves all of v. Pass a tensor of shape (n, ...).")
    if upper.device != lower.device:
        raise OptionError(f"u and v must be on one device; got {upper.device} and {lower.device}. Move one with .to().")
    if problem.trials is not None:
        _check_trials(problem.trials, upper, lower)
    for variable, option in ((upper, "project_upper"), (lower, "project_lower")):
        for name, leaf in variable.named(rows=False):
            if (projection := variable.projection(name)) is not None:
                _check_projection(projection, leaf, option)
    mine = {leaf.data_ptr() for leaf in lower.leaves if leaf.numel()}
    if any(leaf.data_ptr() in mine for leaf in upper.leaves if leaf.numel()):
        raise OptionError("u and v must not share tensors. Pass separate ones; clone() makes a copy.")
    return upper, lower


def _check_trials(trials: int, *both: Variable) -> None:
    for variable in both:
        if variable.rows:
            raise OptionError(f"{variable.name} cannot hold Rows if the problem has trials. Use a tensor.")
        for leaf in variable.leaves:
            if leaf.dim() == 0 or leaf.shape[0] != trials:
                raise OptionError(
                    f"every tensor of {variable.name} must have a leading dimension of {trials}, one part for each "
                    f"trial; got shape {tuple(leaf.shape)}."
                )


def _check_projection(projection: Projection, leaf: Tensor, option: str) -> None:
    try:
        shape = tuple(projection(leaf.detach()).shape)
    except Exception as error:
        raise ProblemError(f"{option} failed on a tensor of shape {tuple(leaf.shape)}: {error}") from error
    if shape != tuple(leaf.shape):
        raise ProblemError(f"{option} must keep the shape {tuple(leaf.shape)}; it returned {shape}.")


def first_evaluation(d: PenalisedObjective, sources: Sources) -> None:
    """Refuse a problem that `solve` cannot solve, before it changes anything."""
    with keeping(d.v.buffers() + d.u.buffers()):
        _, _, depends, coupled = _evaluate(d, sources.first_pairs(1))
    if not coupled and not d.u.rows:
        warn_user("lower does not depend on u: u cannot change v, and only the terms of u in upper are minimised.")
    elif coupled and not depends and not d.problem.equalities and not d.problem.inequalities:
        warn_user("upper does not depend on v: the lower problem cannot change the answer.")


def _evaluate(d: PenalisedObjective, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, bool, bool]:
    """Return f, g, whether f depends on v, and whether g or a constraint depends on u."""
    with _explained(d, "prepare", pairs[0]):
        pair = d.prepare(pairs, graph=True)[0]
    with d.differentiating_u(True) as inputs:
        with _explained(d, "lower", pair[1]):
            g = d.lower(pair[1])
        with _explained(d, "a constraint", pair[0]):
            h = d.constraints(pair[0])
        # With data, the lower constraints receive no batch: they belong to every lower problem.
        own = None if d.problem.prepare is None else pair[1]
        with _explained(d, "a lower constraint", own):
            below = d.lower_constraints(own)
        with _explained(d, "upper", pair[0]):
            f = d.upper(pair[0])
        named = [(f"constraint {i}", x) for i, x in enumerate(h)]
        named += [(f"lower constraint {i}", x) for i, x in enumerate(below)]
        for name, value in (("upper", f), ("lower", g), *named):
            if not isinstance(value, Tensor):
                raise ProblemError(f"{name} must return a tensor; got {type(value).__name__}.")
            if value.numel() == 0:
                raise ProblemError(f"{name} must return at least one number; got shape {tuple(value.shape)}.")
            if not bool(torch.isfinite(value).all()):
                raise ProblemError(
                    f"{name} must be finite; it is {value.detach().reshape(-1)[:3].tolist()} at the first evaluation. "
                    "Check the starting point and the data for NaN, log(0) or division by zero."
                )
        wrt = [*d.v.leaves, *inputs()]
        count = len(d.v.leaves)
        if not _reaches(g, wrt[:count]):
            raise ProblemError(
                "lower must depend on v; its gradient in v is missing. Use v as it is passed in, and do not detach it, "
                "convert it with .item(), or compute under torch.no_grad()."
            )
        if not all(bool(torch.isfinite(s).all()) for s in gradient(g, wrt[:count], retain=True)):
            raise ProblemError(
                "the gradient of lower in v must be finite; it is not at the first evaluation. Look for sqrt, norm or "
                "a power at zero, and start v elsewhere or add a small constant inside."
            )
        if not _reaches(f, wrt):
            raise ProblemError(
                "upper must depend on u or v; it has no gradient in either. Use them as they are passed in, and do not "
                "detach them, convert them with .item(), or compute under torch.no_grad()."
            )
        coupled = any(_reaches(x, wrt[count:]) for x in (g, *h, *below))
        if not (coupled or d.u.rows or _reaches(f, wrt[count:])):
            raise ProblemError(
                "upper or lower must depend on u; neither does. Use u as it is passed in, and do not detach it, "
                "convert it with .item(), or compute under torch.no_grad()."
            )
        return f.detach(), g.detach(), _reaches(f, wrt[:count]), coupled


@contextmanager
def _explained(d: PenalisedObjective, name: str, batch: Any) -> Iterator[None]:
    """Raise an error of the user's function as a `ProblemError` with the shapes of its arguments."""
    try:
        yield
    except BilevelError:
        raise
    except Exception as error:
        given = {"u": d.u.value, "v": d.v.value, "batch": batch}
        received = "; ".join(f"{key} {_shape(value)}" for key, value in given.items())
        raise ProblemError(
            f"{name} failed at the first evaluation with {type(error).__name__}: {str(error).rstrip('. ')}. "
            f"It received {received}."
        ) from error


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_shape(item) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shape(item)}' for key, item in value.items())}}}"
    return "None" if value is None else type(value).__name__


def _reaches(output: Tensor, leaves: Sequence[Tensor]) -> bool:
    if not output.requires_grad or not leaves:
        return False
    weights = torch.ones_like(output)
    found = torch.autograd.grad(output, leaves, weights, retain_graph=True, allow_unused=True)
    return any(d is not None for d in found)
