"""What every method must do: reach the known answer, repeat itself bit for bit, resume bit for bit, count its
evaluations, report divergence, and refuse bad options by name. A new method is one more `Case`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from quadratic import Quadratic
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    Callback,
    ForwardMode,
    OptionError,
    Penalty,
    Problem,
    ReverseMode,
    Run,
    Solution,
    Status,
    ValueFunction,
    ValueGap,
    solve,
)
from bilevel._util.random_state import seeded
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.methods.penalty.exact_multipliers import ExactMultipliers
from bilevel.results import COLUMNS

ADAM = partial(torch.optim.Adam, lr=0.05)
PRESET: dict[str, Any] = {
    "lower_steps": 3,
    "gamma": 3.0,
    "epsilon": 0.03,
    "upper_rate": 0.02,
    "lower_rate": 0.02,
    "decay": "linear",
}
SGD = partial(torch.optim.SGD, lr=0.3)
MOVING: dict[str, Any] = {"lower_steps": 3, "lower_optimizer": ADAM, "upper_optimizer": ADAM}


def one_step(quadratic: Quadratic) -> tuple[Tensor, Tensor]:
    """Where SAMA ends with a rate of 0.3: v minimises g, and alpha (u - b) + 0.3 C'(v - a) = 0."""
    M, m = torch.linalg.solve(quadratic.H, quadratic.C), torch.linalg.solve(quadratic.H, quadratic.c)
    bend = quadratic.alpha * torch.eye(3, dtype=torch.float64) + 0.3 * quadratic.C.T @ M
    u = torch.linalg.solve(bend, quadratic.alpha * quadratic.b + 0.3 * quadratic.C.T @ (quadratic.a - m))
    return u, M @ u + m


@dataclass(frozen=True)
class Case:
    name: str
    method: Any
    data: bool
    steps: int
    error: float
    """What the relative error must fall below, and why."""
    lower: int = 0
    """Evaluations of g in a step that moves u, with `lower_steps=3`; 0: another test counts them."""
    upper: int = 0
    calls: tuple[int, int] = (40, 40)
    """Evaluations of f and of g after which the divergence test spoils them: in the middle of its run."""
    answer: Callable[[Quadratic], tuple[Tensor, Tensor]] = Quadratic.solution
    """Where the method ends."""
    late: int = 11
    """A step that is not one of the first, before the end of the run."""


