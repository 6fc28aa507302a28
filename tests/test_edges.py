"""Combinations that are easy to get wrong: each of these went wrong once."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from common import leaf
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from bilevel import (
    Ball,
    Box,
    Callback,
    CheckpointError,
    EarlyStopping,
    OptionError,
    Penalty,
    Problem,
    ProblemError,
    Rows,
    Simplex,
    Status,
    solve,
)
from bilevel.errors import BilevelWarning

ADAM = partial(torch.optim.Adam, lr=0.01)


def pull(u, v, batch):
    return torch.sum((v - 1) ** 2) + torch.sum(u**2)


def follow(u, v, batch):
    return torch.sum((v - u) ** 2)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run) -> bool:
        return run.step >= self.step


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


SETTINGS = [
    (curvature, cotangent, accumulate, restart)
    for curvature in ("exact", "difference")
    for cotangent in ("same", "running")
    for accumulate, restart in ((1, False), (2, False), (1, True))
]


@pytest.mark.parametrize(("curvature", "cotangent", "accumulate", "restart"), SETTINGS)
def test_features_with_batch_norm_and_dropout_run_and_resume_bit_for_bit(
    curvature, cotangent, accumulate, restart, tmp_path
):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(5)]

    def start(v, prepared):
        v.zero_()

    problem = Problem(
        lambda u, v, x: ((x @ v - 1) ** 2).mean(),
        lambda u, v, x: ((x @ v - x[:, 0]) ** 2).mean() + 0.1 * v @ v,
        prepare=lambda u, pair: u(pair[1]),
        start_lower=start if restart else None,
    )
    method = Penalty(lower_steps=2, curvature=curvature, cotangent=cotangent)

    def run(folder, stop=None, resume=False):
        torch.manual_seed(0)
        u, v = Network(), leaf(0.0, 0.0, 0.0, 0.0)
        callbacks = [StopAt(stop)] if stop else []
        solution = solve(
            problem,
            method,
            u,
            v,
            (batches[:2], batches),
            max_steps=8,
            seed=1,
            log_every=1,
            callbacks=callbacks,
            checkpoint=tmp_path / folder,
            resume=resume,
            accumulate=accumulate,
        )
        return [*(t.clone() for t in u.state_dict().values()), v.detach().clone()], solution

    straight, one = run("straight")
    run("halves", stop=4)
    resumed, two = run("halves", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    assert one.certificate == two.certificate
    again, three = run("halves", resume=True)  # a finished run comes back as it ended
    assert three.certificate == two.certificate
    assert torch.equal(again[-1], resumed[-1])


def test_settings_that_make_no_sense_for_episodes_are_refused():
    problem = Problem(pull, follow, start_lower=lambda v, pair: None)
    data = ([0, 1], [0, 1])
    with pytest.raises(OptionError, match="accumulate must be 1 with start_lower"):
        solve(problem, Penalty(), leaf(0.0), leaf(0.0), data, max_steps=2, accumulate=2)


def test_start_of_the_lower_level_receives_the_pair_of_batches_where_nothing_is_prepared():
    seen = []
    problem = Problem(pull, follow, start_lower=lambda v, pair: seen.append(pair))
    solve(problem, Penalty(warm_up=0.0), leaf(0.0), leaf(0.0), (["upper"], ["lower"]), max_steps=2)
    assert set(seen) == {("upper", "lower")}


def test_divergence_before_the_first_log_is_an_ending_with_a_tolerance_too():
    problem = Problem(pull, lambda u, v, batch: torch.sum((v - u) ** 2) ** 3)
    method = Penalty(mode="stochastic", epsilon=1e-9, warm_up=0.0, lower_optimizer=partial(torch.optim.SGD, lr=1e9))
    solution = solve(problem, method, leaf(0.0), leaf(3.0), max_steps=20, log_every=20)
    assert solution.status is Status.DIVERGED
    assert solution.v.item() == 3.0


def test_buffer_that_is_not_finite_is_no_divergence():
    model = nn.Linear(2, 1).double()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    problem = Problem(
        lambda u, v, _: (v(torch.eye(2).double()) ** 2).sum(), lambda u, v, _: ((v.weight - u) ** 2).sum() + v.bias**2
    )
    solution = solve(problem, Penalty(mode="stochastic"), leaf(1.0, 2.0), model, max_steps=5)
    assert solution.status is Status.MAX_STEPS


def weighted(u, v, batch):
    return (torch.sigmoid(u[batch]) * (v - batch.double()) ** 2).mean()


@pytest.mark.parametrize("count", [400, 401])
def test_default_rate_of_rows_does_not_depend_on_the_size_of_the_last_batch(count):
    batches = list(torch.arange(count).split(100))
    solution = solve(
        Problem(lambda u, v, _: (v**2).sum(), weighted),
        Penalty(cotangent="same"),
        Rows(count, dtype=torch.float64),
        leaf(0.0),
        ([0], batches),
        max_steps=100,
        seed=0,
        log_every=1,
    )
    # 90 steps move u, a quarter (a fifth) of the rows each: 2 * 5 over 22.5 (18) visits.
    assert solution.history["upper_rate"][10] == pytest.approx(10 / (90 * 0.25) * 0.9, rel=0.3)


def test_tensor_beside_rows_has_a_rate_of_its_own():
    u = {"w": Rows(400, dtype=torch.float64), "b": leaf(0.0)}
    problem = Problem(
        lambda u, v, _: (v**2).sum(),
        lambda u, v, i: (torch.sigmoid(u["w"][i]) * (v - i.double() - u["b"]) ** 2).mean(),
    )
    solve(
        problem, Penalty(cotangent="same"), u, leaf(0.0), ([0], list(torch.arange(400).split(4))), max_steps=100, seed=0
    )
    # At most 90 steps of Adam at a rate of 10/90 that falls linearly.
    assert u["b"].abs() < 6


def test_generator_of_a_batch_sampler_is_seeded_for_each_pass():
    items = list(torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def run(loader) -> Tensor:
        v = leaf(0.0)
        problem = Problem(pull, lambda u, v, x: ((v - u - x) ** 2).mean())
        solve(
            problem,
            Penalty(lower_optimizer=ADAM, upper_optimizer=ADAM),
            leaf(0.0),
            v,
            ([0], loader),
            max_steps=9,
            seed=1,
        )
        return v.detach()

    sampler = BatchSampler(RandomSampler(items, generator=torch.Generator()), 7, False)
    loader = DataLoader(items, batch_sampler=sampler)
    assert torch.equal(run(loader), run(loader))


def test_maximum_of_the_lower_objective_is_not_called_converged_in_stochastic_mode():
    problem = Problem(
        lambda u, v, _: ((u - 1) ** 2 + v**2).sum(), lambda u, v, _: (((v * v - 1) ** 2) / 4 + 0 * u).sum()
    )
    u, v = leaf(1.0), leaf(0.0)
    solution = solve(problem, Penalty(mode="stochastic"), u, v, max_steps=50, tolerance=1e-2, seed=0)
    assert solution.certificate.lower_minimiser is False
    assert solution.status is Status.STATIONARY


def test_checkpoint_goes_by_the_names_of_the_objectives_and_not_by_their_code(tmp_path):
    def run(target: float, lower) -> None:
        problem = Problem(lambda u, v, _: torch.sum((v - target) ** 2), lower)
        solve(problem, Penalty(), leaf(0.0), leaf(0.0), max_steps=9, seed=0, checkpoint=tmp_path, resume=True)

    run(1.0, lambda u, v, _: torch.sum((v - u) ** 2))
    run(7.0, lambda u, v, _: torch.sum((v - 5 * u) ** 2))
    with pytest.raises(CheckpointError, match="another run: its objectives"):
        run(1.0, follow)


@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
def test_projection_of_rows_acts_on_each_row(mode):
    u = Rows(6, shape=(3,), init=2.0, dtype=torch.float64)
    problem = Problem(
        lambda u, v, _: ((v - torch.arange(3.0)) ** 2).sum(),
        lambda u, v, _: ((v - u[torch.arange(5)].mean(0)) ** 2).sum(),
        project_upper=Simplex(),
    )
    solve(problem, Penalty(mode=mode), u, leaf(0.0, 0.0, 0.0), max_steps=200, seed=0)
    # Each row on the simplex, the one that is never read too.
    torch.testing.assert_close(u.values.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (u.values >= 0).all()


def test_projected_adam_rests_at_the_solution_and_not_where_its_own_scaling_would_have_it():
    a, b = leaf(1.3, -0.2, -1.1).detach(), leaf(0.6, 0.4, -0.3).detach()
    problem = Problem(
        lambda u, v, _: ((v - a) ** 2).sum() / 2 + ((u - b) ** 2).sum() / 4,
        lambda u, v, _: ((v - u) ** 2).sum() / 2,
        project_upper=Ball(0.8),
    )
    u, v = leaf(0.0, 0.0, 0.0), leaf(0.0, 0.0, 0.0)
    solve(problem, Penalty(mode="stochastic", cotangent="same"), u, v, max_steps=600, seed=0)
    # Rates fall to zero over 600 steps; a step along the scaled gradient ends 0.06 away.
    torch.testing.assert_close(u.detach(), Ball(0.8)((a + b / 2) / 1.5), rtol=0, atol=1e-4)


def test_history_of_a_diverged_run_ends_where_its_state_does():
    calls = itertools.count()

    def upper(u, v, batch):
        return pull(u, v, batch) * (float("nan") if next(calls) > 30 else 1.0)

    method = Penalty(mode="stochastic")
    solution = solve(Problem(upper, follow), method, leaf(0.0), leaf(3.0), max_steps=50, log_every=4)
    assert solution.status is Status.DIVERGED
    assert solution.steps > 0
    assert len(solution.history) == solution.steps


def test_callbacks_are_closed_where_an_objective_raises():
    class Closing(Callback):
        closed = False

        def close(self) -> None:
            self.closed = True

    calls = itertools.count()

    def upper(u, v, batch):
        if next(calls) > 30:
            raise RuntimeError("out of order")
        return pull(u, v, batch)

    callback = Closing()
    with pytest.raises(RuntimeError, match="out of order"):
        solve(
            Problem(upper, follow),
            Penalty(mode="stochastic"),
            leaf(0.0),
            leaf(0.0),
            max_steps=50,
            callbacks=[callback],
        )
    assert callback.closed


def test_early_stopping_is_resumed_with_the_run(tmp_path):
    frozen = partial(torch.optim.SGD, lr=0.0)
    method = Penalty(mode="stochastic", lower_optimizer=frozen, upper_optimizer=frozen)

    def run(folder, *callbacks):
        return solve(
            Problem(pull, follow),
            method,
            leaf(0.0),
            leaf(0.0),
            max_steps=100,
            log_every=1,
            seed=0,
            resume=True,
            callbacks=[EarlyStopping(patience=20), *callbacks],
            checkpoint=tmp_path / folder,
        )

    straight = run("straight")
    run("halves", StopAt(8))
    assert run("halves").steps == straight.steps == 21


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"upper_optimizer": lambda parameters: 3}, "upper_optimizer must make a torch optimizer"),
        ({"lower_optimizer": torch.optim.LBFGS}, "no closure; got LBFGS"),
    ],
)
def test_nothing_is_changed_where_the_start_is_refused(options, words):
    model = nn.BatchNorm1d(2).double()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    problem = Problem(lambda u, v, x: v(x).square().mean(), lambda u, v, x: (v(x) - u).square().mean())
    data = ([torch.eye(2).double()], [torch.eye(2).double()])
    with pytest.raises(OptionError, match=words):
        solve(problem, Penalty(**options), leaf(0.0), model, data, max_steps=5)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_checkpoint_that_cannot_be_written_is_refused_before_any_evaluation(tmp_path):
    (tmp_path / "file").write_text("")
    calls = []

    def lower(u, v, batch):
        calls.append(1)
        return follow(u, v, batch)

    with pytest.raises(CheckpointError, match="cannot be written"):
        solve(Problem(pull, lower), Penalty(), leaf(0.0), leaf(0.0), max_steps=5, checkpoint=tmp_path / "file")
    assert not calls


def test_optimizer_that_works_on_lists_of_tensors_takes_a_rate_that_is_a_tensor():
    lists = partial(torch.optim.Adam, lr=0.01, foreach=True)
    method = Penalty(mode="stochastic", lower_optimizer=lists, upper_optimizer=lists)
    assert solve(Problem(pull, follow), method, leaf(0.0), leaf(0.0), max_steps=5).steps == 5


def test_half_precision_is_refused_without_data():
    u, v = (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with pytest.raises(OptionError, match="float32 or float64 in deterministic mode; got bfloat16"):
        solve(Problem(pull, follow), Penalty(), u, v, max_steps=5)


def test_plain_sgd_slows_down_as_gamma_grows_and_adam_does_not():
    sgd = partial(torch.optim.SGD, lr=0.01)
    options = {"lower_optimizer": sgd, "upper_optimizer": ADAM, "decay": "constant", "warm_up": 0.0}
    method = Penalty(mode="stochastic", cotangent="same", **options)
    solution = solve(Problem(pull, follow), method, leaf(0.0), leaf(0.0), max_steps=40, log_every=1)
    gamma = solution.history["gamma"]
    # One rounding of a quotient for each number.
    assert solution.history["lower_rate"] == pytest.approx([0.01 * gamma[0] / g for g in gamma], rel=1e-12)
    assert solution.history["upper_rate"] == pytest.approx([0.01] * 40, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"problem": follow}, "problem must be a Problem"),
        ({"method": "penalty"}, "method must be a method such as Penalty"),
        ({"callbacks": Callback()}, "callbacks must be a list"),
        ({"callbacks": [Callback]}, "callbacks must hold Callback objects"),
        ({"method": Penalty}, "with its parentheses"),
        ({"tolerance": "a"}, "tolerance must be a number; got 'a'"),
        ({"tolerance": 0.0}, "tolerance must be above 0; got 0.0"),
        ({"max_steps": True}, "max_steps must be a whole number"),
        ({"every": 0}, "every must be at least 1; got 0"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments, words):
    given = {"problem": Problem(pull, follow), "method": Penalty(), "u": leaf(0.0), "v": leaf(0.0), "max_steps": 3}
    with pytest.raises(OptionError, match=words):
        solve(**(given | arguments))


def test_changed_set_is_another_problem(tmp_path):
    def run(bound: float) -> None:
        problem = Problem(pull, follow, project_upper=Box(-bound, bound))
        solve(problem, Penalty(), leaf(0.0), leaf(0.0), max_steps=9, seed=0, checkpoint=tmp_path, resume=True)

    run(6.0)
    with pytest.raises(CheckpointError, match="another run: its objectives"):
        run(1.0)


def test_upper_objective_without_a_gradient_is_refused():
    problem = Problem(lambda u, v, batch: pull(u, v, batch).detach(), follow)
    with pytest.raises(ProblemError, match="upper must depend on u or v"):
        solve(problem, Penalty(), leaf(0.0), leaf(0.0), max_steps=3)


def test_projection_that_changes_the_shape_is_named():
    problem = Problem(pull, follow, project_upper=lambda x: x[:1])
    with pytest.raises(ProblemError, match="project_upper must keep the shape"):
        solve(problem, Penalty(), leaf(0.0, 0.0), leaf(0.0, 0.0), max_steps=3)


def test_set_without_constraints_is_never_called_infeasible():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.3 * torch.randn(160, generator=generator, dtype=torch.float64) > 0).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    problem = Problem(
        lambda u, v, _: loss(x[60:] @ v, y[60:]),
        lambda u, v, _: loss(x[:60] @ v, y[:60]) + (u.exp() * v**2).sum(),
        project_upper=Box(-8, 4),
    )
    u, v = (torch.full((8,), value, dtype=torch.float64, requires_grad=True) for value in (-3.0, 0.0))
    solution = solve(problem, Penalty(), u, v, max_steps=400, seed=0, hypergradient=False)
    assert solution.status is not Status.INFEASIBLE


def test_rows_outside_every_batch_are_put_into_their_box():
    u = Rows(4, init=3.0, dtype=torch.float64)
    problem = Problem(lambda u, v, _: (v**2).sum(), weighted, project_upper=Box(0, 1))
    solve(problem, Penalty(), u, leaf(0.0), ([0], [torch.tensor([0, 1])]), max_steps=10, seed=0)
    assert (u.values <= 1).all()


@pytest.mark.parametrize(
    ("depth", "size", "most"), [(2, 0.2, 0.03), (4, 0.02, 0.0025), (9, 0.01, 1e-3), (1, 1e-3, 0.03)]
)
def test_default_rate_does_not_move_the_product_of_many_layers_by_more_than_a_half(depth, size, most):
    """The rate is at most 1e-3, or size / (2 depth), where the loss hardly falls at the first weights."""
    layers = [nn.Linear(30, 30, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.constant_(layer.weight, size)
    x, y = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 30
    flat = lambda u, v, b: 5 + 1e-6 * (v(x) - u).square().mean()  # noqa: E731
    v, u = nn.Sequential(*layers), torch.zeros((), requires_grad=True)
    found = solve(Problem(flat, flat), Penalty(), u, v, ([y], [y]), max_steps=1, seed=0, hypergradient=False)
    assert found.history["lower_rate"][0] == pytest.approx(most, rel=1e-6)


def test_objective_that_u_or_v_cannot_change_is_named_at_the_first_evaluation():
    square, both = lambda u, v, _: (v * v).sum(), lambda u, v, _: ((v - u) ** 2).sum()
    with pytest.raises(ProblemError, match="upper or lower must depend on u"):
        solve(Problem(square, square), Penalty(), leaf(1.0), leaf(1.0), max_steps=1)
    with pytest.warns(BilevelWarning, match="lower does not depend on u"):
        solve(Problem(both, square), Penalty(), leaf(1.0), leaf(1.0), max_steps=1)
    with pytest.warns(BilevelWarning, match="upper does not depend on v"):
        solve(Problem(lambda u, v, _: (u * u).sum(), both), Penalty(), leaf(1.0), leaf(1.0), max_steps=1)
