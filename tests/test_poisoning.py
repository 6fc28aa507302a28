"""Poisoning: attacks hurt a victim that is trained anew, bounds hold to the last bit, bad input is refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from bilevel import Callback, DataError, Penalty
from bilevel._util.random_state import seeded
from bilevel.applications import networks as models
from bilevel.applications.poisoning.attack import attack, evaluate, unmoved
from bilevel.applications.poisoning.audit import carry_out, detection_auc, smallest
from bilevel.applications.poisoning.goals import (
    Bound,
    Goal,
    Within,
    clean_label,
    norms,
    raised_loss,
    targeted,
    untargeted,
)
from bilevel.applications.poisoning.setting import AttackGoal, goal_of, on_features, prepare
from bilevel.applications.poisoning.victims import CURVATURE, Recipe, Whitened, decayed, mapped, trained, whitened
from bilevel.data import Labelled, load
from bilevel.errors import OptionError, ProblemError
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.reverse_mode import ReverseMode

poisoning = importlib.import_module("bilevel.applications.poisoning.attack")  # functions have these names
auditing = importlib.import_module("bilevel.applications.poisoning.audit")

EXACT = Recipe(optimizer="lbfgs", steps=300, decay=0.005)
ADAM = partial(torch.optim.Adam, lr=0.05)


@pytest.fixture(scope="module")
def digits():
    """300 for training, 300 for validation, 400 that no attack sees."""
    data = load("digits")
    x, y = data.x, data.y
    return (x[:300], y[:300]), (x[300:600], y[300:600]), data.test


def softmax_regression() -> nn.Sequential:
    model = models.linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def own(**options) -> Penalty:
    return Penalty(**({"mode": "stochastic", "warm_up": 0.0, "upper_optimizer": ADAM} | options))


# -- attacks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attacked(digits):
    train, validation, _ = digits
    goal = untargeted(train, validation, 30, seed=0)
    model = softmax_regression()
    return goal, model, attack(goal, train, model, recipe=EXACT, steps=120)


def test_untargeted_attack_costs_a_victim_trained_anew_more_than_label_flipping(digits, attacked):
    train, _, test = digits
    goal, model, poison = attacked
    clean = evaluate(None, train, test, model, recipe=EXACT).accuracy
    flipped = evaluate(unmoved(goal), train, test, model, recipe=EXACT).accuracy
    poisoned = evaluate(poison, train, test, model, recipe=EXACT).accuracy
    assert clean > 0.85
    assert poisoned < flipped - 0.08
    assert float(poison.x.min()) >= 0
    assert float(poison.x.max()) <= 1


def test_attack_leaves_the_model_as_it_was_and_evaluation_knows_nothing_of_the_attack(digits, attacked):
    train, _, test = digits
    _, model, poison = attacked
    assert all(bool((p == 0).all()) for p in model.parameters())
    by_pair = evaluate((poison.x, poison.labels), train, test, softmax_regression(), recipe=EXACT)
    assert by_pair.accuracy == evaluate(poison, train, test, model, recipe=EXACT).accuracy
    right = sum(by_pair.by_class[c] * int((test[1] == c).sum()) for c in by_pair.by_class)
    assert right / len(test[1]) == pytest.approx(by_pair.accuracy)


def test_targeted_attack_makes_the_victim_take_one_class_for_another(digits):
    train, validation, test = digits
    goal = targeted(train, validation, 30, source=8, wanted=3, seed=0)
    assert sorted(set(zip(train[1][goal.rows].tolist(), goal.labels.tolist(), strict=True))) == [(3, 8), (8, 3)]
    assert bool((goal.y == 3).all())
    assert len(goal.y) == int((validation[1] == 8).sum())
    poison = attack(goal, train, softmax_regression(), recipe=EXACT, steps=150)
    shares = [
        evaluate(points, train, test, softmax_regression(), recipe=EXACT).share(test, 8, 3)
        for points in (None, unmoved(goal), poison)
    ]
    assert shares[2] > shares[1] + 0.2


@pytest.mark.parametrize(
    "method",
    [
        ApproxGrad(lower_steps=3, linear_steps=3, warm_up=0.0, upper_optimizer=ADAM),
        ReverseMode(lower_steps=10, warm_up=0.0, upper_optimizer=ADAM),
    ],
)
def test_other_methods_attack_too_and_keep_the_l2_bound(digits, method):
    train, validation, test = digits
    goal = untargeted(train, validation, 30, seed=0)
    poison = attack(goal, train, softmax_regression(), recipe=EXACT, steps=60, method=method, bound=Bound(1.5))
    assert float(poison.l2.max()) <= 1.5
    accuracies = [
        evaluate(points, train, test, softmax_regression(), recipe=EXACT).accuracy for points in (unmoved(goal), poison)
    ]
    assert accuracies[1] < accuracies[0] - 0.01


def test_direction_of_the_attack_is_that_of_the_retrained_objective(digits):
    """A short run lowers the validation objective of a victim trained anew, which the attack never evaluates."""
    train, validation, _ = digits
    train, validation = ((x.double(), y) for x, y in (train, validation))
    goal = untargeted(train, validation, 6, seed=1, objective=raised_loss)
    model = softmax_regression().double()
    poison = attack(
        goal,
        train,
        model,
        recipe=EXACT,
        steps=30,
        method=own(gamma=30.0, upper_optimizer=partial(torch.optim.Adam, lr=0.01)),
    )
    values = []
    for points in (goal.base, poison.x):
        x, y = torch.cat([train[0], points]), torch.cat([train[1], goal.labels])
        victim = trained(model, x, y, EXACT)
        values.append(raised_loss(victim(goal.x), goal.y).item())
    assert values[1] < values[0]


@pytest.mark.parametrize("white", [True, False])
def test_lower_objective_is_that_of_the_victim_on_clean_rows_and_points(digits, white, monkeypatch):
    train, validation, _ = digits
    if not white:
        monkeypatch.setattr(poisoning, "whitened", lambda *_: None)
    recipe = Recipe(optimizer="lbfgs", steps=300, decay=0.2)
    goal = untargeted(train, validation, 30, seed=0)
    poison = attack(goal, train, softmax_regression(), recipe=recipe, steps=1)
    victim = trained(softmax_regression(), *train, recipe)
    x, y = torch.cat([train[0], goal.base]), torch.cat([train[1], goal.labels])
    value = cross_entropy(victim(x), y) + decayed(victim, recipe.decay)
    assert poison.solution.history["lower"][0] == pytest.approx(value.item(), rel=1e-4)
    assert decayed(victim, recipe.decay).item() > 0.05 * value.item()


def test_any_network_and_any_loss_can_be_the_victim(digits):
    train, validation, test = digits
    torch.manual_seed(0)
    model = models.mlp(64, (32,), 10)
    first = copy.deepcopy(model.state_dict())

    def margin(scores, labels):
        own = one_hot(labels, 10).bool()
        return ((1 - scores[own][:, None] + scores[~own].reshape(-1, 9)).clamp(min=0) ** 2).mean(1)

    recipe = Recipe(steps=300, rate=1e-2, decay=1e-3)
    goal = untargeted(train, validation, 30, seed=0)
    poison = attack(goal, train, model, recipe=recipe, loss=margin, steps=60)
    assert all(torch.equal(a, b) for a, b in zip(first.values(), model.state_dict().values(), strict=True))
    found = evaluate(poison, train, test, model, recipe=recipe, loss=margin)
    assert found.accuracy < evaluate(None, train, test, model, recipe=recipe, loss=margin).accuracy
    assert poison.settings["whitened"] is False


def network() -> nn.Sequential:
    with seeded(0):
        return models.mlp(64, (64,), 10)


def test_tether_is_half_the_square_of_the_way_from_the_clean_victim_and_decay_stays():
    model = network()
    start = [p.detach() - 0.1 for p in model.parameters()]
    way = 0.01 * sum(p.numel() for p in model.parameters())

    def total(tether, weight=None):
        return poisoning._regularisation(start, tether, 0.2, model, weight).item()

    assert total(0.0) == pytest.approx(decayed(model, 0.2).item())
    assert total(3.0) - total(0.0) == pytest.approx(3.0 / 2 * way, rel=1e-4)
    assert total(3.0, torch.ones(4)) == pytest.approx(3.0 / 2 * way + 0.2 / 2 * 4, rel=1e-4)


def test_tethered_attack_flips_targets_in_a_victim_trained_anew_and_a_free_one_in_its_own_variable_alone(digits):
    train, validation, test = digits
    recipe = Recipe(steps=300, rate=5e-3, batch=50, decay=5e-4)
    clean = trained(network(), *train, recipe)
    for row in (2, 3):
        target, wanted = test[0][row], int((test[1][row] + 3) % 10)
        assert int(clean(target[None]).argmax()) == test[1][row]
        goal = clean_label(validation, target, wanted, points=10, features=clean[:-1], collision=0.0)
        ahead = {}
        for tether in (None, 0.0):
            poison = attack(goal, train, network(), recipe=recipe, bound=Bound(0.3, "linf"), steps=150, tether=tether)
            scores = evaluate(poison, train, test, network(), recipe=recipe).model(target[None])[0]
            ahead[tether] = (scores[wanted] - scores[test[1][row]]).item()
            assert poison.solution.history["upper"][-1] < 0.7, "by its own variable, each has what it wants"
        assert ahead[None] > 0 > ahead[0.0] + 2, ahead


def test_points_are_normalised_together_with_the_clean_rows(digits):
    """One point by itself has no moments, and several would be normalised as no training does."""
    train, validation, _ = digits
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    recipe = Recipe(steps=50, rate=1e-2)
    for points in (1, 9):
        goal = untargeted(train, validation, points, seed=0)
        poison = attack(goal, train, model, recipe=recipe, steps=1)
        x, y = torch.cat([train[0], goal.base]), torch.cat([train[1], goal.labels])
        value = cross_entropy(trained(model, *train, recipe).train()(x), y)
        assert poison.solution.history["lower"][0] == pytest.approx(value.item(), rel=1e-4)


def test_points_take_the_precision_of_the_victim(digits):
    train, validation, _ = digits
    goal = untargeted(train, validation, 3, seed=0)
    poison = attack(goal, train, softmax_regression().double(), recipe=EXACT, steps=3, bound=Bound(0.1))
    assert poison.x.dtype == poison.base.dtype == torch.float64
    target = clean_label(train, validation[0][0], (int(validation[1][0]) + 1) % 10)
    assert attack(target, train, softmax_regression().double(), recipe=EXACT, steps=3).x.dtype == torch.float64


def test_batches_give_an_attack_too(digits):
    train, validation, _ = digits
    goal = untargeted(train, validation, 9, seed=0)
    poison = attack(goal, train, softmax_regression(), recipe=EXACT, steps=20, batch=50, method=own())
    assert poison.settings["batch"] == 50
    assert float(poison.l2.min()) > 0


def test_same_seed_gives_the_same_points_and_a_stopped_attack_goes_on(digits, tmp_path):
    train, validation, _ = digits
    goal = untargeted(train, validation, 6, seed=0)
    options = {"recipe": EXACT, "steps": 20}
    whole = attack(goal, train, softmax_regression(), **options)

    class Stop(Callback):
        def log(self, run):
            return run.step >= 10

    part = attack(goal, train, softmax_regression(), checkpoint=tmp_path / "c", callbacks=[Stop()], **options)
    assert part.solution.steps < 20
    resumed = attack(goal, train, softmax_regression(), checkpoint=tmp_path / "c", resume=True, **options)
    assert torch.equal(whole.x, resumed.x)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_bounds_hold_exactly_in_what_is_returned(digits, norm):
    train, validation, _ = digits
    epsilon = {"l2": 0.7, "linf": 0.13}[norm]
    goal = untargeted(train, validation, 12, seed=0)
    poison = attack(goal, train, softmax_regression(), recipe=EXACT, steps=200, bound=Bound(epsilon, norm))
    size = getattr(poison, norm)
    assert float(size.max()) <= epsilon
    assert float(size.max()) > 0.95 * epsilon  # and they are reached
    assert torch.equal(size, norms(poison.x, goal.base, norm))
    assert float(poison.x.min()) >= 0
    assert float(poison.x.max()) <= 1
    costs = poison.solution.multipliers["inequalities"]
    assert len(costs) == (norm == "l2")
    assert all(float(cost.max()) > 0 for cost in costs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 20), st.sampled_from(["l2", "linf"]))
def test_settled_points_are_in_box_and_bound_for_any_perturbation(seed, epsilon, norm):
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(4, 3, 5, generator=generator)
    far = base + 10 * torch.randn(4, 3, 5, generator=generator)
    found = Within(base, 0.0, 1.0, Bound(epsilon, norm)).settled(far)
    assert float(norms(found, base, norm).max()) <= epsilon
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    inside = Within(base, 0.0, 1.0, Bound(epsilon, norm)).settled(base + 0)
    assert torch.equal(inside, base)


def test_bases_outside_of_the_box_are_refused():
    with pytest.raises(DataError, match="must lie in the box from 0 to 1; they go from -1 to 1"):
        Within(torch.tensor([[-1.0, 1.0]]), 0.0, 1.0)


# -- the victim --------------------------------------------------------------------------------------------------------


def test_whitened_classifier_is_the_same_one_and_its_inputs_are_white(digits):
    (x, y), *_ = digits
    model = trained(softmax_regression(), x, y, EXACT)
    same = whitened(model, x, EXACT.decay)
    assert isinstance(same, Whitened)
    assert torch.allclose(same(x), model(x), atol=1e-4)
    assert torch.allclose(same.on_mapped(same.mapped(x)), model(x), atol=1e-4)
    assert decayed(same, 0.3).item() == pytest.approx(decayed(model, 0.3).item(), rel=1e-4)
    scores, others, weight = same.together(same.mapped(x[:5]), x[5:9])
    assert torch.allclose(torch.cat([scores, others]), model(x[:9]), atol=1e-4)
    assert torch.allclose(weight.T, model[1].weight, atol=1e-4)

    inputs = x.flatten(1)
    moment = CURVATURE / len(x) * inputs.T @ inputs + EXACT.decay * torch.eye(64)
    assert torch.allclose(same.P @ moment @ same.P, torch.eye(64), atol=1e-4)


def test_a_victim_whose_loss_is_no_number_is_told(digits):
    (x, y), *_ = digits
    bad = nn.Sequential(softmax_regression(), Logarithm())
    with pytest.raises(ProblemError, match="loss is not a number"):
        trained(bad, x, y, EXACT)


class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(x - 1)


def test_few_rows_of_many_inputs_are_whitened_without_a_square_of_the_inputs(digits):
    (x, y), *_ = digits
    rows = x[:20]
    model = trained(softmax_regression(), rows, y[:20], EXACT)
    same = whitened(model, rows, EXACT.decay)
    assert same.few
    assert not hasattr(same, "P")
    assert torch.allclose(same(x), model(x), atol=1e-4)
    assert torch.allclose(same.on_mapped(same.mapped(x)), model(x), atol=1e-4)
    assert decayed(same, 0.3).item() == pytest.approx(decayed(model, 0.3).item(), rel=1e-4)
    inputs = rows.flatten(1)
    moment = CURVATURE / len(rows) * inputs.T @ inputs + EXACT.decay * torch.eye(64)
    half = same._times(torch.eye(64))
    assert torch.allclose(half @ moment @ half, torch.eye(64), atol=1e-4)


def test_convex_victims_are_not_tethered(digits):
    train, validation, _ = digits
    goal = untargeted(train, validation, 5, seed=0)
    for model, recipe, tether in (
        (softmax_regression(), Recipe(optimizer="adam", steps=5), 0.0),
        (network(), Recipe(optimizer="lbfgs", steps=5), 0.0),
        (network(), Recipe(optimizer="adam", steps=5), poisoning.TETHER),
    ):
        assert attack(goal, train, model, recipe=recipe, steps=1).settings["tether"] == tether
    with pytest.raises(OptionError, match="tether"):
        attack(goal, train, network(), steps=1, tether=-1.0)


def test_networks_are_not_whitened(digits):
    assert whitened(models.mlp(64, (8,), 10), digits[0][0], 0.1) is None


def test_training_starts_from_the_first_weights_each_time(digits):
    (x, y), *_ = digits
    torch.manual_seed(0)
    model = models.mlp(64, (16,), 10)
    recipe = Recipe(steps=30, rate=1e-2)
    first, second = trained(model, x, y, recipe), trained(model, x, y, recipe)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(model.parameters()))


# The loss is 0.4 and its curvature about 1. In float32 a search sees no fall below 4e-8, which a slope of 3e-4 has.
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_lbfgs_reaches_the_minimum_of_the_regularised_loss(digits, dtype, least):
    (x, y), *_ = digits
    x = x.to(dtype)
    found = trained(softmax_regression().to(dtype), x, y, EXACT)
    value = cross_entropy(found(x), y) + decayed(found, EXACT.decay)
    slope = torch.autograd.grad(value, list(found.parameters()))
    assert max(float(s.abs().max()) for s in slope) < least


def test_decay_is_of_weights_and_not_of_biases():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 9.0)
    assert decayed(model, 0.5).item() == pytest.approx(0.25 * 16)


# -- clean labels ------------------------------------------------------------------------------------------------------


class Map(nn.Module):
    """A small fixed feature map, counted."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(64, 24, generator=generator) / 8
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(x.flatten(1) @ self.weight)


