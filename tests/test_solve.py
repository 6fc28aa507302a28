"""The loop: what reaches the user's functions, the data, the callbacks, the endings, and every refusal."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, RandomSampler

import bilevel
from bilevel import (
    BilevelWarning,
    Callback,
    CSVHistory,
    DataError,
    EarlyStopping,
    OptionError,
    Penalty,
    Problem,
    ProblemError,
    Progress,
    Rows,
    Run,
    Status,
    TensorBoard,
    VariableError,
    solve,
)
from bilevel.solution import COLUMNS

SGD = partial(torch.optim.SGD, lr=0.01)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def plain(**options: Any) -> Penalty:
    """The step-wise mode with nothing that moves by itself: fixed prices, fixed rates, no warm-up, u and v in turn."""
    fixed: dict[str, Any] = {
        "mode": "stochastic", "lower_steps": 2, "joint": False, "gamma": 1.0, "lam": 0.5, "advances": 0, "warm_up": 0.0,
        "decay": "constant", "lower_optimizer": SGD, "upper_optimizer": SGD,
    }  # fmt: skip
    return Penalty(**(fixed | options))


class Each(Callback):
    """Calls a function before the first step and after each log."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def start(self, run: Run) -> None:
        self.function(run)

    def log(self, run: Run) -> bool | None:
        return self.function(run)


# -- u and v -----------------------------------------------------------------------------------------------------------


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def first(value: Any) -> Tensor:
    """The tensor in any kind of variable."""
    if isinstance(value, nn.Module):
        return value.x
    if isinstance(value, dict):
        return value["x"]
    if isinstance(value, list):
        return value[0]
    return value[torch.arange(2)] if isinstance(value, Rows) else value


KINDS = {
    "tensor": lambda: leaf(0.0, 0.0),
    "dict": lambda: {"x": leaf(0.0, 0.0)},
    "list": lambda: [leaf(0.0, 0.0)],
    "module": Point,
}


@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
@pytest.mark.parametrize("make_v", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("make_u", [*KINDS.values(), lambda: Rows(2, dtype=torch.float64)], ids=[*KINDS, "rows"])
def test_u_and_v_reach_the_objectives_as_they_were_passed(make_u, make_v, mode):
    u, v = make_u(), make_v()
    seen = []

    def upper(a, b, batch):
        seen.append(a is u and b is v and batch is None)
        return torch.sum((first(b) - 1) ** 2) + torch.sum(first(a) ** 2)

    def lower(a, b, batch):
        seen.append(a is u and b is v and batch is None)
        return torch.sum((first(b) - first(a)) ** 2)

    def constraint(a, b, batch):
        seen.append(a is u and b is v and batch is None)
        return first(a) - 2

    solution = solve(Problem(upper, lower, inequalities=[constraint]), Penalty(mode=mode), u, v, max_steps=3, seed=0)
    assert all(seen)
    assert len(seen) > 9
    assert solution.u is u
    assert solution.v is v
    assert first(v).detach().abs().min() > 0  # moved in place


def test_frozen_parameters_stay_as_they_are():
    v = nn.Linear(2, 1, dtype=torch.float64)
    v.bias.requires_grad_(False)
    before = v.bias.clone()
    u = leaf(0.0)
    x = torch.ones(1, 2, dtype=torch.float64)
    problem = Problem(lambda u, v, _: (v(x) - 1).square().sum(), lambda u, v, _: (v(x) - u).square().sum())
    weight = v.weight.detach().clone()
    solve(problem, plain(), u, v, max_steps=3, seed=0)
    assert torch.equal(v.bias, before)
    assert not v.bias.requires_grad
    assert not torch.equal(v.weight, weight)


# -- data --------------------------------------------------------------------------------------------------------------


class Record:
    """A problem on numbered batches that notes which batch each evaluation got, step by step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.steps: list[list[tuple[str, Any]]] = []
        self.problem = Problem(self._upper, self._lower)
        self.callback = Each(self._next)

    def _upper(self, u: Tensor, v: Tensor, batch: Any) -> Tensor:
        self.calls.append(("upper", batch))
        return torch.sum((v - 1) ** 2) + torch.sum(u**2)

    def _lower(self, u: Tensor, v: Tensor, batch: Any) -> Tensor:
        self.calls.append(("lower", batch))
        return torch.sum((v - u) ** 2)

    def _next(self, run: Run) -> None:
        if run.step:
            self.steps.append(self.calls)
        self.calls = []

    def run(self, method: Penalty, data: Any, steps: int, **options: Any) -> list[list[tuple[str, Any]]]:
        options = {"callbacks": [self.callback], "log_every": 1, "seed": 0} | options
        solve(self.problem, method, leaf(0.0), leaf(0.0), data, max_steps=steps, **options)
        return self.steps

    def order(self, name: str) -> list[Any]:
        return [batch for step in self.steps for which, batch in step if which == name]


def used(step: list[tuple[str, Any]]) -> list[tuple[Any, Any]]:
    """The (upper, lower) batches of each gradient of a step, the upper step's last."""
    upper, lower = ([batch for which, batch in step if which == name] for name in ("upper", "lower"))
    return list(zip(upper, lower, strict=True))


def test_sources_are_cycled_each_on_its_own_and_every_lower_step_gets_a_fresh_pair():
    record = Record()
    steps = record.run(plain(lower_steps=2), ([0, 1], [10, 11, 12]), 6)
    pairs = [(i % 2, 10 + i % 3) for i in range(18)]
    for k, step in enumerate(steps):
        drawn = pairs[3 * k : 3 * k + 3]
        # Which of the draws is the upper step's changes without a period, so that it sees all batches of a fixed order.
        last = drawn.pop([0, 1, 0, 2, 1, 0][k])
        assert used(step) == [*drawn, last]


def test_shared_batches_are_one_pair_for_the_whole_upper_step():
    record = Record()
    record.run(plain(lower_steps=2, lower_batches="shared"), ([0, 1], [10, 11, 12]), 5)
    assert record.order("upper") == [i % 2 for i in range(5) for _ in range(3)]
    assert record.order("lower") == [10 + i % 3 for i in range(5) for _ in range(3)]


def test_accumulation_takes_so_many_pairs_for_each_gradient():
    record = Record()
    steps = record.run(plain(lower_steps=1), (range(100), range(100, 200)), 3, accumulate=3)
    for k, step in enumerate(steps):
        drawn = list(range(6 * k, 6 * k + 6))
        upper = [b for which, b in step if which == "upper"]
        assert sorted(upper) == drawn
        assert sorted((upper[:3], upper[3:])) == [drawn[:3], drawn[3:]]  # neighbours make up one gradient
        # Each lower batch is read twice: for the mean slope, and to be pulled on.
        assert sorted(b for which, b in step if which == "lower") == sorted([100 + i for i in drawn] * 2)


@pytest.mark.parametrize("batches", ["fresh", "shared"])
def test_other_cotangent_comes_from_a_lower_batch_of_its_own(batches):
    record = Record()
    steps = record.run(plain(lower_steps=2, cotangent="other", lower_batches=batches), (range(50), range(50)), 3)
    for step in steps:
        lower = [b for which, b in step if which == "lower"]
        own, other = lower[1::2], lower[0::2]
        assert len(set(other)) == 3
        assert not set(own) & set(other)


def test_running_cotangent_draws_nothing_more():
    record = Record()
    steps = record.run(plain(lower_steps=2, cotangent="running"), (range(50), range(50)), 3)
    for k, step in enumerate(steps):
        assert sorted(used(step)) == [(i, i) for i in range(3 * k, 3 * k + 3)]


def loader(kind: str, n: int = 12) -> DataLoader[Any]:
    if kind == "plain":
        return DataLoader(range(n), batch_size=4, shuffle=True)
    generator = torch.Generator().manual_seed(99)
    if kind == "generator":
        return DataLoader(range(n), batch_size=4, shuffle=True, generator=generator)
    return DataLoader(range(n), batch_size=4, sampler=RandomSampler(range(n), replacement=True, generator=generator))


def drawn(kind: str, seed: int, steps: int = 4) -> list[list[int]]:
    """The lower batches of a run with one evaluation too many to be a multiple of a pass."""
    record = Record()
    record.run(plain(lower_steps=2), ([0], loader(kind)), steps, seed=seed)
    return [batch.tolist() for batch in record.order("lower")]


@pytest.mark.parametrize("kind", ["plain", "generator", "replacement"])
def test_shuffled_loader_is_shuffled_anew_each_pass_from_the_seed(kind):
    one = drawn(kind, 1)
    torch.manual_seed(1234)  # the global generator has no say in it
    assert one == drawn(kind, 1)
    assert one != drawn(kind, 2)
    passes = [[row for batch in one[i : i + 3] for row in batch] for i in range(0, 12, 3)]
    assert len({tuple(p) for p in passes}) == 4
    if kind != "replacement":
        assert all(sorted(p) == list(range(12)) for p in passes)


@pytest.mark.parametrize("kind", ["plain", "generator", "replacement"])
def test_resumed_run_draws_what_the_straight_one_drew_even_where_certificates_are_measured_on_the_way(kind, tmp_path):
    problem = Problem(
        lambda u, v, batch: torch.sum((v - 1) ** 2), lambda u, v, batch: torch.sum((v - u - batch.double().mean()) ** 2)
    )

    def run(folder: str, stop: int | None = None, resume: bool = False) -> tuple[Tensor, list[float]]:
        v = leaf(0.0)
        # Records that are small enough have the certificate measured, on batches of its own, at every log.
        solution = solve(
            problem, plain(lower_steps=1), leaf(0.0), v, ([0], loader(kind, 200)), max_steps=30, tolerance=1e3, seed=0,
            log_every=1, callbacks=[Each(lambda run: run.step == stop)], checkpoint=tmp_path / folder, resume=resume,
        )  # fmt: skip
        assert solution.status is (Status.MAX_STEPS if stop is None else Status.STOPPED)
        return v, solution.history["lower"]

    measured = 0

    def fail(*args: Any) -> bool:
        nonlocal measured
        measured += 1
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bilevel.Certificate, "passes", fail)
        straight = run("straight")
        run("halves", stop=4)
        resumed = run("halves", resume=True)
    assert measured > 30
    assert resumed[1] == straight[1]
    assert torch.equal(resumed[0], straight[0])


