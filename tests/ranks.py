"""Real ranks for tests: processes that find each other as torchrun's do."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from forked import CONTEXT


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(size: int, function: Callable[..., Any], *arguments: Any) -> tuple[list[Any], Any]:
    """`function(*arguments)` on `size` ranks: the processes, and the queue that their ends come in."""
    results, port = CONTEXT.SimpleQueue(), free_port()
    ranks = [CONTEXT.Process(target=_rank, args=(r, size, port, results, function, arguments)) for r in range(size)]
    for process in ranks:
        process.start()
    return ranks, results


def ends(ranks: list[Any], results: Any, count: int, seconds: float = 600) -> dict[int, Any]:
    """The ends of `count` ranks; those that are there after so long are killed."""
    limit, found = time.monotonic() + seconds, {}
    try:
        while len(found) < count:
            if not results.empty():
                rank, end = results.get()
                found[rank] = end
                continue
            alive = any(process.is_alive() for process in ranks) or not results.empty()
            assert alive, f"the ranks died; of {count} ends there are those of {sorted(found)}"
            assert time.monotonic() < limit, f"after {seconds:g} seconds there are ends of {sorted(found)} alone"
            time.sleep(0.01)
        for process in ranks:
            process.join(max(0.0, limit - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return found


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on each of `size` ranks."""
    ranks, results = started(size, function, *arguments)
    found = ends(ranks, results, size)
    errors = [found[r][1] for r in range(size) if not found[r][0]]
    assert not errors, "\n".join(errors)
    return [found[r][1] for r in range(size)]


def _rank(rank: int, size: int, port: int, results: Any, function: Callable[..., Any], arguments: Any) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, (True, function(*arguments))))
    except BaseException as error:
        results.put((rank, (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
