"""Ranks, as real processes: the trajectory of one process, whatever their number."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import BOTH, CASES, FEW, STEPS, all_cases, data, decays, network, ridge
from ranks import on_ranks
from torch.utils.data import DataLoader, Dataset

from bilevel import (
    BilevelWarning,
    Callback,
    DataError,
    OptionError,
    Penalty,
    Problem,
    ProblemError,
    Run,
    solve,
    weighted_mean,
)
from bilevel.batches.rank_shares import BatchShare, RankShares
from bilevel.batches.sources import Sources
from bilevel.cli.main import main
from bilevel.distributed.process_group import _meeting


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_cases(list(CASES))


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return on_ranks(2, all_cases, list(CASES))


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return on_ranks(4, all_cases, FEW)


def assert_alike(name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    # Sums in another order, and 6 steps of Adam, whose first ones divide by a gradient's own size; a difference of
    # gradients divides rounding by about 1e-5.
    tolerance = 1e-6 if "difference" in name or "value" in name else 1e-9
    assert found["advanced"] == expected["advanced"]
    for column in expected.keys() - {"ranks", "bytes", "advanced"}:
        assert found[column] == pytest.approx(expected[column], rel=tolerance, abs=tolerance), column


def test_one_rank_is_one_process(alone):
    for name in ("penalty, rows", "value gap"):
        assert on_ranks(1, all_cases, [name])[0][name] == alone[name]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_one_process(name, alone, two):
    assert two[0][name]["ranks"] == 2
    assert_alike(name, alone[name], two[0][name])


@pytest.mark.parametrize("name", FEW)
def test_four_ranks_take_the_steps_of_one_process(name, alone, four):
    assert four[0][name]["ranks"] == 4
    assert_alike(name, alone[name], four[0][name])


@pytest.mark.slow
def test_four_ranks_take_the_steps_of_one_process_in_every_case(alone):
    found = on_ranks(4, all_cases, list(CASES))
    for name in CASES:
        assert_alike(name, alone[name], found[0][name])


def test_all_ranks_end_with_the_same_bits(two, four):
    for found in (two, four):
        for other in found[1:]:
            assert other == found[0]


def test_bytes_of_a_step_are_those_of_its_means(two, alone):
    """s for each of T + 1 gradients, then F's with f and g; the last with u: a float64 for each number."""
    weights, u, gradients = len(alone["penalty, steps on v"]["v"]), 4, 3
    expected = 8 * (gradients * weights + gradients * (weights + 2) + u)
    warm_up = 8 * gradients * (2 * weights + 2)  # grad f and grad g, with f and g
    assert alone["penalty, steps on v"]["bytes"] == 0
    # One step of warm-up, and the scales at its end, which are measured in the step after it: 4 pairs of batches.
    scales = 8 * 4 * (2 * weights + 2 + weights)
    assert two[0]["penalty, steps on v"]["bytes"] == ((STEPS - 1) * expected + warm_up + scales) / STEPS


def talk_of_one_step() -> list[str]:
    """An upper iteration of the penalty method with T = 1: its evaluations and all-reduces, in their order."""
    told: list[str] = []
    whole, problem = dist.all_reduce, ridge()

    class Awaited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            told.append("wait")
            self.work.wait()

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        told.append("begin")
        return Awaited(whole(tensor, **options))

    def said(name: str, objective: Any) -> Any:
        def evaluated(*given: Any) -> Any:
            told.append(name)
            return objective(*given)

        return evaluated

    class Log(Callback):
        every_rank = True

        def log(self, run: Run) -> None:
            told.append("log")

    dist.all_reduce = counted
    method = Penalty(mode="stochastic", lower_steps=1, warm_up=0.0, advance_every=1000, **BOTH)
    both = Problem(said("f", problem.upper), said("g", problem.lower))
    solve(
        both,
        method,
        decays(),
        network(),
        data(),
        max_steps=3,
        seed=0,
        log_every=1,
        callbacks=[Log()],
        hypergradient=False,
    )
    last = [i for i, what in enumerate(told) if what == "log"][-2:]
    return told[last[0] + 1 : last[1]]


