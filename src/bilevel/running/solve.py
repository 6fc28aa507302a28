"""`solve`: checks its arguments and runs from one starting point or from several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from torch import Tensor, nn

from bilevel._util.checks import check_counts, in_range, one_of
from bilevel.derivatives.mixed_precision import Precision, refuse_precision
from bilevel.engines.engine import ENGINES
from bilevel.errors import OptionError
from bilevel.measures.problem_check import variables
from bilevel.methods.base import Method
from bilevel.problem import Problem, Rows
from bilevel.results import Solution
from bilevel.running.callbacks import Callback
from bilevel.running.multistart import run_starts
from bilevel.running.run_once import RunRequest, run_once

# What u and v can be.
Optimised = Tensor | nn.Module | Rows | Mapping[str, Tensor] | Mapping[str, Tensor | Rows] | Sequence[Tensor | Rows]
U = TypeVar("U", bound=Optimised)
V = TypeVar("V", bound=Optimised)


def solve(
    problem: Problem,
    method: Method,
    u: U,
    v: V,
    data: object = None,
    *,
    max_steps: int,
    tolerance: float | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    every: int | None = None,
    resume: bool = False,
    log_every: int | None = None,
    engine: str = "auto",
    precision: Precision | None = None,
    accumulate: int = 1,
    starts: int = 1,
    seed: int | None = None,
    hypergradient: bool | None = None,
) -> Solution[U, V]:
    """Solve a bilevel problem; u and v are updated in place.

    Under torchrun the same call is data-parallel: every rank draws its share of each batch, and gradients are
    averaged (docs/distributed.md). Only the first rank writes files and calls callbacks; the engine is `eager` there.

    Args:
        problem: The two objectives, the constraints and the sets.
        method: A method with its options, such as `Penalty()`.
        u: The upper variable: a tensor that requires grad, a module, `Rows`, or a dict or list of tensors.
        v: The lower variable, as u.
        data: None, or a pair (upper, lower) of iterables of batches. Each is cycled separately.
        max_steps: The number of upper steps after which the run ends.
        tolerance: The run ends as converged if the relative measures of the certificate are at most this. None
            (default): the method's own tolerance without data, and no tolerance with data.
        callbacks: A list such as `[Progress(), CSVHistory("run.csv")]`. Default: none.
        checkpoint: A folder for the state of the run, which is written every `every` steps and at the end. None
            (default): nothing is written.
        every: The number of steps between checkpoints. Default: a tenth of `max_steps`.
        resume: Whether to resume from the checkpoint, if there is one. The result is the same, bit for bit. Default:
            False, which starts from u and v.
        log_every: The number of steps between calls of the callbacks. Default: a hundredth of `max_steps`, at most 100.
        engine: How to run the steps: `eager` (as written), `compile`, `graph` (CUDA graphs) or `compile+graph`. `auto`
            (default) chooses one; `Solution.engine` names it.
        precision: `"bf16"` runs the problem's functions under bfloat16 autocast; variables, moments and multipliers
            stay in their own precision, and so does the certificate. None (default): no autocast.
        accumulate: The number of batches that every gradient is the mean of. Default: 1. Raise it if a larger batch
            does not fit into memory.
        starts: The number of starting points. Default: 1, the point that was passed; the others are drawn. The best
            end is kept: feasible, then a lower solution, then by f; `Solution.candidates` lists the distinct ends. Each
            run has its folder in `checkpoint`. See `bilevel.running.multistart`.
        seed: The seed of all random numbers of the run. None (default): one from torch's global generator.
        hypergradient: Whether the certificate solves for the exact hypergradient. None (default): if v is small.

    >>> import torch
    >>> from bilevel import Penalty, Problem, solve
    >>> problem = Problem(
    ...     upper=lambda u, v, batch: (v - 1).square().sum() + u.square().sum(),
    ...     lower=lambda u, v, batch: (v - 2 * u).square().sum(),
    ... )
    >>> u, v = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    >>> solution = solve(problem, Penalty(), u, v, max_steps=100, seed=0)
    >>> print(solution.status)
    Converged: the certificate is within the tolerance.
    >>> print([round(x, 4) for x in solution.u.tolist()])
    [0.4, 0.4, 0.4]
    """
    _check(problem, method, callbacks)
    check_counts(max_steps=max_steps, every=every, log_every=log_every, accumulate=accumulate, starts=starts)
    in_range("tolerance", tolerance, above=0)
    in_range("seed", seed, least=0, whole=True)
    one_of("engine", engine, ENGINES)
    if checkpoint is None and (resume or every is not None):
        raise OptionError("resume and every need checkpoint=, the folder of the run.")
    if starts > 1 and problem.trials is not None:
        raise OptionError(f"starts must be 1 with trials, which start at different points; got starts={starts}.")
    if starts > 1 and checkpoint is not None and seed is None:
        raise OptionError("seed must be given with starts and checkpoint, because it determines the starting points.")
    upper, lower = variables(problem, u, v)
    refuse_precision(precision, upper, lower)
    request = RunRequest(
        problem=problem,
        method=method,
        u=upper,
        v=lower,
        data=data,
        max_steps=max_steps,
        tolerance=tolerance,
        callbacks=callbacks,
        folder=None if checkpoint is None else Path(checkpoint),
        every=every,
        resume=resume,
        log_every=log_every,
        engine=engine,
        precision=precision,
        accumulate=accumulate,
        hypergradient=hypergradient,
        seed=seed,
    )
    return run_once(request) if starts == 1 else run_starts(request, starts)


def _check(problem: object, method: object, callbacks: object) -> None:
    """Refuse arguments of another kind."""
    if not isinstance(problem, Problem):
        raise OptionError(f"problem must be a Problem(upper, lower); got {type(problem).__name__}.")
    if isinstance(method, type) or not hasattr(method, "init"):
        raise OptionError(f"method must be a method such as Penalty(), with its parentheses; got {method!r}.")
    if isinstance(callbacks, Callback):
        raise OptionError("callbacks must be a list; got one callback. Pass callbacks=[...].")
    for callback in cast(Sequence[object], callbacks):
        if not isinstance(callback, Callback):
            raise OptionError(f"callbacks must hold Callback objects such as Progress(); got {callback!r}.")