def test_set_epoch_of_a_sampler_is_called_with_the_pass():
    class Sampler(torch.utils.data.Sampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __len__(self):
            return 2

        def __iter__(self):
            return iter([0, 1])

    record = Record()
    sampler = Sampler()
    record.run(plain(lower_steps=1), ([0], DataLoader([5, 6], batch_size=None, sampler=sampler)), 3)
    steps = sampler.epochs[-4:-1] if sampler.epochs[-1] == 0 else sampler.epochs[-3:]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((iter([1]), [1]), "the upper data is a one-shot iterator"),
        (([1], (x for x in [1])), "the lower data is a one-shot iterator"),
        (([], [1]), "the upper data is empty"),
        (([1], DataLoader([], batch_size=2)), "the lower data is empty"),
        (([1],), "data must be None or a pair .* got tuple of 1"),
        (([1], [2], [3]), "data must be None or a pair .* got tuple of 3"),
        (5, "data must be None or a pair .* got int"),
        ({"upper": [1], "lower": [1]}, "data must be None or a pair .* got dict"),
        ((3, [1]), "the upper data must be an iterable of batches; got int"),
        ((torch.zeros(3), [1]), "the upper data must be an iterable of batches; got a tensor"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_cycled_is_refused(data, words):
    u, v = leaf(0.0), leaf(0.0)
    with pytest.raises(DataError, match=words):
        solve(Record().problem, plain(), u, v, data, max_steps=1, seed=0)
    with pytest.raises(DataError, match=words):
        bilevel.check(Record().problem, leaf(0.0), leaf(0.0), data)
    assert u.item() == v.item() == 0


def test_source_that_runs_dry_after_the_first_pass_is_named():
    class Once:
        left = 3  # check, scales and one pass of the run

        def __iter__(self):
            self.left -= 1
            return iter([1, 2] if self.left >= 0 else [])

    with pytest.raises(DataError, match="the lower data is empty"):
        solve(Record().problem, plain(lower_steps=3), leaf(0.0), leaf(0.0), ([0], Once()), max_steps=2, seed=0)


def global_state() -> list[Any]:
    numbers = [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
    return [torch.get_rng_state().tolist(), numbers, random.getstate()]


class Noisy(torch.utils.data.Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.randn(2, dtype=torch.float64) + np.random.rand() + random.random()


@pytest.mark.parametrize("fails", [False, True])
def test_global_generators_are_put_back_after_a_run(fails):
    data = (DataLoader(Noisy(), 2, shuffle=True), DataLoader(Noisy(), 3, shuffle=True))
    calls = 0

    def lower(u, v, batch):
        nonlocal calls
        calls += 1
        if fails and calls > 20:
            raise RuntimeError("broken")
        return torch.sum((dropout(v) - u - batch) ** 2)

    problem = Problem(lambda u, v, batch: torch.sum((dropout(v) - batch) ** 2), lower)
    before = global_state()
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            solve(problem, plain(), leaf(0.0, 0.0), leaf(0.0, 0.0), data, max_steps=10, seed=0)
    else:
        solve(problem, plain(), leaf(0.0, 0.0), leaf(0.0, 0.0), data, max_steps=10, seed=0)
    assert global_state() == before


def test_random_data_and_dropout_follow_the_seed_alone():
    def run(seed: int) -> Tensor:
        torch.manual_seed(random.randrange(10**6))
        data = (DataLoader(Noisy(), 2, shuffle=True), DataLoader(Noisy(), 3, shuffle=True))
        problem = Problem(
            lambda u, v, batch: torch.sum((dropout(v) - batch) ** 2),
            lambda u, v, batch: torch.sum((dropout(v) - u - batch) ** 2),
        )
        v = leaf(0.0, 0.0)
        solve(problem, plain(), leaf(0.0, 0.0), v, data, max_steps=5, seed=seed)
        return v

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_seed_of_none_comes_from_torchs_generator(quadratic):
    def run() -> Tensor:
        u, v = quadratic.start()
        solve(quadratic.problem, plain(), u, v, quadratic.data(), max_steps=3)
        return v

    torch.manual_seed(5)
    one, other = run(), run()
    torch.manual_seed(5)
    assert torch.equal(run(), one)
    assert not torch.equal(one, other)


# -- logs and callbacks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_every", "expected"), [(1, list(range(1, 8))), (3, [3, 6, 7]), (100, [7]), (7, [7])])
def test_callbacks_hear_every_log_every_steps_and_at_the_end(quadratic, log_every, expected):
    heard, rows = [], []

    def note(run):
        if run.step:
            heard.append(run.step)
            rows.extend(row["step"] for row in run.rows())

    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, max_steps=7, log_every=log_every, callbacks=[Each(note)], seed=0)
    assert heard == expected
    assert rows == solution.history["step"] == list(range(1, 8))


def test_log_every_changes_nothing_but_the_logs(quadratic):
    ends = []
    for log_every in (1, 4, None):
        u, v = quadratic.start()
        solution = solve(
            quadratic.problem, Penalty(lower_steps=2), u, v, quadratic.data(), max_steps=9, log_every=log_every, seed=0
        )
        ends.append((u, v, solution.history["upper"]))
    for u, v, upper in ends[1:]:
        assert torch.equal(u, ends[0][0])
        assert torch.equal(v, ends[0][1])
        assert upper == ends[0][2]


def test_callback_that_returns_true_stops_the_run_with_a_partial_solution(quadratic):
    u, v = quadratic.start()
    ended = []

    class Stop(Callback):
        def log(self, run):
            return run.step >= 6

        def end(self, solution):
            ended.append(solution)

    solution = solve(quadratic.problem, plain(), u, v, max_steps=50, log_every=3, callbacks=[Stop()], seed=0)
    assert solution.status is Status.STOPPED
    assert solution.steps == len(solution.history) == 6
    assert ended == [solution]
    assert u.detach().abs().min() > 0
    assert math.isfinite(solution.certificate.stationarity)


def test_run_that_ends_by_itself_at_the_step_where_a_callback_stops_it_has_its_own_status(quadratic):
    u, v = quadratic.start()
    straight = solve(quadratic.problem, Penalty(), u, v, max_steps=100, log_every=1, seed=0)
    assert straight.status is Status.CONVERGED
    u, v = quadratic.start()
    solution = solve(
        quadratic.problem, Penalty(), u, v, max_steps=100, log_every=1, seed=0,
        callbacks=[Each(lambda run: run.step == straight.steps)],
    )  # fmt: skip
    assert solution.status is Status.CONVERGED
    assert solution.certificate.lower_minimiser is True


def test_early_stopping_ends_a_run_that_no_longer_falls(quadratic):
    u, v = quadratic.start()
    frozen = partial(torch.optim.SGD, lr=0.0)
    method = plain(lower_optimizer=frozen, upper_optimizer=frozen)
    stop = EarlyStopping(patience=10)
    solution = solve(quadratic.problem, method, u, v, max_steps=100, log_every=1, callbacks=[stop], seed=0)
    assert solution.status is Status.STOPPED
    assert solution.steps == 11


def test_early_stopping_lets_a_falling_run_go_on(quadratic):
    u, v = quadratic.start()
    stop = EarlyStopping(patience=3, least=0.0)
    method = plain(gamma=0.0, lam=0.0)  # f alone falls at every step
    solution = solve(quadratic.problem, method, u, v, max_steps=40, log_every=1, callbacks=[stop], seed=0)
    assert solution.status is Status.MAX_STEPS
    assert all(b < a for a, b in pairwise(solution.history["upper"]))


def test_early_stopping_watches_a_value_of_the_users_own(quadratic):
    u, v = quadratic.start()
    values = iter([5.0, 4.0, *[6.0] * 100])
    stop = EarlyStopping(patience=8, value=lambda: next(values))
    solution = solve(quadratic.problem, plain(), u, v, max_steps=100, log_every=4, callbacks=[stop], seed=0)
    assert solution.steps == 8 + 8  # the best value came at step 8
    assert stop.best == 4.0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"monitor": "loss"}, "monitor must be a column"), ({"patience": 0}, "patience must be at least 1")],
)
def test_early_stopping_refuses_bad_options(options, words):
    with pytest.raises(OptionError, match=words):
        EarlyStopping(**options)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def as_text(history: Any) -> list[dict[str, str]]:
    return [{name: str(value) for name, value in row.items()} for row in history.rows()]


