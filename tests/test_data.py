"""Where batches come from, as a run sees them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from common import Each, global_state, leaf, plain
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, RandomSampler

import bilevel
from bilevel import DataError, Penalty, Problem, Run, Status, solve


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
            problem,
            plain(lower_steps=1),
            leaf(0.0),
            v,
            ([0], loader(kind, 200)),
            max_steps=30,
            tolerance=1e3,
            seed=0,
            log_every=1,
            callbacks=[Each(lambda run: run.step == stop)],
            checkpoint=tmp_path / folder,
            resume=resume,
        )
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
)
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
