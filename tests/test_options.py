"""The options of a method: each is explained where a user looks, and a method shows those that were given."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial

import pytest
import torch

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    SRBA,
    Alternating,
    ApproxGrad,
    ForwardMode,
    Penalty,
    ReverseMode,
    ValueFunction,
    ValueGap,
)

METHODS = [Alternating, ApproxGrad, F2SA, ForwardMode, Penalty, ReverseMode, SAMA, SOBA, SRBA, ValueFunction, ValueGap]


def public(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if not field.name.startswith("_")]


@pytest.mark.parametrize("kind", METHODS)
def test_docstring_explains_each_option_with_its_default_and_no_other(kind):
    found = re.findall(r"^        (\w+): ((?:.|\n            )+)", kind.__doc__, flags=re.M)
    assert sorted(name for name, _ in found) == sorted(public(kind))
    for name, text in found:
        assert "default" in text.lower(), name


def test_penalty_has_at_most_22_options():
    assert len(public(Penalty)) <= 22


def test_method_shows_only_the_options_that_are_not_the_defaults():
    assert repr(Penalty()) == "Penalty()"
    assert repr(Penalty(mode="stochastic", lam=0.5)) == "Penalty(mode='stochastic', lam=0.5)"
    adam = partial(torch.optim.Adam, lr=0.1)
    assert repr(Alternating(upper_optimizer=adam)) == "Alternating(upper_optimizer=partial(Adam, lr=0.1))"
    assert "average_residual" not in repr(Penalty.algorithm_2())


def test_what_a_preset_sets_apart_is_part_of_the_runs_identity():
    """A checkpoint of a preset belongs to the same options as before these became private."""
    assert Penalty.algorithm_2().describe()["average_residual"] == "False"
