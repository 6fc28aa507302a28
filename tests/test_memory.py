"""Memory does not grow with the number of lower steps, nor with the number of upper steps."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bilevel import Callback, Penalty, Problem, Rows, Run, solve
from bilevel.methods.minibatch_run import MinibatchRun


def network() -> tuple[Problem, Rows, nn.Module, Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator)
    torch.manual_seed(0)
    v = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def upper(u: Any, v: Any, batch: Any) -> Tensor:
        return cross_entropy(v(batch[0]), batch[1])

    def lower(u: Any, v: Any, batch: Any) -> Tensor:
        a, b, row = batch
        return (torch.sigmoid(u[row]) * cross_entropy(v(a), b, reduction="none")).mean()

    rows = torch.arange(64)
    data = ([(x[:32], y[:32])], [(x[i : i + 32], y[i : i + 32], rows[i : i + 32]) for i in (0, 32)])
    return Problem(upper, lower), Rows(64), v, data


class Peak(TorchDispatchMode):
    """The most bytes that were alive at one time among the tensors made under the mode, graphs included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def gone(_: Any) -> None:
            self.known.pop(key, None)
            self.now -= size

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def peak(monkeypatch: pytest.MonkeyPatch, method: Penalty, **options: Any) -> int:
    """The peak of the second step: the first one makes the optimizer's state."""
    problem, u, v, data = network()
    found = []
    plain = MinibatchRun.step

    def step(self: MinibatchRun, k: int) -> Tensor:
        gc.collect()
        with Peak() as mode:
            record = plain(self, k)
        found.append(mode.most)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(MinibatchRun, "step", step)
        solve(problem, method, u, v, data, max_steps=2, seed=0, log_every=10**9, hypergradient=False, **options)
    return found[1]


@pytest.mark.parametrize("cotangent", ["tracked", "same", "running"])
@pytest.mark.parametrize("batches", ["fresh", "shared"])
def test_working_memory_is_the_same_for_one_and_for_a_hundred_lower_steps(monkeypatch, cotangent, batches):
    def measured(lower_steps: int) -> int:
        method = Penalty(lower_steps=lower_steps, cotangent=cotangent, lower_batches=batches, warm_up=0.0)
        return peak(monkeypatch, method)

    one, hundred = measured(1), measured(100)
    assert one > 100_000  # the mode saw the network's graph: its weights alone take 20 kB each way
    # A graph of one lower step takes about `one`; a few scalars may live on until the next collection.
    assert hundred < 1.05 * one


def test_working_memory_does_not_grow_with_accumulation(monkeypatch):
    method = Penalty(lower_steps=1, warm_up=0.0)
    few, many = peak(monkeypatch, method, accumulate=2), peak(monkeypatch, method, accumulate=30)
    # What is kept of a batch is its generator's state, 5 kB; a gradient of the network would take 20 kB.
    assert many < 1.1 * few + 30 * 6_000


def test_mode_sees_a_graph_that_is_kept():
    """Without this the tests above could not fail."""
    v = torch.zeros(1000, requires_grad=True)
    with Peak() as mode:
        x = v
        for _ in range(20):
            x = torch.sin(x)
    assert mode.now >= 19 * 4000
    del x
    gc.collect()
    assert mode.now == 0


# -- over many upper steps ---------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory, without pages of files: those of libraries come and go with the load."""
    with open("/proc/self/statm") as file:
        _, pages, shared, *_ = map(int, file.read().split())
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


class Sample(Callback):
    """Notes the memory of the process and its number of tensors at certain steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps, self.found = steps, []

    def log(self, run: Run) -> None:
        if run.step in self.steps:
            gc.collect()
            tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
            self.found.append((run.step, resident(), tensors))


STEPS, EARLY = 5_000, 1_500
"""The first count comes after the warm-up, which ends at 1,000: before it the upper optimizer has no state."""


def child() -> None:
    """5,000 upper steps on 20,000 numbers: one tensor kept a step would take 400 MB, one graph more."""
    torch.set_num_threads(1)
    v = torch.zeros(20_000, requires_grad=True)
    u = torch.zeros(2, requires_grad=True)
    problem = Problem(
        lambda u, v, batch: torch.mean((v - batch) ** 2),
        lambda u, v, batch: torch.mean((v - u[0] * batch) ** 2) + torch.mean(v**2) * u[1] ** 2,
    )
    method = Penalty(lower_steps=1, cotangent="running")
    sample = Sample([EARLY, STEPS])
    solve(
        problem,
        method,
        u,
        v,
        ([1.0, 2.0], [0.5, 1.0, 1.5]),
        max_steps=STEPS,
        log_every=500,
        callbacks=[sample],
        seed=0,
        hypergradient=False,
    )
    print(json.dumps(sample.found))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc to read the memory of a process")
def test_memory_does_not_grow_over_five_thousand_upper_steps():
    out = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    ).stdout
    (_, early, tensors_early), (step, late, tensors_late) = json.loads(out.splitlines()[-1])
    assert step == STEPS
    # The history takes 120 bytes a step, 0.5 MB here; a tensor of v takes 80 kB, so that one kept every 40 steps shows.
    assert late - early < 8e6
    # Records wait for the next log, and none is due between the two counts.
    assert tensors_late <= tensors_early + 2


if __name__ == "__main__":
    child()
