"""A transformer that FSDP2 divides among two ranks, against the same one in one process."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ends, on_ranks, started
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bilevel import (
    F2SA,
    SAMA,
    Alternating,
    ApproxGrad,
    Callback,
    OptionError,
    Penalty,
    Problem,
    ReverseMode,
    Run,
    Solution,
    ValueFunction,
    ValueGap,
    solve,
    weighted_mean,
)
from bilevel.running import checkpoints as checkpoint

ADAM = partial(torch.optim.Adam, lr=0.01)
METHODS = {
    "difference": Penalty(curvature="difference", lower_steps=1, lower_optimizer=ADAM, upper_optimizer=ADAM),
    "value gap": ValueGap(lower_steps=2, lower_optimizer=ADAM, upper_optimizer=ADAM),
    "f2sa": F2SA(lower_steps=2, lower_optimizer=ADAM, upper_optimizer=ADAM),
    "sama": SAMA(lower_steps=2, lower_optimizer=ADAM, upper_optimizer=ADAM),
    "defaults": Penalty(curvature="difference"),
    "constraints": Penalty(curvature="difference", warm_up=0.5, lower_optimizer=ADAM, upper_optimizer=ADAM),
    "tolerance": Penalty(
        curvature="difference",
        lower_steps=1,
        warm_up=0.0,
        epsilon=1.0,
        epsilon_factor=0.9,
        advance_every=100,
        multipliers=True,
        lower_optimizer=ADAM,
        upper_optimizer=ADAM,
    ),
}
RESUMED = METHODS | {
    "running": Penalty(curvature="difference", lower_steps=1, cotangent="running"),
    "momentum": Penalty(
        curvature="difference", lower_steps=1, lower_optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5)
    ),
    "alternating": Alternating(lower_steps=1),
    "value function": ValueFunction(lower_steps=1),
    "reverse mode": ReverseMode(lower_steps=2, momentum=0.5),
    "conjugate gradients": ApproxGrad(lower_steps=1, curvature="difference"),
    "neumann": ApproxGrad(lower_steps=1, curvature="difference", linear_solver="neumann"),
    "least squares": ApproxGrad(lower_steps=1, curvature="difference", linear_solver="adam"),
}
"""All that a state has in the shape of v."""
FEW = ["value gap", "tolerance", "running", "neumann"]
WORDS, CLASSES = 7, 3


class Reader(nn.Module):
    """A transformer that classifies sentences of few words. Its attention has no double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sentences: Tensor) -> Tensor:
        return self.head(self.block(self.words(sentences)).mean(1))


def reader() -> Reader:
    torch.manual_seed(1)
    return Reader().double()


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    draw = torch.Generator().manual_seed(2)
    sentences = torch.randint(WORDS, (40, 5), generator=draw)
    labels = sentences.sum(1) % CLASSES
    return (
        DataLoader(TensorDataset(sentences[:16], labels[:16]), 7, shuffle=True),
        DataLoader(TensorDataset(sentences[16:], labels[16:]), 8, shuffle=True),
    )


