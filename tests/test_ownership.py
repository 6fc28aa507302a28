"""Rows that ranks own: what each has of them, what it costs, and what a checkpoint and the end have."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
from typing import Any

import pytest
import torch
from parallel_cases import STEPS, data, importance, network, numbers, shifts, solved, vectors
from ranks import on_ranks
from test_distributed import assert_alike

from bilevel import Callback, OptionError, Penalty, Problem, RankError, Rows, Run, Solution, solve
from bilevel.problem.rows import OWNED_FROM
from bilevel.running import checkpoints as store

CASES = ["penalty, owned", "penalty, owned, box", "value gap, owned"]


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run: Run) -> bool:
        return run.step >= self.step


def run(folder: str, stop: int | None) -> dict[str, Any]:
    """Go on from the folder, to the end or to a stop."""
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
def test_a_checkpoint_has_all_rows_and_is_gone_on_from_at_any_number_of_ranks(tmp_path, size, other):
    alone = {name: numbers(solved(name)) for name in CASES}
    ends = on_ranks(size, in_turn, str(tmp_path))
    stopped = ends[0][0]
    for _, resumed, straight in ends:
        assert resumed == straight
        for name in CASES:
            assert_alike(name, alone[name], straight[name])
    saved = store.load(tmp_path / "for others" / "penalty,-owned,-box")
    assert saved["u"][""].reshape(-1).tolist() == stopped["penalty, owned, box"]["u"]
    moments = saved["method"]["upper"]["rows"][0]
    assert {key: tuple(t.shape) for key, t in moments.items()} == {
        "mean": (33, 2),
        "square": (33, 2),
        "visits": (33,),
    }
    for block in moments["visits"].split(9):
        assert int(block.count_nonzero()) > 0  # the rows of every rank have moved
    folder = str(tmp_path / "for others")
    for found in [run(folder, None)] if other == 1 else on_ranks(other, run, folder, None):
        for name in CASES:
            assert_alike(name, alone[name], found[name])


# -- memory --------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Notes, on every rank, how many rows of u and of its moments there are in the midst of a run."""

    every_rank = True

    def __init__(self, u: Rows) -> None:
        self.u, self.rows, self.said = u, 0, ""

    def log(self, run: Run) -> None:
        self.rows = len(self.u.kept)
        for read in (lambda: self.u.values, lambda: self.u[torch.tensor([0])]):
            try:
                read()
            except RankError as error:
                self.said += f"{error} "


def watched(owned: bool | None) -> dict[str, Any]:
    u = Rows(33, shape=(2,), dtype=torch.float64, owned=owned)
    whole, watch = u.values, Watch(u)
    solution = solve(
        shifts(),
        Penalty(lower_steps=1),
        u,
        network(),
        data(rows=True),
        max_steps=STEPS,
        seed=7,
        hypergradient=False,
        callbacks=[watch],
    )
    moments = solution.state["upper"]["rows"][0]
    return {
        "rows": watch.rows,
        "said": watch.said,
        "moments": {len(t) for t in moments.values()},
        "same tensor": u.values is whole,
        "numel": u.numel(),
        "length": len(u),
        "shown": repr(u),
        "moved": int((whole != 0).any(1).sum()),
        "copied": pickle.loads(pickle.dumps(u)).values.equal(whole),
    }


def test_each_rank_has_its_own_rows_and_moments_alone_and_all_rows_at_the_end():
    found = on_ranks(4, watched, True)
    assert [rank["rows"] for rank in found] == [8, 8, 8, 9]
    for rank in found:
        assert rank["moments"] == {rank["rows"]}
        assert rank["same tensor"]
        assert (rank["numel"], rank["length"], rank["shown"]) == (66, 33, "Rows(33, shape=(2,), dtype=torch.float64)")
        assert rank["moved"] > 9
        assert rank["copied"]
        assert "while solve runs" in rank["said"]
        assert "in the objectives and constraints alone" in rank["said"]


