"""One run from the present u and v: opens the checkpoint, starts the method, and runs the loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilevel._util.random_state import seeded
from bilevel.batches.rank_shares import RankShares
from bilevel.batches.sources import Sources
from bilevel.distributed.derivatives import make_derivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.synchronise import check_same_arguments, run_on_first, seed_by_rank
from bilevel.errors import CheckpointError, OptionError
from bilevel.measures.problem_check import first_evaluation
from bilevel.methods.base import Method, RunContext, RunOptions
from bilevel.results import Solution
from bilevel.running import checkpoints as store
from bilevel.running.callbacks import Callback
from bilevel.running.loop import Loop, PausedRun
from bilevel.running.run_identity import compare, run_identity
from bilevel.running.starting_points import copied, write_point


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunOptions):
    """The arguments of `solve`, checked. See its docstring."""

    method: Method
    data: object
    callbacks: Sequence[Callback]
    # The folder of the checkpoint.
    folder: Path | None = None
    every: int | None = None
    resume: bool = False
    log_every: int | None = None
    hypergradient: bool | None
    seed: int | None


def run_once(request: RunRequest, paused: PausedRun | None = None) -> Solution:
    """Run from the present u and v, by this process or by all ranks.

    If `paused` is given, the run resumes from its state, and leaves a new state there if it spends its budget.
    """
    upper, lower, data = request.u, request.v, request.data
    ranks = ProcessGroup.from_environment(lower.device)
    with nullcontext() if ranks is None else ranks.reporting_lost_ranks():
        stored = _open(request) if ranks is None else run_on_first(ranks, lambda: _open(request))
        saved = paused.state if stored is None and paused is not None else stored
        if (seed := request.seed) is None:
            seed = drawn_seed(ranks) if saved is None else int(saved["seed"])
        shares = None if ranks is None or data is None else RankShares(ranks.rank, ranks.size)
        sources = Sources(data, seed, lower.device, shares)
        identity = _identity(request, seed, saved, ranks)
        with seeded(seed, lower.device) as generator:
            setting = RunContext(
                problem=request.problem,
                u=upper,
                v=lower,
                sources=sources,
                max_steps=request.max_steps,
                tolerance=request.tolerance,
                accumulate=request.accumulate,
                generator=generator,
                precision=request.precision,
                engine=request.engine,
                start=request.start,
                ranks=None if shares is None else ranks,
            )
            first = copied(upper), copied(lower)
            try:
                try:
                    loop = _start(request, setting, seed, identity, ranks, paused)
                    if saved is not None:
                        with nullcontext() if request.folder is None else store.understood(request.folder):
                            loop.restore(saved)
                except BaseException:
                    write_point(first, upper, lower)
                    raise
                return loop.run(request.hypergradient)
            finally:
                upper.release()


def _open(request: RunRequest) -> dict[str, Any] | None:
    """Return the checkpoint to resume from; None if there is none yet. Makes its folder, so that no work is lost."""
    folder = request.folder
    if folder is None:
        return None
    store.prepare(folder)
    if not store.exists(folder):
        return None
    if not request.resume:
        raise CheckpointError(
            f"{folder} holds a checkpoint already, and nothing is overwritten. Pass resume=True to resume it, or "
            "another folder."
        )
    saved = store.load(folder)
    with store.understood(folder):
        int(saved["seed"]), saved["fingerprint"].items(), saved["max_steps"]
    return saved


def drawn_seed(ranks: ProcessGroup | None) -> int:
    """Draw a seed from torch's global generator; all ranks get the seed of the first."""
    seed = int(torch.randint(2**62, ()).item())
    return seed if ranks is None else int(ranks.broadcast_object(seed))


def _identity(
    request: RunRequest, seed: int, saved: dict[str, Any] | None, ranks: ProcessGroup | None
) -> dict[str, Any]:
    """Return which run this is; refuse a checkpoint of another one, and ranks with other arguments."""
    upper, lower = request.u, request.v
    identity = {
        **run_identity(request.problem, request.method, upper, lower, request.data, request.accumulate, seed),
        "precision": request.precision,
    }
    if ranks is not None:
        check_same_arguments(ranks, identity, upper, lower)
    if saved is not None:
        compare(saved["fingerprint"], identity, request.folder)
    if request.accumulate > 1 and request.data is None:
        raise OptionError(
            f"accumulate needs data: without data every gradient is exact; got accumulate={request.accumulate}."
        )
    return identity


def _start(
    request: RunRequest,
    setting: RunContext,
    seed: int,
    identity: dict[str, Any],
    ranks: ProcessGroup | None,
    paused: PausedRun | None,
) -> Loop:
    """Evaluate the objectives once and start the method."""
    upper, lower = setting.u, setting.v
    if not lower.shards:  # autograd does not reach those
        d = make_derivatives(request.problem, upper, lower, ranks=setting.ranks, precision=request.precision)
        first_evaluation(d, setting.sources)
    loop = Loop(
        setting,
        request.method.init(setting),
        [c for c in request.callbacks if ranks is None or ranks.first or c.every_rank],
        request.folder,
        every=request.every,
        log_every=request.log_every,
        seed=seed,
        identity=identity,
        together=ranks,
        paused=paused,
    )
    if setting.ranks is not None:
        seed_by_rank(setting.ranks, seed, lower.device)
    return loop