CASES = [
    # The run ends at a relative stationarity of 1e-8; the problem's condition number is about 10.
    Case("deterministic", Penalty(), False, 200, 1e-6, calls=(5, 9), late=5),
    # Differences have no exact multipliers, and the errors of differences.
    Case("augmented lagrangian", Penalty(curvature="difference"), False, 200, 1e-6),
    # Adam's steps at the end are about 0.05 / steps, and gamma keeps a bias of the order 1/gamma before nu removes it.
    Case(
        "stochastic",
        Penalty(mode="stochastic", lower_steps=3, warm_up=0.1, lower_optimizer=ADAM, upper_optimizer=ADAM),
        True,
        200,
        0.06,
    ),
    # Without multipliers the error is of the order 1/gamma; gamma ends between 5 and 80.
    Case("algorithm 1", Penalty.algorithm_1(**PRESET), False, 200, 0.01),
    Case("algorithm 1 with data", Penalty.algorithm_1(**PRESET), True, 200, 0.03),
    Case("algorithm 2", Penalty.algorithm_2(lam=0.1, **PRESET), False, 200, 0.01),
    Case("algorithm 2 with data", Penalty.algorithm_2(lam=0.1, **PRESET), True, 200, 0.03),
]
OTHERS = [
    # The adjoint is left out: the end is where u minimises f with v held. Adam's last steps are about 0.05 / steps.
    Case("alternating", Alternating(**MOVING), False, 200, 1e-3, 4, 1, (15, 60), Quadratic.held),
    Case("alternating with data", Alternating(**MOVING), True, 200, 5e-3, 4, 1, (15, 60), Quadratic.held),
    # Steps of Adam at the end are about 0.05 / steps; on minibatches q is solved for on one batch.
    Case("approx grad", ApproxGrad(**MOVING), False, 200, 1e-3, lower=4, upper=1, calls=(15, 60)),
    Case("approx grad with data", ApproxGrad(**MOVING), True, 200, 5e-3, lower=4, upper=1, calls=(15, 60)),
    Case("neumann", ApproxGrad(linear_solver="neumann", **MOVING), True, 200, 5e-3, lower=4, upper=1, calls=(15, 60)),
    Case("adam", ApproxGrad(linear_solver="adam", **MOVING), False, 200, 1e-3, lower=4, upper=1, calls=(15, 60)),
    Case(
        "adam with data", ApproxGrad(linear_solver="adam", **MOVING), True, 200, 5e-3, lower=4, upper=1, calls=(15, 60)
    ),
    # T = 5 steps at 1/L leave out (1 - 1/kappa)^T of the adjoint; with data the rate of v falls, and they leave more.
    Case("reverse mode", ReverseMode(), False, 200, 0.002, lower=7, upper=1, calls=(15, 150)),
    Case("reverse mode with data", ReverseMode(momentum=0.5), True, 200, 0.04, lower=7, upper=1, calls=(15, 150)),
    Case("truncated", ReverseMode(truncate=2), False, 200, 0.015, lower=6, upper=1, calls=(15, 150)),
    Case("forward mode", ForwardMode(), False, 200, 0.002, lower=4, upper=1, calls=(15, 150)),
    Case("forward mode with data", ForwardMode(momentum=0.5), True, 200, 0.04, lower=4, upper=1, calls=(15, 150)),
    # The error is of the order 1/gamma, and gamma ends at a hundred times its first value.
    Case("value gap", ValueGap(**MOVING), False, 200, 5e-3, lower=8, upper=4, calls=(60, 120)),
    Case("value gap with data", ValueGap(**MOVING), True, 200, 5e-3, lower=8, upper=4, calls=(60, 120)),
    Case("value function", ValueFunction(**MOVING), False, 200, 5e-3, lower=8, upper=4, calls=(60, 120)),
    Case("value function with data", ValueFunction(**MOVING), True, 200, 5e-3, lower=8, upper=4, calls=(60, 120)),
    # Without noise, constant rates converge linearly; with data the rate ends at 0.3 / sqrt(200).
    Case("soba", SOBA(upper_rate=0.3, decay="constant"), False, 200, 1e-6, lower=1, upper=1, calls=(15, 15)),
    Case("soba with data", SOBA(upper_rate=0.3), True, 200, 0.02, lower=1, upper=1, calls=(15, 15)),
    # The noise of the batches is not seen.
    Case("srba", SRBA(upper_rate=0.3), False, 200, 1e-6, lower=1, upper=1, calls=(15, 15)),
    Case("srba with data", SRBA(upper_rate=0.3), True, 200, 1e-6, calls=(15, 30)),
    # The third derivatives are zero, and so is the error of a central difference. q descends for 600 steps.
    Case("f2sa", F2SA(lower_steps=3, upper_rate=0.3), False, 200, 1e-4, lower=8, upper=8, calls=(60, 60)),
    Case("f2sa with data", F2SA(lower_steps=3, upper_rate=0.3), True, 200, 5e-3, lower=8, upper=8, calls=(60, 60)),
    # Adam's last steps are about 0.05 / steps.
    Case(
        "sama",
        SAMA(lower_steps=3, lower_optimizer=SGD, upper_optimizer=ADAM),
        False,
        200,
        1e-3,
        lower=6,
        upper=2,
        calls=(25, 80),
        answer=one_step,
    ),
    Case(
        "sama with data",
        SAMA(lower_steps=3, lower_optimizer=SGD, upper_optimizer=ADAM),
        True,
        200,
        0.01,
        lower=6,
        upper=2,
        calls=(25, 80),
        answer=one_step,
    ),
    # The error of q is at most (1 - 1/kappa)^20 of it without a warm start.
    Case("amigo", ApproxGrad(linear_solver="sgd", **MOVING), True, 200, 5e-3, lower=7, upper=4, calls=(60, 100)),
    Case(
        "stocbio",
        ApproxGrad(linear_solver="sgd", linear_steps=20, warm_start=False, **MOVING),
        True,
        200,
        5e-3,
        lower=24,
        upper=21,
        calls=(200, 240),
    ),
]


