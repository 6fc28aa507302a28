"""Without decay="linear", nothing needs the number of steps: a run can be stopped, or extended by a second call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    Callback,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Status,
    ValueFunction,
    ValueGap,
    solve,
)

FAST = partial(torch.optim.Adam, lr=0.05)  # v is trained, and u begins to move, after 10 to 80 steps
ROOT: dict[str, Any] = {"decay": "root", "lower_steps": 1}
DOWN: dict[str, Any] = ROOT | {"lower_optimizer": FAST}
METHODS: dict[str, Any] = {
    "tracked": Penalty(lower_optimizer=FAST),
    "same": Penalty(cotangent="same", decay="root", lower_optimizer=FAST),
    "running, in turn": Penalty(cotangent="running", joint=False, **DOWN),
    "with a tolerance": Penalty(cotangent="same", epsilon=1.0, decay="root", lower_optimizer=FAST),
    "alternating": Alternating(**DOWN),
    "approx grad": ApproxGrad(**DOWN),
    "sgd": ApproxGrad(linear_solver="sgd", **DOWN),
    "reverse mode": ReverseMode(**ROOT),
    "forward mode": ForwardMode(**ROOT),
    "value gap": ValueGap(**DOWN),
    "value function": ValueFunction(**DOWN),
    "sama": SAMA(**DOWN),
    "soba": SOBA(),
    "srba": SRBA(),
    "f2sa": F2SA(lower_steps=1),
}
STEPS = 100


class StopAt(Callback):
    def log(self, run):
        return run.step >= STEPS


def taken(quadratic, method, max_steps, *, constrained=False, **options):
    problem = quadratic.problem
    if constrained:
        problem = Problem(problem.upper, problem.lower, inequalities=[lambda u, v, _: u.sum() - 0.5])
    u, v = quadratic.start()
    return solve(problem, method, u, v, quadratic.data(), max_steps=max_steps, seed=0, hypergradient=False, **options)


@pytest.mark.parametrize("name", METHODS)
def test_steps_are_the_same_bits_whatever_the_number_of_steps(quadratic, name):
    whole = taken(quadratic, METHODS[name], STEPS)
    stopped = taken(quadratic, METHODS[name], 10 * STEPS, callbacks=[StopAt()], log_every=STEPS)
    assert stopped.status is Status.STOPPED
    assert torch.equal(whole.u, stopped.u)
    assert torch.equal(whole.v, stopped.v)
    assert not torch.equal(whole.u, quadratic.start()[0])


@pytest.mark.parametrize("name", METHODS)
def test_a_second_call_with_more_steps_goes_on_as_one_long_run(quadratic, name, tmp_path):
    """Warnings are errors here: it also says nothing."""
    whole = taken(quadratic, METHODS[name], STEPS)
    for max_steps in (7, STEPS // 2, STEPS):
        extended = taken(quadratic, METHODS[name], max_steps, checkpoint=tmp_path / "run", resume=True)
    assert extended.steps == STEPS
    assert torch.equal(whole.u, extended.u)
    assert torch.equal(whole.v, extended.v)
    assert whole.history["f"] == extended.history["f"]


def test_constraints_need_no_number_of_steps_either(quadratic):
    method = Penalty(decay="root", lower_optimizer=FAST)
    ends = [taken(quadratic, method, STEPS, constrained=True)]
    ends += [taken(quadratic, method, 9 * STEPS, constrained=True, callbacks=[StopAt()], log_every=STEPS)]
    assert torch.equal(ends[0].u, ends[1].u)
    assert ends[0].history["gamma"] == ends[1].history["gamma"]
    assert len(set(ends[0].history["gamma"])) > 2  # the schedule has advanced


def test_more_steps_of_a_run_that_spends_a_known_number_are_called_other_steps(quadratic, tmp_path):
    method = Alternating(lower_steps=2, decay="linear")
    taken(quadratic, method, 10, checkpoint=tmp_path / "run")
    with pytest.warns(UserWarning, match="max_steps=10"):
        taken(quadratic, method, 20, checkpoint=tmp_path / "run", resume=True)
