"""Checkpoints: exact, atomic, never pickle; a file that is not good is named in one sentence and left alone."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bilevel import Box, Callback, CheckpointError, Penalty, Problem, Rows, Status, solve
from bilevel.running import checkpoints as store

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randint(0, 5, shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    if x.is_floating_point() and x.numel():
        x.reshape(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -0.0, 0.1]))
    return x.T if x.dim() == 2 and draw(st.booleans()) else x


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.text(max_size=8), tensors()
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=10)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, types and bits."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(state=st.dictionaries(keys, trees, max_size=4))
@example(state={"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}})
@settings(max_examples=100, deadline=None)  # files are written: a slow disk is no failure
def test_state_comes_back_as_it_was_saved(state):
    with tempfile.TemporaryDirectory() as folder:
        store.save(Path(folder), state)
        assert same(_sorted(store.load(Path(folder))), _sorted(state))


def _sorted(tree: Any) -> Any:
    """Dicts come back in the order of their keys."""
    if isinstance(tree, dict):
        return {k: _sorted(tree[k]) for k in sorted(tree)}
    return [_sorted(x) for x in tree] if isinstance(tree, list) else tree


STATE = {
    "x": torch.arange(6.0).reshape(2, 3),
    "n": 3,
    "text": "abc",
    "list": [torch.ones(2), None, {"deep": torch.zeros(0)}],
}


def test_loaded_tensors_lie_in_memory_as_torch_allocates_them(tmp_path):
    """The last bit of a dot product depends on whether its operands begin at a multiple of 64 bytes."""
    state = {"n": 3, "list": [torch.arange(n, dtype=torch.float64) for n in range(1, 9)]}
    store.save(tmp_path, state)
    assert [t.data_ptr() % 64 for t in store.load(tmp_path)["list"]] == [0] * 8


def test_file_is_safetensors_and_readable_without_this_library(tmp_path):
    store.save(tmp_path, STATE)
    with safe_open(tmp_path / store.FILE, framework="pt") as file:
        assert torch.equal(file.get_tensor("/x"), STATE["x"])
        assert json.loads(file.metadata()["tree"])
    content = (tmp_path / store.FILE).read_bytes()
    assert not content.startswith((b"PK", b"\x80"))  # neither torch.save's zip nor a pickle


def test_nothing_but_the_file_and_the_one_before_is_left_after_a_save(tmp_path):
    for n in range(3):
        store.save(tmp_path, STATE | {"n": n})
        assert sorted(os.listdir(tmp_path)) == [store.BEFORE, store.FILE][n == 0 :]
    assert store.load(tmp_path)["n"] == 2
    (tmp_path / store.FILE).unlink()  # killed between the two renamings of a save
    assert store.exists(tmp_path)
    assert store.load(tmp_path)["n"] == 1


def test_temporary_file_of_a_killed_run_is_cleared_away(tmp_path):
    (tmp_path / f".{store.FILE}.123.tmp").write_bytes(b"half")
    store.save(tmp_path, STATE)
    assert os.listdir(tmp_path) == [store.FILE]


@pytest.mark.parametrize("fails", ["save_file", "fsync", "replace"])
def test_save_that_fails_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch, fails):
    store.save(tmp_path, STATE)
    before = (tmp_path / store.FILE).read_bytes()

    def full(*args: Any, **options: Any) -> None:
        if fails == "save_file":
            Path(args[1]).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((store, fails) if fails == "save_file" else (os, fails)), full)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left.*untouched"):
            store.save(tmp_path, STATE | {"n": 4})
    assert (tmp_path / store.FILE).read_bytes() == before
    assert os.listdir(tmp_path) == [store.FILE]


def test_new_file_is_on_the_disk_before_it_takes_the_old_ones_name(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, plain=plain: (order.append(name), plain(*a)))
    store.save(tmp_path, STATE)
    assert order == ["fsync", "replace", "fsync"]  # the last one is the folder's


def test_state_that_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="/a/0 is set"):
        store.save(tmp_path, {"a": [{1, 2}]})
    assert os.listdir(tmp_path) == []


# -- files that are not good -------------------------------------------------------------------------------------------


def refused(folder: Path, content: bytes) -> str:
    """The sentence with which this file is refused; the file must be left as it is."""
    path = folder / store.FILE
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        store.load(folder)
    assert path.read_bytes() == content
    assert os.listdir(folder) == [store.FILE]
    text = str(caught.value)
    assert str(path) in text
    assert "left as it is" in text
    assert "\n" not in text
    return text


@pytest.fixture
def content(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    store.save(folder, STATE)
    return (folder / store.FILE).read_bytes()


def test_truncated_file_is_refused_at_every_length(tmp_path, content):
    for length in {*range(0, len(content), 7), len(content) - 1}:
        refused(tmp_path, content[:length])


def test_altered_byte_is_refused_wherever_it_is(tmp_path, content):
    draw = random.Random(0)
    for position in [*draw.sample(range(len(content)), 200), 0, 7, 8, len(content) - 1]:
        altered = bytearray(content)
        altered[position] ^= draw.randrange(1, 256)
        refused(tmp_path, bytes(altered))


def test_file_with_more_behind_it_is_refused(tmp_path, content):
    refused(tmp_path, content + b"\0")


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60], ids=range(4))
def test_other_file_is_refused(tmp_path, content):
    refused(tmp_path, content)


def test_safetensors_file_of_something_else_is_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / store.FILE)
    refused(tmp_path, (tmp_path / store.FILE).read_bytes())


def test_other_version_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
    store.save(tmp_path, STATE)
    monkeypatch.undo()
    text = refused(tmp_path, (tmp_path / store.FILE).read_bytes())
    assert f"version {store.VERSION + 1}" in text
    assert f"reads {store.VERSION}" in text


def test_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        store.load(tmp_path)


# -- through solve -----------------------------------------------------------------------------------------------------


def upper(u: Any, v: Any, batch: Any) -> Tensor:
    return torch.sum((v - 1) ** 2)


def lower(u: Any, v: Any, batch: Any) -> Tensor:
    return torch.sum((v - u) ** 2)


def other_lower(u: Any, v: Any, batch: Any) -> Tensor:
    return torch.sum((v - 2 * u) ** 2)


def constraint(u: Any, v: Any, batch: Any) -> Tensor:
    return u - 5


def point(size: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(size, dtype=dtype, requires_grad=True)


METHOD = Penalty(mode="stochastic", lower_steps=1, cotangent="same")


def run(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "problem": Problem(upper, lower),
        "method": METHOD,
        "u": point(),
        "v": point(),
        "max_steps": 4,
        "seed": 1,
        "checkpoint": folder,
        "resume": True,
        "hypergradient": False,
    }
    return solve(**(given | changes))


DIFFERENT = {
    "the size of u and v": lambda: {"u": point(3), "v": point(3)},
    "the type of u": lambda: {"u": point(2, torch.float32)},
    "the names in v": lambda: {"v": [point()]},
    "the lower objective": lambda: {"problem": Problem(upper, other_lower)},
    "a constraint": lambda: {"problem": Problem(upper, lower, inequalities=[constraint])},
    "an option": lambda: {"method": Penalty(mode="stochastic", lower_steps=2)},
    "an optimizer": lambda: {
        "method": Penalty(mode="stochastic", lower_steps=1, lower_optimizer=partial(torch.optim.SGD, lr=0.1))
    },
    "the mode": lambda: {"method": Penalty()},
    "the seed": lambda: {"seed": 2},
    "the data": lambda: {"data": ([1], [1])},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_checkpoint_of_another_run_is_refused_and_nothing_overwritten(tmp_path, changes):
    run(tmp_path, resume=False)
    before, names = (tmp_path / store.FILE).read_bytes(), os.listdir(tmp_path)
    given = changes()
    with pytest.raises(CheckpointError, match=r"is of another run: its .* left as it is"):
        run(tmp_path, **given)
    assert (tmp_path / store.FILE).read_bytes() == before
    assert os.listdir(tmp_path) == names
    for x in (given.get("u"), given.get("v")):
        for t in x if isinstance(x, list) else [] if x is None else [x]:
            assert not t.any()


def test_checkpoint_whose_objectives_have_a_digest_of_their_code_resumes_by_their_names(tmp_path):
    """Releases before 0.2 wrote `name digest`."""

    def boxed(**changes: Any) -> Any:
        return run(tmp_path, **({"problem": Problem(upper, lower, project_upper=Box(-1.0, 1.0))} | changes))

    straight = boxed(resume=False, max_steps=8)
    saved = store.load(tmp_path)
    saved["fingerprint"]["objectives"] = ["upper 0123456789ab", "lower 123456789abc", "Box 23456789abcd"]
    store.save(tmp_path, saved)
    assert boxed(max_steps=8).history["upper"] == straight.history["upper"]
    for changes in ({"problem": Problem(upper, other_lower)}, {"problem": Problem(upper, lower)}):
        with pytest.raises(CheckpointError, match="its objectives"):
            run(tmp_path, max_steps=8, **changes)


def test_learning_rate_of_an_optimizer_is_part_of_the_run(tmp_path):
    def method(rate: float) -> Penalty:
        return Penalty(mode="stochastic", lower_steps=1, lower_optimizer=partial(torch.optim.SGD, lr=rate))

    run(tmp_path, method=method(0.1), resume=False)
    run(tmp_path, method=method(0.1))
    with pytest.raises(CheckpointError, match="its options"):
        run(tmp_path, method=method(0.2))


def test_accumulation_is_part_of_the_run(tmp_path):
    data = ([1], [1])
    run(tmp_path, data=data, resume=False)
    with pytest.raises(CheckpointError, match="its accumulate"):
        run(tmp_path, data=data, accumulate=2)


def test_existing_checkpoint_is_not_overwritten_without_resume(tmp_path):
    run(tmp_path, resume=False)
    before = (tmp_path / store.FILE).read_bytes()
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already, and nothing is overwritten.*resume=True"):
        run(tmp_path, resume=False)
    assert (tmp_path / store.FILE).read_bytes() == before


@pytest.mark.parametrize("harm", ["truncated", "altered"])
def test_resume_from_a_bad_file_changes_neither_it_nor_the_variables(tmp_path, harm):
    run(tmp_path, resume=False)
    path = tmp_path / store.FILE
    (tmp_path / store.BEFORE).write_bytes(b"harmed, too")
    content = bytearray(path.read_bytes())
    if harm == "truncated":
        del content[-20:]
    else:
        content[-20] ^= 1
    path.write_bytes(content)
    u, v = point(), point()
    with pytest.raises(CheckpointError, match=r"left as it is\. The one before, .* cannot be read either"):
        run(tmp_path, u=u, v=v)
    assert path.read_bytes() == bytes(content)
    assert not u.any()
    assert not v.any()


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    assert run(tmp_path / "new" / "folder").steps == 4
    assert (tmp_path / "new" / "folder" / store.FILE).exists()


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(tmp_path / "file" / "state", resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            run(tmp_path, resume=False)
    finally:
        tmp_path.chmod(0o700)


class Count(Callback):
    """Notes the step of the checkpoint on the disk at each log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, []

    def log(self, run: Any) -> None:
        self.seen.append(store.load(self.folder)["step"] if store.exists(self.folder) else 0)