def named(case: Case) -> str:
    return case.name.replace(" ", "_")


each = pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=named)
stepwise = pytest.mark.parametrize("case", CASES[2:], ids=named)
others = pytest.mark.parametrize("case", OTHERS, ids=named)
with_data = pytest.mark.parametrize("case", [case for case in [*CASES, *OTHERS] if case.data], ids=named)


def run(quadratic: Any, case: Case, *, problem: Problem | None = None, **options: Any) -> Solution:
    u, v = quadratic.start()
    data = quadratic.data() if case.data else None
    options = {"max_steps": case.steps, "seed": 3} | options
    return solve(problem or quadratic.problem, case.method, u, v, data, **options)


def difference(a: Solution, b: Solution) -> list[str]:
    """The names of what is not the same in both, bit for bit. Clocks differ, and are left out."""
    found = [name for name in ("u", "v") if not torch.equal(getattr(a, name), getattr(b, name))]
    found += [f"history {name}" for name in COLUMNS if name != "seconds" and a.history[name] != b.history[name]]
    for name in a.multipliers:
        pairs = zip(a.multipliers[name], b.multipliers[name], strict=True)
        found += [name for x, y in pairs if not torch.equal(x, y)]
    found += [name for name in ("status", "steps", "mode", "certificate") if getattr(a, name) != getattr(b, name)]
    return found


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run: Run) -> bool:
        return run.step >= self.step


# -- answers and bits --------------------------------------------------------------------------------------------------


@each
def test_known_answer_is_reached(quadratic, case):
    solution = run(quadratic, case)
    assert quadratic.error(solution.u, solution.v, case.answer(quadratic)) < case.error
    assert solution.status in (Status.CONVERGED, Status.MAX_STEPS)
    assert solution.mode == ("deterministic" if case in CASES[:2] else "stochastic")


@each
def test_neither_the_start_nor_the_answer_of_another_method_would_pass(quadratic, case):
    answer = case.answer(quadratic)
    assert quadratic.error(*quadratic.start(), answer) > 10 * case.error
    others = [other for other in (quadratic.solution(), quadratic.held()) if not torch.equal(other[0], answer[0])]
    assert others
    assert all(quadratic.error(*other, answer) > case.error for other in others)


@each
def test_same_seed_gives_the_same_bits(quadratic, case):
    short = replace(case, steps=30)
    assert difference(run(quadratic, short), run(quadratic, short)) == []


@with_data
def test_other_seed_gives_other_bits_with_data(quadratic, case):
    short = replace(case, steps=10)
    one, other = run(quadratic, short, seed=1), run(quadratic, short, seed=2)
    assert not torch.equal(one.v, other.v)
    # The data of f moves v alone: where v is held, u does not see it.
    assert torch.equal(one.u, other.u) == (case.answer is Quadratic.held)


@each
@pytest.mark.parametrize("early", [True, False])
def test_stopped_run_resumes_bit_for_bit(quadratic, case, early, tmp_path):
    short, stop = replace(case, steps=25), 1 if early else case.late
    straight = run(quadratic, short, checkpoint=tmp_path / "straight", every=4)
    options = {"checkpoint": tmp_path / "halves", "every": 4}
    half = run(quadratic, short, callbacks=[StopAt(stop)], log_every=1, **options)
    assert half.status is Status.STOPPED
    assert half.steps == stop
    resumed = run(quadratic, short, resume=True, **options)
    assert difference(straight, resumed) == []


