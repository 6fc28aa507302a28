"""One function on many inputs, side by side: here, in processes of this machine, or by the workers of a Ray cluster.

An input whose run fails, or whose process dies, is tried again. `bilevel.running.run_many` keeps what comes back.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bilevel.errors import BilevelError, OptionError, reason

Found = Generator[tuple[int, Any], None, None]
"""Places of items with their results."""
Queue = deque[tuple[int, int]]
"""Places of the items that wait, each with the number of its next try."""
REACH = 10.0
"""Seconds in which the address of a cluster has to answer."""


@dataclass(frozen=True)
class Failed:
    """Why a run has no result."""

    why: str
    trace: str = ""
    """Where it happened."""


@dataclass(frozen=True)
class Where:
    """Where runs go: `workers` processes of this machine, or the Ray cluster at `address`, each run with `gpus`."""

    workers: int = 1
    address: str | None = None
    gpus: float = 0.0
    retries: int = 2
    """How often a run that failed is tried again. An error of this library is of the input, and is not."""
    one_thread: bool = True
    """Whether a run in this process has one thread of torch, as those in processes of their own have."""


ONCE = Where(retries=0, one_thread=False)
"""In this process as it is, and not tried again."""


def each(
    function: Callable[[Any], Any], items: Sequence[Any], where: Where, late: Callable[[], bool] = lambda: False
) -> Found:
    """(place, result) as they come, the result `Failed` after the last try; none is begun once it is `late`.

    An error of this library is raised at once. KeyboardInterrupt ends what runs. `function` is one of a module, except
    with one worker here.
    """
    left = deque((place, 1) for place in range(len(items)))
    if where.address is not None:
        yield from _on_ray(function, items, left, where, late)
    elif where.workers <= 1 or len(items) <= 1:
        yield from _here(function, items, left, where, late)
    else:
        yield from _in_processes(function, items, left, where, late)


def _judged(left: Queue, place: int, attempt: int, found: Any, where: Where) -> Found:
    """A result passes; a failure goes back to the queue while tries are left."""
    if isinstance(found, BilevelError):
        raise found
    if isinstance(found, Failed) and attempt <= where.retries:
        left.append((place, attempt + 1))
    else:
        yield place, found


def attempted(function: Callable[[Any], Any], item: Any) -> Any:
    """The function's result, or its error as a value that any process can send."""
    try:
        return function(item)
    except BilevelError as error:
        return error
    except Exception as error:  # the function is the caller's: it raises anything
        return Failed(f"{type(error).__name__}: {reason(error)}", traceback.format_exc())


def _here(
    function: Callable[[Any], Any], items: Sequence[Any], left: Queue, where: Where, late: Callable[[], bool]
) -> Found:
    with one_thread() if where.one_thread else nullcontext():
        while left and not late():
            place, attempt = left.popleft()
            yield from _judged(left, place, attempt, attempted(function, items[place]), where)


# -- processes ---------------------------------------------------------------------------------------------------------


def _in_processes(
    function: Callable[[Any], Any], items: Sequence[Any], left: Queue, where: Where, late: Callable[[], bool]
) -> Found:
    busy: dict[Connection, tuple[BaseProcess, int, int]] = {}
    free: list[tuple[BaseProcess, Connection]] = []
    try:
        while busy or (left and not late()):
            while left and len(busy) < where.workers and not late():
                process, pipe = free.pop() if free else _begun(function)
                busy[pipe] = process, *left.popleft()
                with suppress(OSError):  # of a process that died: its pipe ends, which is heard below
                    pipe.send(items[busy[pipe][1]])
            heard = set(map(id, wait(list(busy))))
            for ready in [pipe for pipe in busy if id(pipe) in heard]:
                process, place, attempt = busy.pop(ready)
                try:
                    found = ready.recv()
                except (EOFError, OSError):
                    process.join()
                    found = Failed(f"its process ended with code {process.exitcode}")
                if isinstance(found, Failed):  # an error of a GPU spoils every later run of a process
                    ready.close()
                    process.terminate()
                    process.join()
                else:
                    free.append((process, ready))
                yield from _judged(left, place, attempt, found, where)
    finally:
        for process, pipe in [*free, *((process, pipe) for pipe, (process, *_) in busy.items())]:
            pipe.close()
            process.terminate()
            process.join()


def _begun(function: Callable[[Any], Any]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs))
    process.start()
    theirs.close()
    return process, mine


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    """In a process of its own: run what comes until the pipe ends, as it does where the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear, except in `solve`
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(attempted(function, pipe.recv()))


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch inside: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- Ray ---------------------------------------------------------------------------------------------------------------


def _reach(address: str) -> None:
    """Raise OSError where nothing listens at `host:port`: Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()


def _on_ray(
    function: Callable[[Any], Any], items: Sequence[Any], left: Queue, where: Where, late: Callable[[], bool]
) -> Found:
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise OptionError(
            f"the address of a Ray cluster ({where.address}) needs Ray. Install it with: pip install 'bilevel[ray]'."
        ) from None
    mine = not ray.is_initialized()
    if mine:
        try:
            _reach(where.address or "")
            ray.init(address=where.address, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises several, and none is a base of the others
            raise OptionError(f"there is no Ray cluster at {where.address} ({reason(error)}).") from None
    remote = ray.remote(num_cpus=1, num_gpus=where.gpus, max_retries=0)(attempted)
    shared = ray.put(function)
    slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
    busy: dict[Any, tuple[int, int]] = {}
    try:
        while busy or (left and not late()):
            while left and len(busy) < slots and not late():
                place, attempt = left.popleft()
                busy[remote.remote(shared, items[place])] = place, attempt
            for ready in ray.wait(list(busy))[0]:
                place, attempt = busy.pop(ready)
                try:
                    found = ray.get(ready)
                except ray.exceptions.RayError as error:  # its worker or its machine is gone
                    found = Failed(f"{type(error).__name__}: {reason(error)}")
                yield from _judged(left, place, attempt, found, where)
    finally:
        for reference in busy:
            ray.cancel(reference, force=True)
        if mine:
            ray.shutdown()
