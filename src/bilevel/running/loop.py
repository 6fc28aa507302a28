"""The loop of a run: steps, records, callbacks, checkpoints. It knows no algorithm and prints nothing."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilevel._util.checks import warn_user
from bilevel._util.nested import copy_state, each_tensor
from bilevel._util.random_state import random_state, set_random_state
from bilevel.certificates import Certificate
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.sharded_state import gather_state, split_state
from bilevel.distributed.synchronise import agree_on_end, average_buffers, restore_generators
from bilevel.measures.certificate import certify
from bilevel.measures.certificate_batches import Allowed
from bilevel.methods.base import RECORD, MethodState, RunContext
from bilevel.problem.variables import Variable
from bilevel.results import SOLVERS, History, Solution, Status
from bilevel.running import checkpoints as store
from bilevel.running.callbacks import Callback, Run


@dataclass
class PausedRun:
    """The state of a run that spent its budget, so that it can continue later with a larger one."""

    # The state to resume from, in checkpoint format; None if there is none.
    state: dict[str, Any] | None = None


class Loop:
    """A run in progress."""

    def __init__(
        self,
        setting: RunContext,
        state: MethodState,
        callbacks: Sequence[Callback],
        folder: Path | None,
        *,
        every: int | None,
        log_every: int | None,
        seed: int,
        identity: dict[str, Any],
        together: ProcessGroup | None = None,
        paused: PausedRun | None = None,
    ) -> None:
        self.setting, self.state, self.callbacks, self.folder = setting, state, callbacks, folder
        self.every = every or max(1, setting.max_steps // 10)
        self.log_every = log_every or max(1, min(100, setting.max_steps // 100))
        self.seed, self.identity = seed, identity
        # The ranks that share the work, and the ranks that end together: without data no work is shared.
        self.ranks, self.together = setting.ranks, together
        self.writes = together is None or together.first
        self.paused, self.like_v = paused, getattr(state, "like_v", ())
        # The number of bytes that the steps of this process sent to other ranks, and the number of steps.
        self.sent = self.counted = 0
        self.history = History()
        self.step, self.seconds = 0, 0.0
        self.pending: list[tuple[Tensor, dict[str, float]]] = []
        self.message, self.interrupted = "", False
        self.finished: Status | None = None
        self.variables: tuple[Variable, Variable] = (setting.u, setting.v)
        self.good = self._snapshot()

    def run(self, hypergradient: bool | None) -> Solution:
        """Step until the budget, the method, a callback or Ctrl-C ends the run; measure the end."""
        try:
            with _noting_interrupts(self):
                started = time.perf_counter() - self.seconds
                watch = Run(
                    mode=self.state.mode,
                    max_steps=self.setting.max_steps,
                    step=self.step,
                    history=self.history,
                    seen=len(self.history),
                    seconds=self.seconds,
                    engine=self.state.engine,
                    ranks=1 if self.ranks is None else self.ranks.size,
                )
                status = self.finished or self.state.ended()
                for callback in self.callbacks:
                    callback.start(watch)
                while status is None and self.step < self.setting.max_steps:
                    sent = 0 if self.ranks is None else self.ranks.payload
                    solver = getattr(self.state, "solver", "")
                    record = self.state.step(self.step)
                    self.step += 1
                    if self.ranks is not None:
                        self.sent, self.counted = self.sent + self.ranks.payload - sent, self.counted + 1
                    self.seconds = time.perf_counter() - started
                    done = {"step": self.step, "seconds": self.seconds, "solver": SOLVERS.index(solver)}
                    self.pending.append((record, done | {"evaluations": self.state.derivatives.lower_evaluations}))
                    status = self._after_step(watch)
                solution = self._end(status or Status.MAX_STEPS, hypergradient)
            for callback in self.callbacks:
                callback.end(solution)
            return solution
        finally:
            for callback in self.callbacks:
                callback.close()

    def _after_step(self, watch: Run) -> Status | None:
        """Log and save when due; return how the run ended, or None while it continues."""
        status = self.state.ended()
        due = self.folder is not None and self.step % self.every == 0
        # Ranks exchange interrupts when they communicate anyway: Ctrl-C reaches them in different steps.
        stopping = self.interrupted and self.together is None
        last = status is not None or self.step >= self.setting.max_steps or stopping
        if due or last or self.step % self.log_every == 0:
            found = self._fetch(watch)
            status = found if status is None or found is Status.DIVERGED else status
            if due and status is not Status.DIVERGED:
                self._save()
        return status

    def _end(self, status: Status, hypergradient: bool | None) -> Solution:
        """Save, leave u and v as they are returned, and measure them."""
        if status is not Status.DIVERGED:
            self._save(status)
        if self.paused is not None:  # in the other modes, steps depend on the budget
            spent = status is Status.MAX_STEPS and self.state.mode == "deterministic"
            self.paused.state = _clone(self._whole(status)) if spent else None
        with self.state.derivatives.full_precision():
            minimiser = self.state.finish() if status not in (Status.STOPPED, Status.DIVERGED) else None
            state = self.state.state_dict()
            certificate, multipliers = certify(
                self.state,
                self.setting.sources,
                minimiser=minimiser,
                hypergradient=hypergradient,
                allowed=self._allowed(),
            )
        reason = getattr(self.state, "message", "")
        status = self._judged(status, certificate, getattr(self.state, "doubt", ""))
        if status is Status.DIVERGED:  # an end check can leave v where it met numbers that are not finite
            self._write(self.good)
        return Solution(
            u=self.setting.u.value,
            v=self.setting.v.value,
            status=status,
            steps=self.step,
            mode=self.state.mode,
            engine=self.state.engine,
            history=self.history,
            certificate=certificate,
            multipliers=multipliers,
            adjoint=[-n for n in multipliers["nu"]],
            message=self.message or reason,
            waiting=min(1.0, self.setting.sources.waited / self.seconds) if self.seconds else 0.0,
            interrupted=self.interrupted,
            ranks=1 if self.ranks is None else self.ranks.size,
            bytes_per_step=self._bytes_per_step(),
            state=state,
        )

    def _judged(self, status: Status, certificate: Certificate, doubt: str) -> Status:
        """Return the status that the certificate supports; `doubt` is why the method does not trust its end."""
        tolerance = self.state.tolerance
        if status in (Status.STALLED, Status.CONVERGED):  # a line search turns back from numbers that are not finite
            measured = {
                "grad_u": certificate.stationarity_u,
                "grad_v": certificate.stationarity_v,
                "residual": certificate.lower_residual,
                "violation": certificate.violation,
            }
            for name, value in measured.items():
                if not math.isfinite(value):
                    self.message = f"At step {self.step}, {name} is {value}."
                    return Status.DIVERGED
        if status is Status.INFEASIBLE and certificate.lower_minimiser is False:
            # If only a cut is violated, the user's constraints are met.
            return Status.STATIONARY if certificate.infeasibility <= (tolerance or 0.0) else status
        if tolerance is None or status not in (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED):
            return status
        if certificate.passes(tolerance):
            if not doubt and (certificate.trusted or self.state.mode != "deterministic"):
                return Status.CONVERGED
            return status if status is Status.MAX_STEPS else Status.STALLED
        if certificate.worst <= tolerance and certificate.lower_minimiser is False:
            return Status.STATIONARY
        if certificate.relative_stationarity <= tolerance < certificate.infeasibility:
            return Status.INFEASIBLE
        return Status.STALLED if status is Status.CONVERGED else status

    def _fetch(self, watch: Run) -> Status | None:
        """Bring the pending records to the host, look for divergence, and call the callbacks."""
        if not self.pending:
            return None
        pending, self.pending = self.pending, []
        table = torch.stack([record for record, _ in pending]).cpu().tolist()
        for values, (_, done) in zip(table, pending, strict=True):
            row = dict(zip(RECORD, values, strict=True))
            for name, value in row.items():
                if not math.isfinite(value):
                    return self._diverged(f"At step {done['step']}, {name} is {value}.")
            self.history.append(row | done)
        finite = self._finite()
        if self.together is not None:
            finite, self.interrupted = agree_on_end(self.together, table, finite, self.interrupted, self.step)
        if not finite:
            return self._diverged(f"At step {self.step}, u or v is not finite.")
        self.good = self._snapshot()
        watch.step, watch.seconds, watch.bytes_per_step = self.step, self.seconds, self._bytes_per_step()
        stop = [bool(callback.log(watch)) for callback in self.callbacks]
        if self.together is not None:
            stop = [any(each) for each in self.together.all_gather_object(stop)]
        watch.seen = len(self.history)
        if self._within_tolerance():
            return Status.CONVERGED
        return Status.STOPPED if any(stop) or self.interrupted else None

    def _finite(self) -> bool:
        tensors = [t for variable in self.variables for _, t in variable.named()]
        return bool(torch.stack([torch.isfinite(t.detach()).all() for t in tensors]).all())

    def _within_tolerance(self) -> bool:
        """Return whether the certificate passes. It is measured only if the last records are small enough."""
        tolerance = self.state.tolerance
        if tolerance is None or self.state.mode != "stochastic":
            return False
        scale_u, scale, lower_scale, _ = self.state.scales()
        row = next(self.history.rows(len(self.history) - 1))
        if max(math.hypot(row["grad_u"] / scale_u, row["grad_v"] / scale), row["residual"] / lower_scale) > tolerance:
            return False
        with self.state.derivatives.full_precision():
            for allowed in (Allowed.sample(), self._allowed()):
                found, _ = certify(
                    self.state, self.setting.sources, minimiser=None, hypergradient=False, allowed=allowed
                )
                if not found.passes(tolerance):
                    return False
        return True

    def _allowed(self) -> Allowed:
        """Return how many evaluations the certificate at the end can take."""
        return Allowed.by_run(self.state.derivatives, self.state.engine, quick=self.interrupted)

    # -- state -----------------------------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "u": _clone(self.variables[0].tensors()),
            "v": _clone(self.variables[1].tensors()),
            "method": _clone(self.state.state_dict()),
        }

    def _diverged(self, message: str) -> Status:
        """Restore the last state that was kept."""
        self._write(self.good)
        self.state.load_state_dict(self.good["method"])
        self.step = self.good["step"]
        self.message = f"{message} u and v are those of step {self.step}."
        self.history.truncate(self.step)
        return Status.DIVERGED

    def _write(self, saved: dict[str, Any]) -> None:
        u, v = self.variables
        copy_state({"u": u.tensors(), "v": v.tensors()}, saved)

    def _bytes_per_step(self) -> float:
        return self.sent / self.counted if self.counted else 0.0

    def _save(self, status: Status | None = None) -> None:
        if self.ranks is not None:
            # Each rank's forward passes left statistics of BatchNorm for its shares of the batches.
            average_buffers(self.ranks, self.variables)
        if self.folder is None:
            return
        saved = self._whole(status)
        if self.writes:
            store.save(self.folder, saved)

    def _whole(self, status: Status | None) -> dict[str, Any]:
        """Return the content of a checkpoint. All ranks call it; the rank that writes gets sharded tensors whole."""
        device = self.setting.v.device
        more = {} if self.ranks is None else {"ranks": self.ranks.all_gather_object(list(random_state(device)))}
        u, v = self.variables
        return {
            "fingerprint": self.identity,
            "seed": self.seed,
            "step": self.step,
            "seconds": self.seconds,
            "max_steps": self.setting.max_steps,
            "status": status.name if status else None,
            **gather_state(u, v, self.state.state_dict(), self.like_v, first=self.writes),
            "sources": self.setting.sources.state_dict(),
            "waited": self.setting.sources.waited,
            "random": torch.get_rng_state(),
            "generator": self.setting.generator.get_state(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "history": torch.tensor(self.history.to_lists(), dtype=torch.float64),
            **more,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        other = saved["max_steps"] != self.setting.max_steps and getattr(self.state, "horizon", False)
        if other:
            warn_user(
                f"the checkpoint was made with max_steps={saved['max_steps']}; with max_steps={self.setting.max_steps} "
                f"the warm-up, the decay of the learning rates and the schedule span {self.setting.max_steps} steps "
                f"from step {saved['step']} on."
            )
        saved = split_state(*self.variables, saved, self.like_v)
        self._write(saved)
        self.state.load_state_dict(saved["method"] | ({"other_steps": True} if other else {}))
        self.setting.sources.load_state_dict(saved["sources"])
        set_random_state((saved["random"], saved["cuda"]), self.setting.v.device)
        self.setting.generator.set_state(saved["generator"])
        if self.ranks is not None:
            restore_generators(self.ranks, saved, self.setting.v.device)
        self.history = History.from_lists(saved["history"].tolist())
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.setting.sources.waited = saved.get("waited", 0.0)
        if saved["status"] not in (None, Status.STOPPED.name) and saved["max_steps"] == self.setting.max_steps:
            self.finished = Status[saved["status"]]
        self.good = self._snapshot()


def _clone(tree: Any) -> Any:
    return each_tensor(lambda tensor: tensor.detach().clone(), tree)


@contextmanager
def _noting_interrupts(loop: Loop) -> Iterator[None]:
    """Let Ctrl-C end the run after the current step; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(*_: object) -> None:
        if loop.interrupted:
            raise KeyboardInterrupt
        loop.interrupted = True
        for callback in loop.callbacks:
            callback.interrupted()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
