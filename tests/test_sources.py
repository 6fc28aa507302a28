"""Batches are those of the DataLoader, bit for bit, however they are read; and the time spent waiting for them."""

from __future__ import annotations

import random
import time
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from bilevel import Callback, DataError, Penalty, Problem, Status, solve
from bilevel.batches import readers
from bilevel.batches.readers import DeviceCopies, IndexReader, ListReader, StreamReader
from bilevel.batches.sources import Source, Sources, _Generators, hash_seed
from bilevel.running import checkpoints as store

CPU = torch.device("cpu")
N = 22


def rows(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tensors() -> TensorDataset:
    return TensorDataset(rows(3), torch.arange(N), rows(2, 2).transpose(1, 2))


def own() -> torch.Generator:
    return torch.Generator().manual_seed(99)


WEIGHTS = [1.0 + i % 3 for i in range(N)]

INDEXED: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(tensors(), 4),
    "drop last": lambda: DataLoader(tensors(), 4, drop_last=True),
    "one batch": lambda: DataLoader(tensors(), 100, shuffle=True),
    "shuffled": lambda: DataLoader(tensors(), 4, shuffle=True),
    "shuffled, drop last": lambda: DataLoader(tensors(), 4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(tensors(), 4, shuffle=True, generator=own()),
    "generator of the loader, not of its sampler": lambda: DataLoader(
        tensors(), 4, sampler=RandomSampler(range(N)), generator=own()
    ),
    "with replacement": lambda: DataLoader(
        tensors(), 4, sampler=RandomSampler(range(N), replacement=True, num_samples=70)
    ),
    "more than a permutation": lambda: DataLoader(tensors(), 4, sampler=RandomSampler(range(N), num_samples=50)),
    "weighted": lambda: DataLoader(tensors(), 4, sampler=WeightedRandomSampler(WEIGHTS, 30)),
    "weighted, own generator": lambda: DataLoader(
        tensors(), 4, sampler=WeightedRandomSampler(WEIGHTS, 9, replacement=False, generator=own())
    ),
    "random subset": lambda: DataLoader(tensors(), 4, sampler=SubsetRandomSampler([3, 1, -2, 20])),
    "distributed": lambda: DataLoader(tensors(), 4, sampler=DistributedSampler(range(N), num_replicas=2, rank=1)),
    "batch sampler": lambda: DataLoader(tensors(), batch_sampler=BatchSampler(RandomSampler(range(N)), 5, True)),
    "subset": lambda: DataLoader(Subset(tensors(), [5, -1, 5, 0, 13]), 2, shuffle=True),
    "subset of a subset": lambda: DataLoader(Subset(Subset(tensors(), range(3, 19)), [7, 0, 2]), 2, shuffle=True),
    "split": lambda: DataLoader(random_split(tensors(), [7, 15], own())[1], 4, shuffle=True),
}

Point = namedtuple("Point", "x y")


class Noisy(Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.randn(2, dtype=torch.float64) + np.random.rand() + random.random()


class Shifted(TensorDataset):
    def __getitem__(self, i):
        return tuple(t + torch.rand(()) for t in super().__getitem__(i))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(2))


class Turned(Sampler):
    """Unknown to torch: one draw for each example, and another start for each pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return N

    def __iter__(self):
        for i in range(N):
            yield (i + self.epoch + int(torch.randint(5, ()))) % N


class Reversed(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


STREAMED: dict[str, Callable[[], Any]] = {
    "noisy": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "noisy, own generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=own()),
    "worker": lambda: DataLoader(tensors(), 4, shuffle=True, num_workers=1),
    "own sampler": lambda: DataLoader(tensors(), 4, sampler=Turned()),
    "list as sampler": lambda: DataLoader(tensors(), 4, sampler=[4, 2, 7]),
    "collate": lambda: DataLoader(tensors(), 4, shuffle=True, collate_fn=lambda items: default_collate(items)[0]),
    "subclass of the dataset": lambda: DataLoader(Shifted(rows(2), rows()), 4, shuffle=True),
    "subclass of the loader": lambda: Reversed(tensors(), 4, shuffle=True),
    "one example at a time": lambda: DataLoader(tensors(), None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "dicts": lambda: DataLoader([{"x": x} for x in rows(3)], 4, shuffle=True),
    "named tuples": lambda: DataLoader([Point(x, i) for i, x in enumerate(rows(3))], 4, shuffle=True),
    "numbers": lambda: DataLoader(range(N), 4, shuffle=True),
    "tensors and numbers": lambda: DataLoader([(x, i) for i, x in enumerate(rows(3))], 4, shuffle=True),
    "two types": lambda: DataLoader([rows()[0], *rows().float()], 4),
    "list of tensors": lambda: DataLoader(list(rows(3)), 4, shuffle=True),
    "list of scalars": lambda: DataLoader(list(rows()), 4, shuffle=True),
    "list of tuples": lambda: DataLoader([(x, x.sum() > 0) for x in rows(3)], 4, shuffle=True),
    "requires grad": lambda: DataLoader(TensorDataset(rows(3).requires_grad_()), 4, shuffle=True),
    "unsigned": lambda: DataLoader(TensorDataset(torch.arange(N).to(torch.uint16)), 4, shuffle=True),
    "range": lambda: range(7),
}

LISTED: dict[str, Callable[[], Any]] = {
    "list": lambda: [(rows(2)[:3], 1), {"x": rows()}, [torch.arange(3)]],
    "tuple": lambda: (rows(), rows(2), None),
}

EVERY = {**INDEXED, **STREAMED, **LISTED}


def same(a: Any, b: Any) -> bool:
    """Equal in type, in values and in layout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def source(items: Any, seed: int = 3) -> Source:
    return Source(items, "lower", seed, DeviceCopies(CPU))


def drawn(items: Any, count: int, seed: int = 3) -> list[Any]:
    one = source(items, seed)
    return [one.draw() for _ in range(count)]


def iterated(items: Any, count: int, seed: int = 3) -> list[Any]:
    """What iterating over the items gives, pass after pass, each from its seed."""
    found: list[Any] = []
    epoch = 0
    while len(found) < count:
        start = hash_seed(seed, "lower", epoch)
        torch.manual_seed(start)
        np.random.seed(start % 2**32)
        random.seed(start)
        sampler = getattr(getattr(items, "batch_sampler", None), "sampler", None)
        for owner in (items, sampler):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(start)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        found += items
        epoch += 1
    return found[:count]


def global_state() -> list[Any]:
    numbers = [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
    return [torch.get_rng_state().tolist(), numbers, random.getstate()]


# -- which batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_batches_are_those_of_the_iterable_in_three_passes(kind):
    reader = IndexReader if kind in INDEXED else StreamReader if kind in STREAMED else ListReader
    items = EVERY[kind]()
    assert type(source(items)._reader) is reader
    expected = iterated(items, 20)
    before = global_state()
    found = drawn(items, 20)
    assert global_state() == before
    assert all(map(same, found, expected))


@pytest.mark.parametrize("kind", [k for k in INDEXED if k not in ("in order", "drop last", "distributed")])
def test_seed_alone_decides(kind):
    torch.manual_seed(1)
    one = drawn(INDEXED[kind](), 5)
    torch.manual_seed(2)
    assert all(map(same, drawn(INDEXED[kind](), 5), one))
    assert not all(map(same, drawn(INDEXED[kind](), 5, seed=4), one))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_resumed_source_draws_what_the_straight_one_drew(kind, taken):
    straight = source(EVERY[kind]())
    for _ in range(taken):
        straight.draw()
    other = source(EVERY[kind]())
    other.draw()
    other.seek(straight.position)
    for _ in range(5):
        assert same(other.draw(), straight.draw())
        assert other.position == straight.position


def test_resume_of_a_source_read_by_index_fetches_no_batch(monkeypatch):
    selected = []
    plain = readers._rows
    monkeypatch.setattr(readers, "_rows", lambda columns, index: selected.append(index) or plain(columns, index))
    one = source(DataLoader(TensorDataset(rows(3)), 2, shuffle=True))
    one.seek([5, 9])
    assert same(one.draw(), iterated(one.items, 11 * 6)[5 * 11 + 9])
    assert len(selected) == 1


@pytest.mark.parametrize("kind", EVERY)
def test_peeking_moves_nothing(kind):
    items = EVERY[kind]()
    plain, peeked = source(EVERY[kind]()), source(items)
    for i in range(8):
        if i in (0, 1, 5):
            first, every = peeked.peek(2)
            assert every is (len(list(EVERY[kind]())) <= 2)
            assert all(map(same, first, iterated(EVERY[kind](), len(first))))
        assert same(peeked.draw(), plain.draw())


def test_generators_are_swapped_once_a_pass_where_indices_are_drawn_at_its_start(monkeypatch):
    entered = []
    plain = _Generators.__enter__
    monkeypatch.setattr(_Generators, "__enter__", lambda self: entered.append(self) or plain(self))
    drawn(DataLoader(tensors(), 4, shuffle=True), 12)  # two passes of six
    assert len(entered) == 2
    entered.clear()
    drawn([1, 2], 12)
    assert not entered


@pytest.mark.parametrize(
    "items",
    [
        DataLoader(TensorDataset(rows(2)), 4, sampler=WeightedRandomSampler([0.0] * N + [1.0], 3)),
        DataLoader(Subset(TensorDataset(rows(2)), [0, N]), 4),
        DataLoader(TensorDataset(rows(2)), 4, sampler=SubsetRandomSampler([0, -N - 1])),
    ],
)
def test_example_that_does_not_exist_is_refused(items):
    with pytest.raises(DataError, match=f"the lower data has {N} examples, numbered from 0"):
        source(items).draw()


@pytest.mark.parametrize(
    "items", [[], (), DataLoader(TensorDataset(rows()[:0]), 4), DataLoader(tensors(), 100, drop_last=True)]
)
def test_empty_data_is_named(items):
    for attempt in (Source.draw, lambda one: one.peek(2)):
        with pytest.raises(DataError, match="the lower data is empty"):
            attempt(source(items))


def test_one_shot_iterator_is_refused():
    with pytest.raises(DataError, match="one-shot iterator"):
        source(iter(DataLoader(tensors(), 4)))


# -- copies ------------------------------------------------------------------------------------------------------------


def test_copies_on_the_device_are_made_once():
    copies = DeviceCopies(torch.device("meta"))
    copies.room = 64
    x, y = torch.zeros(4), torch.zeros(8)
    copy = copies.copy(x)
    assert copy.device.type == "meta"
    assert copies.copy(x) is copy
    assert copies.room == 48
    assert copies.fit([x, y])
    assert not copies.fit([x, y, torch.zeros(5)])
    assert not copies.fit([y.requires_grad_()])


def test_error_of_the_data_comes_with_its_batch():
    class Broken:
        def __iter__(self):
            yield from (1, 2)
            raise OSError("no such file")

    sources = Sources(([0], Broken()), 0, CPU)
    assert sources.draw(2) == [(0, 1), (0, 2)]
    with pytest.raises(OSError, match="no such file"):
        sources.draw()


# -- runs --------------------------------------------------------------------------------------------------------------


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run) -> bool:
        return run.step >= self.step


def run(
    data: Any, *, stop: int | None = None, device: str = "cpu", steps: int = 12, **options: Any
) -> tuple[Any, Tensor]:
    problem = Problem(
        lambda u, v, batch: torch.sum((dropout(v) - batch[0].mean()) ** 2),
        lambda u, v, batch: torch.sum((dropout(v) - u - batch[0].mean()) ** 2),
    )
    u, v = (torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    callbacks = [StopAt(stop)] if stop else []
    solution = solve(
        problem, Penalty(), u, v, data, max_steps=steps, seed=5, log_every=1, callbacks=callbacks, **options
    )
    return solution, torch.cat([u, v]).detach()


PAIRS: dict[str, Callable[[], Any]] = {
    "indexed": lambda: (INDEXED["weighted"](), INDEXED["own generator"]()),
    "streamed": lambda: (DataLoader(Shifted(rows(2)), 4, shuffle=True), STREAMED["own sampler"]()),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_run_has_the_same_bits_however_its_data_is_read(kind, monkeypatch):
    torch.manual_seed(1)
    _, expected = run(PAIRS[kind]())
    torch.manual_seed(2)
    before = global_state()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopies, "fit", lambda *_: False)
        assert torch.equal(run(PAIRS[kind]())[1], expected)
    assert torch.equal(run(PAIRS[kind]())[1], expected)
    assert global_state() == before


@pytest.mark.parametrize("kind", PAIRS)
def test_run_that_was_stopped_resumes_bit_for_bit(kind, tmp_path):
    _, expected = run(PAIRS[kind]())
    half, _ = run(PAIRS[kind](), stop=5, checkpoint=tmp_path)
    assert half.status is Status.STOPPED
    assert torch.equal(run(PAIRS[kind](), checkpoint=tmp_path, resume=True)[1], expected)


# -- waiting -----------------------------------------------------------------------------------------------------------


class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)


def test_waiting_is_a_share_that_rises_with_slow_data():
    fast, _ = run((INDEXED["shuffled"](),) * 2)
    slow, _ = run((DataLoader(Slow(rows(2)), 2),) * 2)
    assert 0 < fast.waiting < slow.waiting < 1
    u, v = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, _: torch.sum((v - 1) ** 2), lambda u, v, _: torch.sum((v - u) ** 2))
    none = solve(problem, Penalty(), u, v, max_steps=5)
    assert none.waiting == 0.0


