"""One function on many items: in this process, in several processes (joblib's loky), or on a Ray cluster.

An item that fails, or whose process dies, is run again. `bilevel.running.run_many` keeps what comes back.
"""

from __future__ import annotations

import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from bilevel._util.optional import require
from bilevel.errors import BilevelError, OptionError, reason


@dataclass(frozen=True)
class Failed:
    """Why a run has no result."""

    why: str
    # Where it happened.
    trace: str = ""


class Worker(NamedTuple):
    """What does one run at a time: this process, another one, or a part of a cluster. `end` ends it and its run."""

    submit: Callable[..., Future[Any]]
    end: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Where:
    """The place of the runs: `workers` processes here, or the Ray cluster at `address`, with `gpus` for each run."""

    workers: int = 1
    address: str | None = None
    gpus: float = 0.0
    # How often a run that failed is tried again. An error of this library is the caller's, and is not.
    retries: int = 2
    # Whether torch has one thread for a run in this process, as in worker processes.
    one_thread: bool = True


# In this process as it is, and not tried again.
ONCE = Where(retries=0, one_thread=False)


def parallel_map(
    function: Callable[[Any], Any], items: Sequence[Any], where: Where, late: Callable[[], bool] = lambda: False
) -> Generator[tuple[int, Any], None, None]:
    """Yield (position, result) as results come; the result is `Failed` after the last try.

    No run is started once `late()` is true. An error of this library is raised at once. KeyboardInterrupt, and closing
    the generator, end the runs that are under way.
    """
    local = _processes if where.workers > 1 and len(items) > 1 else _here
    waiting, tries = deque(range(len(items))), [0] * len(items)
    busy: dict[Future[Any], tuple[int, Worker]] = {}
    with (local if where.address is None else _cluster)(where) as (begin, count):
        free = [begin() for _ in range(count)]
        try:
            while busy or (waiting and not late()):
                while free and waiting and not late():
                    position, worker = waiting.popleft(), free.pop()
                    busy[worker.submit(attempted, function, items[position])] = position, worker
                for done in wait(busy, return_when=FIRST_COMPLETED).done:
                    (position, worker), result = busy.pop(done), _outcome(done)
                    if isinstance(result, BilevelError):
                        raise result
                    failed = isinstance(result, Failed)
                    if failed:  # an error of a GPU spoils its process for later runs
                        worker.end()
                    free.append(begin() if failed else worker)
                    tries[position] += 1
                    if failed and tries[position] <= where.retries:
                        waiting.append(position)
                    else:
                        yield position, result
        finally:
            for worker in (*free, *(worker for _, worker in busy.values())):
                worker.end()


def attempted(function: Callable[[Any], Any], item: Any) -> Any:
    """Return the function's result, or its error as a value that any process can send."""
    try:
        return function(item)
    except BilevelError as error:
        return error
    except Exception as error:  # the function is the caller's: it raises anything
        return Failed(f"{type(error).__name__}: {reason(error)}", traceback.format_exc())


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread inside: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _outcome(done: Future[Any]) -> Any:
    """The result of a run; `Failed` if its process died or its result cannot be sent."""
    try:
        return done.result()
    except Exception as error:  # several libraries raise here
        return Failed(f"its process ended ({type(error).__name__}: {reason(error)})")


@contextmanager
def _here(where: Where) -> Iterator[tuple[Callable[[], Worker], int]]:
    """Run in this process, at once."""

    def submit(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done

    with one_thread() if where.one_thread else nullcontext():
        yield lambda: Worker(submit), 1


@contextmanager
def _processes(where: Where) -> Iterator[tuple[Callable[[], Worker], int]]:
    """Run in processes of this machine. Each has its own pool, so that a process that dies takes one run with it."""
    loky = require("joblib.externals.loky", extra="apps")

    def begin() -> Worker:
        pool = loky.ProcessPoolExecutor(1, initializer=_begin_process)
        return Worker(pool.submit, partial(pool.shutdown, wait=True, kill_workers=True))

    yield begin, where.workers


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, except in `solve`
    torch.set_num_threads(1)


@contextmanager
def _cluster(where: Where) -> Iterator[tuple[Callable[[], Worker], int]]:
    """Run on a Ray cluster. (joblib's backend for Ray cannot return results as they come.)"""
    ray = require("ray", extra="ray")
    mine = not ray.is_initialized()
    if mine:
        try:
            _reach(where.address or "")
            ray.init(address=where.address, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises several, and none is a base of the others
            raise OptionError(f"there is no Ray cluster at {where.address} ({reason(error)}).") from None
    remote = ray.remote(num_cpus=1, num_gpus=where.gpus, max_retries=0)(attempted)
    references: list[Any] = []

    def submit(_: Any, *arguments: Any) -> Future[Any]:
        references.append(remote.remote(*arguments))
        return references[-1].future()  # type: ignore[no-any-return]

    try:
        yield lambda: Worker(submit), max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        for reference in references:
            ray.cancel(reference, force=True)
        if mine:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`: Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