def test_clean_label_goal_takes_the_nearest_of_the_wanted_class(digits):
    train, _, test = digits
    features = Map()
    target = test[0][0]
    wanted = (int(test[1][0]) + 1) % 10
    goal = clean_label(train, target, wanted, points=2, features=features)
    apart = (features(train[0]) - features(target[None])).norm(dim=1)
    apart[train[1] != wanted] = torch.inf
    assert goal.rows.tolist() == apart.argsort()[:2].tolist()
    assert goal.labels.tolist() == [wanted] * 2


def test_clean_label_attack_draws_the_features_to_the_target_within_the_bound(digits):
    train, _, test = digits
    features = Map()
    target = test[0][3]
    wanted = (int(test[1][3]) + 1) % 10
    goal = clean_label(train, target, wanted, features=features)
    model = nn.Linear(24, 10)
    calls = features.calls
    poison = attack(
        goal,
        train,
        model,
        recipe=EXACT,
        features=features,
        bound=Bound(2.0),
        steps=40,
        method=own(lower_steps=3, lower_batches="shared"),
    )
    assert features.calls - calls < 40 + 20  # once a step, not for every lower one, and a few at both ends
    before, after = ((features(x) - features(target[None])).norm().item() for x in (goal.base, poison.x))
    assert after < 0.7 * before
    assert float(poison.l2.max()) <= 2.0


