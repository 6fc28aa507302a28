"""`tune`: each knob does what it says, values stay in their range, known answers are found, misuse is refused."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from bilevel import DataError, OptionError, Penalty
from bilevel.applications.augmentation import add_noise
from bilevel.applications.networks import mlp
from bilevel.applications.tuning.hyperparameters import (
    Augmentation,
    ClassWeights,
    FeaturePenalty,
    Free,
    LabelSmoothing,
    LossMix,
    SourceWeights,
    WeightDecay,
    parameters_of,
)
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.ranges import Range
from bilevel.applications.tuning.tune import tune
from bilevel.errors import CheckpointError
from bilevel.running.callbacks import Callback

DOUBLE = torch.float64


def regression(seed=0, rows=120, features=20, noise=2.0, useful=None):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=draw, dtype=DOUBLE)
    w = torch.zeros(features, dtype=DOUBLE)
    w[: useful or features] = 1.0
    return x, x @ w + noise * torch.randn(rows, generator=draw, dtype=DOUBLE)


def classes(seed=0, rows=150, features=5, count=3):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=draw)
    y = (x @ torch.randn(features, count, generator=torch.Generator().manual_seed(99))).argmax(1)
    return x, y


# -- what each knob does to the training loss --------------------------------------------------------------------------


def test_knobs_make_the_training_loss_that_they_say():
    torch.manual_seed(0)
    model, (x, y) = mlp(5, (4,), 3), classes()
    source = torch.arange(len(y)) % 2
    hyper = {
        "decay": WeightDecay(per="tensor", biases=True),
        "feature": FeaturePenalty(),
        "smooth": LabelSmoothing(),
        "class": ClassWeights(),
        "source": SourceWeights(),
    }
    value = {
        "decay": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "feature": torch.arange(1.0, 6.0),
        "smooth": torch.tensor([0.3]),
        "class": torch.tensor([1.0, 2.0, 3.0]),
        "source": torch.tensor([1.0, 5.0]),
    }
    found = TrainingLoss(hyper, 3)(value, model, (x, y, source))
    target = 0.7 * one_hot(y, 3) + 0.1
    w = value["class"][y] * value["source"][source]
    expected = (w * cross_entropy(model(x), target, reduction="none")).sum() / w.sum()
    for c, p in zip((1, 2, 3, 4), model.parameters(), strict=True):
        expected = expected + c * (p**2).sum() / 2
    first = next(model.parameters())
    expected = expected + (torch.arange(1.0, 6.0) * first**2).sum() / 2
    torch.testing.assert_close(found, expected)


def test_weight_decay_has_one_value_for_what_it_is_per():
    model = mlp(5, (4,), 3)
    parameters = {name: p.detach() for name, p in parameters_of(model).items()}
    squares = [float((p**2).sum()) / 2 for p in parameters.values() if p.ndim == 2]
    total = sum(squares)
    assert float(WeightDecay().penalty(torch.tensor([2.0]), parameters)) == pytest.approx(2 * total, rel=1e-5)
    two = torch.tensor([2.0, 5.0])
    for per in ("layer", "tensor"):
        expected = 2 * squares[0] + 5 * squares[1]
        assert float(WeightDecay(per=per).penalty(two, parameters)) == pytest.approx(expected, rel=1e-5)
    each = WeightDecay(per="weight").penalty(torch.arange(32.0), parameters)
    flat = torch.cat([p.flatten() for p in parameters.values() if p.ndim == 2])
    assert float(each) == pytest.approx(float((torch.arange(32.0) * flat**2).sum() / 2), rel=1e-5)


def test_mixed_losses_have_shares_that_sum_to_one():
    knob = LossMix(mixed=(lambda s, y: torch.ones(len(y)), lambda s, y: 5 * torch.ones(len(y))))
    found = knob.losses(torch.tensor([1.0, 3.0]), torch.zeros(4, 2), torch.zeros(4))
    torch.testing.assert_close(found, torch.full((4,), 4.0))


def test_a_validation_loss_that_reads_no_values_makes_none(monkeypatch):
    calls = []
    plain = Range.value
    monkeypatch.setattr(Range, "value", lambda *given: calls.append(given) or plain(*given))
    x, y = regression()
    model, batch = nn.Linear(20, 1).double(), (x, y)
    u = {"decay": torch.zeros(1, dtype=DOUBLE)}
    problem = TrainingLoss({"decay": WeightDecay()}, None).problem()
    problem.upper(u, model, batch)
    assert not calls
    problem.lower(u, model, batch)
    assert len(calls) == 1


# -- known answers -----------------------------------------------------------------------------------------------------


def test_one_penalty_of_ridge_regression_is_that_of_the_closed_form_curve():
    (x, y), (a, b) = regression(0, rows=40, noise=5.0), regression(1, rows=40, noise=5.0)
    model = nn.Linear(20, 1, bias=False).double()
    found = tune(model, (x, y), (a, b), {"decay": WeightDecay(low=1e-4, high=1e3, start=1.0)})
    assert found.mode == "convex"

    def curve(log):
        w = torch.linalg.solve(x.T @ x / 40 + np.exp(log) * torch.eye(20, dtype=DOUBLE), x.T @ y / 40)
        return float(((a @ w - b) ** 2).mean()) / 2

    best = minimize_scalar(curve, bounds=(-9, 6), method="bounded", options={"xatol": 1e-8})
    assert float(found.values["decay"]) == pytest.approx(np.exp(best.x), rel=0.01)
    assert found.valid_loss == pytest.approx(best.fun, rel=1e-6)
    assert found.curve[-1] < found.curve[0]


def test_useless_features_get_the_larger_penalties_with_and_without_minibatches():
    (x, y), (a, b) = (regression(seed, rows=200, useful=3, noise=1.0) for seed in (0, 1))
    for mode, options in (("convex", {"steps": 40}), ("minibatch", {"steps": 600, "final_steps": 100})):
        model = nn.Linear(20, 1).double()
        options |= {"rate": 0.1} if mode == "minibatch" else {}
        found = tune(model, (x, y), (a, b), {"p": FeaturePenalty()}, mode=mode, grid=0, seed=0, **options)
        penalty = found.values["p"].log()
        assert float(penalty[3:].median() - penalty[:3].median()) > 1, mode


@pytest.mark.parametrize("mode", ["training", "minibatch"])
def test_tuning_of_a_network_finds_that_one_source_has_wrong_labels(mode):
    x, y = classes(rows=400)
    source = torch.arange(400) % 2
    wrong = torch.where(source == 1, (y + 1) % 3, y)
    torch.manual_seed(0)
    model = mlp(5, (16,), 3)
    first = copy.deepcopy(model.state_dict())
    options = {"mode": mode, "steps": 300, "rate": 1e-2, "seed": 0}
    found = tune(model, (x, wrong, source), classes(7), {"source": SourceWeights()}, **options)
    assert float(found.values["source"][0] / found.values["source"][1]) > 3
    assert any(not torch.equal(first[name], value) for name, value in model.state_dict().items())
    assert len(found.curve) == (300 if mode == "minibatch" else len(found.candidates))
    again = mlp(5, (16,), 3)
    again.load_state_dict(first)
    other = tune(again, (x, wrong, source), classes(7), {"source": SourceWeights()}, **options)
    assert torch.equal(found.values["source"], other.values["source"])
    assert found.valid_loss == other.valid_loss


def test_a_loss_of_ones_own_reads_a_free_tensor():
    (x, y), (a, b) = regression(0, useful=2), regression(1, useful=2)
    model = nn.Linear(20, 1).double()

    def loss(value, model, batch):
        residual = model(batch[0])[:, 0] - batch[1]
        return (residual**2).mean() / 2 + (value["own"] * model.weight**2).sum()

    found = tune(model, (x, y), (a, b), {"own": Free(low=1e-3, high=10.0, start=0.1, size=(20,))}, loss=loss, steps=200)
    assert found.values["own"].shape == (20,)
    assert float(found.values["own"][2:].median()) > float(found.values["own"][:2].max())


def test_the_strength_of_an_augmentation_moves():
    x, y = classes(rows=60)
    model = mlp(5, (8,), 3)
    knob = Augmentation(transform=add_noise, high=2.0, start=1.0)
    found = tune(model, (x, y), classes(3), {"noise": knob}, steps=200, rate=1e-2, grid=0, seed=0)
    assert found.mode == "training"
    assert 0 <= float(found.values["noise"]) < 0.9  # classes without noise: less is better


def test_all_knobs_are_tuned_at_once_and_stay_in_their_ranges():
    x, y = classes(rows=120)
    source = torch.arange(120) % 2
    torch.manual_seed(0)
    model = mlp(5, (8,), 3)

    def squared(scores, target):
        return (scores.softmax(1) - target).square().sum(1)

    hyper = {
        "layer": WeightDecay(per="layer"),
        "weight": WeightDecay(per="weight"),
        "smoothing": LabelSmoothing(),
        "group": FeaturePenalty(groups=[0, 0, 1, 1, 1]),
        "class": ClassWeights(),
        "source": SourceWeights(),
        "noise": Augmentation(transform=add_noise),
        "mix": LossMix(mixed=(lambda s, t: cross_entropy(s, t, reduction="none"), squared)),
    }
    found = tune(model, (x, (y + source) % 3, source), classes(3), hyper, steps=60, seed=0)
    sizes = {"layer": 2, "weight": 64, "smoothing": 1, "group": 2, "class": 3, "source": 2, "noise": 1, "mix": 2}
    assert {name: value.numel() for name, value in found.values.items()} == sizes
    assert found.settings["hyper_parameters"] == sum(sizes.values())
    for name, value in found.values.items():
        knob = hyper[name]
        assert bool(((value >= knob.low) & (value <= knob.high)).all()), name
        assert bool(((value / knob.start - 1).abs() > 1e-3).all()), f"{name} has not moved"


def test_batch_normalisation_learns_nothing_from_the_checks_of_the_data(monkeypatch):
    (x, y), model = classes(), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    monkeypatch.setattr(sys.modules["bilevel.applications.tuning.tune"], "training_search", _stop)
    with pytest.raises(KeyboardInterrupt):
        tune(model, (x, y), classes(1), {"decay": WeightDecay()})
    assert int(model[0].num_batches_tracked) == 0
    assert model.training


def _stop(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_ends_the_tuning_of_a_linear_layer():
    (x, y), (a, b) = regression(0, rows=40), regression(1, rows=40)
    with pytest.raises(KeyboardInterrupt):
        tune(nn.Linear(20, 1).double(), (x, y), (a, b), {"decay": WeightDecay()}, on_progress=_stop)


# -- a run that was stopped --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the run on minibatches ended")
@pytest.mark.parametrize(
    ("mode", "at"),
    [
        ("convex", "tuning"),
        ("minibatch", "tuning"),
        ("minibatch", "training"),
        ("training", "training"),
        ("training", "trying values (grid, penalty = 0.01)"),
        ("training", "trying values (descent)"),
    ],
)
def test_a_tuning_that_was_stopped_goes_on_bit_for_bit(mode, at, tmp_path, monkeypatch):
    monkeypatch.setattr("bilevel.applications.tuning.implicit_descent.SAVE_EVERY", 0.0)
    x, y = regression()
    first = nn.Linear(20, 1).double()

    class Stop(Callback):
        def log(self, run):
            if stopping and at == "tuning" and run.step >= 20:
                raise KeyboardInterrupt

    def on_progress(stage, done, total):
        if stopping and stage == at and (done == 4 or "values" in at):
            raise KeyboardInterrupt

    def tuned(**options):
        options |= {"callbacks": [Stop()]} if mode == "minibatch" else {}
        options |= {"rate": 1e-2} if mode == "training" else {}
        model, hyper = copy.deepcopy(first), {"penalty": FeaturePenalty()}
        return tune(
            model, (x[:80], y[:80]), (x[80:], y[80:]), hyper, mode=mode, steps=40, on_progress=on_progress, **options
        )

    stopping = False
    straight = tuned()
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        tuned(checkpoint=tmp_path)
    stopping = False
    again = tuned(checkpoint=tmp_path)
    assert torch.equal(again.values["penalty"], straight.values["penalty"])
    assert torch.equal(again.model.weight, straight.model.weight)
    assert again.curve == straight.curve
    with pytest.raises(CheckpointError, match="is of another run: its examples differ"):
        tune(
            first, (x[:80], y[:80] + 1), (x[80:], y[80:]), {"penalty": FeaturePenalty()}, mode=mode, checkpoint=tmp_path
        )
    for hyper, own, differs in (
        (FeaturePenalty(high=10.0), None, "hyper"),
        (FeaturePenalty(groups=[0] * 20), None, "hyper"),
        (FeaturePenalty(), lambda value, model, batch: model(batch[0]).square().mean(), "loss"),
    ):
        with pytest.raises(CheckpointError, match=f"is of another run: its {differs} differ"):
            tune(
                first,
                (x[:80], y[:80]),
                (x[80:], y[80:]),
                {"penalty": hyper},
                mode=mode,
                steps=40,
                valid_loss=own,
                checkpoint=tmp_path,
            )


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_misuse_is_refused_with_a_sentence_that_names_it():
    x, y = classes()
    model, valid = mlp(5, (4,), 3), classes(1)
    for change, error, message in (
        ({"hyper": {}}, OptionError, "at least one knob"),
        ({"hyper": {"a": 1.0}}, OptionError, r"hyper\['a'\]"),
        ({"hyper": {"a": SourceWeights()}}, OptionError, "sources"),
        ({"hyper": {"a": FeaturePenalty(groups=[0, 1])}}, OptionError, "groups"),
        ({"train": (x, y + 1)}, DataError, "0 to 2"),
        ({"train": (x, y[:5])}, DataError, "one target"),
        ({"train": (x * float("nan"), y)}, DataError, "finite"),
        ({"valid": (x[:, :3], y)}, DataError, "one shape"),
        ({"valid": (x, y.float())}, DataError, "both"),
        ({"mode": "convex", "method": Penalty()}, OptionError, "method"),
        ({"steps": 0}, OptionError, "steps"),
        ({"hyper": {"a": LossMix(mixed=[len, len]), "b": LossMix(mixed=[len, len])}}, OptionError, "one LossMix"),
        ({"train": (x, x[:, 0]), "valid": (x, x[:, 0])}, DataError, "one for each example"),
        (
            {"train": (x, x[:, 0]), "valid": (x, x[:, 0]), "hyper": {"a": LabelSmoothing()}},
            OptionError,
            "LabelSmoothing needs class labels",
        ),
        ({"hyper": {"a": ClassWeights()}, "loss": lambda *_: torch.zeros(())}, OptionError, "Free"),
    ):
        options = {"train": (x, y), "valid": valid, "hyper": {"a": WeightDecay()}} | change
        with pytest.raises(error, match=message):
            tune(model, **options)
    with pytest.raises(OptionError, match="start"):
        WeightDecay(start=5.0)
    with pytest.raises(OptionError, match="per"):
        WeightDecay(per="neuron")
