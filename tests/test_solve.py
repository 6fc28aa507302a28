"""The loop: what reaches the user's functions, the endings, the optimizers, another horizon."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from common import Each, leaf, plain
from torch import Tensor, nn

from bilevel import BilevelWarning, OptionError, Penalty, Problem, Rows, Status, solve

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


def test_representations_are_short_and_say_what_to_do_next(quadratic):
    u, v = quadratic.start()
    solution = solve(quadratic.problem, Penalty(), u, v, max_steps=100, seed=0, starts=2)
    text = repr(solution)
    assert len(text.splitlines()) <= 20
    f = solution.history["f"][-1]
    for words in ("CONVERGED after", f"f: {f:.6g}", "residual", "Next: use u and"):
        assert words in text
    short = solve(quadratic.problem, plain(), *quadratic.start(), max_steps=2, seed=0, starts=1)
    assert "raise max_steps" in repr(short)
    for shown in (solution, solution.candidates, solution.certificate, solution.history, quadratic.problem, Penalty()):
        assert len(repr(shown)) < 2000
    for status in Status:
        assert "Next: " in repr(replace(solution, status=status))


def test_columns_have_the_names_of_the_progress_bar_too_and_a_wrong_name_gets_the_nearest(quadratic):
    history = solve(quadratic.problem, plain(), *quadratic.start(), max_steps=3, seed=0).history
    assert history["f"] == history["upper"]
    assert history["g"] == history["lower"]
    with pytest.raises(KeyError, match=r"history has no column 'residuals'\. Did you mean 'residual'"):
        history["residuals"]


def test_warning_points_at_the_line_of_the_user(quadratic, tmp_path):
    def run(steps: int) -> None:
        options = {"max_steps": steps, "seed": 0, "checkpoint": tmp_path, "resume": True}
        solve(quadratic.problem, plain(decay="linear"), *quadratic.start(), quadratic.data(), **options)

    run(2)
    with pytest.warns(BilevelWarning, match="max_steps=2") as caught:
        run(4)
    assert caught[0].filename == __file__


def test_constraint_that_cannot_be_met_is_called_infeasible():
    problem = Problem(
        lambda u, v, _: torch.sum((v - 1) ** 2),
        lambda u, v, _: torch.sum((v - u) ** 2),
        equalities=[lambda u, v, _: u**2 + 1],
    )
    solution = solve(problem, Penalty(), leaf(0.5), leaf(0.0), max_steps=3000, seed=0)
    assert solution.status is Status.INFEASIBLE
    assert solution.certificate.violation >= 1


@pytest.mark.parametrize(("count", "tolerance", "tried"), [(1000, None, True), (1001, None, False), (1001, 1e-3, True)])
def test_stochastic_run_without_data_minimises_g_again_where_v_is_small_or_the_status_asks_for_it(
    count, tolerance, tried
):
    u, v = leaf(1.0), leaf(*([0.0] * count))
    problem = Problem(lambda u, v, b: ((v - 1) ** 2).mean(), lambda u, v, b: ((v - u) ** 2).mean())
    solution = solve(problem, Penalty(mode="stochastic"), u, v, max_steps=20, tolerance=tolerance, seed=0)
    assert solution.certificate.lower_minimiser is (False if tried else None)  # after 20 steps v is no minimiser


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
    for asked, data in ((None, None), (None, ([0], [0])), (True, ([0], [0]))):
        u, v = leaf(0.0), big.clone().requires_grad_()
        solution = solve(problem, plain(), u, v, data, max_steps=1, seed=0, hypergradient=asked)
        assert (solution.certificate.hypergradient_error is None) is (asked is None and data is not None)


def test_hypergradient_is_called_unknown_where_g_curves_down():
    problem = Problem(lambda u, v, _: torch.sum((v - 1) ** 2 + u * u), lambda u, v, _: torch.sum(u * v - v * v / 2))
    solution = solve(problem, plain(), leaf(0.0), leaf(0.5), max_steps=1, seed=0)
    assert solution.certificate.hypergradient_error is None
    assert "curves down" in solution.certificate.hypergradient_unknown
    assert "curves down" in str(solution)
    assert "curves down" in repr(solution)


def test_last_line_names_the_usual_end_with_data_only_and_says_what_a_large_error_calls_for(quadratic):
    for data, usual in ((None, False), (quadratic.data(), True)):
        u, v = quadratic.start()
        solution = solve(quadratic.problem, plain(), u, v, data, max_steps=1, seed=0)
        assert solution.status is Status.MAX_STEPS
        assert ("usual end" in str(solution)) is usual
        assert solution.certificate.hypergradient_error > 0.1
        assert "Hypergradient error" in str(solution)
        assert "ApproxGrad()" in str(solution)


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
        rate_power=power,
        decay=decay,
        advances=None,
        advance_every=3,
        gamma_factor=2.0,
        upper_optimizer=partial(torch.optim.SGD, lr=0.02),
    )
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
        problem,
        plain(lower_optimizer=factory, decay="linear"),
        leaf(0.0),
        v,
        max_steps=4,
        log_every=1,
        seed=0,
        callbacks=[Each(lambda run: rates.append([float(group["lr"]) for group in made[-1].param_groups]))],
    )
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


# -- resuming with another horizon -------------------------------------------------------------------------------------


def test_longer_horizon_on_resume_warns_with_one_sentence(quadratic, tmp_path):
    u, v = quadratic.start()
    solve(quadratic.problem, plain(decay="linear"), u, v, max_steps=5, checkpoint=tmp_path, seed=0)
    with pytest.warns(BilevelWarning) as caught:
        solution = solve(
            quadratic.problem, plain(decay="linear"), u, v, max_steps=9, checkpoint=tmp_path, resume=True, seed=0
        )
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