def test_few_rows_stay_whole_on_every_rank_unless_asked_for():
    for rank in on_ranks(2, watched, None):
        assert (rank["rows"], rank["moments"], rank["said"]) == (33, {33}, "")
    assert not Rows(OWNED_FROM - 1).owned
    assert Rows(OWNED_FROM // 4, shape=(4,)).owned
    assert not Rows(OWNED_FROM, owned=False).owned


class Bytes(Callback):
    """The bytes of all tensors of a process in the midst of a run."""

    every_rank = True

    def __init__(self) -> None:
        self.most = 0

    def log(self, run: Run) -> None:
        gc.collect()
        storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
        self.most = max(self.most, sum({x.data_ptr(): x.nbytes() for x in storages}.values()))


def memory(owned: bool) -> float:
    """Bytes for each number of u, with its moments, its scratch and the last good state."""
    n, width, watch = 1000, 200, Bytes()
    problem = Problem(
        lambda u, v, row: (v - 1).square().sum() + u[row].square().mean(),
        lambda u, v, row: (v - u[row].mean(0)).square().mean(),
    )
    batches = list(torch.arange(100).split(10))
    v = torch.zeros(width, requires_grad=True)
    solve(
        problem,
        Penalty(lower_steps=1),
        Rows(n, shape=(width,), owned=owned),
        v,
        (batches, batches),
        max_steps=4,
        log_every=1,
        seed=0,
        hypergradient=False,
        callbacks=[watch],
    )
    return watch.most / (n * width)


def test_memory_of_rows_is_divided_by_the_number_of_ranks():
    """Values, two moments, a scratch, and copies of the first three: 7 floats for each number of u."""
    whole, half, quarter = (max(on_ranks(size, memory, owned)) for size, owned in ((2, False), (2, True), (4, True)))
    assert whole == pytest.approx(28, abs=1)  # batches, v and what is its size are a fraction of a byte
    assert half == pytest.approx(14, abs=1)
    assert quarter == pytest.approx(7, abs=1)


# -- what goes wrong -----------------------------------------------------------------------------------------------


def failing(where: str) -> tuple[str, float]:
    u = vectors()
    u.values.fill_(0.02)

    def lower(u: Any, v: Any, batch: Any) -> Any:
        rows = batch[2] + (33 if where == "row" else 0)
        return shifts().lower(u, v, (batch[0], batch[1], rows))

    method = Penalty(lower_optimizer=(lambda leaves: 3) if where == "start" else None)  # type: ignore[arg-type]
    try:
        solve(Problem(shifts().upper, lower), method, u, network(), data(rows=True), max_steps=2, seed=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}", float(u.values.sum())
    return "nothing", 0.0


def test_an_error_before_the_first_step_leaves_the_rows_whole_as_they_were():
    for message, total in on_ranks(2, failing, "start"):
        assert message.startswith(f"{OptionError.__name__}: lower_optimizer must make a torch optimizer")
        assert total == pytest.approx(66 * 0.02)


def test_a_row_that_is_not_there_is_refused():
    for message, _ in on_ranks(2, failing, "row"):
        assert "u was read at a row that it does not have; it has 33" in message


def one_fails(folder: str) -> tuple[str, str]:
    """One rank fails between the two exchanges of a read and those of the next, while the other waits for its rows."""
    calls = [0]

    def lower(u: Any, v: Any, batch: Any) -> Any:
        calls[0] += 1
        if os.environ["RANK"] == "1" and calls[0] > 60:
            u[batch[2]]
            raise ValueError("the rows of this machine are gone")
        return shifts().lower(u, v, batch)

    u, said = vectors(), ["", ""]
    try:
        solve(
            Problem(shifts().upper, lower),
            Penalty(lower_steps=1, warm_up=0.0),
            u,
            network(),
            data(rows=True),
            max_steps=200,
            seed=0,
            checkpoint=folder,
            every=1,
        )
    except Exception as error:
        said[0] = f"{type(error).__name__}: {error}"
    try:
        u.values.sum()
    except RankError as error:
        said[1] = str(error)
    return said[0], said[1]


def test_a_rank_that_fails_between_two_exchanges_is_named_and_the_rows_are_in_the_checkpoint(tmp_path):
    (first, rows), (second, _) = on_ranks(2, one_fails, str(tmp_path))
    assert second == "ValueError: the rows of this machine are gone"
    assert first.startswith("RankError: rank 1 of 2 ended: ValueError: the rows of this machine are gone")
    assert "in its checkpoint" in rows
    assert store.load(tmp_path)["u"][""].count_nonzero() > 0


def few(_: str) -> dict[str, Any]:
    """More ranks than rows, and rows that only some ranks read."""
    u = Rows(3, dtype=torch.float64, owned=True)

    def lower(u: Rows, v: Any, batch: Any) -> Any:
        picked = batch[2][batch[1] > 0] % 3
        return importance().upper(u, v, batch) + (u[picked] * batch[0][batch[1] > 0][:, 0]).sum() * 1e-2

    solution: Solution = solve(
        Problem(importance().upper, lower),
        Penalty(lower_steps=1),
        u,
        network(),
        data(rows=True),
        max_steps=2,
        seed=0,
        hypergradient=False,
    )
    return numbers(solution)


def test_ranks_without_rows_and_reads_of_none_are_no_obstacle():
    first, *others = on_ranks(4, few, "")
    assert all(other == first for other in others)
