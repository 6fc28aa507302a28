"""Ranks, as real processes: the trajectory of one process, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_cases import CASES, all_cases
from ranks import on_ranks


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_cases(list(CASES))


@pytest.fixture(scope="module")
def together() -> dict[int, list[dict[str, Any]]]:
    return {size: on_ranks(size, all_cases, list(CASES)) for size in (2, 4)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_steps_of_one_process(name, size, alone, together):
    # Sums in another order, 12 steps of Adam, whose first ones divide by a gradient's own size; a difference of
    # gradients divides rounding by about 1e-5.
    tolerance = 1e-6 if "difference" in name or "value" in name else 1e-9
    expected, found = alone[name], together[size][0][name]
    assert found["ranks"] == size
    for column in expected:
        if column not in ("ranks", "bytes"):
            if column == "advanced":
                assert found[column] == expected[column]
            else:
                assert found[column] == pytest.approx(expected[column], rel=tolerance, abs=tolerance), column


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_end_with_the_same_bits(size, together):
    for other in together[size][1:]:
        assert other == together[size][0]