def test_checkpoint_keeps_the_time_waited(tmp_path):
    data = partial(map, lambda kind: INDEXED[kind](), ("shuffled", "shuffled"))
    first, _ = run(tuple(data()), checkpoint=tmp_path)
    again, _ = run(tuple(data()), checkpoint=tmp_path, resume=True)  # all steps are done: nothing is drawn
    assert again.waiting == first.waiting > 0
    state = store.load(tmp_path)
    del state["waited"]  # as an earlier release wrote it
    store.save(tmp_path, state)
    assert run(tuple(data()), checkpoint=tmp_path, resume=True)[0].waiting == 0.0


# -- on a GPU ----------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def to_cpu(batch: Any) -> Any:
    return readers.each_tensor(Tensor.cpu, batch)


def on_gpu(items: Any, other: Any = (0,)) -> Sources:
    return Sources((other, items), 3, torch.device("cuda", torch.cuda.current_device()))


@needs_cuda
@pytest.mark.parametrize("kind", EVERY)
def test_batches_on_the_gpu_are_those_of_the_cpu_and_drawing_them_waits_for_nothing(kind):
    sources, expected = on_gpu(EVERY[kind]()), drawn(EVERY[kind](), 20)
    sources.draw()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(19):
            found += sources.draw()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (_, batch), other in zip(found, expected[1:], strict=True):
        devices: list[str] = []
        readers.each_tensor(lambda t, devices=devices: devices.append(t.device.type) or t, batch)
        assert set(devices) <= {"cuda"}
        assert same(to_cpu(batch), other)


