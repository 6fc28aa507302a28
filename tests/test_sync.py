"""A stochastic step reads no device value on the host.

On the CPU a dispatch mode refuses what would wait for the device; on a GPU torch's own debug mode does. torch.optim
is exempt: some of its optimizers read their own counters.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    Ball,
    Box,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    Simplex,
    ValueFunction,
    ValueGap,
    solve,
)
from bilevel.methods.minibatch_run import MinibatchRun

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    # Sizes that depend on values are read on the host, too.
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}
OPTIM = torch.optim.__path__[0]


class HostReadError(AssertionError):
    pass


class NoHostReadErrors(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS and not _inside_optim():
            raise HostReadError(f"{function} inside a step")
        return function(*args, **(kwargs or {}))


def _inside_optim() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(OPTIM):
            return True
        frame = frame.f_back
    return False


def watched(monkeypatch: pytest.MonkeyPatch, mode: Callable[[], AbstractContextManager[Any]]) -> list[int]:
    """The steps taken, each of which runs in the mode: those of every method, and what one adds to the shared step."""
    taken: list[int] = []

    def patch(kind: type[MinibatchRun]) -> None:
        plain = vars(kind).get("step")
        if plain is not None:

            def step(self: MinibatchRun, k: int) -> Tensor:
                with mode():
                    record: Tensor = plain(self, k)
                if k not in taken:
                    taken.append(k)
                return record

            monkeypatch.setattr(kind, "step", step)
        for further in kind.__subclasses__():
            patch(further)

    patch(MinibatchRun)
    return taken


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps, each of which runs under the mode."""
    return watched(monkeypatch, NoHostReadErrors)