@pytest.mark.parametrize("log_every", [1, 4])
def test_csv_file_holds_the_history_also_after_a_resume(quadratic, tmp_path, log_every):
    path = tmp_path / "run" / "history.csv"

    def run(*more: Callback, resume: bool) -> Any:
        u, v = quadratic.start()
        return solve(
            quadratic.problem, Penalty(lower_steps=1), u, v, quadratic.data(), max_steps=20, seed=0, every=3,
            log_every=log_every, callbacks=[CSVHistory(path), *more], checkpoint=tmp_path / "state", resume=resume,
        )  # fmt: skip

    half = run(Each(lambda run: run.step >= 10), resume=False)
    assert 10 <= half.steps < 20
    assert read(path) == as_text(half.history)
    whole = run(resume=True)
    assert len(whole.history) == 20
    assert list(read(path)[0]) == list(COLUMNS)
    assert read(path) == as_text(whole.history)


def test_rows_written_after_the_last_checkpoint_are_in_the_file_once(quadratic, tmp_path):
    """A run that dies between two checkpoints has rows in its file that the resumed run makes again."""

    class Die(Callback):
        def log(self, run):
            if run.step == 8:
                raise RuntimeError("killed")

    def run(*more: Callback, resume: bool) -> Any:
        u, v = quadratic.start()
        return solve(
            quadratic.problem, plain(), u, v, max_steps=12, seed=0, every=5, log_every=1, checkpoint=tmp_path / "state",
            callbacks=[CSVHistory(tmp_path / "h.csv"), *more], resume=resume,
        )  # fmt: skip

    with pytest.raises(RuntimeError, match="killed"):
        run(Die(), resume=False)
    assert [row["step"] for row in read(tmp_path / "h.csv")] == [str(i) for i in range(1, 9)]
    solution = run(resume=True)
    assert read(tmp_path / "h.csv") == as_text(solution.history)


