"""The derivative through a training: that of differences and of autograd, with and without kept states, truncated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from bilevel import OptionError
from bilevel.applications.tuning import unrolled_training
from bilevel.applications.tuning.hyperparameters import LabelSmoothing, LearningRate, WeightDecay
from bilevel.applications.tuning.losses import TrainingLoss
from bilevel.applications.tuning.searches import train_with
from bilevel.applications.tuning.tune import tune
from bilevel.applications.tuning.unrolled_training import UnrolledTraining

DOUBLE = torch.float64
VALUES = {"decay": torch.tensor([0.02, 0.005], dtype=DOUBLE), "smooth": torch.tensor([0.1], dtype=DOUBLE)}
HYPER = {"decay": WeightDecay(per="layer"), "smooth": LabelSmoothing()}


def task(dropout: float = 0.0):
    """A smooth network, so that differences are exact; an input that is always zero has weights without a gradient."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw, dtype=DOUBLE)
    x[:, 3] = 0.0
    y = (x[:, 0] * x[:, 1] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2)).double()
    return model, (x[:40], y[:40]), (x[40:], y[40:])


def unrolled(model, train, steps=30, **options):
    return UnrolledTraining(TrainingLoss(HYPER, 2), model, train, steps=steps, batch=16, rate=0.02, seed=3, **options)


def loss_after(run, value, valid):
    run.train(value, None, lambda _: None)
    return run.objective.measured(value, run.model, valid)


def slope_of(run, value, valid):
    marks = []
    run.train(value, marks, lambda _: None)
    return run.slope(value, marks, valid), marks


def by_autograd(model, train, valid, steps, rate, seed, value, from_step=0):
    """Adam as written in the module, with autograd through all steps from `from_step` on."""
    run = unrolled(model, train, steps)
    held = {name: tensor.clone().requires_grad_() for name, tensor in value.items()}
    p = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    m, s = ({name: torch.zeros_like(tensor) for name, tensor in p.items()} for _ in range(2))
    for k, index in enumerate(run._batches()):
        x, y = train[0][index], train[1][index]
        scores = functional_call(model, p, (x,))
        target = (1 - held["smooth"]) * nn.functional.one_hot(y, 2) + held["smooth"] / 2
        loss = -(target * scores.log_softmax(1)).sum(1).mean()
        decays = {"0.weight": held["decay"][0], "3.weight": held["decay"][1]}
        loss = loss + sum(decay * p[name].square().sum() / 2 for name, decay in decays.items())
        g = dict(zip(p, torch.autograd.grad(loss, list(p.values()), create_graph=True), strict=True))
        m = {name: 0.9 * m[name] + 0.1 * g[name] for name in p}
        s = {name: 0.999 * s[name] + 0.001 * g[name] ** 2 for name in p}
        moved = {}
        for name in p:
            root = torch.where(s[name] > 0, s[name], 1.0).sqrt() * (s[name] > 0)
            step = rate * (1 - k / steps) / (1 - 0.9 ** (k + 1))
            moved[name] = p[name] - step * m[name] / (root / (1 - 0.999 ** (k + 1)) ** 0.5 + 1e-8)
        p = moved
        if k + 1 == from_step:
            p, m, s = ({name: t.detach().requires_grad_() for name, t in d.items()} for d in (p, m, s))
    end = nn.functional.cross_entropy(functional_call(model, p, (valid[0],)), valid[1])
    return dict(zip(held, torch.autograd.grad(end, list(held.values())), strict=True))


def test_the_training_is_that_of_fit_to_the_bit():
    model, train, _ = task(dropout=0.3)
    run = unrolled(copy.deepcopy(model), train)
    run.train(VALUES, [], lambda _: None)
    train_with(run.objective, VALUES, model, train, steps=30, batch=16, rate=0.02, seed=3)
    for a, b in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_derivative_is_that_of_autograd_through_all_steps():
    model, train, valid = task()
    found, _ = slope_of(unrolled(copy.deepcopy(model), train), VALUES, valid)
    expected = by_autograd(model, train, valid, 30, 0.02, 3, VALUES)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-9
        )  # Adam amplifies rounding, over 30 steps to 2e-8


