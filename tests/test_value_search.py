"""`tune` ends with the best of what it tried, trained from scratch; the grid grows at its end; it says what won."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn

from bilevel import BilevelWarning, OptionError, Penalty
from bilevel.applications.networks import mlp
from bilevel.applications.tuning import FeaturePenalty, LabelSmoothing, WeightDecay, tune
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.searches import train_with
from bilevel.applications.tuning.tune import Tuned
from bilevel.applications.tuning.tune_table import Point, TunedTable
from bilevel.applications.tuning.unrolled_training import Mark
from bilevel.applications.tuning.value_search import Candidate, Trial, ValueSearch, comparison
from bilevel.errors import CheckpointError

DOUBLE = torch.float64


def noisy_numbers(rows=80, features=30, noise=3.0):
    """Numbers that only a strong decay predicts: one of many columns matters, and little."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=draw)
    y = x[:, 0] + noise * torch.randn(rows, generator=draw)
    return (x[: rows // 2], y[: rows // 2]), (x[rows // 2 :], y[rows // 2 :])


def search_of(loss, hyper, start, **options):
    """A search on a function of the values, without any training."""

    def attempt(values):
        held = {name: value.double().requires_grad_() for name, value in values.items()}
        found = loss(held)
        slope = dict(zip(held, torch.autograd.grad(found, list(held.values())), strict=True))
        return Trial(found.item(), None, {"at": values["a"]}, lambda: slope)

    search = ValueSearch(attempt, hyper, **options)
    search.attempt("start", start)
    return search


def test_the_result_is_the_best_candidate_and_a_training_from_scratch_repeats_it():
    train, valid = noisy_numbers()
    torch.manual_seed(0)
    model = mlp(30, (16,), 1)
    first = copy.deepcopy(model)
    hyper = {"decay": WeightDecay(per="layer")}
    found = tune(model, train, valid, hyper, steps=100, rate=1e-2, rounds=4)
    assert found.mode == "training"
    assert {"start", "grid", "descent"} == {tried.stage for tried in found.candidates}
    assert found.valid_loss == min(tried.valid_loss for tried in found.candidates) == found.best.valid_loss
    objective = TrainingLoss(hyper, None)
    train_with(objective, found.values, first, train, steps=100, batch=100, rate=1e-2, seed=1)
    assert objective.measured({}, first, valid) == found.valid_loss
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), model.parameters(), strict=True))
    assert found.best.name in found.message
    assert f"{found.valid_loss:.4g}" in found.message


def test_the_grid_grows_where_its_end_is_best_unless_the_range_was_given():
    train, valid = noisy_numbers()
    options = {"steps": 150, "rate": 3e-2, "rounds": 0}
    for knob, most in ((WeightDecay(), 1.0), (WeightDecay(high=0.05), 0.05)):
        torch.manual_seed(0)
        found = tune(mlp(30, (16,), 1), train, valid, {"decay": knob}, **options)
        tried = [float(c.values["decay"]) for c in found.candidates]
        assert max(tried) == pytest.approx(most, rel=1e-6) or (most == 1.0 and max(tried) > 1.0)
        assert len(tried) == len(set(tried))


def test_growth_goes_on_while_the_end_is_better_and_stops_behind_the_best():
    target = math.log(30.0)
    search = search_of(
        lambda v: (v["a"].log() - target).square().sum() + 1, {"a": WeightDecay()}, {"a": torch.tensor([1e-4])}
    )
    search.grid(5)
    tried = sorted(float(c.values["a"]) for c in search.candidates)
    assert tried[-3:] == pytest.approx([1.0, 10.0, 100.0])  # 100 is not better than 10
    assert search.hyper["a"].high == pytest.approx(100.0)
    assert float(search.best.values["a"]) == pytest.approx(10.0)


def test_the_descent_finds_the_minimum_from_the_best_of_the_grid():
    goal = torch.tensor([0.02, 0.0005], dtype=DOUBLE)

    def loss(v):
        return (v["a"].log() - goal.log()).square().sum() + (v["b"] - 0.3).square().sum() + 1

    hyper = {"a": WeightDecay(per="layer"), "b": LabelSmoothing()}
    search = search_of(loss, hyper, {"a": torch.full((2,), 1e-4), "b": torch.tensor([0.05])})
    search.grid(5)
    single = search.best.valid_loss
    search.descend(25)
    assert search.best.stage == "descent"
    assert search.best.valid_loss < 1 + 0.01 * (single - 1)
    torch.testing.assert_close(search.best.values["a"].double(), goal, rtol=0.1, atol=0.0)
    assert all(0 <= float(c.values["b"]) <= 0.9 for c in search.candidates)


def test_a_descent_stays_in_the_range_and_slides_along_its_end():
    def loss(v):
        return (v["a"].log() - torch.tensor([10.0, -5.0])).square().sum()

    hyper = {"a": WeightDecay(per="layer", low=1e-4, high=0.05)}
    search = search_of(loss, hyper, {"a": torch.full((2,), 1e-3)})
    search.descend(30)
    assert float(search.best.values["a"][0]) == pytest.approx(0.05, rel=1e-3)
    assert float(search.best.values["a"][1]) == pytest.approx(math.exp(-5), rel=0.05)