def test_history_writes_itself_as_csv(quadratic, tmp_path):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(advance_every=2, advances=None), u, v, max_steps=5, seed=0)
    solution.history.to_csv(tmp_path / "h.csv")
    assert read(tmp_path / "h.csv") == as_text(solution.history)
    assert solution.history["advanced"] == ["", "steps", "", "steps", ""]
    with pytest.raises(KeyError, match="history has no column 'loss'; it has step, seconds"):
        solution.history["loss"]


def test_tensorboard_writes_event_files(quadratic, tmp_path):
    u, v = quadratic.start()
    try:
        writer = TensorBoard(tmp_path)
    except OptionError as error:
        pytest.skip(str(error))
    solve(quadratic.problem, plain(), u, v, max_steps=3, callbacks=[writer], seed=0)
    files = list(tmp_path.glob("events.out.tfevents.*"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for name in (b"upper", b"residual", b"gamma"):
        assert name in content


def test_progress_is_quiet_where_standard_error_is_no_terminal(quadratic, capfd):
    u, v = quadratic.start()
    solve(quadratic.problem, plain(), u, v, max_steps=5, log_every=1, callbacks=[Progress()], seed=0)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_progress_shows_the_values_and_the_speed(quadratic, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    u, v = quadratic.start()
    solve(
        quadratic.problem, plain(gamma=2.5), u, v, max_steps=5, log_every=1,
        callbacks=[Progress("the label", force=True)], seed=0,
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert out == ""
    for words in ("the label", "steps/s", "f ", "|grad_v g| ", "gamma 2.5", "5/5"):
        assert words in err, words


def test_solve_prints_nothing(quadratic, capfd):
    u, v = quadratic.start()
    solve(quadratic.problem, Penalty(), u, v, max_steps=100, seed=0)
    u, v = quadratic.start()
    solve(quadratic.problem, Penalty(lower_steps=1), u, v, quadratic.data(), max_steps=5, seed=0)
    assert capfd.readouterr() == ("", "")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def long_upper(u, v, batch):
    return torch.sum((v - batch) ** 2) + torch.sum(u**2)


def long_lower(u, v, batch):
    return torch.sum((v - u - batch) ** 2)


def long_run(folder: str, steps: int, *callbacks: Callback, resume: bool) -> Any:
    draws = torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = (DataLoader(list(draws[:4]), 2, shuffle=True), DataLoader(list(draws[4:]), 2, shuffle=True))
    return solve(
        Problem(long_upper, long_lower), Penalty(lower_steps=1), leaf(0.0, 0.0), leaf(0.0, 0.0), data, max_steps=steps,
        log_every=7, seed=0, checkpoint=folder, every=10**6, callbacks=callbacks, resume=resume, hypergradient=False,
    )  # fmt: skip


LONG = 300


def child(folder: str) -> None:
    """Run until the parent interrupts, then say how it ended."""
    torch.set_num_threads(1)

    def tell(run: Run) -> None:
        print("step", run.step, flush=True)
        time.sleep(0.05)  # leaves the parent time to interrupt before the end

    solution = long_run(folder, LONG, Each(tell), resume=False)
    print(json.dumps({"status": solution.status.name, "steps": solution.steps, "rows": len(solution.history)}))


def test_interrupt_saves_the_state_and_returns_what_there_is_and_the_run_can_go_on(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path / "killed")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1]) >= 20:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "KeyboardInterrupt" not in err
    end = json.loads(out.splitlines()[-1])
    assert end["status"] == "STOPPED"
    assert 20 <= end["steps"] == end["rows"] < LONG
    resumed = long_run(str(tmp_path / "killed"), LONG, resume=True)
    straight = long_run(str(tmp_path / "straight"), LONG, resume=False)
    assert torch.equal(resumed.u, straight.u)
    assert torch.equal(resumed.v, straight.v)
    assert resumed.history["upper"] == straight.history["upper"]


def test_second_interrupt_stops_at_once(quadratic):
    before = signal.getsignal(signal.SIGINT)
    calls = 0

    def lower(u, v, batch):
        nonlocal calls
        calls += 1
        if calls in (30, 31):  # both within one step of six evaluations
            signal.raise_signal(signal.SIGINT)
        return quadratic.lower(u, v, batch)

    u, v = quadratic.start()
    with pytest.raises(KeyboardInterrupt):
        solve(Problem(quadratic.upper, lower), plain(lower_steps=20), u, v, max_steps=100, seed=0)
    assert calls == 31
    assert signal.getsignal(signal.SIGINT) is before


def test_first_interrupt_ends_the_run_after_the_step_in_hand(quadratic):
    before = signal.getsignal(signal.SIGINT)

    def interrupt(run):
        if run.step == 4:
            signal.raise_signal(signal.SIGINT)

    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, max_steps=100, log_every=2, callbacks=[Each(interrupt)], seed=0)
    assert solution.status is Status.STOPPED
    assert solution.steps in (4, 5)
    assert signal.getsignal(signal.SIGINT) is before


# -- endings -----------------------------------------------------------------------------------------------------------


def test_statuses_are_sentences():
    for status in Status:
        assert status.value[0].isupper()
        assert status.value.endswith(".")
        assert str(status) == status.value
    assert len({status.value for status in Status}) == len(Status)


def test_solution_prints_as_its_status_and_message(quadratic):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, Penalty(), u, v, max_steps=100, seed=0)
    assert str(solution) == Status.CONVERGED.value
    u, v = quadratic.start()
    fast = partial(torch.optim.SGD, lr=1e6)
    solution = solve(quadratic.problem, plain(lower_optimizer=fast, upper_optimizer=fast), u, v, max_steps=99, seed=0)
    assert str(solution) == f"{Status.DIVERGED.value} {solution.message}"