def classify(device: str = "cpu", *, constrained: bool = False, rows: bool = True) -> tuple[Problem, Any, Any, Any]:
    """Weighted classification with a network: (problem, u, v, data)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator).to(device)
    y = torch.randint(2, (24,), generator=generator).to(device)
    index = torch.arange(24, device=device)
    torch.manual_seed(0)
    v = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2)).to(device)
    u = Rows(24, device=device) if rows else torch.zeros(24, device=device, requires_grad=True)

    def upper(u: Any, v: Any, batch: Any) -> Tensor:
        return cross_entropy(v(batch[0]), batch[1])

    def lower(u: Any, v: Any, batch: Any) -> Tensor:
        w = torch.sigmoid(u[batch[2]])
        return (w * cross_entropy(v(batch[0]), batch[1], reduction="none")).sum() / w.sum()

    options: dict[str, Any] = {}
    if constrained:
        options = {
            "equalities": [lambda u, v, batch: v[4].weight.sum(1) - 1],
            "inequalities": [lambda u, v, batch: v[0].weight - 0.1, lambda u, v, batch: v[0].bias.square().sum() - 1],
            "project_upper": Box(-3.0, 3.0),
        }
    data = (
        [(x[i : i + 6], y[i : i + 6]) for i in (0, 6)],
        [(x[i : i + 8], y[i : i + 8], index[i : i + 8]) for i in (0, 8, 16)],
    )
    return Problem(upper, lower, **options), u, v, data


ADAM = partial(torch.optim.Adam, lr=0.01)
METHODS = {
    "defaults": Penalty(),
    "running": Penalty(cotangent="running"),
    "difference": Penalty(curvature="difference"),
    "shared": Penalty(lower_batches="shared", decay="constant", warm_up=0.0),
    "multipliers": Penalty(advance_every=1, multipliers=True, warm_up=0.0, nu=0.1, _average_residual=False),
    "averaged": Penalty(advance_every=2, multipliers=True, warm_up=0.0),
    "tolerances": Penalty(epsilon=10.0, rate_power=1.0, warm_up=0.0),
    "algorithm 1": Penalty.algorithm_1(),
    "algorithm 2": Penalty.algorithm_2(),
    "momentum": Penalty(lower_optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
}
OTHERS = {
    "alternating": Alternating(warm_up=0.4),
    **{f"approx grad, {s}": ApproxGrad(linear_solver=s, damping=0.1, warm_up=0.4) for s in ("cg", "neumann", "adam")},
    **{
        f"approx grad, {s}, difference": ApproxGrad(linear_solver=s, curvature="difference", damping=0.1, warm_up=0.4)
        for s in ("cg", "neumann", "adam")
    },
    "reverse mode": ReverseMode(lower_steps=2, momentum=0.5),
    "truncated": ReverseMode(lower_steps=3, truncate=1, lower_batches="shared"),
    "forward mode": ForwardMode(lower_steps=2, momentum=0.5, chunk_size=10),
    "value gap": ValueGap(warm_up=0.4),
    "value function": ValueFunction(warm_up=0.4),
    "soba": SOBA(),
    "soba, difference": SOBA(curvature="difference"),
    "srba": SRBA(period=2),
    "f2sa": F2SA(lower_steps=2),
    "sama": SAMA(warm_up=0.4),
    "sgd": ApproxGrad(linear_solver="sgd", lower_steps=2, warm_start=False, warm_up=0.4),
}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
other = pytest.mark.parametrize("method", OTHERS.values(), ids=OTHERS)
tensor_or_rows = pytest.mark.parametrize("rows", [True, False], ids=["rows", "tensor"])


def run_other(method: Any, device: str, *, rows: bool, accumulate: int = 1) -> None:
    if rows and isinstance(method, (ForwardMode, SRBA)):
        pytest.skip("takes no Rows")
    problem, u, v, data = classify(device, rows=rows)
    solve(problem, method, u, v, data, max_steps=5, log_every=10**9, seed=0, hypergradient=False, accumulate=accumulate)


@each
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_step_reads_nothing_on_the_host(steps, method, constrained):
    problem, u, v, data = classify(constrained=constrained)
    solve(problem, method, u, v, data, max_steps=5, log_every=10**9, seed=0, hypergradient=False)
    assert steps == list(range(5))


@other
@tensor_or_rows
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_of_another_method_reads_nothing_on_the_host(steps, method, rows, accumulate):
    run_other(method, "cpu", rows=rows, accumulate=accumulate)
    assert steps == list(range(5))


PROJECTIONS = pytest.mark.parametrize(
    "projection", [Box(-0.1, None), Ball(0.3), Ball(0.3, dim=-1), Simplex()], ids=repr
)


def run_projected(projection: Any, device: str) -> None:
    problem = Problem(
        lambda u, v, batch: torch.sum((v - batch) ** 2),
        lambda u, v, batch: torch.sum((v - u) ** 2) * batch,
        project_lower=projection,
        project_upper=projection,
    )
    u = torch.zeros(2, 3, device=device, requires_grad=True)
    v = torch.full((2, 3), 0.2, device=device, requires_grad=True)
    solve(problem, Penalty(), u, v, ([1.0], [1.0, 2.0]), max_steps=5, log_every=10**9, seed=0, hypergradient=False)


def run_below(method: Any, device: str, *, rows: bool = True) -> None:
    """With constraints of the lower level."""
    problem, u, v, data = classify(device, rows=rows)
    problem = replace(
        problem,
        lower_inequalities=[lambda u, v, _: v[4].bias - 0.1, lambda u, v, _: v[0].weight.square().sum() - 1],
        lower_equalities=lambda u, v, _: v[4].weight.sum(1),
    )
    solve(problem, method, u, v, data, max_steps=5, log_every=10**9, seed=0, hypergradient=False)


@each
def test_step_with_lower_constraints_reads_nothing_on_the_host(steps, method):
    run_below(method, "cpu")
    assert steps == list(range(5))


@PROJECTIONS
def test_step_with_projections_reads_nothing_on_the_host(steps, projection):
    run_projected(projection, "cpu")
    assert steps == list(range(5))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["plain", "accumulated"])
def test_step_with_a_plain_tensor_reads_nothing_on_the_host(steps, options):
    problem, u, v, data = classify(rows=False)
    solve(problem, Penalty(), u, v, data, max_steps=5, log_every=10**9, seed=0, hypergradient=False, **options)
    assert steps == list(range(5))


def run_episodes(device: str) -> None:
    def start(v: Tensor, prepared: Any) -> None:
        v.zero_()

    problem = Problem(
        lambda u, v, x: torch.sum((v - x) ** 2),
        lambda u, v, x: torch.sum((v - 2 * x) ** 2),
        prepare=lambda u, batches: torch.tanh(u) * batches[0],
        start_lower=start,
    )
    u, v = (torch.zeros(3, device=device, requires_grad=True) for _ in range(2))
    solve(problem, Penalty(), u, v, ([1.0], [1.0]), max_steps=5, log_every=10**9, seed=0, hypergradient=False)


def test_episode_reads_nothing_on_the_host(steps):
    run_episodes("cpu")
    assert steps == list(range(5))


@pytest.mark.parametrize("method", [Penalty(), *OTHERS.values()], ids=["penalty", *OTHERS])
def test_objective_that_reads_on_the_host_is_caught(steps, method):
    """The mode sees a read: without this the tests above could not fail."""
    problem, u, v, data = classify(rows=False)
    reading = Problem(lambda *a: problem.upper(*a) * float(v[0].bias.sum().item() < 1e9), problem.lower)
    with pytest.raises(HostReadError):
        solve(reading, method, u, v, data, max_steps=1, seed=0, engine="eager", hypergradient=False)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@contextmanager
def no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture
def gpu_steps(monkeypatch):
    """Counts the steps, each of which runs with synchronisation as an error."""
    return watched(monkeypatch, no_waiting)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
# torch's SGD reads a learning rate that is a tensor, unless it is fused.
@pytest.mark.parametrize("method", [METHODS[name] for name in METHODS if name != "momentum"])
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_step_does_not_wait_for_the_gpu(gpu_steps, method, constrained):
    problem, u, v, data = classify("cuda", constrained=constrained)
    solve(problem, method, u, v, data, max_steps=5, log_every=10**9, seed=0, hypergradient=False)
    assert gpu_steps == list(range(5))


@gpu
@other
@tensor_or_rows
def test_step_of_another_method_does_not_wait_for_the_gpu(gpu_steps, method, rows):
    run_other(method, "cuda", rows=rows)
    assert gpu_steps == list(range(5))


@gpu
@tensor_or_rows
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_on_data_that_comes_from_the_host_does_not_wait_for_the_gpu(gpu_steps, rows, accumulate):
    problem, u, v, data = classify("cuda", rows=rows)
    host = tuple([tuple(t.cpu() for t in batch) for batch in source] for source in data)
    solve(
        problem, Penalty(), u, v, host, max_steps=5, log_every=10**9, seed=0, hypergradient=False, accumulate=accumulate
    )
    assert gpu_steps == list(range(5))


@gpu
@tensor_or_rows
def test_step_with_lower_constraints_does_not_wait_for_the_gpu(gpu_steps, rows):
    run_below(Penalty(lower_steps=1, warm_up=0.4), "cuda", rows=rows)
    assert gpu_steps == list(range(5))


@gpu
@PROJECTIONS
def test_step_with_projections_does_not_wait_for_the_gpu(gpu_steps, projection):
    run_projected(projection, "cuda")
    assert gpu_steps == list(range(5))


@gpu
def test_episode_does_not_wait_for_the_gpu(gpu_steps):
    run_episodes("cuda")
    assert gpu_steps == list(range(5))


@gpu
def test_objective_that_waits_for_the_gpu_is_caught(gpu_steps):
    problem, u, v, data = classify("cuda")
    reading = Problem(lambda *a: problem.upper(*a) * float(v[0].bias.sum().item() < 1e9), problem.lower)
    with pytest.raises(RuntimeError, match="synchronizing"):
        solve(reading, Penalty(), u, v, data, max_steps=1, seed=0, engine="eager", hypergradient=False)