def test_checkpoint_is_written_every_so_many_steps_and_at_the_end(tmp_path):
    count = Count(tmp_path)
    run(tmp_path, resume=False, max_steps=8, every=3, log_every=1, callbacks=[count])
    # A log comes before the checkpoint of its own step.
    assert count.seen == [0, 0, 0, 3, 3, 3, 6, 6]
    saved = store.load(tmp_path)
    assert saved["step"] == 8
    assert Status[saved["status"]] is Status.MAX_STEPS


def test_checkpoint_holds_everything_that_a_run_goes_on_from(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    data = ([torch.ones(4, 2)], [torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) for _ in range(3)])
    problem = Problem(lambda u, v, x: v(x).square().mean(), lambda u, v, x: (v(x) - u[torch.arange(4)]).square().mean())
    u = Rows(4, shape=(2,))
    run(tmp_path, problem=problem, u=u, v=model, data=data, resume=False, max_steps=5)
    saved = store.load(tmp_path)
    assert torch.equal(saved["u"][""], u.values)
    assert set(saved["v"]) == set(model.state_dict())
    assert all(torch.equal(saved["v"][name], t) for name, t in model.state_dict().items())
    assert saved["sources"] == [[9, 1], [3, 1]]  # ten draws, from sources of one and of three batches
    assert saved["method"]["upper"]["rows"][0]["visits"].tolist() == [5] * 4  # a tenth of five steps is no warm-up
    assert saved["method"]["lower"]["optimizer"]["0"]["step"].item() == 10  # twice an upper step: T = 1, and with u
    assert set(saved["method"]["schedule"]) >= {"gamma", "nu", "lam", "epsilon"}
    assert saved["random"].dtype == torch.uint8
    assert saved["seed"] == 1
