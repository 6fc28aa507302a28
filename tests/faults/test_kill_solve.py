"""A run that is killed with SIGKILL again and again, and resumed each time, ends with the bits of one that was not.

Each life is a process of its own, forked from a server that has torch loaded. A life is killed a random moment after
it has passed a random step, so that the kill falls anywhere: in a step, in a log, in the middle of a save.
"""

from __future__ import annotations

import random
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import CONTEXT
from tally import readable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bilevel import Callback, Penalty, Problem, Rows, Run, Solution, solve
from bilevel.results import COLUMNS


def upper(u: Any, v: Any, batch: Any) -> Tensor:
    return cross_entropy(v(batch[0]), batch[1])


def lower(u: Any, v: Any, batch: Any) -> Tensor:
    x, y, row = batch
    w = torch.sigmoid(u[row])
    return (w * cross_entropy(v(x), y, reduction="none")).sum() / w.sum()


def stochastic(steps: int, **options: Any) -> Solution:
    """Shuffled loaders, dropout, BatchNorm, per-example weights with moments of their own, momentum."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 3, generator=generator), torch.randint(2, (80,), generator=generator)
    trusted = DataLoader(TensorDataset(x[:16], y[:16]), 8, shuffle=True)
    noisy = DataLoader(TensorDataset(x[16:], y[16:], torch.arange(64)), 16, shuffle=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        v = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))
    momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    method = Penalty(lower_steps=2, lower_optimizer=momentum, cotangent="running", advance_every=7)
    u = Rows(64)
    return solve(Problem(upper, lower), method, u, v, (trusted, noisy), max_steps=steps, **options)


def bent_upper(u: Tensor, v: Tensor, batch: None) -> Tensor:
    return torch.sum((v - 1) ** 2) + 0.01 * torch.sum(u**4)


def bent_lower(u: Tensor, v: Tensor, batch: None) -> Tensor:
    # A narrow valley, so that the run has some hundred steps.
    return torch.sum((v[1:] - v[:-1] ** 2) ** 2) * 10 + torch.sum((v - torch.sin(u)) ** 2) + torch.sum(v**4)


def deterministic(steps: int, **options: Any) -> Solution:
    u = torch.full((6,), 0.3, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    problem = Problem(bent_upper, bent_lower, inequalities=[tied])
    return solve(problem, Penalty(), u, v, max_steps=steps, **options)


def tied(u: Tensor, v: Tensor, batch: None) -> Tensor:
    return u.sum() - 1


RUNS = {"stochastic": stochastic, "deterministic": deterministic}


class Tell(Callback):
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, run: Run) -> None:
        self.pipe.send(run.step)

    def log(self, run: Run) -> None:
        self.pipe.send(run.step)


def live(which: str, steps: int, folder: str, every: int, pipe: Connection) -> None:
    """One life: go on from the checkpoint, if there is one, to the end; then send the end."""
    torch.set_num_threads(1)
    solution = RUNS[which](
        steps, checkpoint=folder, every=every, resume=True, log_every=1, callbacks=[Tell(pipe)], seed=5
    )
    pipe.send(bits(solution))


def bits(solution: Solution) -> dict[str, Any]:
    """Everything that must be the same, as plain values; clocks are left out."""
    u = solution.u.values if isinstance(solution.u, Rows) else solution.u
    v = solution.v.state_dict() if isinstance(solution.v, nn.Module) else {"": solution.v}
    return {
        "u": u.detach().numpy().tobytes(),
        "v": {name: t.detach().numpy().tobytes() for name, t in v.items()},
        "history": {name: solution.history[name] for name in COLUMNS if name != "seconds"},
        "multipliers": {name: [t.numpy().tobytes() for t in ts] for name, ts in solution.multipliers.items()},
        "status": solution.status.name,
        "steps": solution.steps,
        "certificate": repr(solution.certificate),
    }


def one_life(
    which: str, steps: int, folder: Path, every: int, until: int | None, delay: float
) -> dict[str, Any] | None:
    """Run a life; kill it `delay` seconds after step `until`. Returns its end, or None where it was killed."""
    mine, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=live, args=(which, steps, str(folder), every, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            message = mine.recv()
            if isinstance(message, dict):
                process.join()
                return message
            if until is not None and message >= until:
                time.sleep(delay)
                process.kill()
                break
        end = None
        try:
            while not isinstance(end, dict):
                end = mine.recv()
        except EOFError:
            end = None
        process.join()
        return end
    finally:
        mine.close()
        process.kill()
        process.join()


def check(which: str, steps: int, kills: int, seed: int, every: int, folder: Path, last: int) -> None:
    straight = one_life(which, steps, folder / "straight", every, None, 0.0)
    assert straight is not None
    assert straight["steps"] > last, "the run is too short for its kills"
    draw, run = random.Random(seed), 0

    def compared(end: dict[str, Any] | None) -> None:
        assert end is not None
        assert [name for name in straight if straight[name] != end[name]] == []

    for until in sorted(draw.randrange(last) for _ in range(kills)):
        while (
            end := one_life(which, steps, folder / f"killed-{run}", every, until, draw.uniform(0.0, 0.01))
        ) is not None:  # on a busy machine it may end before its kill
            compared(end)
            run += 1
        readable(folder / f"killed-{run}")
    compared(one_life(which, steps, folder / f"killed-{run}", every, None, 0.0))


def test_stochastic_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    check("stochastic", steps=100, kills=10, seed=0, every=2, folder=tmp_path, last=80)


def test_deterministic_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    check("deterministic", steps=80, kills=8, seed=1, every=2, folder=tmp_path, last=60)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("seed", range(4))
def test_stochastic_run_killed_many_times_ends_with_the_same_bits(tmp_path, seed, every):
    check("stochastic", steps=250, kills=40, seed=seed, every=every, folder=tmp_path, last=220)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_deterministic_run_killed_many_times_ends_with_the_same_bits(tmp_path, seed):
    check("deterministic", steps=200, kills=20, seed=seed, every=1, folder=tmp_path, last=180)