@needs_cuda
def test_tensors_live_on_the_gpu_once_even_where_both_sources_share_them():
    x = torch.randn(1000, 100)
    before = torch.cuda.memory_allocated()
    data = [DataLoader(Subset(TensorDataset(x), range(i, 1000, 2)), 10, shuffle=True) for i in range(2)]
    sources = on_gpu(*data)
    sources.draw(120)
    assert x.nbytes <= torch.cuda.memory_allocated() - before < 1.5 * x.nbytes


@needs_cuda
def test_batches_of_a_list_are_copied_once():
    one, two = on_gpu([rows(2)]).draw(2)
    assert one[1].data_ptr() == two[1].data_ptr()


@needs_cuda
@pytest.mark.parametrize("kind", [*INDEXED, *LISTED])
def test_data_that_does_not_fit_streams(kind, monkeypatch):
    monkeypatch.setattr(readers, "ROOM", 0.0)
    sources = on_gpu(EVERY[kind]())
    assert isinstance(sources.pair[1]._reader, StreamReader)
    assert all(same(to_cpu(b), a) for (_, b), a in zip(sources.draw(12), drawn(EVERY[kind](), 12), strict=True))


@needs_cuda
def test_streamed_batches_survive_the_reuse_of_memory():
    """Large batches, used late on a busy stream, while their memory would be free for the next copies."""
    big = [torch.full((2**20,), float(i)) for i in range(12)]
    sources = on_gpu(islice_of(big))
    totals = []
    work = torch.randn(3000, 3000, device="cuda")
    for _ in range(48):
        ((_, batch),) = sources.draw()
        work = torch.nn.functional.normalize(work @ work)
        totals.append(batch.sum() / 2**20)
        del batch
    assert torch.stack(totals).tolist() == [float(i % 12) for i in range(48)]