def test_constraint_that_cannot_be_met_is_called_infeasible():
    problem = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2),
        lambda u, v, _: torch.sum((v - u) ** 2),
        equalities=[lambda u, v, _: u**2 + 1],
    )
    solution = solve(problem, Penalty(), leaf(0.5), leaf(0.0), max_steps=3000, seed=0)
    assert solution.status is Status.INFEASIBLE
    assert solution.certificate.violation >= 1


def test_certificate_of_a_solved_problem_passes(quadratic):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, Penalty(), u, v, max_steps=200, seed=0)
    certificate = solution.certificate
    assert solution.status is Status.CONVERGED
    assert certificate.passes(1e-7)
    assert not certificate.passes(1e-20)
    # The run ends at 1e-8 relative to scales of the order 1; the hypergradient inherits that error.
    assert certificate.stationarity < 1e-6
    assert certificate.lower_residual < 1e-6
    assert certificate.hypergradient_error < 1e-6
    assert certificate.violation == 0
    assert certificate.lower_minimiser is True
    assert certificate.damping == 0
    assert certificate.batches == 0
    assert certificate.full_data
    # The adjoint is g_vv^-1 f_v.
    q = torch.linalg.solve(quadratic.H, v.detach() - quadratic.a)
    assert torch.allclose(solution.adjoint[0], q, atol=1e-6)


def test_certificate_far_from_the_solution_does_not_pass(quadratic):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, max_steps=1, seed=0)
    assert solution.status is Status.MAX_STEPS
    assert solution.certificate.worst > 0.05
    assert solution.certificate.hypergradient_error > 0.05


def test_certificate_states_the_damping_and_the_batches_it_is_of(quadratic):
    u, v = quadratic.start()
    method = plain(lam=0.3, gamma=2.0, advances=None, advance_every=2, gamma_factor=1.5, lam_factor=0.5)
    solution = solve(quadratic.problem, method, u, v, quadratic.data(), max_steps=5, seed=0)
    # Two advances: lam / gamma falls by 3 each time. All of these are rounded once or twice.
    assert solution.certificate.damping == pytest.approx(0.15 / 9, rel=1e-12)
    schedule = solution.state["schedule"]
    assert solution.certificate.damping == (schedule["lam"] / schedule["gamma"]).item()
    assert solution.certificate.batches == 4
    assert solution.certificate.full_data


def test_certificate_measures_the_mean_objectives_over_all_batches(quadratic):
    """The values on the data of mean zero are those of the problem without data."""
    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, quadratic.data(0.5), max_steps=2, seed=0)
    certificate, (gamma, nu) = solution.certificate, (2.0, 0.0)
    gamma = solution.state["schedule"]["gamma"].item()
    nu = solution.state["schedule"]["nu"][0]
    u, v = u.detach(), v.detach()
    s = quadratic.H @ v - quadratic.C @ u - quadratic.c
    pull = nu + gamma * s
    # Exact means of eight and four numbers: rounding only.
    assert certificate.lower_residual == pytest.approx(s.norm().item(), rel=1e-10)
    assert certificate.stationarity_v == pytest.approx((v - quadratic.a + quadratic.H @ pull).norm().item(), rel=1e-10)
    slope_u = quadratic.alpha * (u - quadratic.b) - quadratic.C.T @ pull
    assert certificate.stationarity_u == pytest.approx(slope_u.norm().item(), rel=1e-10)
    assert torch.allclose(solution.multipliers["nu"][0], pull, rtol=1e-10)


def test_hypergradient_is_solved_for_only_where_asked_or_small(quadratic):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, max_steps=1, seed=0, hypergradient=False)
    assert solution.certificate.hypergradient_error is None
    big = torch.zeros(2000, dtype=torch.float64)
    problem = Problem(lambda u, v, _: torch.sum((v - 1) ** 2), lambda u, v, _: torch.sum((v - u) ** 2))
    for asked in (None, True):
        u, v = leaf(0.0), big.clone().requires_grad_()
        solution = solve(problem, plain(), u, v, max_steps=1, seed=0, hypergradient=asked)
        assert (solution.certificate.hypergradient_error is None) is (asked is None)


def test_stochastic_run_ends_as_converged_when_the_tolerance_is_met(quadratic):
    u, v = quadratic.start()
    adam = partial(torch.optim.Adam, lr=0.02)
    method = plain(lam=0.0, gamma=4.0, lower_optimizer=adam, upper_optimizer=adam, decay="linear")
    solution = solve(quadratic.problem, method, u, v, max_steps=600, tolerance=0.05, log_every=5, seed=0)
    assert solution.status is Status.CONVERGED
    assert solution.steps < 600
    assert solution.certificate.worst <= 0.05