def test_a_gradient_has_two_means_of_one_all_reduce_each_and_that_of_s_is_under_way_while_f_is_evaluated():
    for told in on_ranks(2, talk_of_one_step):
        assert told == ["g", "begin", "f", "wait", "begin", "wait"] * 2


def with_engine(name: str) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = solve(ridge(), Penalty(lower_steps=1), decays(), network(), data(), max_steps=2, engine=name, seed=0)
    return found.engine, [str(w.message) for w in told if w.category is BilevelWarning]


def test_an_engine_that_ranks_do_not_have_is_named_in_a_sentence_and_steps_run_as_written():
    for engine, told in on_ranks(2, with_engine, "compile"):
        assert engine == "eager"
        assert told == [
            "engine 'compile' cannot run these steps: ranks average gradients within a step, which a recorded "
            "step cannot do. They run eagerly (engine='eager')."
        ]


# -- shares --------------------------------------------------------------------------------------------------------


def test_shares_of_a_batch_are_all_of_it_once():
    for count in (1, 3, 4, 7, 100):
        parts = [RankShares(r, 4).part(count) for r in range(4)]
        named = [i for start, stop, _ in parts for i in range(start, stop)]
        assert named == (list(range(count)) if count >= 4 else list(range(count)) * 4)
        assert sum(weight for *_, weight in parts) == pytest.approx(4)


class Squares(Dataset[Any]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return torch.tensor(float(i)), torch.tensor(float(i * i))


def test_a_rank_loads_its_own_examples_alone():
    sets = [Squares(), Squares()]
    found = []
    for rank, items in enumerate(sets):
        loader = DataLoader(items, 5, shuffle=True)
        sources = Sources((loader, [torch.ones(2)]), 3, torch.device("cpu"), RankShares(rank, 2))
        found.append([sources.draw()[0][0] for _ in range(2)])
    assert sorted(sets[0].read + sets[1].read) == list(range(10))
    whole = Sources((DataLoader(Squares(), 5, shuffle=True), [torch.ones(2)]), 3, torch.device("cpu"))
    for k in range(2):
        batch = whole.draw()[0][0]
        shares = [found[r][k] for r in range(2)]
        assert all(isinstance(share, BatchShare) for share in shares)
        for column in range(2):
            assert torch.equal(torch.cat([share.batch[column] for share in shares]), batch[column])


def test_batches_without_a_row_an_example_are_refused():
    sources = Sources(([(torch.ones(4), torch.ones(3))], [torch.ones(4)]), 0, torch.device("cpu"), RankShares(0, 2))
    with pytest.raises(DataError, match=r"a row for each example.*upper data gave shapes"):
        sources.draw()


def test_ranks_that_start_again_meet_under_a_new_name_in_a_store_that_is_not_new():
    store, names = torch.distributed.HashStore(), []
    store.set("bilevel/asks/2", "a rank that is dead")
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(_meeting, store, rank, 3) for rank in (2, 0, 1)]
            names += [{each.result(60) for each in asked}]
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_ranks_without_an_address_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(OptionError, match=r"got WORLD_SIZE=2.*torchrun"):
        solve(ridge(), Penalty(), decays(), network(), data(), max_steps=1)


def test_a_weighted_mean_needs_a_weight_for_each_loss():
    assert weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0])) == 2.5
    with pytest.raises(ProblemError, match="one weight for each loss"):
        weighted_mean(torch.ones(3), torch.ones(2))


def test_commands_other_than_denoise_are_refused_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in ((0, "torchrun works with denoise only; run demo in one process."), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["demo"]) == 2
        assert (said in capsys.readouterr().err) if said else capsys.readouterr().err == ""
