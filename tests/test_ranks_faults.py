"""Runs of ranks that are stopped, resumed at other numbers of ranks, and lose one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import PATIENCE, wait_for
from parallel_cases import STEPS, data, decays, network, numbers, ridge, solved
from ranks import ends, free_port, on_ranks, started
from test_distributed import assert_alike

from bilevel import Callback, Penalty, Problem, RankError, Run, solve
from bilevel.distributed import process_group as distributed
from bilevel.distributed.process_group import ProcessGroup

CASES = ["penalty, rows", "value gap"]


class Stop(Callback):
    """Ends a run after some steps; the first rank alone is asked."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run: Run) -> bool:
        return run.step >= self.step


def dropping(u: Any, v: Any, batch: Any) -> Any:
    """An objective that draws random numbers, each rank its own."""
    x = torch.nn.functional.dropout(batch[0], 0.2)
    decay = torch.exp(u).sum() * 1e-3 * sum(p.square().sum() for p in v.parameters())
    return ((v(x).squeeze(1) - batch[1]) ** 2).mean() + decay


def run(folder: str, stop: int | None) -> dict[str, Any]:
    """Go on from the folder, to the end or to a stop."""
    callbacks = [] if stop is None else [Stop(stop)]
    found = {}
    for name in CASES:
        path = f"{folder}/{name.replace(' ', '-')}"
        solution = solved(name, callbacks=callbacks, checkpoint=path, every=2, resume=True)
        assert solution.steps == (stop or STEPS)
        found[name] = numbers(solution)
    problem = Problem(dropping, dropping)
    drop = solve(
        problem,
        Penalty(lower_steps=1),
        decays(),
        network(),
        data(),
        max_steps=STEPS,
        seed=1,
        log_every=4,
        checkpoint=f"{folder}/dropout",
        resume=True,
        every=2,
        callbacks=callbacks,
        hypergradient=False,
    )
    return found | {"dropout": numbers(drop), "without data": without_data(stop)}


def without_data(stop: int | None) -> dict[str, Any]:
    """Every rank solves all of it; where the first is stopped, so are the others."""
    u, v = (torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, batch: (v - 1).square().sum(), lambda u, v, batch: (v - torch.sin(u)).square().sum())
    method = Penalty(mode="stochastic", lower_steps=1)
    callbacks = [] if stop is None else [Stop(stop)]
    found = solve(problem, method, u, v, max_steps=STEPS, seed=0, log_every=2, callbacks=callbacks)
    assert found.steps == (stop or STEPS)
    return {"u": u.tolist(), "v": v.tolist()}


def in_turn(folder: str) -> tuple[dict[str, Any], ...]:
    """A run that is stopped and goes on, one that is not stopped, and one that was begun by one process."""
    run(f"{folder}/two", 4)
    run(f"{folder}/shrinks", 4)
    return run(f"{folder}/two", None), run(f"{folder}/straight", None), run(f"{folder}/grows", None)


def test_a_run_resumes_to_the_same_bits_and_at_another_number_of_ranks(tmp_path):
    alone = {name: numbers(solved(name)) for name in CASES}
    run(str(tmp_path / "grows"), 4)
    for resumed, straight, grown in on_ranks(2, in_turn, str(tmp_path)):
        assert resumed == straight
        for name in CASES:
            assert_alike(name, alone[name], grown[name])
    shrunk = run(str(tmp_path / "shrinks"), None)
    for name in CASES:
        assert_alike(name, alone[name], shrunk[name])


def long_run(folder: str, limit: float) -> None:
    distributed.TIMEOUT = timedelta(seconds=limit)
    solve(
        ridge(),
        Penalty(),
        decays(),
        network(),
        data(),
        max_steps=100_000,
        seed=0,
        log_every=1,
        every=1,
        checkpoint=folder,
    )


