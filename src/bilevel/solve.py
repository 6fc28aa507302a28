"""The one loop. It knows no algorithm and prints nothing."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint as store
from .autodiff import Derivatives
from .callbacks import Callback, Run
from .certificate import certify
from .check import first_evaluation, variables
from .engine import ENGINES
from .errors import BilevelWarning, CheckpointError, OptionError
from .fingerprint import compare, fingerprint
from .method import RECORD, Method, Setting, State
from .precision import Precision, refuse_precision
from .problem import Problem, Variable
from .reading import worst_case
from .replay import seeded
from .solution import Certificate, History, Solution, Status
from .sources import Sources
from .starts import several


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

    `starts=k`, for problems without data, runs from k points one after another (see `bilevel.starts`), each with
    `max_steps`, and keeps the best end: feasible, then a lower solution, then by f. `Solution.candidates` lists the
    distinct ends. Callbacks hear one run after another; a checkpoint has a folder for each.
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
        problem, method, upper, lower, data, max_steps, tolerance, callbacks, every, resume, log_every, engine,
        precision, accumulate, hypergradient,
    )  # fmt: skip
    if starts == 1:
        return order.run(folder, seed)
    if data is not None or problem.trials is not None:
        raise OptionError(
            f"starts needs a problem without data and without trials, whose runs come one after another; got "
            f"starts={starts}. With data, make the starts trials of one problem: Problem(..., trials={starts})."
        )
    if folder is not None and seed is None:
        raise OptionError("seed must be given with starts and checkpoint: the starting points are drawn by it.")
    return several(order, folder, seed, starts)


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

    def run(self, folder: Path | None, seed: int | None, start: int = 0) -> Solution:
        """One run from the present u and v, in the reading that the method has."""
        if getattr(self.method, "reading", "optimistic") == "pessimistic":
            if self.data is not None or folder is not None:
                given = "data" if self.data is not None else "checkpoint"
                raise OptionError(f"reading='pessimistic' cannot be used with {given}. Leave it out.")
            return worst_case(self, seed, start)
        return self.once(folder, seed, start)

    def once(self, folder: Path | None, seed: int | None, start: int) -> Solution:
        """One run from the present u and v."""
        problem, upper, lower = self.problem, self.upper, self.lower
        saved = _open(folder, self.resume)
        if seed is None:
            seed = int(torch.randint(2**62, ()).item()) if saved is None else int(saved["seed"])
        sources = Sources(self.data, seed, lower.device)
        identity = fingerprint(problem, self.method, upper, lower, self.data, self.accumulate, seed)
        identity |= {"precision": self.precision}
        if saved is not None:
            compare(saved["fingerprint"], identity, folder)
        if self.accumulate > 1 and not sources:
            raise OptionError(
                f"accumulate needs data: without it every gradient is exact; got accumulate={self.accumulate}."
            )
        with seeded(seed, lower.device) as generator:
            setting = Setting(
                problem, upper, lower, sources, self.max_steps, self.tolerance, self.accumulate, generator,
                self.precision, self.engine, start,
            )  # fmt: skip
            first_evaluation(Derivatives(problem, upper, lower, precision=self.precision), sources)
            try:
                with _unchanged_on_error(upper, lower):
                    state = self.method.init(setting)
                    loop = _Loop(setting, state, self.callbacks, folder, self.every, self.log_every, seed, identity)
                    if saved is not None and folder is not None:
                        with store.understood(folder):
                            loop.restore(saved)
                return loop.run(self.hypergradient)
            finally:
                upper.release()


class _Loop:
    """A run in progress."""

    def __init__(
        self,
        setting: Setting,
        state: State,
        callbacks: Sequence[Callback],
        folder: Path | None,
        every: int | None,
        log_every: int | None,
        seed: int,
        identity: dict[str, Any],
    ) -> None:
        self.setting, self.state, self.callbacks, self.folder = setting, state, callbacks, folder
        self.every = every or max(1, setting.max_steps // 10)
        self.log_every = log_every or max(1, min(100, setting.max_steps // 100))
        self.seed, self.fingerprint = seed, identity
        self.history = History()
        self.step = 0
        self.seconds = 0.0
        self.pending: list[tuple[Tensor, int, float, int]] = []
        self.message = ""
        self.finished: Status | None = None
        self.interrupted = False
        self.variables: tuple[Variable, Variable] = (setting.u, setting.v)
        self.good = self._snapshot()

    def run(self, hypergradient: bool | None) -> Solution:
        try:
            with _noting_interrupts(self):
                status = self._steps()
                solution = self._end(status, hypergradient)
            for callback in self.callbacks:
                callback.end(solution)
            return solution
        finally:
            for callback in self.callbacks:
                callback.close()

    def _steps(self) -> Status:
        """Step until the budget, the method, a callback or Ctrl-C ends the run."""
        started = time.perf_counter() - self.seconds
        watch = Run(
            self.state.mode, self.setting.max_steps, self.step, self.history, len(self.history), self.seconds,
            self.state.engine,
        )  # fmt: skip
        status: Status | None = self.finished or self.state.ended()
        for callback in self.callbacks:
            callback.start(watch)
        while status is None and self.step < self.setting.max_steps:
            record = self.state.step(self.step)
            self.step += 1
            # On the CPU there is nothing to overlap with: its step has ended by now.
            if self.setting.v.device.type == "cuda" and self.step < self.setting.max_steps:
                self.setting.sources.ahead(self.state.draws)
            self.seconds = time.perf_counter() - started
            self.pending.append((record, self.step, self.seconds, self.state.derivatives.lower_evaluations))
            status = self.state.ended()
            due = self.folder is not None and self.step % self.every == 0
            last = status is not None or self.step >= self.setting.max_steps or self.interrupted
            if due or last or self.step % self.log_every == 0:
                found = self._fetch(watch)
                status = found if status is None or found is Status.DIVERGED else status
                if due and status is not Status.DIVERGED:
                    self._save()
        return status or Status.MAX_STEPS

    def _end(self, status: Status, hypergradient: bool | None) -> Solution:
        """Save, leave u and v as they are returned, and measure them."""
        if status is not Status.DIVERGED:
            self._save(status)
        with self.state.derivatives.full_precision():
            minimiser = self.state.finish() if status not in (Status.STOPPED, Status.DIVERGED) else None
            certificate, multipliers = certify(
                self.state, self.setting.sources, minimiser=minimiser, hypergradient=hypergradient
            )
        return Solution(
            u=self.setting.u.value, v=self.setting.v.value, status=self._judged(status, certificate),
            steps=self.step, mode=self.state.mode, engine=self.state.engine, history=self.history,
            certificate=certificate, multipliers=multipliers, adjoint=[-n for n in multipliers["nu"]],
            message=self.message,
            waiting=min(1.0, self.setting.sources.waited / self.seconds) if self.seconds else 0.0,
            interrupted=self.interrupted, state=self.state.state_dict(),
        )  # fmt: skip

    def _judged(self, status: Status, certificate: Certificate) -> Status:
        """The status that the certificate bears out."""
        tolerance = self.state.tolerance
        if status in (Status.STALLED, Status.CONVERGED):  # a line search turns back from numbers that are not finite
            measured = {
                "grad_u": certificate.stationarity_u, "grad_v": certificate.stationarity_v,
                "residual": certificate.lower_residual, "violation": certificate.violation,
            }  # fmt: skip
            bad = [name for name, value in measured.items() if not math.isfinite(value)]
            if bad:
                self.message = f"At step {self.step}, {bad[0]} is {measured[bad[0]]}."
                return Status.DIVERGED
        if tolerance is None or status not in (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED):
            return status
        stationary = certificate.stationarity / certificate.scale <= tolerance
        if certificate.passes(tolerance):
            return Status.CONVERGED
        if stationary and certificate.infeasibility > tolerance:
            return Status.INFEASIBLE
        if certificate.worst <= tolerance and certificate.lower_minimiser is False:
            return Status.STATIONARY
        return Status.STALLED if status is Status.CONVERGED else status

    def _fetch(self, watch: Run) -> Status | None:
        """Bring the pending records to the host; look for divergence; tell the callbacks."""
        if not self.pending:
            return None
        table = torch.stack([record for record, *_ in self.pending]).cpu().tolist()
        self.seconds = max(self.seconds, self.pending[-1][2])
        for values, (_, step, seconds, evaluations) in zip(table, self.pending, strict=True):
            row = dict(zip(RECORD, values, strict=True))
            bad = [name for name, value in row.items() if not math.isfinite(value)]
            if bad:
                self.message = f"At step {step}, {bad[0]} is {row[bad[0]]}."
                self.pending = []
                self._restore_snapshot()
                return Status.DIVERGED
            self.history.append(row | {"step": step, "seconds": seconds, "evaluations": evaluations})
        self.pending = []
        if not self._finite():
            self.message = f"At step {self.step}, u or v is not finite."
            self._restore_snapshot()
            return Status.DIVERGED
        self.good = self._snapshot()
        watch.step, watch.seconds = self.step, self.seconds
        stop = [callback.log(watch) for callback in self.callbacks]
        watch.seen = len(self.history)
        if self._within_tolerance():
            return Status.CONVERGED
        return Status.STOPPED if any(stop) or self.interrupted else None

    def _finite(self) -> bool:
        tensors = [t for variable in self.variables for t in (*variable.leaves, *(r.values for r in variable.rows))]
        return bool(torch.stack([torch.isfinite(t.detach()).all() for t in tensors]).all())

    def _within_tolerance(self) -> bool:
        """Whether the last records are small enough for the certificate to be worth measuring, and it passes."""
        tolerance = self.state.tolerance
        if tolerance is None or self.state.mode != "stochastic":
            return False
        scale, lower_scale, _ = self.state.scales()
        row = next(self.history.rows(len(self.history) - 1))
        if max(math.hypot(row["grad_u"], row["grad_v"]) / scale, row["residual"] / lower_scale) > tolerance:
            return False
        with self.state.derivatives.full_precision():
            certificate, _ = certify(self.state, self.setting.sources, minimiser=None, hypergradient=False)
        return certificate.passes(tolerance)

    # -- state -----------------------------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "u": _clone(self.variables[0].tensors()),
            "v": _clone(self.variables[1].tensors()),
            "method": _clone(self.state.state_dict()),
        }

    def _restore_snapshot(self) -> None:
        self._write(self.good)
        self.state.load_state_dict(self.good["method"])
        self.step = self.good["step"]
        self.history.truncate(self.step)

    @torch.no_grad()
    def _write(self, saved: dict[str, Any]) -> None:
        for name, variable in zip("uv", self.variables, strict=True):
            for key, tensor in variable.tensors().items():
                tensor.copy_(saved[name][key])

    def _save(self, status: Status | None = None) -> None:
        if self.folder is None:
            return
        device = self.setting.v.device
        store.save(self.folder, {
            "fingerprint": self.fingerprint, "seed": self.seed, "step": self.step, "seconds": self.seconds,
            "max_steps": self.setting.max_steps, "status": status.name if status else None,
            "u": self.variables[0].tensors(), "v": self.variables[1].tensors(), "method": self.state.state_dict(),
            "sources": self.setting.sources.state_dict(), "waited": self.setting.sources.waited,
            "random": torch.get_rng_state(), "generator": self.setting.generator.get_state(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "history": torch.tensor(self.history.to_lists(), dtype=torch.float64),
        })  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        if saved["max_steps"] != self.setting.max_steps:
            warnings.warn(
                f"the checkpoint was made with max_steps={saved['max_steps']}; with max_steps={self.setting.max_steps} "
                f"the warm-up, the decay of the learning rates and the schedule span {self.setting.max_steps} steps "
                f"from step {saved['step']} on.",
                BilevelWarning,
                stacklevel=5,
            )
        self._write(saved)
        self.state.load_state_dict(saved["method"])
        self.setting.sources.load_state_dict(saved["sources"])
        torch.set_rng_state(saved["random"])
        self.setting.generator.set_state(saved["generator"])
        if saved["cuda"] is not None:
            torch.cuda.set_rng_state(saved["cuda"], self.setting.v.device)
        self.history = History.from_lists(saved["history"].tolist())
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.setting.sources.waited = saved.get("waited", 0.0)
        if saved["status"] not in (None, Status.STOPPED.name) and saved["max_steps"] == self.setting.max_steps:
            self.finished = Status[saved["status"]]
        self.good = self._snapshot()


def _clone(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _clone(item) for key, item in tree.items()}
    return [_clone(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


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


@contextmanager
def _noting_interrupts(loop: _Loop) -> Iterator[None]:
    """Ctrl-C ends the run after the step in hand; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(*_: object) -> None:
        if loop.interrupted:
            raise KeyboardInterrupt
        loop.interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    counts = {"max_steps": max_steps, "every": every, "log_every": log_every, "accumulate": accumulate,
              "starts": starts}  # fmt: skip
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise OptionError(f"tolerance must be positive; got {tolerance!r}.")
    if engine not in ENGINES:
        raise OptionError(f"engine must be one of {', '.join(map(repr, ENGINES))}; got {engine!r}.")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise OptionError(f"seed must be a whole number of at least 0; got {seed!r}.")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise OptionError(f"solve runs in one process; got WORLD_SIZE={ranks}. Data-parallel runs are not built yet.")
    if checkpoint is None and (resume or every is not None):
        raise OptionError("resume and every need checkpoint=, the folder of the run.")