def upper(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(v(batch[0]), batch[1])


def lower(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
    """u is what the examples of each class count."""
    return weighted_mean(cross_entropy(v(batch[0]), batch[1], reduction="none"), torch.sigmoid(u)[batch[1]])


def balance(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
    return v(batch[0]).mean() - 0.1


def run(method: Any, v: nn.Module, **more: Any) -> Solution:
    u = torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)
    # In a warm-up, constraints are evaluated without a backward pass.
    problem = Problem(upper, lower, equalities=[balance] if method is METHODS["constraints"] else [])
    return solve(problem, method, u, v, data(), max_steps=6, seed=3, hypergradient=False, **more)


def numbers(solution: Solution) -> dict[str, Any]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in solution.v.parameters()]
    certificate = solution.certificate
    return {
        "u": solution.u.tolist(),
        "v": torch.cat([p.detach().reshape(-1) for p in whole]).tolist(),
        **{name: solution.history[name] for name in ("upper", "lower", "grad_u", "grad_v", "residual", "gamma")},
        "advanced": solution.history["advanced"],
        "certificate": [certificate.stationarity_u, certificate.stationarity_v, certificate.lower_residual],
    }


def divided() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        v = reader()
        fully_shard(v.block)
        fully_shard(v)
        whole = sum(p.numel() for p in v.parameters())
        found[name] = numbers(run(method, v))
        found["share"] = sum(p.to_local().numel() for p in v.parameters()) / whole
    v = reader()
    fully_shard(v)
    with pytest.raises(OptionError) as error:
        run(Penalty(curvature="exact"), v)
    found["exact"] = str(error.value)
    with pytest.raises(OptionError, match="accumulate cannot be used if v is sharded"):
        run(METHODS["difference"], v, accumulate=2)
    dist.destroy_process_group()
    return found


SGD = partial(torch.optim.SGD, lr=0.1)
PREPARED = {
    "conjugate gradients": ApproxGrad(
        lower_steps=2, curvature="difference", damping=0.1, warm_up=0.3, lower_optimizer=SGD, upper_optimizer=SGD
    ),
    "reverse mode": ReverseMode(lower_steps=2, lower_rate=0.1, momentum=0.5, warm_up=0.3, upper_optimizer=SGD),
}
"""Methods that differentiate through `prepare` more than once in an upper step."""


def run_prepared(method: Any, *, sharded: bool) -> list[float]:
    """u makes the features that v classifies, and bounds what v says of them, too; ranks have shares of two sizes."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(40, 4, generator=draw, dtype=torch.float64)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 7), (7, 15), (15, 26), (26, 40))]

    def prepare(u: Tensor, pair: Any) -> Any:
        return [(torch.tanh(x @ u), y) for x, y in pair]

    def above(u: Tensor, v: nn.Module, made: Any) -> Tensor:
        return cross_entropy(v(made[0][0]), made[0][1]) + 0.1 * u.square().sum()

    def below(u: Tensor, v: nn.Module, made: Any) -> Tensor:
        said = v(made[1][0])
        return cross_entropy(said, made[1][1]) + 0.05 * u.square().sum() * said.square().mean()

    torch.manual_seed(1)
    v = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    u = torch.randn(4, 4, dtype=torch.float64).requires_grad_()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(v)
    problem = Problem(above, below, prepare=prepare)
    solve(problem, method, u, v, (parts[:2], parts[2:]), max_steps=6, seed=3, hypergradient=False)
    return u.detach().reshape(-1).tolist()


def prepared_on_ranks() -> dict[str, list[list[float]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # what sharding and several shapes of batches have to say
    found = {name: [run_prepared(m, sharded=each) for each in (True, False)] for name, m in PREPARED.items()}
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", PREPARED)
def test_what_is_prepared_is_each_ranks_own_until_u_is_reached(name, request):
    ranks = request.getfixturevalue("prepared_ends")
    alone = run_prepared(PREPARED[name], sharded=False)
    for rank in ranks:
        for found in rank[name]:
            assert found == pytest.approx(alone, abs=1e-9)


@pytest.fixture(scope="module")
def prepared_ends() -> list[Any]:
    return on_ranks(2, prepared_on_ranks)


class Stop(Callback):
    def log(self, run: Run) -> bool:
        return run.step >= 3


def in_turn(folder: str, names: list[str]) -> dict[str, Any]:
    """Runs that are stopped and go on, and straight ones."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    warnings.filterwarnings("ignore", "v is sharded by fully_shard")

    def sharded(name: str, **more: Any) -> dict[str, Any]:
        v = reader()
        fully_shard(v.block)
        fully_shard(v)
        return numbers(run(RESUMED[name], v, log_every=1, **more))

    for name in names:
        stopped = sharded(name, checkpoint=f"{folder}/{name}", callbacks=[Stop()])
        if dist.get_rank() == 0:
            shutil.copytree(f"{folder}/{name}", f"{folder}/{name} for one")
        resumed = sharded(name, checkpoint=f"{folder}/{name}", resume=True, every=1)
        found[name] = stopped, resumed, sharded(name)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, divided)


@pytest.mark.parametrize("name", METHODS)
def test_a_sharded_transformer_takes_the_steps_of_a_whole_one(name, ranks):
    expected = numbers(run(METHODS[name], reader()))
    assert ranks[0][name]["advanced"] == expected.pop("advanced")
    for column, values in expected.items():
        # A difference of gradients divides rounding by about 1e-5, and gamma multiplies it.
        assert ranks[0][name][column] == pytest.approx(values, rel=1e-5, abs=1e-6), column
    assert ranks[1][name] == ranks[0][name]


def test_each_rank_has_half_of_it_and_what_does_not_work_is_refused(ranks):
    assert ranks[0]["share"] == pytest.approx(0.5, abs=0.02)
    assert "no double backward" in ranks[0]["exact"]


def check_resumed(folder: Path, name: str, found: list[dict[str, Any]]) -> None:
    """The same bits, from a checkpoint that is whole; one process, too, goes on from it."""
    for first, resumed, straight in (rank[name] for rank in found):
        assert resumed == straight
        assert first["v"] != straight["v"]
    saved = checkpoint.load(folder / f"{name} for one")
    whole = reader().state_dict()
    assert {key: tensor.shape for key, tensor in saved["v"].items()} == {key: t.shape for key, t in whole.items()}
    assert torch.cat([saved["v"][key].reshape(-1) for key in whole]).tolist() == first["v"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has no double backward")
        alone = numbers(run(RESUMED[name], reader(), checkpoint=folder / f"{name} for one", resume=True, log_every=1))
    assert alone.pop("advanced") == straight["advanced"]
    for column, values in alone.items():
        assert straight[column] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, column)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, on_ranks(2, in_turn, str(folder), FEW)


@pytest.mark.parametrize("name", FEW)
def test_a_sharded_run_resumes_from_a_checkpoint_that_is_whole(name, stopped):
    check_resumed(stopped[0], name, stopped[1])


@pytest.mark.slow
def test_a_sharded_run_of_any_method_resumes_from_a_checkpoint_that_is_whole(tmp_path):
    names = [name for name in RESUMED if name not in FEW]
    found = on_ranks(2, in_turn, str(tmp_path), names)
    for name in names:
        check_resumed(tmp_path, name, found)


def dying() -> None:
    """Kill the second rank in an objective while the first waits for it in its model, in a collective of FSDP."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    calls = [0]

    def lower_then_killed(u: Tensor, v: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return lower(u, v, batch)

    v, u = reader(), torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)
    fully_shard(v)
    solve(Problem(upper, lower_then_killed), METHODS["value gap"], u, v, data(), max_steps=6, seed=3)


def test_a_rank_that_is_lost_in_a_collective_of_the_model_is_named():
    found = ends(*started(2, dying), 1)
    assert found[0][1].startswith("RankError: rank 1 of 2 did not answer rank 0: ")