def test_the_derivative_is_that_of_differences():
    model, train, valid = task(dropout=0.3)  # the same units are dropped in every training
    run = unrolled(model, train)
    found, _ = slope_of(run, VALUES, valid)
    for name, at in (("decay", 0), ("decay", 1), ("smooth", 0)):
        ends = []
        for step in (1e-6, -1e-6):
            moved = {key: tensor.clone() for key, tensor in VALUES.items()}
            moved[name][at] += step
            ends.append(loss_after(run, moved, valid))
        # Differences of 1e-6 round at 1e-10; Adam bends where the gradient of a weight is about zero.
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(found[name][at].item(), rel=1e-3)


def test_steps_that_are_repeated_on_the_way_back_give_the_same_derivative(monkeypatch):
    model, train, valid = task(dropout=0.3)
    kept, every = slope_of(unrolled(copy.deepcopy(model), train), VALUES, valid)
    monkeypatch.setattr(unrolled_training, "KEPT", 0)
    repeated, few = slope_of(unrolled(model, train), VALUES, valid)
    assert (len(every), len(few)) == (31, 7)  # 30 steps: a state after every fifth
    for name, value in kept.items():
        torch.testing.assert_close(repeated[name], value, rtol=1e-6, atol=1e-9)


def test_a_truncated_derivative_goes_back_through_the_last_steps_only():
    model, train, valid = task()
    found, marks = slope_of(unrolled(copy.deepcopy(model), train, truncate=12), VALUES, valid)
    assert [mark.step for mark in marks] == list(range(18, 31))
    # autograd from the state before step 18 on, with the values of the last 12 steps
    expected = by_autograd(model, train, valid, 30, 0.02, 3, VALUES, from_step=18)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


def test_batch_normalisation_keeps_the_statistics_of_its_training():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw, dtype=DOUBLE)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    run, marks = unrolled(model, (x, y)), []
    run.train(VALUES, marks, lambda _: None)
    before = [buffer.clone() for buffer in model.buffers()]
    assert all(torch.isfinite(t).all() for t in run.slope(VALUES, marks, (x, y)).values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_learning_rates_of_phases_are_differentiated_and_tuned():
    model, train, valid = task()
    hyper = {"decay": WeightDecay(), "rate": LearningRate(phases=2)}
    value = {"decay": torch.tensor([0.01], dtype=DOUBLE), "rate": torch.tensor([0.03, 0.01], dtype=DOUBLE)}
    objective = TrainingLoss(hyper, 2)
    run = UnrolledTraining(objective, copy.deepcopy(model), train, steps=31, batch=16, rate=1.0, seed=3)
    found, _ = slope_of(run, value, valid)
    for at in range(2):
        ends = []
        for step in (1e-6, -1e-6):
            moved = {"decay": value["decay"], "rate": value["rate"].clone()}
            moved["rate"][at] += step
            ends.append(loss_after(run, moved, valid))
        # torch keeps rates in float32 here: their rounding is a millionth of the difference.
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(found["rate"][at].item(), rel=0.02)
    options = {"steps": 60, "batch": 16, "seed": 3}
    slow = {"rate": LearningRate(start=1e-5)}
    tuned = tune(copy.deepcopy(model), train, valid, slow, grid=0, **options)
    assert tuned.mode == "training"
    assert float(tuned.values["rate"]) > 1e-4  # far too low a rate grows
    assert tuned.valid_loss < 0.9 * tuned.candidates[0].valid_loss
    with pytest.raises(OptionError, match="LearningRate is for mode='training'"):
        tune(model, train, valid, slow, mode="minibatch")
