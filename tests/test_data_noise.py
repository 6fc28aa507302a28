"""Wrong labels on purpose, and rows moved to the trusted and the test part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.data import Labelled, corrupt, split_test, split_trusted
from bilevel.errors import DataError, OptionError


def make(sizes: list[int]) -> Labelled:
    """Rows whose input, key and field are their number; class c has sizes[c] of them, in mixed order."""
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    n = len(y)
    return Labelled(
        "rows",
        "table",
        torch.arange(n).float()[:, None],
        torch.from_numpy(y),
        tuple(map(str, range(len(sizes)))),
        [f"k{i}" for i in range(n)],
        fields={"number": np.arange(n)},
    )


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    classes=st.integers(2, 7),
    rate=st.floats(0, 0.999),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["symmetric", "asymmetric"]),
)
def test_exactly_the_asked_number_of_labels_is_wrong(n: int, classes: int, rate: float, seed: int, kind: str) -> None:
    y = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
    before = y.clone()
    new = corrupt(y, rate, classes, seed, kind)  # type: ignore[arg-type]
    assert torch.equal(y, before)
    assert int((new != y).sum()) == round(rate * n)
    assert new.dtype == y.dtype
    assert n == 0 or 0 <= int(new.min()) <= int(new.max()) < classes
    if kind == "asymmetric":
        assert set(((new - y) % classes).tolist()) <= {0, 1}
    assert torch.equal(new, corrupt(y, rate, classes, seed, kind))  # type: ignore[arg-type]


def test_symmetric_noise_spreads_evenly_over_the_other_classes_and_differs_by_seed() -> None:
    y = torch.full((9000,), 2)
    new = corrupt(y, 0.5, 4, 0)
    counts = torch.bincount(new, minlength=4)
    assert int(counts[2]) == 4500
    # 1,500 expected in each, with a deviation of sqrt(4500 * 2/9) = 32: five of them.
    assert all(abs(int(counts[c]) - 1500) < 160 for c in (0, 1, 3))
    assert not torch.equal(new, corrupt(y, 0.5, 4, 1))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rate": 1.0}, "rate"),
        ({"rate": -0.1}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"classes": 1}, "classes"),
        ({"seed": -1}, "seed"),
        ({"kind": "pairs"}, "kind"),
        ({"classes": 2}, "y must be"),
    ],
)
def test_corrupt_refuses_what_is_out_of_range(options: dict[str, object], word: str) -> None:
    given_options = {"rate": 0.5, "classes": 3, "seed": 0, **options}
    with pytest.raises((OptionError, DataError), match=word):
        corrupt(torch.tensor([0, 1, 2]), **given_options)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_split_moves_rows_and_loses_none(data: st.DataObject) -> None:
    whole = make(data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=6)))
    count = data.draw(st.integers(1, whole.count - 1))
    split = split_trusted(whole, count, data.draw(st.integers(0, 9)))
    assert split.trusted is not None
    moved = split.trusted[0][:, 0].long()
    assert len(moved) == count
    assert sorted([*moved.tolist(), *split.positions.tolist()]) == list(range(whole.count))
    assert torch.equal(split.trusted[1], whole.y[moved])
    assert torch.equal(split.y, whole.y[torch.from_numpy(split.positions)])
    assert split.keys == [f"k{i}" for i in split.positions]
    assert split.fields["number"].tolist() == split.x[:, 0].long().tolist() == split.positions.tolist()
    if count >= len(whole.classes):
        assert set(split.trusted[1].tolist()) == set(range(len(whole.classes)))


def test_a_split_gives_each_class_its_share() -> None:
    split = split_trusted(make([600, 300, 100]), 100, 0)
    assert split.trusted is not None
    assert torch.bincount(split.trusted[1]).tolist() == [60, 30, 10]
    rare = split_trusted(make([990, 5, 5]), 10, 0)
    assert rare.trusted is not None
    assert torch.bincount(rare.trusted[1]).tolist() == [8, 1, 1]


def test_a_split_keeps_rows_of_rare_classes_where_asked() -> None:
    split = split_test(make([50, 2, 3, 1]), share=0.2, seed=0, keep=2)
    assert torch.bincount(split.y).tolist() == [40, 2, 2, 1]
    assert torch.bincount(split.test[1]).tolist() == [10, 0, 1]  # type: ignore[index]
    assert len(split_test(make([2, 2]), count=2, seed=0, keep=2).y) == 2


def test_a_split_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    whole = make([50, 50])
    first, again, other = (split_test(whole, count=20, seed=seed).positions.tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_a_second_split_keeps_the_positions_of_the_source() -> None:
    split = split_trusted(split_test(make([40, 40]), share=0.25, seed=0), 10, 0)
    assert (split.count, len(split.test[1]), len(split.trusted[1])) == (50, 20, 10)  # type: ignore[index]
    assert split.positions.tolist() == split.x[:, 0].long().tolist()


def test_splits_refuse_counts_that_cannot_be() -> None:
    whole = make([10, 10])
    for count in (0, 20, -1, 2.5):
        with pytest.raises(OptionError, match="count"):
            split_trusted(whole, count, 0)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="either share or count"):
        split_test(whole, seed=0)
    with pytest.raises(OptionError, match="either share or count"):
        split_test(whole, share=0.5, count=3, seed=0)
    with pytest.raises(OptionError, match="share"):
        split_test(whole, share=1.0, seed=0)
    with pytest.raises(OptionError, match=r"already has .* trusted rows"):
        split_trusted(split_trusted(whole, 4, 0), 4, 0)
    with pytest.raises(OptionError, match=r"already has .* test rows"):
        split_test(split_test(whole, count=4, seed=0), count=4, seed=0)
