"""How much faster two ranks are than one, and a model on paper of many: the tables of docs/scaling.md.

    python studies/benchmarks/distributed.py               two processes of one thread on the CPU, all models
    python studies/benchmarks/distributed.py --models mlp --rounds 3
    python studies/benchmarks/distributed.py --write       the page, from the results so far, and the model on paper

Both ways run in the same two processes, round by round: in turn, the first process takes steps on whole batches, while
the other waits, and both take them on halves. A ratio is the median over rounds of the ratio within a round: of the
time that passed, and of the CPU seconds of the busier process, which other work on the machine disturbs less. The first
process takes steps on halves without the other, too: what two take beyond it is the talk between them. Results
go to studies/results/distributed.json as they come; one that is there already is not measured again (--again does).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import Store, cpu_capability, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel import Penalty, Problem, Rows, weighted_mean
from bilevel.applications import networks as models
from bilevel.batches.rank_shares import RankShares
from bilevel.batches.sources import Sources
from bilevel.distributed.process_group import ProcessGroup
from bilevel.measures.problem_check import variables
from bilevel.methods.base import MethodState, RunContext

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "scaling.md", ROOT / "studies" / "results" / "distributed.json"
MODELS = {
    "linear": (models.linear, 400),
    "mlp": (models.mlp, 400),
    "cnn": (models.mnist_cnn, 64),
}
"""The builder, and the size of each of the two batches."""
SIZES = {"linear": 7_850, "mlp": 238_510, "cnn": 1_389_578}
LOWER_STEPS = 2
ENOUGH = 0.5
"""Seconds that each way runs in each round, at the least one iteration."""


def upper(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(v(batch[0]), batch[1])


def lower(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    return weighted_mean(cross_entropy(v(batch[0]), batch[1], reduction="none"), torch.sigmoid(u[batch[2]]))


def run(name: str, ranks: ProcessGroup | None, parts: int = 1) -> MethodState:
    """The state of a run, as `solve` makes it, on a part of each batch."""
    build, size = MODELS[name][0], MODELS[name][1] // parts
    torch.manual_seed(0)
    v, u = build(), Rows(10_000)
    draw = torch.Generator().manual_seed(1)
    shape = (1, 28, 28)
    batches = [
        (
            torch.rand(size, *shape, generator=draw),
            torch.randint(10, (size,), generator=draw),
            torch.randint(10_000, (size,), generator=draw),
        )
        for _ in range(4)
    ]
    first, second = variables(Problem(upper, lower), u, v)
    shares = None if ranks is None else RankShares(ranks.rank, ranks.size)
    setting = RunContext(
        problem=Problem(upper, lower),
        u=first,
        v=second,
        sources=Sources((batches, batches), 0, second.device, shares),
        max_steps=10**6,
        tolerance=None,
        generator=torch.Generator().manual_seed(0),
        engine="eager",
        ranks=ranks,
    )
    return Penalty(lower_steps=LOWER_STEPS, warm_up=0.0).init(setting)


def timed(state: MethodState, steps: int) -> tuple[float, float]:
    """Seconds that passed, and CPU seconds of this process, for one step."""
    began, worked = time.perf_counter(), time.process_time()
    for k in range(steps):
        state.step(k)
    return (time.perf_counter() - began) / steps, (time.process_time() - worked) / steps


def process(rank: int, port: int, name: str, rounds: int, answer: Any) -> None:
    torch.set_num_threads(1)
    own = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in own.items()})
    ranks = ProcessGroup.from_environment(torch.device("cpu"))
    assert ranks is not None
    both = run(name, ranks)
    alone = run(name, None) if rank == 0 else None
    half = run(name, None, 2) if rank == 0 else None
    timed(both, 1)
    if half:
        timed(half, 1)
    count = max(1, math.ceil(ENOUGH / timed(alone, 1)[0])) if alone else 0
    count = ranks.broadcast_object(count)
    found = []
    for _ in range(rounds):
        one, part = (timed(way, count) if way else (0.0, 0.0) for way in (alone, half))
        dist.barrier()
        before = ranks.payload
        two = timed(both, count)
        sent = (ranks.payload - before) / count
        found.append((one, two, max(x[1] for x in ranks.all_gather_object(two)), sent, part[1]))
    weights = torch.zeros(SIZES[name])
    ranks.all_reduce_mean([weights])
    began = time.perf_counter()
    for _ in range(20):
        ranks.all_reduce_mean([weights])
    reduce = (time.perf_counter() - began) / 20
    if rank == 0:
        answer.put(
            {
                "alone_ms": 1e3 * statistics.median(one[0] for one, *_ in found),
                "both_ms": 1e3 * statistics.median(two[0] for _, two, *_ in found),
                "faster": statistics.median(one[0] / two[0] for one, two, *_ in found),
                "range": [
                    min(one[0] / two[0] for one, two, *_ in found),
                    max(one[0] / two[0] for one, two, *_ in found),
                ],
                "less_cpu": statistics.median(one[1] / worked for one, _, worked, *_ in found),
                "cpu_ms": [
                    1e3 * statistics.median(times)
                    for times in zip(*((one[1], part, worked) for one, _, worked, _, part in found), strict=True)
                ],
                "bytes": found[-1][3],
                "mean_ms": 1e3 * reduce,
                "rounds": rounds,
                "steps": count,
                "load": os.getloadavg()[0],
                "torch": torch.__version__.split("+")[0],
                "cpu": cpu_capability(),
            }
        )


def measured(name: str, rounds: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = mp.get_context("spawn").SimpleQueue()
    mp.spawn(process, (port, name, rounds, answer), nprocs=2)
    return answer.get()


def lines(store: Store) -> list[str]:
    found = {name: store.results[name] for name in MODELS if name in store.results}
    if not found:
        return []
    head = [
        "model",
        "weights",
        "batches",
        "one, ms",
        "two, ms",
        "faster",
        "range over rounds",
        "less CPU",
        "CPU ms: one, on halves, two",
        "bytes a step",
        "one mean of v, ms",
        "load",
    ]
    rows = [
        [
            name,
            f"{SIZES[name]:,}",
            str(MODELS[name][1]),
            f"{x['alone_ms']:.1f}",
            f"{x['both_ms']:.1f}",
            f"{x['faster']:.2f}",
            f"{x['range'][0]:.2f} to {x['range'][1]:.2f}",
            f"{x['less_cpu']:.2f}",
            ", ".join(f"{ms:.1f}" for ms in x["cpu_ms"]),
            f"{x['bytes']:,.0f}",
            f"{x['mean_ms']:.2f}",
            f"{x['load']:.1f}",
        ]
        for name, x in found.items()
    ]
    one, versions = next(iter(found.values())), ", ".join(sorted({x["torch"] for x in found.values()}))
    where = f"torch {versions}, gloo, two processes of one thread ({one['cpu']}), T = {LOWER_STEPS}, eager."
    return [where, "", *table(head, rows)]


# -- on paper ----------------------------------------------------------------------------------------------------------

INSIDE, BETWEEN = 300e9, 40e9
"""Bytes a second that an all-reduce gets out of the links of one machine's 8 GPUs, and of one GPU's network port."""
HOP_INSIDE, HOP_BETWEEN = 3e-6, 10e-6
"""Seconds that one hop takes inside a machine, and between two."""
LAUNCH = 20e-6
"""Seconds to launch a collective."""
PEAK, SHARE = 989e12, 0.4
"""bf16 operations a second of an H200, without sparsity, and the part of them that large products reach."""
TOKENS = 32_768
LAUNCHES = 10e-3
"""Seconds that the host takes to launch a transformer's gradient, operator by operator."""
COUNTS = (1, 2, 8, 64, 256, 1000)