def signalled(folder: Path, rank: int, number: int, size: int = 3, limit: float = 600) -> dict[int, str]:
    """Signal one rank during a run; return the messages that end the others."""
    ranks, results = started(size, long_run, str(folder), limit)
    file = folder / "state.safetensors"
    wait_for(file.exists)
    os.kill(ranks[rank].pid, number)
    found = ends(ranks[:rank] + ranks[rank + 1 :], results, size - 1, seconds=PATIENCE)
    ranks[rank].kill()
    ranks[rank].join()
    assert rank not in found
    assert file.exists()
    assert not any(good for good, _ in found.values())
    return {other: message.splitlines()[0] for other, (_, message) in found.items()}


def assert_named(messages: dict[int, str], rank: int) -> None:
    """Rank 0 names the rank, the others point to rank 0, and all say what to do."""
    for other, message in messages.items():
        expected = (
            f"rank {rank} of 3 did not answer rank 0: " if other == 0 else f"rank {other} of 3 lost the other ranks: "
        )
        assert message.startswith(f"RankError: {expected}")
        assert "resume=True" in message


# The first rank holds the store. If it is killed, no rank can name another.
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_when_one_is_killed_and_rank_0_names_it_and_a_checkpoint_is_left(tmp_path, rank):
    assert_named(signalled(tmp_path, rank, signal.SIGKILL), rank)


def test_a_rank_that_lives_but_does_not_answer_is_named_after_the_timeout(tmp_path):
    assert_named(signalled(tmp_path, 1, signal.SIGSTOP, limit=4), 1)


def one_is_late(folder: Path) -> str:
    """What a rank says if the second of three comes to the barrier when the others have given up."""
    ranks, said = ProcessGroup.from_environment(torch.device("cpu")), "nothing"
    ranks.wait_for_all()
    if ranks.rank == 1:
        wait_for(lambda: len(list(folder.iterdir())) == 2)
    try:
        with ranks.reporting_lost_ranks():
            ranks.wait_for_all(timedelta(seconds=2))
    except RankError as error:
        said = str(error)
    (folder / str(ranks.rank)).touch()
    return said


def test_rank_0_names_a_rank_that_does_not_come_where_the_ranks_talk(tmp_path):
    first, _, third = on_ranks(3, one_is_late, tmp_path)
    assert first.startswith("rank 1 of 3 did not answer rank 0: ")
    assert third.startswith("rank 2 of 3 lost the other ranks: ")


def waiting_for_each_other() -> None:
    """Rank 1 dies. Rank 0 has a pending operation with rank 2, which waits for rank 0."""
    ranks = ProcessGroup.from_environment(torch.device("cpu"))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with ranks.reporting_lost_ranks():
        if ranks.rank == 2:
            dist.recv(torch.zeros(1), 0)
        dist.broadcast(torch.zeros(1), 2, async_op=True)
        ranks.wait_for_all(timedelta(seconds=2))


def test_ranks_that_wait_for_each_other_end_soon_after_a_rank_is_lost():
    """In processes that end as scripts do: a forked process runs no handlers at its exit."""
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_ranks_faults as t; t.waiting_for_each_other()"
    shared = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=shared | {"RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(3)
    ]
    try:
        ends_of = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1]
    assert all("RankError: " in ends_of[r] for r in (0, 2))


def one_fails(wrong: str, which: int = 1) -> str:
    rank, calls = int(os.environ["RANK"]), [0]

    def lower(u: Any, v: Any, batch: Any) -> Any:
        calls[0] += 1
        if rank == which and calls[0] > 40:
            raise ValueError("the disk of this machine is gone")
        return ridge().lower(u, v, batch)

    seed = rank if wrong == "seed" else 0
    problem = Problem(ridge().upper, lower) if wrong == "objective" else ridge()
    try:
        solve(problem, Penalty(), decays(), network(), data(), max_steps=200, seed=seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_ends_one_rank_ends_the_others(rank):
    found = dict(enumerate(on_ranks(3, one_fails, "objective", rank)))
    assert found.pop(rank) == "ValueError: the disk of this machine is gone"
    assert_named(found, rank)


def test_ranks_that_were_called_with_other_arguments_are_refused():
    for message in on_ranks(2, one_fails, "seed"):
        assert message.startswith("RankError: every rank must call solve with the same arguments; seed is ")
