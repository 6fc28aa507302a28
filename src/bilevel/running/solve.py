"""`solve`: checks what it was asked for, opens the checkpoint, and runs the loop (see `bilevel.running.loop`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilevel._util.random_state import seeded
from bilevel.batches.rank_shares import Sharing
from bilevel.batches.sources import Sources
from bilevel.derivatives.mixed_precision import Precision, refuse_precision
from bilevel.distributed.derivatives import make_derivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.synchronise import check_same_arguments, run_on_first, seed_by_rank
from bilevel.engines.engine import ENGINES
from bilevel.errors import CheckpointError, OptionError
from bilevel.measures.problem_check import first_evaluation, variables
from bilevel.methods.base import Method, Setting
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable
from bilevel.results import Solution
from bilevel.running import checkpoints as store
from bilevel.running.callbacks import Callback
from bilevel.running.loop import Loop
from bilevel.running.multistart import Aside, several
from bilevel.running.multistart_data import several_with_data
from bilevel.running.pessimistic import worst_case
from bilevel.running.run_identity import compare, fingerprint


def solve(
    problem: Problem,
    method: Method,
    u: Any,
    v: Any,
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
) -> Solution:
    """Solve a bilevel problem; u and v are updated in place.

    `data` is None or a pair (upper, lower) of iterables of batches, each cycled on its own. `tolerance` is what the
    relative measures of the certificate must reach for the run to end as converged. `checkpoint` names a folder that
    is written every `every` steps and at the end; `resume=True` goes on from it, bit for bit. `accumulate=k` makes
    every gradient one of k batches. `engine` runs the steps as they are written (`eager`), compiled, captured as CUDA
    graphs, or both (`compile`, `graph`, `compile+graph`); `auto` picks one, and `Solution.engine` says which.
    `precision="bf16"` runs the problem's functions under bfloat16 autocast, with float32 variables, moments and prices;
    the certificate is measured in full precision all the same. `hypergradient=True` has the certificate solve for the
    exact hypergradient, which it does by itself only where v is small. `seed=None` takes a seed from torch's global
    generator.

    `starts=k` runs from k points and keeps the best end: feasible, then a lower solution, then by f.
    `Solution.candidates` lists the distinct ends. Without data they run one after another (see
    `bilevel.running.multistart`, also
    for those that are cut short); with data at once, as trials of one run, where that is exact, and else one after
    another (see `bilevel.running.multistart_data`). Callbacks hear one run after another; a checkpoint has a folder
    for each.

    Under torchrun the same call is data-parallel: every rank draws its share of each batch, and gradients are averaged
    (docs/distributed.md). The first rank alone writes files and calls callbacks; every engine is `eager` there.
    """
    if not isinstance(problem, Problem):
        raise OptionError(f"problem must be a Problem(upper, lower); got {type(problem).__name__}.")
    if isinstance(method, type) or not hasattr(method, "init"):
        raise OptionError(f"method must be a method such as Penalty(), with its parentheses; got {method!r}.")
    if isinstance(callbacks, Callback):
        raise OptionError("callbacks must be a list; got one callback. Pass callbacks=[...].")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise OptionError(f"callbacks must hold Callback objects such as Progress(); got {callback!r}.")
    _refuse(max_steps, tolerance, every, log_every, engine, accumulate, starts, seed, checkpoint, resume)
    upper, lower = variables(problem, u, v)
    refuse_precision(precision, upper, lower)
    folder = None if checkpoint is None else Path(checkpoint)
    order = _Order(
        problem,
        method,
        upper,
        lower,
        data,
        max_steps,
        tolerance,
        callbacks,
        every,
        resume,
        log_every,
        engine,
        precision,
        accumulate,
        hypergradient,
    )
    if starts == 1:
        return order.run(folder, seed)
    if problem.trials is not None:
        raise OptionError(f"starts must be 1 with trials, each of which starts where it is; got starts={starts}.")
    if folder is not None and seed is None:
        raise OptionError("seed must be given with starts and checkpoint: the starting points are drawn by it.")
    return (several if data is None else several_with_data)(order, folder, seed, starts)


@dataclass(frozen=True)
class _Order:
    """What `solve` was asked for, checked."""

    problem: Problem
    method: Method
    upper: Variable
    lower: Variable
    data: object
    max_steps: int
    tolerance: float | None
    callbacks: Sequence[Callback]
    every: int | None
    resume: bool
    log_every: int | None
    engine: str
    precision: Precision | None
    accumulate: int
    hypergradient: bool | None

    def run(self, folder: Path | None, seed: int | None, start: int = 0, aside: Aside | None = None) -> Solution:
        """One run from the present u and v, in the reading that the method has; see `Aside`."""
        if getattr(self.method, "reading", "optimistic") == "pessimistic":
            if self.data is not None or folder is not None:
                given = "data" if self.data is not None else "checkpoint"
                raise OptionError(f"reading='pessimistic' cannot be used with {given}. Leave it out.")
            return worst_case(self, seed, start)
        return self.once(folder, seed, start, aside)

    def once(self, folder: Path | None, seed: int | None, start: int, aside: Aside | None = None) -> Solution:
        """One run from the present u and v, by this process or by all ranks."""
        ranks = ProcessGroup.from_environment(self.lower.device)
        with nullcontext() if ranks is None else ranks.reporting_lost_ranks():
            return self._once(folder, seed, start, ranks, aside)

    def _once(
        self, folder: Path | None, seed: int | None, start: int, ranks: ProcessGroup | None, aside: Aside | None
    ) -> Solution:
        problem, upper, lower = self.problem, self.upper, self.lower
        saved = _open(folder, self.resume) if ranks is None else run_on_first(ranks, lambda: _open(folder, self.resume))
        stored = saved is not None
        if saved is None and aside is not None:
            saved = aside.state
        if seed is None:
            seed = int(torch.randint(2**62, ()).item()) if saved is None else int(saved["seed"])
            seed = seed if ranks is None else ranks.broadcast_object(seed)
        sharing = None if ranks is None or self.data is None else Sharing(ranks.rank, ranks.size)
        sources = Sources(self.data, seed, lower.device, sharing)
        identity = fingerprint(problem, self.method, upper, lower, self.data, self.accumulate, seed)
        identity |= {"precision": self.precision}
        if ranks is not None:
            check_same_arguments(ranks, identity, upper, lower)
        if saved is not None:
            compare(saved["fingerprint"], identity, folder)
        if self.accumulate > 1 and not sources:
            raise OptionError(
                f"accumulate needs data: without it every gradient is exact; got accumulate={self.accumulate}."
            )
        with seeded(seed, lower.device) as generator:
            setting = Setting(
                problem,
                upper,
                lower,
                sources,
                self.max_steps,
                self.tolerance,
                self.accumulate,
                generator,
                self.precision,
                self.engine,
                start,
                None if sharing is None else ranks,
            )
            try:
                if not lower.shards:  # autograd does not reach those
                    first_evaluation(
                        make_derivatives(problem, upper, lower, ranks=setting.ranks, precision=self.precision), sources
                    )
                with _unchanged_on_error(upper, lower):
                    state = self.method.init(setting)
                    loop = Loop(
                        setting,
                        state,
                        self._heard(ranks),
                        folder,
                        self.every,
                        self.log_every,
                        seed,
                        identity,
                        writes=ranks is None or ranks.first,
                        together=ranks,
                        keeps=aside is not None,
                    )
                    if setting.ranks is not None:
                        seed_by_rank(setting.ranks, seed, lower.device)
                    if saved is not None:
                        with store.understood(folder) if stored and folder is not None else nullcontext():
                            loop.restore(saved)
                solution = loop.run(self.hypergradient)
                if aside is not None:
                    aside.state = loop.kept
                return solution
            finally:
                upper.release()

    def _heard(self, ranks: ProcessGroup | None) -> Sequence[Callback]:
        """The callbacks that are called in this process."""
        return [c for c in self.callbacks if ranks is None or ranks.first or c.every_rank]


def _open(folder: Path | None, resume: bool) -> dict[str, Any] | None:
    """The checkpoint to go on from; None where there is none yet. Makes the folder, so that no work is lost for it."""
    if folder is None:
        return None
    store.prepare(folder)
    if not store.exists(folder):
        return None
    if not resume:
        raise CheckpointError(
            f"{folder} holds a checkpoint already, and nothing is overwritten. Pass resume=True to go on from it, or "
            "another folder."
        )
    saved = store.load(folder)
    with store.understood(folder):
        int(saved["seed"]), saved["fingerprint"].items(), saved["max_steps"]
    return saved


@contextmanager
def _unchanged_on_error(*variables: Variable) -> Iterator[None]:
    """Put u and v back as they were where the start of a run fails or is interrupted."""
    held = [(tensor, tensor.detach().clone()) for variable in variables for tensor in variable.tensors().values()]
    try:
        yield
    except BaseException:
        for tensor, value in held:
            tensor.data.copy_(value)
        raise


def _refuse(
    max_steps: int,
    tolerance: float | None,
    every: int | None,
    log_every: int | None,
    engine: str,
    accumulate: int,
    starts: int,
    seed: int | None,
    checkpoint: object,
    resume: bool,
) -> None:
    counts = {
        "max_steps": max_steps,
        "every": every,
        "log_every": log_every,
        "accumulate": accumulate,
        "starts": starts,
    }
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise OptionError(f"tolerance must be positive; got {tolerance!r}.")
    if engine not in ENGINES:
        raise OptionError(f"engine must be one of {', '.join(map(repr, ENGINES))}; got {engine!r}.")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise OptionError(f"seed must be a whole number of at least 0; got {seed!r}.")
    if checkpoint is None and (resume or every is not None):
        raise OptionError("resume and every need checkpoint=, the folder of the run.")