def test_denoiser_gives_poison_less_importance_than_clean_rows(digits, attacked):
    train, validation, test = digits
    _, _, poison = attacked
    data = Labelled("d", "images", *train, tuple("0123456789"), [""] * 300, trusted=validation, test=test)
    ground = prepare(data, softmax_regression())
    assert detection_auc(ground, poison, softmax_regression(), steps=200) > 0.7


def table(**parts) -> Labelled:
    """A table of two classes whose validation rows are spread more widely than its training rows."""
    generator = torch.Generator().manual_seed(0)
    x, wide, far = (s * torch.randn(60, 3, generator=generator) for s in (1, 3, 1))
    pairs = [(z, (z[:, 0] > 0).long()) for z in (x, wide, far)]
    return Labelled("t", "table", *pairs[0], ("a", "b"), [""] * 60, **({"trusted": pairs[1], "test": pairs[2]} | parts))


def test_bases_from_the_validation_rows_of_a_table_are_in_its_box():
    ground = prepare(table(), models.linear(3, 2))
    label = int(ground.test[1][0])
    found = carry_out(ground, AttackGoal("clean-label", 20, wanted=1 - label, target=0), bound=Bound(0.5), steps=2)
    assert float(found.poison.base.abs().max()) > float(ground.train[0].abs().max())
    assert bool((found.poison.labels == 1 - label).all())