def all_reduce(size: float, ranks: int) -> float:
    """Seconds of a hierarchical all-reduce: a ring inside each machine, a tree between them."""
    if ranks == 1:
        return 0.0
    inside = min(ranks, 8)
    machines = math.ceil(ranks / 8)
    seconds = LAUNCH + 2 * (inside - 1) / inside * size / INSIDE + 2 * (inside - 1) * HOP_INSIDE
    if machines > 1:
        # Each GPU of a machine has its own port, and carries an eighth.
        seconds += 2 * (machines - 1) / machines * (size / 8) / BETWEEN + 2 * math.log2(machines) * HOP_BETWEEN
    return seconds


@dataclasses.dataclass(frozen=True)
class Work:
    """A gradient of F: the device's time for it on one GPU, the host's to launch it, and the bytes of one mean."""

    what: str
    device: float
    launch: float
    size: float


def works() -> Iterator[Work]:
    step = Store(ROOT / "studies" / "results" / "step.json").results["step/cuda/cnn/T20/tf32"]["ms"]
    compiled, eager = step["compile+graph, auto"] / 21e3, step["eager, auto"] / 21e3  # T + 1 gradients
    yield Work("CNN, 1.4 million weights, 200 + 200 images", compiled, eager, 4.0 * SIZES["cnn"])
    for billions in (0.1, 1.0, 3.0):
        # Forward and backward are 6 operations a weight and token: of f, of g, and twice for the second backward.
        seconds = (6 + 6 + 12) * billions * 1e9 * TOKENS / (PEAK * SHARE)
        what = f"transformer, {billions:g} billion weights, {TOKENS:,} + {TOKENS:,} tokens"
        yield Work(what, seconds, LAUNCHES, 4e9 * billions)


def paper() -> list[str]:
    rows = []
    for work in works():
        for word, whole in (("on each", True), ("on all together", False)):
            cells, single = [], max(work.device, work.launch)
            for ranks in COUNTS:
                compute = max(work.launch, work.device if whole else work.device / ranks)
                mean = all_reduce(work.size, ranks)
                # The mean of s is computed while f is evaluated: 2 of 24 operations.
                seconds = compute + max(0.0, mean - compute / 12) + mean
                speed = single / seconds * (ranks if whole else 1)
                cells.append(f"{speed:,.1f} ({100 * speed / ranks:.0f}%)" if ranks > 1 else "1")
            rows.append([work.what, word, f"{1e3 * single:.1f}", f"{1e3 * all_reduce(work.size, 1000):.1f}", *cells])
    head = ["work of a gradient", "batch", "one GPU, ms", "one mean of 1,000, ms", *(f"{n:,}" for n in COUNTS)]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the page from the results so far, measure nothing")
    given = parser.parse_args()
    store = Store(given.out, given.again)
    if not given.write:
        for name in given.models:
            store.make(name, lambda name=name: measured(name, given.rounds))
    if given.out == RESULTS:
        write({"two": lines(store), "paper": paper()}, PAGE)


if __name__ == "__main__":
    main()