def test_a_training_that_diverges_does_not_win():
    search = search_of(
        lambda v: (v["a"] - 1e-4).square().sum() + torch.where(v["a"] > 1e-3, torch.nan, 1.0).sum(),
        {"a": WeightDecay()},
        {"a": torch.tensor([1e-2])},
    )
    assert math.isnan(search.best.valid_loss)
    search.grid(5)
    assert search.best.valid_loss == pytest.approx(1.0)


def test_values_of_the_caller_are_tried_and_measured():
    train, valid = noisy_numbers()
    options = {"steps": 20, "grid": 0, "rounds": 0}
    given = {"before": {"decay": 0.03}, "none": {}}
    found = tune(
        mlp(30, (8,), 1), train, valid, {"decay": WeightDecay()}, candidates=given, measure=lambda m: 7.0, **options
    )
    assert [(c.stage, round(float(c.values["decay"]), 6), c.measured) for c in found.candidates] == [
        ("start", 1e-4, 7.0),
        ("before", 0.03, 7.0),
        ("none", 1e-4, 7.0),
    ]
    for wrong, message in (({"x": {"other": 1.0}}, "must name knobs"), ({"x": {"decay": [1.0, 2.0]}}, "shapes")):
        with pytest.raises(OptionError, match=message):
            tune(mlp(30, (8,), 1), train, valid, {"decay": WeightDecay()}, candidates=wrong, **options)


def test_a_run_on_minibatches_that_ends_above_the_grid_says_so_in_python_and_does_not_win():
    train, valid = noisy_numbers()
    torch.manual_seed(0)
    with pytest.warns(BilevelWarning, match="the run on minibatches ended with values .* is returned|are returned"):
        found = tune(
            mlp(30, (16,), 1),
            train,
            valid,
            {"decay": WeightDecay()},
            method=Penalty(cotangent="same"),
            steps=150,
            rate=3e-2,
        )
    ends = {c.stage: c.valid_loss for c in found.candidates}
    assert found.valid_loss < ends["run on minibatches"]
    assert found.best.stage == "grid"


def test_a_linear_layer_is_tuned_from_the_best_single_value_and_ends_below_it():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 10, generator=draw, dtype=DOUBLE)
    y = x[:, 0] + torch.randn(60, generator=draw, dtype=DOUBLE)
    knob = {"p": FeaturePenalty(high=1e2)}
    found = tune(nn.Linear(10, 1).double(), (x[:30], y[:30]), (x[30:], y[30:]), knob)
    grid = min(c.valid_loss for c in found.candidates if c.stage == "grid")
    assert found.mode == "convex"
    assert found.best.stage == "descent"
    assert found.valid_loss < grid
    assert found.curve[0] == pytest.approx(grid, rel=1e-3)  # an end of a range is moved a little inside


def test_candidates_of_other_trainings_are_refused(tmp_path):
    train, valid = noisy_numbers()

    def tuned(**options):
        torch.manual_seed(0)
        return tune(mlp(30, (8,), 1), train, valid, {"decay": WeightDecay()}, rounds=0, checkpoint=tmp_path, **options)

    tuned(steps=20)
    with pytest.raises(CheckpointError, match="its steps differ"):
        tuned(steps=30)
    with pytest.raises(CheckpointError, match="its rate differ"):
        tuned(steps=20, rate=0.1)


@pytest.mark.filterwarnings("ignore:the run on minibatches ended")
@pytest.mark.parametrize("mode", ["convex", "training", "minibatch"])
def test_other_tries_in_one_folder_have_the_losses_of_their_own_values(mode, tmp_path):
    train, valid = noisy_numbers()
    options = {"steps": 20} | {"convex": {}, "training": {"rounds": 3}, "minibatch": {"rate": 1e-2}}[mode]

    def tuned(seed=0, **more):
        torch.manual_seed(seed)
        model = nn.Linear(30, 1) if mode == "convex" else mlp(30, (8,), 1)
        return tune(model, train, valid, {"decay": WeightDecay()}, mode=mode, **options, **more)

    for changed in (
        {"grid": 5},
        {"grid": 3},
        {"grid": 0, "candidates": {"mine": {"decay": 0.01}}},
        {"grid": 0, "candidates": {"mine": {"decay": 0.02}}},
    ):
        alone, kept = tuned(**changed), tuned(**changed, checkpoint=tmp_path)
        losses = [(c.name, c.values["decay"].tolist(), c.valid_loss) for c in alone.candidates]
        assert [(c.name, c.values["decay"].tolist(), c.valid_loss) for c in kept.candidates] == losses
        assert kept.curve == alone.curve
        assert all(torch.equal(a, b) for a, b in zip(kept.model.parameters(), alone.model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="its first weights differ"):
        tuned(seed=1, checkpoint=tmp_path)


def test_values_without_a_minimum_have_an_infinite_loss_and_the_others_win():
    draw = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(40, 3, generator=draw, dtype=DOUBLE))[0] * 40**0.5
    y = x @ torch.tensor([1.0, 2.0, 0.0], dtype=DOUBLE)

    def loss(value, model, batch):
        """Without a decay above 0.005 this has no minimum."""
        return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2 - 1.005 / 2 * model.weight.square().sum()

    for steps in ({"steps": 5}, {"steps": 5, "grid": 0}):
        model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(1.0)
        hyper = {"decay": WeightDecay(high=10.0)}
        found = tune(model, (x, y), (x, y), hyper, loss=loss, mode="convex", **steps)
        for tried in found.candidates:
            decay = float(tried.values["decay"])
            weight = x.T @ y / 40 / (decay - 0.005)
            expected = math.inf if decay < 0.005 else float((x @ weight - y).square().mean() / 2)
            assert tried.valid_loss == pytest.approx(expected, rel=1e-6)
        assert math.isfinite(found.valid_loss) == ("grid" not in steps)


