"""Tracked multipliers: how well v is trained, and how the rate of u is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bilevel import BilevelWarning, Callback, Penalty, Problem, Rows, Run, Solution, Status, solve
from bilevel.methods.penalty.tracked import AGAIN, FIRST_LOOK, TrackedRun

STILL = partial(torch.optim.SGD, lr=0.0)


def drawn(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    """Return batches of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def runs(monkeypatch: pytest.MonkeyPatch) -> list[TrackedRun]:
    """Return a list that gets the runs of `Penalty()` as they are made."""
    made: list[TrackedRun] = []
    ready = TrackedRun._ready

    def noting(run: TrackedRun) -> None:
        made.append(run)
        ready(run)

    monkeypatch.setattr(TrackedRun, "_ready", noting)
    return made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))


def classes(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches with labels by a random linear map, a tenth of them wrong."""
    teacher, generator = drawn(1, 10, 4, seed=7)[0], torch.Generator().manual_seed(8)
    found = []
    for x in drawn(count, 40, 10):
        y = (x @ teacher).argmax(1)
        wrong = torch.rand(len(y), generator=generator) < 0.1
        found.append((x, torch.where(wrong, torch.randint(4, y.shape, generator=generator), y)))
    return found


def loss(u: Tensor, v: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.cross_entropy(v(x), y) + 0 * u.sum()


def g_of(v: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return sum(loss(torch.zeros(1), v, batch).item() for batch in batches) / len(batches)


def test_at_fixed_u_v_is_trained_as_well_as_plain_adam_trains_it():
    steps, batches = 400, classes(50)
    u, v = torch.zeros(1, requires_grad=True), network()
    # f pulls v elsewhere, which it must not feel.
    problem = Problem(lambda u, v, b: (v(b[0]) - 3).square().mean() + 0 * u.sum(), loss)
    given = [batches[k % 50] for k in range(steps)]
    found = solve(
        problem, Penalty(upper_optimizer=STILL), u, v, (batches, given), max_steps=steps, seed=0, hypergradient=False
    )
    ours = g_of(v, batches)

    def plain(rates: list[float]) -> float:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        for batch, rate in zip(given, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss(u, model, batch).backward()
            optimizer.step()
        return g_of(model, batches)

    # The same optimizer with the same rates, and with the first of them throughout.
    rates = found.history["lower_rate"]
    assert ours == pytest.approx(plain(rates), rel=1e-3)  # rounding of 400 steps in float32
    assert ours <= 1.02 * plain([rates[0]] * steps)


def solved(max_steps: int, **options: Any) -> tuple[Tensor, Tensor, Solution[Tensor, Tensor]]:
    """Solve a problem with v* = u + 3, whose batches are so noisy that u begins to move while v is still near zero."""
    u, v = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    problem = Problem(
        lambda u, v, x: (v - 4 - x).square().sum() / 2, lambda u, v, x: (v - u - 3 - 6 * x).square().sum() / 2
    )
    data = drawn(30, 4, seed=1), drawn(30, 4)
    found = solve(problem, Penalty(), u, v, data, max_steps=max_steps, seed=0, hypergradient=False, **options)
    return u.detach(), v.detach(), found


def test_rate_of_u_grows_with_v_which_starts_at_zero():
    rates = solved(100)[2].history["upper_rate"]
    first = next(k for k, rate in enumerate(rates) if rate)
    assert first == FIRST_LOOK
    # Adam moves v by 0.03 a step: it is 0.3 when u begins to move, and 0.9 or more at the second measurement.
    assert rates[first + AGAIN] > 2 * rates[first + AGAIN - 1]


class Stop(Callback):
    def log(self, run: Run) -> bool:
        return run.step == FIRST_LOOK + AGAIN + 5


def test_run_that_resumes_after_the_second_measurement_has_the_same_bits(tmp_path):
    u, v, _ = solved(200)
    solved(200, checkpoint=tmp_path, every=7, callbacks=[Stop()], log_every=1)
    again, same, _ = solved(200, checkpoint=tmp_path, every=7, resume=True)
    assert torch.equal(u, again)
    assert torch.equal(v, same)


def attention(model: nn.Module, x: Tensor) -> Tensor:
    q = model(x)[:, None]
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_default_solves_a_problem_with_fused_attention():
    def lower(u: Tensor, v: nn.Module, x: Tensor) -> Tensor:
        return ((attention(v, x) - x[:, None]).square().mean((0, 1, 2)) * u.sigmoid().repeat(4)).sum()

    torch.manual_seed(0)
    u, v, batches = torch.zeros(2, requires_grad=True), nn.Linear(8, 8), drawn(20, 4, 6, 8)
    problem = Problem(lambda u, v, x: (attention(v, x) - 1).square().mean(), lower)
    with pytest.warns(BilevelWarning, match="no double backward"):
        found = solve(problem, Penalty(), u, v, (batches, batches), max_steps=200, seed=0, hypergradient=False)
    assert found.status is Status.MAX_STEPS
    assert u.abs().max() > 1e-2


@pytest.mark.parametrize("rows", [False, True])
def test_response_by_differences_is_the_exact_one(monkeypatch, rows):
    made, batches = runs(monkeypatch), drawn(20, 6, 4)
    index = torch.arange(6)
    u: Any = Rows(8, init=torch.linspace(-1, 1, 8)) if rows else torch.linspace(-1, 1, 6).requires_grad_()
    v = torch.ones(3, requires_grad=True)

    def lower(u: Any, v: Tensor, x: Tensor) -> Tensor:
        weights = u[index] if rows else u
        return (weights.exp() * (x[:, :3] @ v - x[:, 3]).square()).mean() + v.square().sum()

    problem = Problem(lambda u, v, x: (x[:, :3] @ v - 1).square().mean(), lower)
    solve(problem, Penalty(warm_up=0.25), u, v, (batches, batches), max_steps=80, seed=0, hypergradient=False)
    run = made[-1]
    assert run.largest[0] > 0  # measured a second time
    raw = run._sample()
    for pair in raw:
        exact, share = run._pull(pair)
        near, same = run._pull_by_differences(pair)
        torch.testing.assert_close(near, exact, rtol=1e-2, atol=1e-3)  # central differences in float32
        assert share == same
