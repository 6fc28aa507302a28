"""Ranks on one GPU: two share it with gloo; NCCL, which wants a GPU for each rank, has one rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import CASES, STEPS, data, network, numbers
from ranks import on_ranks
from test_distributed import assert_alike

from bilevel import Rows, solve
from bilevel.distributed.process_group import ProcessGroup

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAMES = [
    "penalty, constraints",
    "penalty, rows",
    "penalty, vectors, box",
    "reverse mode, rows",
    "approx grad",
    "value gap",
]


def solved_on(device: str) -> dict[str, Any]:
    """The cases by all ranks, with u and v on the device."""
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    found = {}
    for name in NAMES:
        method, problem, start, options = CASES[name]
        u = start()
        if isinstance(u, Rows):
            u = Rows(len(u), shape=tuple(u.values.shape[1:]), dtype=torch.float64, device=device)
        else:
            u = u.detach().to(device).requires_grad_()
        solution = solve(
            problem(),
            method,
            u,
            network().to(device),
            data(rows=isinstance(u, Rows)),
            max_steps=STEPS,
            seed=7,
            log_every=4,
            hypergradient=False,
            **options,
        )
        found[name] = numbers(solution) | {"ranks": solution.ranks}
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


@needs_gpu
def test_two_ranks_that_share_a_gpu_take_the_steps_of_one_process():
    (alone,), two = on_ranks(1, solved_on, "cuda"), on_ranks(2, solved_on, "cuda")
    for name in NAMES:
        assert [rank[name]["ranks"] for rank in two] == [2, 2]
        assert two[0][name] == two[1][name]
        assert_alike(name, alone[name], two[0][name])


def spoken(kind: str) -> dict[str, Any]:
    """Everything that ranks say to each other, by one rank that hears itself."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    ranks = ProcessGroup()
    x, whole = torch.arange(6.0, device=device).view(2, 3), torch.arange(4, device=device)
    copy = torch.zeros_like(x)
    copy.copy_(x)
    ranks.broadcast_([copy])
    found = {
        "mean": [t.tolist() for t in ranks.all_reduce_mean([x, x.double(), x[0]])],
        "total": ranks.all_reduce_sum(x).tolist(),
        "each": [t.tolist() for t in ranks.all_gather(whole)],
        "same": copy.tolist(),
        "counts": ranks.all_gather_counts([3, 4]),
        "gather": ranks.all_gather_object("word"),
        "share": ranks.broadcast_object({"a": 1}),
        "device": str(ranks.all_reduce_sum(x).device.type),
    }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_what_ranks_say_to_each_other_comes_back_from_one_rank_as_it_was(kind):
    x, whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [0, 1, 2, 3]
    (found,) = on_ranks(1, spoken, kind)
    assert found == {
        "mean": [x, x, x[0]],
        "total": x,
        "each": [whole],
        "same": x,
        "counts": [[3], [4]],
        "gather": ["word"],
        "share": {"a": 1},
        "device": kind,
    }