def islice_of(items: list[Any]) -> Any:
    class Repeated:
        def __iter__(self):
            return islice(items, None)

    return Repeated()


@needs_cuda
def test_data_drawn_on_the_gpu_has_a_generator_of_its_own():
    class Drawn:
        def __iter__(self):
            return (torch.randn(3, device="cuda") for _ in range(5))

    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    sources = on_gpu(Drawn())
    straight = sources.draw(12)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    resumed = on_gpu(Drawn())
    resumed.load_state_dict([[0, 7], [1, 2]])
    assert all(same(to_cpu(a), to_cpu(b)) for a, b in zip(resumed.draw(5), straight[7:], strict=True))


@needs_cuda
def test_time_that_the_gpu_is_busy_is_not_waiting():
    class Sleepy:
        def __iter__(self):
            for x in rows(2):
                time.sleep(0.02)
                yield x

    work = torch.randn(8192, 8192, device="cuda")
    busy, idle = on_gpu(Sleepy()), on_gpu(Sleepy())
    work @ work
    for sources in (busy, idle):
        torch.cuda.synchronize()
        for _ in range(5):
            if sources is busy:
                for _ in range(100):
                    work @ work
            sources.draw()
            torch.cuda.synchronize()
    assert idle.waited > 5 * 0.02
    assert busy.waited < idle.waited / 2


@needs_cuda
@pytest.mark.parametrize("kind", PAIRS)
def test_run_on_the_gpu_resumes_bit_for_bit(kind, tmp_path):
    expected = run(PAIRS[kind](), device="cuda")[1]
    run(PAIRS[kind](), stop=5, device="cuda", checkpoint=tmp_path)
    assert torch.equal(run(PAIRS[kind](), device="cuda", checkpoint=tmp_path, resume=True)[1], expected)
