"""Feature collision, the attack that clean-label poison is compared with."""

from __future__ import annotations

import pytest
import torch
from bilevel_studies.poisoning.clean_label_batch import collide
from test_poisoning import Map, digits  # noqa: F401

from bilevel.applications.poisoning.goals import Bound, clean_label, untargeted
from bilevel.errors import OptionError


def test_feature_collision_draws_the_features_to_the_target_within_the_bound(digits):  # noqa: F811
    train, _, test = digits
    features, target = Map(), test[0][3]
    goal = clean_label(train, target, (int(test[1][3]) + 1) % 10, features=features)
    for bound in (None, Bound(0.5), Bound(0.1, "linf")):
        poison = collide(goal, features=features, bound=bound, steps=200)
        before, after = ((features(x) - features(target[None])).norm().item() for x in (goal.base, poison.x))
        assert after < before
        assert bound is None or float(getattr(poison, bound.norm).max()) <= bound.epsilon
    with pytest.raises(OptionError, match="needs a goal with a target"):
        collide(untargeted(train, train, 2))


def test_feature_collision_takes_the_step_of_algorithm_1(digits):  # noqa: F811
    train, _, test = digits
    goal = clean_label(train, test[0][3], (int(test[1][3]) + 1) % 10)
    poison = collide(goal, steps=1, rate=0.01, beta=0.1, box=(None, None))
    base, target = goal.base, test[0][3][None]
    moved = base - 0.01 * 2 * (base - target)
    assert torch.allclose(poison.x, (moved + 0.001 * base) / 1.001, atol=1e-6)