def test_float32_problem_without_data_says_its_tolerance_once_and_reaches_it():
    problem = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2) + torch.sum(u**2), lambda u, v, _: torch.sum((v - 2 * u) ** 2)
    )
    u, v = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with pytest.warns(BilevelWarning) as caught:
        solution = solve(problem, Penalty(), u, v, max_steps=500, seed=0)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "float32" in text
    assert "tolerance" in text
    assert solution.status is Status.CONVERGED
    # v = 2u and the derivative of |2u - 1|^2 + |u|^2 vanishes at u = 2/5; float32 has seven digits.
    assert torch.allclose(u, torch.full((3,), 0.4), atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a tolerance of the user's own needs no words
        solve(problem, Penalty(), u, v, max_steps=50, tolerance=1e-2, seed=0)


# -- learning rates and optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("decay", ["linear", "constant"])
def test_learning_rates_fall_as_gamma_grows_and_linearly(quadratic, power, decay):
    u, v = quadratic.start()
    method = plain(
        rate_power=power, decay=decay, advances=None, advance_every=3, gamma_factor=2.0,
        upper_optimizer=partial(torch.optim.SGD, lr=0.02),
    )  # fmt: skip
    history = solve(quadratic.problem, method, u, v, max_steps=10, seed=0).history
    for k in range(10):
        growth = history["gamma"][k] / history["gamma"][0]
        factor = growth**-power * (1 - k / 10 if decay == "linear" else 1)
        # The factor is computed in float64, the rates are float32 or float64.
        assert history["upper_rate"][k] == pytest.approx(0.02 * factor, rel=1e-6)
        assert history["lower_rate"][k] == pytest.approx(0.01 * factor, rel=1e-6)
    assert history["gamma"][-1] == 8.0


def test_warm_up_moves_v_only(quadratic):
    moved = []
    u, v = quadratic.start()

    def note(run):
        moved.append((bool(u.any()), bool(v.any())))

    method = plain(warm_up=0.4)
    history = solve(quadratic.problem, method, u, v, max_steps=10, log_every=1, callbacks=[Each(note)], seed=0).history
    assert [m[0] for m in moved] == [False] * 5 + [True] * 6
    assert [m[1] for m in moved] == [False] + [True] * 10
    assert history["upper_rate"][:4] == [0.0] * 4
    assert min(history["upper_rate"][4:]) > 0


OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_the_given_optimizers_on_the_objective_as_written(quadratic, factory):
    u, v = quadratic.start()
    gamma, lam, steps = 1.5, 0.5, 4
    method = plain(gamma=gamma, lam=lam, lower_steps=2, lower_optimizer=factory, upper_optimizer=factory)
    solve(quadratic.problem, method, u, v, max_steps=steps, seed=0)

    x, y = quadratic.start()
    upper, lower = factory([x]), factory([y])

    def penalised() -> Tensor:
        (s,) = torch.autograd.grad(quadratic.lower(x, y, None), y, create_graph=True)
        return quadratic.upper(x, y, None) + gamma / 2 * s @ s

    for _ in range(steps):
        for _ in range(2):
            (y.grad,) = torch.autograd.grad(penalised() + lam * quadratic.lower(x, y, None), y)
            lower.step()
        (x.grad,) = torch.autograd.grad(penalised(), x)
        upper.step()
    # The same arithmetic in another order, over a dozen steps; learning rates held as float32 tensors differ by 1e-8.
    assert torch.allclose(u, x, rtol=1e-6, atol=1e-9)
    assert torch.allclose(v, y, rtol=1e-6, atol=1e-9)
    assert u.detach().abs().min() > 1e-3


def test_parameter_groups_keep_their_own_rates():
    made = []

    def factory(parameters):
        first, second, third = parameters
        groups = [{"params": [first, second], "lr": 0.02}, {"params": [third], "lr": 0.0}]
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    v = [leaf(0.0), leaf(0.0), leaf(0.0)]
    problem = Problem(
        lambda u, v, _: sum((x - 1).square().sum() for x in v), lambda u, v, _: sum((x - u).square().sum() for x in v)
    )
    rates = []
    solve(
        problem, plain(lower_optimizer=factory, decay="linear"), leaf(0.0), v, max_steps=4, log_every=1, seed=0,
        callbacks=[Each(lambda run: rates.append([float(group["lr"]) for group in made[-1].param_groups]))],
    )  # fmt: skip
    assert v[0].item() == v[1].item() != 0
    assert v[2].item() == 0
    for k, (one, two) in enumerate(rates[1:]):
        assert one == pytest.approx(0.02 * (1 - k / 4), rel=1e-6)  # rates may be float32
        assert two == 0


@pytest.mark.parametrize("option", ["upper_optimizer", "lower_optimizer"])
def test_factory_that_makes_no_optimizer_is_refused(quadratic, option):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=f"{option} must make a torch optimizer.* got list"):
        solve(quadratic.problem, plain(**{option: lambda parameters: list(parameters)}), u, v, max_steps=1, seed=0)


def test_rows_with_another_optimizer_than_adam_are_refused():
    u, v = Rows(3, dtype=torch.float64), leaf(0.0, 0.0, 0.0)
    problem = Problem(lambda u, v, _: torch.sum((v - 1) ** 2), lambda u, v, _: torch.sum((v - u[[0, 1, 2]]) ** 2))
    with pytest.raises(OptionError, match=r"upper_optimizer must be torch.optim.Adam .* got SGD"):
        solve(problem, plain(), u, v, max_steps=1, seed=0)


# -- episodes ----------------------------------------------------------------------------------------------------------