def channels_last(case: Case, **options: Any) -> list[Tensor]:
    """The leaves of u and v after a run of eight steps on a small convolution in the other memory format."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (24,), generator=generator)
    with seeded(1):
        v = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    v = v.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def upper(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch or (x, y)
        return cross_entropy(v(inputs), labels)

    def lower(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        return upper(u, v, batch) + 0.1 * u.exp().sum() * sum((p * p).sum() for p in v.parameters())

    data = [DataLoader(TensorDataset(x, y), 8, shuffle=True) for _ in range(2)] if case.data else None
    solve(Problem(upper, lower), case.method, u, v, data, max_steps=8, seed=3, hypergradient=False, **options)
    return [u.detach(), *(leaf.detach() for leaf in v.parameters())]


@pytest.mark.parametrize("case", [*CASES, *OTHERS, Case("fused", Penalty(), True, 8, 0.0)], ids=named)
def test_weights_in_another_memory_format_resume_bit_for_bit(case, tmp_path):
    straight = channels_last(case, checkpoint=tmp_path / "straight")
    channels_last(case, checkpoint=tmp_path / "halves", callbacks=[StopAt(4)], log_every=1)
    resumed = channels_last(case, checkpoint=tmp_path / "halves", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@each
def test_finished_run_resumes_as_finished(quadratic, case, tmp_path):
    short = replace(case, steps=20)
    first = run(quadratic, short, checkpoint=tmp_path)
    again = run(quadratic, short, checkpoint=tmp_path, resume=True)
    assert difference(first, again) == []


# -- evaluations -------------------------------------------------------------------------------------------------------


class Counter(Callback):
    """Counts the calls of both objectives, and notes the counts after every step."""

    def __init__(self, problem: Problem) -> None:
        self.calls = {"upper": 0, "lower": 0}
        self.after: list[dict[str, int]] = []
        self.problem = Problem(self._counted("upper", problem.upper), self._counted("lower", problem.lower))

    def _counted(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(u: Any, v: Any, batch: Any) -> Tensor:
            self.calls[name] += 1
            return function(u, v, batch)

        return counted

    def start(self, run: Run) -> None:
        self.after.append(dict(self.calls))

    def log(self, run: Run) -> None:
        self.after.append(dict(self.calls))

    def each_step(self, name: str) -> list[int]:
        return [b[name] - a[name] for a, b in pairwise(self.after)]


STEPS = 6


def counts(quadratic: Any, case: Case, **options: Any) -> tuple[list[int], list[int], list[int]]:
    """(lower, upper) calls of each step, and what the history says of the lower ones."""
    counter = Counter(quadratic.problem)
    solution = run(
        quadratic, case, problem=counter.problem, callbacks=[counter], log_every=1, max_steps=STEPS, **options
    )
    recorded = solution.history["evaluations"]
    return counter.each_step("lower"), counter.each_step("upper"), [b - a for a, b in pairwise(recorded)]


@stepwise
def test_objectives_are_evaluated_once_for_each_lower_and_upper_step(quadratic, case):
    exact = replace(case, method=replace(case.method, curvature="exact", cotangent="same", warm_up=0.0))
    lower, upper, recorded = counts(quadratic, exact)
    once = exact.method.lower_steps + 1
    assert lower == upper == [once] * STEPS
    assert recorded == [once] * (STEPS - 1)


@others
def test_other_methods_cost_their_stated_number_of_evaluations(quadratic, case):
    if not case.lower:
        pytest.skip("counted by a test of the method")
    known = {field.name for field in fields(case.method)}
    options = {name: value for name, value in {"lower_steps": 3, "warm_up": 0.0}.items() if name in known}
    lower, upper, recorded = counts(quadratic, replace(case, method=replace(case.method, **options)))
    assert lower == [case.lower] * STEPS
    assert upper == [case.upper] * STEPS
    assert recorded == lower[1:]


@pytest.mark.parametrize("lower_steps", [1, 4])
@pytest.mark.parametrize("batches", ["fresh", "shared"])
@pytest.mark.parametrize(
    ("options", "accumulate", "lower_cost", "upper_cost"),
    [
        pytest.param({"cotangent": "same"}, 1, 1, 1, id="same"),
        pytest.param({"cotangent": "running"}, 1, 1, 1, id="running"),
        pytest.param({"cotangent": "same"}, 3, 6, 3, id="accumulate"),
        pytest.param({"cotangent": "running"}, 2, 4, 2, id="running-accumulate"),
        pytest.param({"curvature": "difference"}, 1, 3, 1, id="difference"),
    ],
)
def test_settings_cost_their_stated_number_of_evaluations(
    quadratic, options, accumulate, lower_cost, upper_cost, lower_steps, batches
):
    method = Penalty(
        mode="stochastic",
        lower_steps=lower_steps,
        warm_up=0.5,
        gamma=1.0,
        lower_batches=batches,
        **({"curvature": "exact"} | options),
    )
    lower, upper, recorded = counts(quadratic, Case("", method, True, STEPS, 0.0), accumulate=accumulate)
    warm, count = STEPS // 2, lower_steps + 1  # the warm-up is of first order: one evaluation for each batch
    assert lower == [accumulate * count] * warm + [lower_cost * count] * (STEPS - warm)
    assert upper == [upper_cost * count] * STEPS
    assert recorded == lower[1:]


def test_exact_multipliers_evaluate_f_once_and_g_twice_for_each_phi_of_a_quadratic(quadratic, monkeypatch):
    """One Newton step brings v to the minimum of a quadratic: g is evaluated before and after it."""
    phis = 0
    phi = ExactMultipliers.__call__

    def counted(self, u):
        nonlocal phis
        phis += 1
        return phi(self, u)

    monkeypatch.setattr("bilevel.methods.penalty.exact_multipliers.ExactMultipliers.__call__", counted)
    counter, noted = Counter(quadratic.problem), []

    class Note(Callback):
        def start(self, run):
            noted.append(phis)

        log = start

    solution = run(quadratic, CASES[0], problem=counter.problem, callbacks=[counter, Note()], log_every=1)
    assert solution.status is Status.CONVERGED
    steps = [b - a for a, b in pairwise(noted)][:-1]  # the last step holds the end check
    assert len(steps) > 3
    assert max(steps) <= 2
    assert counter.each_step("upper")[:-1] == steps
    assert counter.each_step("lower")[:-1] == [2 * count for count in steps]
    recorded = solution.history["evaluations"]
    assert [b - a for a, b in pairwise(recorded)][:-1] == [2 * count for count in steps[1:]]


def test_augmented_lagrangian_evaluates_once_for_each_gradient(quadratic, monkeypatch):
    gradients = 0
    penalised = PenalisedObjective.penalised

    def counted(self, *args, **options):
        nonlocal gradients
        gradients += 1
        return penalised(self, *args, **options)

    monkeypatch.setattr(PenalisedObjective, "penalised", counted)
    # A constraint that never holds anything back: exact multipliers leave it to the augmented Lagrangian.
    counter = Counter(quadratic.problem)
    problem = replace(counter.problem, inequalities=lambda u, v, _: v[:1] - 100)
    noted = []

    class Note(Callback):
        def start(self, run):
            noted.append(gradients)

        log = start

    solution = run(quadratic, CASES[0], problem=problem, callbacks=[counter, Note()], log_every=1)
    assert solution.status is Status.CONVERGED
    assert set(solution.history["solver"]) == {"augmented Lagrangian"}
    steps = [b - a for a, b in pairwise(noted)][:-1]  # the last step holds the end check
    assert len(steps) > 5
    assert min(steps) >= 1
    assert counter.each_step("lower")[:-1] == steps
    assert counter.each_step("upper")[:-1] == steps
    recorded = solution.history["evaluations"]
    assert [b - a for a, b in pairwise(recorded)][:-1] == steps[1:]


# -- divergence --------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Copies u and v before the first step and at every log."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        self.u, self.v = u, v
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def start(self, run: Run) -> None:
        self.states[run.step] = (self.u.detach().clone(), self.v.detach().clone())

    def log(self, run: Run) -> None:
        self.start(run)


def bomb(function: Callable[..., Tensor], calls: int, value: float) -> Callable[..., Tensor]:
    """The function for so many calls, then the value times it."""
    left = calls

    def armed(u: Any, v: Any, batch: Any) -> Tensor:
        nonlocal left
        left -= 1
        return function(u, v, batch) * (value if left < 0 else 1.0)

    return armed


def check_divergence(solution: Solution, watch: Watch, log_every: int) -> int:
    """The step that the message names."""
    assert solution.status is Status.DIVERGED
    assert torch.isfinite(solution.u).all()
    assert torch.isfinite(solution.v).all()
    u, v = watch.states[solution.steps]
    assert torch.equal(solution.u, u)
    assert torch.equal(solution.v, v)
    assert solution.steps == max(watch.states)
    words = solution.message.split()
    assert words[:2] == ["At", "step"], solution.message
    step = int(words[2].strip(","))
    assert solution.steps < step <= solution.steps + log_every
    assert all(math.isfinite(x) for name in ("upper", "lower", "residual") for x in solution.history[name])
    return step


@each
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["upper", "lower"])
def test_divergence_is_reported_within_log_every_steps_and_the_last_finite_state_returned(
    quadratic, case, value, which
):
    u, v = quadratic.start()
    # In the middle of every run: after the first steps, before the end check of the deterministic mode.
    both = {"upper": quadratic.upper, "lower": quadratic.lower}
    problem = Problem(**(both | {which: bomb(both[which], case.calls[which == "lower"], value)}))
    watch = Watch(u, v)
    solution = solve(
        problem,
        case.method,
        u,
        v,
        quadratic.data() if case.data else None,
        max_steps=30,
        log_every=4,
        callbacks=[watch],
        seed=0,
        hypergradient=False,
    )
    check_divergence(solution, watch, 4)
    assert any(name in solution.message for name in ("upper", "lower", "grad_u", "grad_v", "residual"))


@pytest.mark.parametrize("log_every", [1, 7, 50])
def test_learning_rate_that_is_too_large_diverges_and_is_named(quadratic, log_every):
    u, v = quadratic.start()
    watch = Watch(u, v)
    sgd = partial(torch.optim.SGD, lr=1e3)
    method = Penalty(mode="stochastic", lower_steps=2, warm_up=0.0, lower_optimizer=sgd, upper_optimizer=sgd)
    solution = solve(quadratic.problem, method, u, v, max_steps=200, log_every=log_every, callbacks=[watch], seed=0)
    step = check_divergence(solution, watch, log_every)
    assert step < 100
    assert len(solution.history) >= solution.steps


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "batch"),
        ("curvature", "fisher"),
        ("curvature", None),
        ("decay", "cosine"),
        ("lower_batches", "own"),
        ("cotangent", "mean"),
        ("cotangent", "other"),
        ("lower_steps", -1),
        ("lower_steps", 1.5),
        ("lower_steps", True),
        ("lower_steps", "5"),
        ("advance_every", 0),
        ("advances", -1),
        ("gamma", -1.0),
        ("gamma", math.nan),
        ("gamma_h", -1.0),
        ("lam", -1.0),
        ("epsilon", -1e-3),
        ("rate_power", -1),
        ("gamma_factor", 0.9),
        ("lam_factor", 1.1),
        ("epsilon_factor", 1.1),
        ("warm_up", 1.0),
        ("warm_up", -0.1),
        ("upper_optimizer", "adam"),
        ("lower_optimizer", 0.1),
    ],
)
def test_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(OptionError) as caught:
        Penalty(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_optimizer_in_place_of_a_factory_is_refused():
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    with pytest.raises(OptionError, match="upper_optimizer must be a factory"):
        Penalty(upper_optimizer=optimizer)


@pytest.mark.parametrize("preset", [Penalty.algorithm_1, Penalty.algorithm_2])
def test_presets_refuse_bad_options_too(preset):
    with pytest.raises(OptionError, match="lower_steps must be at least 1 with joint=False"):
        preset(lower_steps=0)


@each
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", 0),
        ("max_steps", 2.5),
        ("tolerance", 0.0),
        ("tolerance", -1.0),
        ("tolerance", math.nan),
        ("every", 0),
        ("log_every", 0),
        ("accumulate", 0),
        ("engine", "graph"),
        ("precision", "bf16"),
        ("starts", 0),
        ("seed", -1),
        ("seed", 1.5),
        ("resume", True),
        ("every", 5),
    ],
)
def test_solve_refuses_bad_arguments_with_their_name(quadratic, case, name, value):
    u, v = quadratic.start()
    options = {"max_steps": 1} | {name: value}
    with pytest.raises(OptionError, match=name):
        solve(quadratic.problem, case.method, u, v, quadratic.data() if case.data else None, **options)
    assert not u.any()
    assert not v.any()
