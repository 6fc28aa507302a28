"""Many independent runs: each is run once, and its result is kept as a file.

An item is a dict of plain settings, all that its result depends on. The same call after an interruption runs only the
items that have no file with their settings yet. The items run in this process, in several processes (joblib's loky), or
on a Ray cluster. An item that fails, or whose process dies, is run again.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bilevel._util.atomic_files import read_json, write_whole
from bilevel._util.checks import check_counts, in_range, require
from bilevel.errors import BilevelError, OptionError, RunError, reason

# Characters of a file's name from which the rest is a hash: file systems allow 255.
LONGEST = 150
Settings = Mapping[str, Any]
Found = dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Why a run has no result."""

    why: str
    # The traceback.
    trace: str = ""


class Worker(NamedTuple):
    """Does one run at a time: this process, another one, or a part of a cluster. `end` ends it and its run."""

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


HERE = Where()
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
                    try:
                        busy[worker.submit(attempted, function, items[position])] = position, worker
                    except BrokenExecutor:  # its process has died since its last run
                        worker.end()
                        free.append(begin())
                        waiting.appendleft(position)
                for done in wait(busy, return_when=FIRST_COMPLETED).done:
                    (position, worker), result = busy.pop(done), _outcome(done)
                    failed = isinstance(result, Failed)
                    if failed:  # an error of a GPU spoils its process for later runs
                        worker.end()
                    free.append(begin() if failed else worker)
                    if isinstance(result, BilevelError):
                        raise result
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
    """Return the result of a run; `Failed` if its process died or its result cannot be sent."""
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


@dataclass(frozen=True)
class RunItem:
    """One of many runs."""

    # Everything that the result depends on, as JSON can hold it.
    settings: Settings
    # Roughly how long it takes: the longest runs start first.
    weight: float

    @property
    def name(self) -> str:
        """The name of the file."""
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(map(_word, self.settings.values())).lower()).strip("-")
        if len(name) <= LONGEST:
            return name
        return f"{name[:LONGEST]}-{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:12]}"


class ResultFolder:
    """A folder with one file for each result."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def get(self, item: RunItem) -> Found | None:
        """Return the result of a finished item; None if it is not finished, or its file has other settings."""
        kept = read_json(self.folder / f"{item.name}.json")
        same = kept.get("settings") == json.loads(json.dumps(item.settings))
        return kept["result"] if same and isinstance(kept.get("result"), dict) else None

    def put(self, item: RunItem, found: Found) -> None:
        write_whole(self.folder / f"{item.name}.json", json.dumps({"settings": item.settings, "result": found}) + "\n")


def run_items(
    items: Sequence[RunItem],
    folder: ResultFolder,
    function: Callable[[Settings], Found | None],
    *,
    where: Where = HERE,
    deadline: float | None = None,
    on_progress: Callable[[RunItem], None] = lambda item: None,
) -> bool:
    """Run the items that have no result yet, the longest first; return False if Ctrl-C interrupted it.

    `function` returns None if it was stopped. After the deadline (of `time.monotonic`) no item is started. An item that
    fails is tried again; if it fails for good, the others still run, and RunError names it at the end. `on_progress` is
    called with each finished item.
    """
    left = sorted((item for item in items if folder.get(item) is None), key=lambda item: -item.weight)
    for item in items:
        if item not in left:
            on_progress(item)
    failed: list[tuple[str, Failed]] = []

    results = parallel_map(
        function,
        [item.settings for item in left],
        where,
        lambda: deadline is not None and time.monotonic() >= deadline,
    )
    try:
        for position, found in results:
            if found is None:
                return False
            if isinstance(found, Failed):
                failed.append((left[position].name, found))
                continue
            folder.put(left[position], found)
            on_progress(left[position])
    except KeyboardInterrupt:
        return False
    finally:
        results.close()
    if failed:
        shown = "; ".join(f"{name} ({found.why})" for name, found in failed[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        error = RunError(
            f"{len(failed)} of {len(left)} runs failed, each tried {where.retries + 1} times: {shown}{more}. The "
            "others are kept; the same call tries these again."
        )
        error.add_note(failed[0][1].trace)
        raise error
    return True


def run_many(
    function: Callable[[Settings], Found],
    items: Sequence[Settings],
    folder: str | Path,
    *,
    workers: int = 1,
    address: str | None = None,
    gpus: float = 0.0,
    retries: int = 2,
) -> list[Found]:
    """Run `function` on each item, and return the results in the order of the items.

    Each result is written to `folder` as soon as it exists. The same call after an interruption runs only the items
    that have no result yet.

    Args:
        function: Takes an item and returns a dict that JSON can represent. With several workers, import it from a
            module, and call `run_many` under `if __name__ == "__main__":`.
        items: Dicts of plain settings: a seed, a target, a point of a grid. The file names are made of their values.
        folder: The folder of the results, one file each.
        workers: The number of processes of this machine. Default: 1, this process. More than one needs joblib.
        address: The address of a Ray cluster to run on instead: `auto`, `host:6379` or `ray://host:10001`. None
            (default): this machine.
        gpus: The number of GPUs of the cluster that each run uses; it can be a fraction. Default: 0.
        retries: How often a run that fails, or whose process dies, is tried again. Default: 2.

    >>> import tempfile
    >>> run_many(lambda item: {"square": item["x"] ** 2}, [{"x": 2}, {"x": 3}], tempfile.mkdtemp())
    [{'square': 4}, {'square': 9}]
    """
    check_counts(workers=workers)
    in_range("retries", retries, least=0, whole=True)
    wanted, results = [RunItem(item, 0) for item in items], ResultFolder(Path(folder))
    if not run_items(wanted, results, function, where=Where(workers, address, gpus, retries)):
        raise KeyboardInterrupt
    return [found for item in wanted if (found := results.get(item)) is not None]


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_word(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "-".join(_word(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
