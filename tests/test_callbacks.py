"""What watches a run, and Ctrl-C."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Each, leaf, plain
from torch.utils.data import DataLoader

from bilevel import (
    Callback,
    CSVHistory,
    EarlyStopping,
    OptionError,
    Penalty,
    Problem,
    Progress,
    Run,
    Status,
    TensorBoard,
    solve,
)
from bilevel.results import COLUMNS
from bilevel.running.callbacks import ENDING

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
        quadratic.problem,
        Penalty(),
        u,
        v,
        max_steps=100,
        log_every=1,
        seed=0,
        callbacks=[Each(lambda run: run.step == straight.steps)],
    )
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
            quadratic.problem,
            Penalty(lower_steps=1),
            u,
            v,
            quadratic.data(),
            max_steps=20,
            seed=0,
            every=3,
            log_every=log_every,
            callbacks=[CSVHistory(path), *more],
            checkpoint=tmp_path / "state",
            resume=resume,
        )

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
            quadratic.problem,
            plain(),
            u,
            v,
            max_steps=12,
            seed=0,
            every=5,
            log_every=1,
            checkpoint=tmp_path / "state",
            callbacks=[CSVHistory(tmp_path / "h.csv"), *more],
            resume=resume,
        )

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
    with pytest.raises(KeyError, match=r"history has no column 'loss'\. It has f, g, step, seconds"):
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
        quadratic.problem,
        plain(gamma=2.5),
        u,
        v,
        max_steps=5,
        log_every=1,
        callbacks=[Progress("the label", force=True)],
        seed=0,
    )
    out, err = capfd.readouterr()
    assert out == ""
    for words in ("the label", "steps/s", "f ", "|grad_v g| ", "gamma 2.5", "5/5"):
        assert words in err, words


def test_progress_says_that_the_first_step_is_compiled(quadratic, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)
    for engine in ("compile", "eager"):
        u, v = quadratic.start()
        solve(
            quadratic.problem,
            plain(),
            u,
            v,
            max_steps=5,
            log_every=1,
            callbacks=[Progress(force=True)],
            seed=0,
            engine=engine,
        )
        assert ("compiling the first step" in capfd.readouterr().err) == (engine == "compile")


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
        Problem(long_upper, long_lower),
        Penalty(lower_steps=1),
        leaf(0.0, 0.0),
        leaf(0.0, 0.0),
        data,
        max_steps=steps,
        log_every=7,
        seed=0,
        checkpoint=folder,
        every=10**6,
        callbacks=callbacks,
        resume=resume,
        hypergradient=False,
    )


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
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
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


SLOW = """
import time
import torch
from bilevel import Penalty, Problem, solve
from bilevel import Progress

def lower(u, v, batch):
    time.sleep(0.2)
    return (v - u).square().sum()

u, v = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
solve(Problem(lambda u, v, batch: v.square().sum(), lower), Penalty(mode="stochastic", lower_steps=5), u, v,
      max_steps=500, seed=0, callbacks=[Progress()])
"""


@pytest.mark.skipif(os.name != "posix", reason="a terminal is opened by openpty")
def test_a_terminal_is_told_at_once_that_ctrl_c_waits_for_the_step_in_hand():
    terminal, slave = os.openpty()
    with subprocess.Popen([sys.executable, "-c", SLOW], stderr=slave, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(slave)
        shown = b""
        while b"solving" not in shown:
            shown += os.read(terminal, 1000)
        process.send_signal(signal.SIGINT)
        while ENDING.strip().encode() not in shown:
            shown += os.read(terminal, 1000)
        assert process.poll() is None, "the step goes on"
        assert process.wait(timeout=60) == 0
    os.close(terminal)


if __name__ == "__main__":
    child(sys.argv[1])


def test_ctrl_c_that_comes_too_late_to_stop_a_run_is_told_of(quadratic, monkeypatch):
    module = sys.modules["bilevel.running.loop"]
    plain_certify = module.certify

    def late(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return plain_certify(*arguments, **options)

    u, v = quadratic.start()
    assert not solve(quadratic.problem, plain(), u, v, max_steps=3, seed=0).interrupted
    monkeypatch.setattr(module, "certify", late)
    u, v = quadratic.start()
    solution = solve(quadratic.problem, plain(), u, v, max_steps=3, seed=0)
    assert solution.interrupted
    assert solution.status is Status.MAX_STEPS