@pytest.mark.parametrize(
    ("layers", "plain"),
    [
        ((nn.Flatten(), nn.Linear(3, 2)), True),
        ((nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)), True),
        ((nn.BatchNorm1d(3), nn.Linear(3, 2)), False),
        ((nn.Linear(3, 2), nn.ReLU()), False),
        ((nn.Linear(3, 2), nn.Linear(2, 2)), False),
    ],
)
def test_weights_are_zero_at_first_for_one_linear_after_layers_without_parameters_alone(layers, plain):
    model = nn.Sequential(*copy.deepcopy(layers))
    first = copy.deepcopy(model.state_dict())
    ground = prepare(table(), model)
    assert ground.recipe.optimizer == ("lbfgs" if plain else "adam")
    assert all(bool((p == 0).all()) for p in model.parameters()) is plain
    assert plain or all(torch.equal(first[name], value) for name, value in model.state_dict().items())


def test_features_are_all_layers_but_the_last_however_they_are_nested():
    body = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    ground = on_features(prepare(table(), nn.Sequential(body, nn.Linear(8, 2))))
    assert ground.features is not None
    assert mapped(ground.features, ground.train[0], ground.device).shape == (60, 8)
    flat = prepare(table(), models.linear(3, 2))
    assert on_features(flat) is flat


