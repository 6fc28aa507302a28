"""Ranges of hyper-parameters: kept for any free number, with the formula and its derivatives."""

from __future__ import annotations

import pytest
import torch

from bilevel import OptionError
from bilevel.applications.tuning.ranges import Range

DOUBLE = torch.float64


@pytest.mark.parametrize("given", [Range(1e-6, 1e2), Range(0.0, 0.5, "linear"), Range(-3.0, 3.0, "linear")])
def test_a_range_is_kept_for_any_free_number_and_gives_back_what_it_was_given(given):
    value = given.value(torch.tensor([-1e6, -3.0, 0.0, 3.0, 1e6], dtype=DOUBLE))
    assert bool(((value >= given.low - 1e-12) & (value <= given.high + 1e-12)).all())
    assert bool((value.diff() > 0).all())
    inside = given.value(torch.linspace(-5, 5, 11, dtype=DOUBLE))
    torch.testing.assert_close(given.value(given.free(inside)), inside)


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_values_follow_the_formula_and_have_two_derivatives(scale):
    given = Range(1e-3, 10.0, scale)
    t = torch.linspace(-6, 6, 9, dtype=DOUBLE, requires_grad=True)
    ends = torch.tensor([1e-3, 10.0], dtype=DOUBLE)
    low, high = ends.log() if scale == "log" else ends
    natural = (low + high) / 2 + (high - low) / 2 * torch.tanh(t / 2.5)
    torch.testing.assert_close(given.value(t), natural.exp() if scale == "log" else natural)
    assert torch.autograd.gradcheck(given.value, t)
    assert torch.autograd.gradgradcheck(given.value, t)


def test_a_value_at_the_end_of_its_range_can_still_move():
    t = Range(0.0, 0.5, "linear").free(torch.zeros(1, dtype=DOUBLE)).requires_grad_()
    value = Range(0.0, 0.5, "linear").value(t)
    assert float(torch.autograd.grad(value, t)[0]) > 0
    assert float(value.detach()) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0.0, 1.0), "above 0"),
        ((2.0, 1.0), "below high"),
        ((1.0, float("inf")), "finite"),
        ((1.0, 2.0, "cubic"), "scale"),
    ],
)
def test_a_range_that_is_none_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Range(*options)
