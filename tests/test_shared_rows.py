"""Rows among ranks: whole on each, moved by the same gradients, and resumed at any number of ranks."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from parallel_cases import STEPS, data, importance, network, numbers, shifts, solved, vectors
from ranks import on_ranks
from test_distributed import assert_alike

from bilevel import Callback, OptionError, Penalty, Problem, Rows, Run, solve
from bilevel.running import checkpoints as store

CASES = ["penalty, vectors, box", "value gap, vectors"]


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run: Run) -> bool:
        return run.step >= self.step


def run(folder: str, stop: int | None) -> dict[str, Any]:
    """Resume from the folder, and run to the end or to a stop."""
    callbacks = [] if stop is None else [Stop(stop)]
    found = {}
    for name in CASES:
        path = f"{folder}/{name.replace(' ', '-')}"
        found[name] = numbers(solved(name, callbacks=callbacks, checkpoint=path, every=2, resume=True))
    return found


def in_turn(folder: str) -> tuple[dict[str, Any], ...]:
    stopped = run(f"{folder}/stopped", 4)
    if int(os.environ["RANK"]) == 0:
        shutil.copytree(f"{folder}/stopped", f"{folder}/for others")
    return stopped, run(f"{folder}/stopped", None), run(f"{folder}/straight", None)


@pytest.mark.parametrize(("size", "other"), [(2, 4), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_a_checkpoint_has_all_rows_and_resumes_at_any_number_of_ranks(tmp_path, size, other):
    alone = {name: numbers(solved(name)) for name in CASES}
    ends = on_ranks(size, in_turn, str(tmp_path))
    stopped = ends[0][0]
    for _, resumed, straight in ends:
        assert resumed == straight
        for name in CASES:
            assert_alike(name, alone[name], straight[name])
    saved = store.load(tmp_path / "for others" / "penalty,-vectors,-box")
    assert saved["u"][""].reshape(-1).tolist() == stopped["penalty, vectors, box"]["u"]
    moments = saved["method"]["upper"]["rows"][0]
    assert {key: tuple(t.shape) for key, t in moments.items()} == {
        "mean": (33, 2),
        "square": (33, 2),
        "visits": (33,),
    }
    folder = str(tmp_path / "for others")
    for found in [run(folder, None)] if other == 1 else on_ranks(other, run, folder, None):
        for name in CASES:
            assert_alike(name, alone[name], found[name])


class Watch(Callback):
    """Reads the rows during a run, on every rank."""

    every_rank = True

    def __init__(self, u: Rows) -> None:
        self.u, self.read = u, []

    def log(self, run: Run) -> None:
        assert torch.equal(self.u[torch.arange(33)], self.u.values)
        self.read.append(self.u.values.sum().item())


def watched() -> tuple[list[float], bool]:
    u = vectors()
    values, watch = u.values, Watch(u)
    solve(
        shifts(),
        Penalty(lower_steps=1, warm_up=0.0),
        u,
        network(),
        data(rows=True),
        max_steps=STEPS,
        seed=7,
        log_every=1,
        hypergradient=False,
        callbacks=[watch],
    )
    return watch.read, u.values is values


def test_every_rank_has_all_rows_during_a_run_and_a_callback_can_read_them():
    first, *others = on_ranks(4, watched)
    assert all(other == first for other in others)
    read, same = first
    assert same
    assert len(set(read)) > 1


def failing() -> tuple[str, float]:
    u = vectors()
    u.values.fill_(0.02)
    method = Penalty(lower_optimizer=lambda leaves: 3)  # type: ignore[arg-type, return-value]
    try:
        solve(shifts(), method, u, network(), data(rows=True), max_steps=2, seed=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}", float(u.values.sum())
    return "nothing", 0.0


def test_an_error_before_the_first_step_leaves_the_rows_as_they_were():
    for message, total in on_ranks(2, failing):
        assert message.startswith(f"{OptionError.__name__}: lower_optimizer must make a torch optimizer")
        assert total == pytest.approx(66 * 0.02)


def few() -> dict[str, Any]:
    """More ranks than rows, and rows that only some ranks read."""
    u = Rows(3, dtype=torch.float64)

    def lower(u: Rows, v: Any, batch: Any) -> Any:
        picked = batch[2][batch[1] > 0] % 3
        return importance().upper(u, v, batch) + (u[picked] * batch[0][batch[1] > 0][:, 0]).sum() * 1e-2

    return numbers(
        solve(
            Problem(importance().upper, lower),
            Penalty(lower_steps=1, warm_up=0.0),
            u,
            network(),
            data(rows=True),
            max_steps=2,
            seed=0,
            hypergradient=False,
        )
    )


def test_ranks_without_rows_and_reads_of_none_are_no_obstacle():
    first, *others = on_ranks(4, few)
    assert all(other == first for other in others)