def test_test_set_without_the_class_that_is_attacked_is_refused_before_the_attack():
    x, y = table().test
    ground = prepare(table(test=(x[y == 1], y[y == 1])), models.linear(3, 2))
    with pytest.raises(DataError, match="the test set must have rows of class 'a' to measure the attack on"):
        goal_of(ground, AttackGoal("targeted", 4, source=0, wanted=1), 0)


def test_collision_is_squared_or_plain():
    goal = Goal("clean-label", *[torch.zeros(1, 2)] * 5)
    plain = dataclasses.replace(goal, squared=False)
    z, wanted = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    assert float(goal.collision(z, wanted)) == pytest.approx(25)
    assert float(plain.collision(z, wanted)) == pytest.approx(5)


@pytest.mark.parametrize("squared", [True, False])
def test_slope_of_the_collision_term_is_that_of_its_differences(squared):
    goal = dataclasses.replace(Goal("clean-label", *[torch.zeros(3, 2)] * 5), squared=squared, collision_weight=0.7)
    generator = torch.Generator().manual_seed(0)
    z, wanted = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    assert _apart_from_differences(lambda z: goal.collision(z, wanted[:1]), z) < 1e-8


def test_slope_of_the_l2_inequality_is_that_of_its_differences():
    generator = torch.Generator().manual_seed(1)
    u, base = (torch.rand(3, 2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    bound = Bound(0.3)
    assert _apart_from_differences(lambda u: (bound.inequality(u, base) * torch.arange(1, 4)).sum(), u) < 1e-8
    assert bool((bound.inequality(base, base) == -1).all())
    edge = base + 0.3 * torch.nn.functional.normalize((u - base).flatten(1)).view_as(base)
    assert bound.inequality(edge, base).abs().max() < 1e-12


def _apart_from_differences(function, x, h=1e-6) -> float:
    """How far the derivative is from central differences, along each coordinate."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x), x)
    with torch.no_grad():
        ways = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
        found = torch.stack([(function(x + h * w) - function(x - h * w)) / (2 * h) for w in ways])
    return float((found.view_as(slope) - slope).abs().max())


def test_denoiser_is_not_given_the_bases_of_the_points(digits, monkeypatch):
    train, validation, test = digits
    data = Labelled("d", "images", *train, tuple("0123456789"), [""] * 300, trusted=validation, test=test)
    ground = prepare(data, softmax_regression())
    goal = goal_of(ground, AttackGoal("clean-label", 3, wanted=(int(test[1][0]) + 1) % 10, target=0), 0)
    seen = []
    real = auditing.denoise
    monkeypatch.setattr(
        auditing, "denoise", lambda x, trusted, *a, **k: seen.append(trusted) or real(x, trusted, *a, **k)
    )
    detection_auc(ground, unmoved(goal), softmax_regression(), without=goal.rows, steps=5)
    assert len(seen[0][1]) == 297
    assert not any(bool((seen[0][0] == base).flatten(1).all(1).any()) for base in goal.base)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_a_sentence(digits):
    train, validation, test = digits
    with pytest.raises(OptionError, match="points must be below the 300 examples of the training set"):
        untargeted(train, validation, 300)
    with pytest.raises(OptionError, match=r"points must be at most the [0-9]+ examples of class 3 of the pool"):
        clean_label(train, test[0][0], 3, points=300)
    with pytest.raises(OptionError, match="source and wanted must be two classes; both are 3"):
        targeted(train, validation, 10, source=3, wanted=3)
    with pytest.raises(DataError, match="must have 200 examples of class 8 to begin from; it has"):
        targeted(train, validation, 400, source=8, wanted=3)
    with pytest.raises(OptionError, match="epsilon must be above 0; got 0"):
        Bound(0)
    with pytest.raises(OptionError, match="norm must be one of 'l2', 'linf'; got 'l1'"):
        Bound(1, "l1")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"inputs of one shape; got \(64,\) and \(1, 8, 8\)"):
        attack(untargeted(train, validation, 3), (train[0].flatten(1), train[1]), softmax_regression())
    with pytest.raises(DataError, match="test must have at least one example"):
        evaluate(None, train, (test[0][:0], test[1][:0]), softmax_regression())
    with pytest.raises(OptionError, match="features must give one row for each input; got 2 rows for 300"):
        mapped(lambda x: x.sum(0, keepdim=True), train[0], torch.device("cpu"))
    with pytest.raises(OptionError, match="optimizer must be one of 'lbfgs', 'adam'; got 'sgd'"):
        Recipe(optimizer="sgd")  # type: ignore[arg-type]


def test_bisection_finds_the_smallest_value_with_few_questions():
    for least in range(1, 18):
        asked = []

        def flips(value, least=least, asked=asked):
            asked.append(value)
            return value >= least

        assert smallest(range(1, 17), flips) == (least if least <= 16 else None)
        assert len(asked) <= 5
    assert smallest([], lambda value: True) is None