class Episodes:
    """Features of u for each pair of batches; notes when each function ran and what it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[list[str]] = []
        self.callback = Each(self._next)
        self.problem = Problem(self.upper, self.lower, prepare=self.prepare, start_lower=self.start_lower)

    def _next(self, run: Run) -> None:
        if run.step:
            self.steps.append(self.calls)
        self.calls = []

    def prepare(self, u: Tensor, batches: Any) -> dict[str, Any]:
        self.calls.append("prepare")
        return {"features": torch.tanh(u) * sum(batches), "batches": batches}

    def start_lower(self, v: Tensor, prepared: dict[str, Any]) -> None:
        self.calls.append("start")
        v.fill_(0.1)

    def lower(self, u: Tensor, v: Tensor, prepared: dict[str, Any]) -> Tensor:
        self.calls.append("lower live" if prepared["features"].requires_grad else "lower held")
        return torch.sum((v - prepared["features"]) ** 2)

    def upper(self, u: Tensor, v: Tensor, prepared: dict[str, Any]) -> Tensor:
        self.calls.append("upper")
        return torch.sum((v - prepared["batches"][0]) ** 2)


def test_prepare_runs_once_per_upper_step_and_lower_steps_see_it_detached():
    episodes = Episodes()
    u, v = leaf(0.5), leaf(0.0)
    solve(
        episodes.problem, plain(lower_steps=3), u, v, ([1.0, 2.0], [0.5, 1.5, 2.5]), max_steps=5, log_every=1, seed=0,
        callbacks=[episodes.callback],
    )  # fmt: skip
    assert len(episodes.steps) == 5
    for step in episodes.steps:
        assert step == ["prepare", "start", *["lower held", "upper"] * 3, "lower live", "upper"]
    assert u.item() != 0.5


def test_upper_step_differentiates_through_prepare():
    data = ([1.0, 2.0], [0.5, 1.5, 2.5])
    ends = []
    for prepared in (True, False):
        u, v = leaf(0.5), leaf(0.0)
        episodes = Episodes()
        if prepared:
            problem = Problem(episodes.upper, episodes.lower, prepare=episodes.prepare)
            method = plain()
        else:
            # The pair is the same for both objectives, as with prepare, and shared over the step.
            pairs = [(data[0][i % 2], data[1][i % 3]) for i in range(6)]
            problem = Problem(
                lambda u, v, pair: torch.sum((v - pair[0]) ** 2),
                lambda u, v, pair: torch.sum((v - torch.tanh(u) * sum(pair)) ** 2),
            )
            method = plain(lower_batches="shared")
        solve(problem, method, u, v, data if prepared else (pairs, pairs), max_steps=6, seed=0)
        ends.append((u.item(), v.item()))
    # The same products in another order.
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_every_episode_starts_v_its_optimizer_and_its_multipliers_afresh():
    """With u held by a rate of zero and one episode, every upper step then repeats the first one bit for bit."""
    momentum, still = partial(torch.optim.Adam, lr=0.05), partial(torch.optim.SGD, lr=0.0)

    def lowers(start_lower: bool) -> list[float]:
        def start(v, prepared):
            v.fill_(0.1)

        problem = Problem(
            lambda u, v, _: torch.sum((v - 1) ** 2),
            lambda u, v, _: torch.sum((v - u) ** 2),
            start_lower=start if start_lower else None,
        )
        method = plain(
            lower_steps=3, nu=0.2, multipliers=True, advances=None, advance_every=1, gamma_factor=1.0, lam_factor=1.0,
            lower_optimizer=momentum, upper_optimizer=still,
        )  # fmt: skip
        solution = solve(problem, method, leaf(0.5), leaf(0.1), max_steps=6, seed=0)
        assert "steps" in solution.history["advanced"]
        return solution.history["lower"]

    assert len(set(lowers(True))) == 1
    assert len(set(lowers(False))) == 6


def test_rows_in_prepare_are_refused():
    u, v = Rows(3, dtype=torch.float64), leaf(0.0)
    problem = Problem(
        lambda u, v, p: torch.sum((v - 1) ** 2), lambda u, v, p: torch.sum((v - p) ** 2), prepare=lambda u, _: u[[0]]
    )
    with pytest.raises(OptionError, match="u cannot hold Rows where the problem has prepare"):
        solve(problem, Penalty(mode="stochastic"), u, v, max_steps=1, seed=0)


# -- resuming with another horizon -------------------------------------------------------------------------------------


def test_longer_horizon_on_resume_warns_with_one_sentence(quadratic, tmp_path):
    u, v = quadratic.start()
    solve(quadratic.problem, plain(), u, v, max_steps=5, checkpoint=tmp_path, seed=0)
    with pytest.warns(BilevelWarning) as caught:
        solution = solve(quadratic.problem, plain(), u, v, max_steps=9, checkpoint=tmp_path, resume=True, seed=0)
    assert solution.steps == len(solution.history) == 9
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "max_steps=5" in text
    assert "max_steps=9" in text
    assert text.count(". ") == 0
    assert caught[0].filename == __file__


def test_resume_without_a_seed_takes_that_of_the_checkpoint(quadratic, tmp_path):
    def run(folder: str, **options: Any) -> Tensor:
        u, v = quadratic.start()
        solve(quadratic.problem, plain(), u, v, quadratic.data(), max_steps=8, checkpoint=tmp_path / folder, **options)
        return v

    straight = run("straight", seed=4)
    run("halves", seed=4, callbacks=[Each(lambda run: run.step == 3)], log_every=1)
    assert torch.equal(run("halves", resume=True), straight)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lower_equalities", "lower_inequalities"])
def test_lower_constraints_are_refused_with_a_clear_sentence(quadratic, name):
    with pytest.raises(ProblemError, match=f"{name} is not supported yet. Use project_lower"):
        Problem(quadratic.upper, quadratic.lower, **{name: [lambda u, v, batch: v]})


@pytest.mark.parametrize("name", ["upper", "lower"])
def test_objective_that_is_no_function_is_refused(quadratic, name):
    with pytest.raises(ProblemError, match=f"{name} must be a function"):
        Problem(**({"upper": quadratic.upper, "lower": quadratic.lower} | {name: 3}))


def test_constraint_that_is_no_function_is_refused(quadratic):
    with pytest.raises(ProblemError, match="inequalities must hold functions"):
        Problem(quadratic.upper, quadratic.lower, inequalities=[1])


STOCHASTIC_ONLY = {
    "lower_steps": 3, "lam": 1.0, "epsilon": 0.1, "nu": 0.0, "multipliers": True, "average_residual": True,
    "gamma_factor": 1.1, "lam_factor": 0.9, "epsilon_factor": 0.9, "smoothing": 0.5, "advances": 3, "advance_every": 3,
    "warm_up": 0.1, "decay": "linear", "rate_power": 0.5, "upper_optimizer": SGD, "lower_optimizer": SGD,
    "lower_batches": "fresh", "cotangent": "same",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), STOCHASTIC_ONLY.items())
def test_option_of_the_stochastic_mode_is_refused_without_data(quadratic, name, value):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=f"{name} is not used in deterministic mode.*mode='stochastic'"):
        solve(quadratic.problem, Penalty(**{name: value}), u, v, max_steps=1, seed=0)


@pytest.mark.parametrize(("name", "value"), [("memory", 10), ("inner_steps", 10)])
def test_option_of_the_deterministic_mode_is_refused_with_data(quadratic, name, value):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=f"{name} is not used in stochastic mode.*mode='deterministic'"):
        solve(quadratic.problem, Penalty(**{name: value}), u, v, quadratic.data(), max_steps=1, seed=0)


def test_deterministic_mode_refuses_data(quadratic):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match="mode='deterministic' needs objectives without data"):
        solve(quadratic.problem, Penalty(mode="deterministic"), u, v, quadratic.data(), max_steps=1, seed=0)


def test_accumulation_without_data_is_refused(quadratic):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=r"accumulate needs data.*accumulate=2"):
        solve(quadratic.problem, plain(), u, v, max_steps=1, accumulate=2, seed=0)


def frozen_module() -> nn.Module:
    module = nn.Linear(2, 1)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


BAD_VARIABLES = {
    "without grad": (lambda: torch.zeros(2), r"must require grad; got a tensor of shape \(2,\).*requires_grad_\(\)"),
    "without grad in a dict": (lambda: {"w": torch.zeros(2)}, r"\['w'\] must require grad"),
    "whole numbers": (lambda: torch.zeros(2, dtype=torch.int64), "must hold real numbers; got dtype torch.int64"),
    "not a leaf": (lambda: leaf(1.0, 2.0) * 2, "must be a leaf tensor"),
    "a number": (lambda: 3.0, "must be a tensor, a module, Rows.* got float"),
    "nothing": (lambda: None, "must be a tensor, a module, Rows.* got NoneType"),
    "an empty dict": (dict, "at least one"),
    "an empty list": (list, "at least one"),
    "a frozen module": (frozen_module, "must have a parameter that requires grad"),
    "a list of numbers": (lambda: [1.0], r"\['0'\] must be a tensor or Rows; got float"),
}


@pytest.mark.parametrize("which", ["u", "v"])
@pytest.mark.parametrize(("make", "words"), BAD_VARIABLES.values(), ids=BAD_VARIABLES)
def test_variable_that_cannot_be_optimised_is_refused_by_name(quadratic, which, make, words):
    good = dict(zip("uv", quadratic.start(), strict=True))
    with pytest.raises(VariableError, match=f"^{which}.*{words}"):
        solve(quadratic.problem, Penalty(), **(good | {which: make()}), max_steps=1, seed=0)


def test_tensor_that_is_both_u_and_v_is_refused(quadratic):
    x = leaf(0.0, 0.0)
    with pytest.raises(OptionError, match="u and v must not share tensors"):
        solve(quadratic.problem, Penalty(), [x], x, max_steps=1, seed=0)


def test_projection_of_a_name_that_is_not_there_is_refused():
    problem = Problem(lambda u, v, _: v.sum(), lambda u, v, _: (v * v).sum(), project_upper={"w": bilevel.Box(0, 1)})
    with pytest.raises(ProblemError, match=r"names 'w', which u does not have; it has 'x'"):
        solve(problem, Penalty(), {"x": leaf(0.0)}, leaf(0.0), max_steps=1, seed=0)


def good_f(u, v, batch):
    return torch.sum((v - 1) ** 2)


def good_g(u, v, batch):
    return torch.sum((v - u) ** 2)


BAD_PROBLEMS = {
    "lower without v": (Problem(good_f, lambda u, v, b: torch.sum(u**2)), "lower must depend on v"),
    "lower with v detached": (Problem(good_f, lambda u, v, b: good_g(u, v.detach(), b)), "lower must depend on v"),
    "lower as numbers": (Problem(good_f, lambda u, v, b: (v - u) ** 2), r"lower must return one number.*\(2,\)"),
    "upper as numbers": (Problem(lambda u, v, b: v, good_g), r"upper must return one number.*\(2,\)"),
    "upper as a float": (Problem(lambda u, v, b: 1.0, good_g), "upper must return a tensor; got float"),
    "upper as nothing": (Problem(lambda u, v, b: None, good_g), "upper must return a tensor; got NoneType"),
    "NaN above": (Problem(lambda u, v, b: good_f(u, v, b) * math.nan, good_g), "upper must be finite; it is .*nan"),
    "infinity below": (Problem(good_f, lambda u, v, b: good_g(u, v, b) / 0), "lower must be finite; it is .*inf|nan"),
    "NaN in a constraint": (
        Problem(good_f, good_g, equalities=[lambda u, v, b: torch.log(u - 1)]), "constraint 0 must be finite"
    ),
    "a slope that is not finite": (
        Problem(good_f, lambda u, v, b: torch.sqrt(v**2).sum() + good_g(u, v, b)),
        "the gradient of lower in v must be finite",
    ),
    "shapes that do not match": (
        Problem(good_f, lambda u, v, b: torch.sum(v @ torch.ones(3, dtype=torch.float64))),
        r"lower failed at the first evaluation with RuntimeError.*u of shape \(2,\); v of shape \(2,\); batch None",
    ),
    "an error above": (
        Problem(lambda u, v, b: v["weight"], good_g), "upper failed at the first evaluation with IndexError"
    ),
    "a constraint that is no tensor": (
        Problem(good_f, good_g, inequalities=[lambda u, v, b: 0.0]), "constraint 0 must return a tensor; got float"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
@pytest.mark.parametrize(("problem", "words"), BAD_PROBLEMS.values(), ids=BAD_PROBLEMS)
def test_problem_that_cannot_be_solved_is_refused_before_anything_changes(problem, words, mode):
    u, v = leaf(0.0, 0.0), leaf(0.0, 0.0)
    with pytest.raises(ProblemError, match=words):
        solve(problem, Penalty(mode=mode), u, v, max_steps=1, seed=0)
    assert not u.any()
    assert not v.any()
    with pytest.raises(ProblemError, match=words):
        bilevel.check(problem, u, v)


def test_constraint_whose_shape_changes_is_refused():
    problem = Problem(
        lambda u, v, batch: torch.sum((v - 1) ** 2),
        lambda u, v, batch: torch.sum((v - u) ** 2),
        inequalities=[lambda u, v, batch: u.expand(batch)],
    )
    with pytest.raises(ProblemError, match="constraint 0 must return the same shape for every batch"):
        solve(problem, plain(), leaf(0.0), leaf(0.0), ([2, 3], [0]), max_steps=3, seed=0)


# -- check -------------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_check_prints_and_returns_what_it_found_and_changes_nothing(capsys):
    v, u = network(), Rows(6)
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1, 0, 1])
    data = ([(x, y)], DataLoader([(x[i], y[i], i) for i in range(6)], 3, shuffle=True))

    def lower(u, v, batch):
        a, b, row = batch
        return (torch.sigmoid(u[row]) * cross_entropy(v(a), b, reduction="none")).mean()

    problem = Problem(lambda u, v, batch: cross_entropy(v(batch[0]), batch[1]), lower)
    tensors = {name: t.clone() for name, t in v.state_dict().items()}
    before, rows = global_state(), u.values.clone()
    found = bilevel.check(problem, u, v, data)
    assert global_state() == before
    assert torch.equal(u.values, rows)
    assert not u.values.requires_grad
    assert all(torch.equal(t, tensors[name]) for name, t in v.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in v.parameters())
    assert found.upper_size == 6
    assert found.lower_size == sum(p.numel() for p in v.parameters())
    assert found.upper > 0
    assert found.lower > 0
    assert found.upper_depends_on_v
    assert found.coupled
    assert found.double_backward == "yes"
    assert found.seconds_gradient > 0
    assert found.seconds_step > 0
    out, err = capsys.readouterr()
    assert out == f"{found}\n"
    assert err == ""
    assert "double backward" in out


def test_check_says_what_does_not_depend_on_what(capsys):
    found = bilevel.check(Problem(lambda u, v, _: u.sum(), lambda u, v, _: (v * v).sum()), leaf(1.0), leaf(1.0))
    assert not found.upper_depends_on_v
    assert not found.coupled
    out = capsys.readouterr().out
    assert "no: v cannot influence f" in out
    assert "no: u cannot influence v" in out


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return 2 * ctx.saved_tensors[0] * d


def attention(v: Tensor) -> Tensor:
    x = v * torch.ones(1, 1, 4, 4, dtype=torch.float64)  # with the dimension of heads: without it the kernel is another
    return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("operator", "name"), [(attention, "attention"), (Square.apply, "once_differentiable")], ids=["attention", "once"]
)
def test_check_names_the_operator_without_double_backward(operator, name, capsys):
    problem = Problem(lambda u, v, _: (v * v).sum(), lambda u, v, _: operator(v - u).square().sum())
    found = bilevel.check(problem, leaf(1.0), leaf(2.0))
    assert found.double_backward.startswith("no: ")
    assert name in found.double_backward
    assert found.double_backward in capsys.readouterr().out


if __name__ == "__main__":
    child(sys.argv[1])