@pytest.mark.parametrize(
    ("mode", "option", "message"),
    [
        ("training", {"callbacks": [print]}, r"callbacks=.* is for mode='minibatch', and the mode here is 'training'"),
        ("training", {"engine": "eager"}, "engine='eager' is for mode='minibatch'"),
        ("convex", {"log_every": 5}, "log_every=5 is for mode='minibatch'"),
        ("convex", {"truncate": 5}, "truncate=5 is for mode='training', and the mode here is 'convex'"),
        ("minibatch", {"truncate": 5}, "truncate=5 is for mode='training'"),
        ("convex", {"rounds": 0}, "rounds=0 is for mode='training'"),
        ("minibatch", {"rounds": 3}, "rounds=3 is for mode='training'"),
        ("convex", {"rate": 0.1}, "rate=0.1 is for mode='training' or 'minibatch'"),
        ("convex", {"batch": 10}, "batch=10 is for"),
        (None, {"final_steps": 10}, "final_steps=10 is for"),
    ],
)
def test_an_option_that_the_mode_does_not_read_is_refused_by_name(mode, option, message):
    train, valid = noisy_numbers()
    with pytest.raises(OptionError, match=message):
        tune(nn.Linear(30, 1), train, valid, {"decay": WeightDecay()}, mode=mode, steps=2, **option)


def test_a_loss_that_is_no_number_never_wins():
    tried = tuple(Candidate(stage, {}, loss) for stage, loss in (("start", math.nan), ("grid", 2.0), ("grid", 1.0)))
    assert Tuned({}, nn.Identity(), [], 1.0, "training", 0.0, tried).best is tried[2]
    assert "grid: 1. The best of the other stages: start: nan" in comparison(tried)
    grid = [Point(0.1, math.nan, 1.0), Point(1.0, 3.0, 1.0), Point(10.0, 2.0, 1.0)]
    nothing = torch.zeros(0)
    table = TunedTable((), nothing, nothing, 1.0, 1.0, None, [], grid=grid, state={}, caution=None)
    assert table.best is grid[2]


def test_the_grid_grows_from_its_best_end_although_other_trainings_diverge():
    search = search_of(
        lambda v: (v["a"].log() - math.log(10.0)).square().sum() + torch.where(v["a"] < 1e-3, torch.nan, 1.0).sum(),
        {"a": WeightDecay()},
        {"a": torch.tensor([1e-4])},
    )
    search.grid(5)
    assert float(search.best.values["a"]) == pytest.approx(10.0)


def test_what_a_checkpoint_cannot_hold_is_refused_as_a_result_of_measure(tmp_path):
    train, valid = noisy_numbers()

    def tuned(measured, **options):
        torch.manual_seed(0)
        knobs = {"decay": WeightDecay()}
        options |= {"steps": 5, "grid": 0, "rounds": 0}
        return tune(mlp(30, (8,), 1), train, valid, knobs, measure=lambda _: measured, **options)

    for k, wrong in enumerate((object(), {1: 2.0}, [1.0, {2}])):
        with pytest.raises(OptionError, match="with a checkpoint, measure must return tensors"):
            tuned(wrong, checkpoint=tmp_path / str(k))
        assert tuned(wrong).best.measured is wrong
    right = {"a": [1.0, None, "text"], "b": True}
    for _ in range(2):
        assert tuned(right, checkpoint=tmp_path / "right").best.measured == right


def test_trainings_that_nothing_differentiates_keep_no_states():
    train, valid = noisy_numbers()

    def marks():
        gc.collect()
        return sum(type(each) is Mark for each in gc.get_objects())

    for rounds, kept in ((0, False), (1, True)):
        before = marks()
        found = tune(
            mlp(30, (8,), 1),
            train,
            valid,
            {"decay": WeightDecay()},
            steps=5,
            grid=0,
            rounds=rounds,
            measure=lambda _: marks(),
        )
        assert (found.candidates[0].measured > before) == kept
