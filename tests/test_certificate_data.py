"""The certificate of a run on minibatches: over all the data if that is cheap, otherwise it says over how much."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
import torch
from common import leaf
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bilevel import Alternating, ApproxGrad, Callback, Penalty, Problem, Rows, solve
from bilevel.measures.certificate_batches import BATCHES, LEAST, QUICK, SHARE

DIM = 3


class Ridge:
    """f and g are mean squared errors; u holds the logarithms of penalties, one for each weight. It counts calls."""

    def __init__(self, train: int = 22, held_out: int = 9) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.z = (torch.randn(n, DIM, generator=draw, dtype=torch.float64) for n in (train, held_out))
        truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        self.y, self.t = (
            a @ truth + 0.3 * torch.randn(len(a), generator=draw, dtype=torch.float64) for a in (self.x, self.z)
        )
        self.calls: Counter[str] = Counter()

    def upper(self, u, v, batch):
        self.calls["f"] += 1
        z, t = batch
        return ((z @ v - t) ** 2).mean() + 0.01 * (u**2).sum()

    def lower(self, u, v, batch):
        self.calls["g"] += 1
        x, y = batch
        return ((x @ v - y) ** 2).mean() + (u.exp() * v**2).sum()

    @property
    def problem(self) -> Problem:
        return Problem(self.upper, self.lower)

    def data(self, size: int) -> tuple[DataLoader, DataLoader]:
        held_out = DataLoader(TensorDataset(self.z, self.t), min(size, len(self.z)), shuffle=True)
        return held_out, DataLoader(TensorDataset(self.x, self.y), size, shuffle=True)

    def whole(self, u, v, nu):
        """Return f, |grad_u F|, |grad_v F|, |s| and the hypergradient error on all examples, by dense algebra."""
        n, m = len(self.x), len(self.z)
        weights = u.exp()
        s = 2 / n * self.x.T @ (self.x @ v - self.y) + 2 * weights * v
        g_vv = 2 / n * self.x.T @ self.x + 2 * weights.diag()
        f_v, f_u = 2 / m * self.z.T @ (self.z @ v - self.t), 0.02 * u
        q = torch.linalg.solve(g_vv, f_v)
        slope_u, exact = f_u + 2 * weights * v * nu, f_u - 2 * weights * v * q
        size = f_u.norm() + (2 * weights * v * q).norm()
        f = ((self.z @ v - self.t) ** 2).mean() + 0.01 * (u**2).sum()
        return [
            x.item() for x in (f, slope_u.norm(), (f_v + g_vv @ nu).norm(), s.norm(), (slope_u - exact).norm() / size)
        ]


def start() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(DIM, dtype=torch.float64, requires_grad=True), leaf(0.1, 0.2, 0.3)


@pytest.mark.parametrize("size", [11, 4, 1])
@pytest.mark.parametrize("method", [Penalty(), ApproxGrad(), Penalty(cotangent="same")], ids=["tracked", "cg", "same"])
def test_over_all_batches_it_is_that_of_the_whole_data_whatever_the_size_of_the_last_batch(method, size):
    ridge = Ridge()
    u, v = start()
    solution = solve(ridge.problem, method, u, v, ridge.data(size), max_steps=600, seed=0)
    c = solution.certificate
    found = [c.upper, c.stationarity_u, c.stationarity_v, c.lower_residual, c.hypergradient_error]
    # Means of at most 22 numbers in another order; conjugate gradients stop at 1e-10.
    assert found == pytest.approx(ridge.whole(u.detach(), v.detach(), solution.multipliers["nu"][0]), rel=1e-7)
    assert c.full_data
    assert (c.lower_data.examples, c.upper_data.examples) == (22, 9)
    assert c.batches == c.lower_data.of == -(-22 // size)
    assert "on all the data" in str(solution)


def test_a_pass_over_more_batches_than_are_held_is_that_of_the_whole_data():
    ridge = Ridge(train=3 * BATCHES + 1, held_out=BATCHES + 1)
    u, v = start()
    solution = solve(ridge.problem, Penalty(), u, v, ridge.data(2), max_steps=4000, seed=0, hypergradient=True)
    c = solution.certificate
    assert c.full_data
    assert c.lower_data.batches == (3 * BATCHES + 2) // 2
    found = [c.upper, c.stationarity_u, c.stationarity_v, c.lower_residual, c.hypergradient_error]
    assert found == pytest.approx(ridge.whole(u.detach(), v.detach(), solution.multipliers["nu"][0]), rel=1e-7)


class Stop(Callback):
    """Counts the calls before the certificate; can press Ctrl-C at a step."""

    def __init__(self, ridge: Ridge, interrupt: int | None = None) -> None:
        self.ridge, self.interrupt = ridge, interrupt

    def log(self, run):
        if self.interrupt == run.step:
            os.kill(os.getpid(), signal.SIGINT)
        self.before = Counter(self.ridge.calls)


@pytest.mark.parametrize("steps", [300, 3000])
def test_it_takes_at_most_a_tenth_of_the_evaluations_or_says_over_how_many_batches_it_is(steps):
    ridge = Ridge(train=200, held_out=150)
    u, v = start()
    stop = Stop(ridge)
    solution = solve(
        ridge.problem,
        Alternating(lower_steps=1),
        u,
        v,
        ridge.data(1),
        max_steps=steps,
        seed=0,
        callbacks=[stop],
        hypergradient=False,
    )
    spent, c = ridge.calls - stop.before, solution.certificate
    # Without the evaluations that measure the first scales, on five batches.
    run = {"f": steps, "g": 2 * steps}
    for name, share, each in (("f", c.upper_data, 1), ("g", c.lower_data, 2)):
        affordable = SHARE * run[name] / each >= share.of
        assert share.whole is affordable
        assert spent[name] == each * share.batches
        assert share.batches == share.of if affordable else LEAST <= share.batches <= BATCHES
    assert c.full_data is (steps == 3000)
    if steps == 300:
        assert "30 of 150 batches (30 examples, 20%) of f" in str(solution)
        assert "of 200 batches" in repr(solution)


def test_after_ctrl_c_it_takes_a_few_batches_only():
    ridge = Ridge(train=200, held_out=150)
    u, v = start()
    stop = Stop(ridge, interrupt=2000)
    solution = solve(
        ridge.problem, Penalty(), u, v, ridge.data(1), max_steps=5000, seed=0, callbacks=[stop], log_every=1000
    )
    assert solution.interrupted
    spent = ridge.calls - stop.before
    assert (spent["f"], spent["g"]) == (QUICK, 2 * QUICK)
    assert solution.certificate.lower_data.batches == QUICK


class Endless(IterableDataset):
    def __init__(self, ridge: Ridge) -> None:
        self.ridge = ridge

    def __iter__(self):
        while True:
            yield from zip(self.ridge.x, self.ridge.y, strict=True)


def test_a_source_without_an_end_gives_its_first_batches_and_says_so():
    ridge = Ridge()
    u, v = start()
    data = (ridge.data(3)[0], DataLoader(Endless(ridge), 2))
    solution = solve(ridge.problem, Penalty(), u, v, data, max_steps=200, seed=0)
    c = solution.certificate
    assert not c.full_data
    assert c.lower_data.of is None
    assert f"the first {c.lower_data.batches} batches ({2 * c.lower_data.batches} examples) of g" in str(solution)
    assert c.upper_data.whole


def test_batches_whose_tensors_have_no_common_length_count_alike():
    """The loss of a graph, say: nodes and edges have different numbers."""
    ridge = Ridge()
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(n, DIM, generator=draw, dtype=torch.float64), torch.zeros(1)) for n in (2, 5, 9)]

    def lower(u, v, batch):
        return ((batch[0] @ v - 1) ** 2).mean() + (u.exp() * v**2).sum()

    u, v = start()
    solution = solve(Problem(ridge.upper, lower), Penalty(), u, v, (ridge.data(3)[0], batches), max_steps=20, seed=0)
    value = sum(lower(u.detach(), v, batch) for batch in batches) / 3
    slope = torch.autograd.grad(value, v)[0]
    assert solution.certificate.lower_residual == pytest.approx(slope.norm().item(), rel=1e-10)
    assert solution.certificate.lower_data.examples is None


def test_it_changes_nothing_of_the_run():
    """A run that is measured on the way, and reads its sources again for that, draws and moves as one that is not."""
    ridge = Ridge(train=200, held_out=150)
    ends = []
    for tolerance in (None, 1e-300):
        u, v = start()
        torch.manual_seed(3)
        solution = solve(
            ridge.problem, Alternating(lower_steps=1), u, v, ridge.data(1), max_steps=2500, seed=0, tolerance=tolerance
        )
        ends.append([u, v, torch.rand(1), torch.tensor(solution.history["f"])])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_rows_are_measured_over_all_the_data():
    x, y = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(12)
    target = x @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    rows = Rows(12, dtype=torch.float64)

    def lower(u, v, batch):
        inputs, labels, row = batch
        return (torch.sigmoid(u[row]) * (inputs @ v - labels) ** 2).mean() + 0.1 * (v**2).sum()

    problem = Problem(lambda u, v, batch: ((batch[0] @ v - batch[1]) ** 2).mean(), lower)
    v = leaf(0.0, 0.0)
    loader = DataLoader(TensorDataset(x, target, y), 5, shuffle=True)
    solution = solve(problem, Penalty(), rows, v, (loader, loader), max_steps=40, seed=0)
    nu, values = solution.multipliers["nu"][0], rows.values.detach().requires_grad_()
    s = torch.autograd.grad(lower(values, v, (x, target, y)), v, create_graph=True)[0]
    slope = torch.autograd.grad(s @ nu, values)[0]
    assert solution.certificate.stationarity_u == pytest.approx(slope.norm().item(), rel=1e-10)
