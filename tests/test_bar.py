"""How far a command is, where standard error is a pipe or a file: a line now and then, and nothing in the result."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from bilevel.cli import progress as bar
from bilevel.cli.main import main
from bilevel.cli.progress import Bar, stages


@pytest.fixture
def clock(monkeypatch):
    """The seconds that lines go by."""
    now = [0.0]
    monkeypatch.setattr("bilevel.cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("bilevel.cli.progress._last", 0.0)
    return now


def test_a_pipe_has_a_line_for_what_is_done_whenever_time_has_passed(clock, capsys):
    with stages("images") as tell:
        for second in range(0, 40, 4):
            clock[0] = second
            tell("evaluating", 100 * second, 4000)
    told = [
        "evaluating: 1,200 of 4,000 images",
        "evaluating: 2,400 of 4,000 images",
        "evaluating: 3,600 of 4,000 images",
    ]
    assert capsys.readouterr().err.splitlines() == told


def test_the_bars_of_a_command_together_have_no_more_lines(clock, capsys):
    for second in range(0, 40, 5):
        clock[0] = second
        with Bar("cells") as one:  # a new one each time
            task = one.add_task("tuning", total=8)
            one.update(task, advance=1)
    assert capsys.readouterr().err.splitlines() == ["tuning: 1 of 8 cells"] * 3


def test_a_terminal_has_no_lines(clock, capsys, monkeypatch):
    monkeypatch.setattr(bar, "Console", partial(Console, force_terminal=True))
    clock[0] = 1000.0
    with stages("images") as tell:
        tell("evaluating", 100, 4000)
    err = capsys.readouterr().err
    assert "evaluating" in err
    assert "evaluating: 100" not in err


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 4))
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=x, y=(x[:, 0] + 0.3 * draw.normal(size=120) > 0).astype(int))
    return path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tune", "--steps", 8), ("tuning one penalty: 1 of 8", "trying a grid: 11 of 11")),
        (
            ("tune", "--model", "mlp", "--penalty", "single", "--steps", 20),
            ("training: 20 of 20", "trying values (start): 1 of 1", "trying values (grid, decay = 0.1): 5 of 5"),
        ),
        (("denoise", "--trusted", 20, "--steps", 20), ("learning importances: 20 of 20 steps",)),
        (("poison", "--steps", 20), ("moving points: 20 of 20 steps",)),
    ],
)
def test_commands_tell_a_pipe_how_far_they_are_and_the_result_stays_clean(
    arguments, told, table, tmp_path, capsys, monkeypatch
):
    command = [arguments[0], str(table), *map(str, arguments[1:]), "--json", "--out"]
    monkeypatch.setattr(bar, "EVERY", 0.0)
    assert main([*command, str(tmp_path)]) == 0
    heard = capsys.readouterr()
    assert json.loads(heard.out)["command"] == arguments[0]
    assert set(told) <= set(heard.err.splitlines())
