"""Prototypes and cosines to class means, the methods that few-shot learning is compared with."""

from __future__ import annotations

import pytest
import torch
from bilevel_studies.few_shot import prototypes
from bilevel_studies.few_shot.prototypes import evaluate_prototypes, scores, train_prototypes
from test_few_shot import coarse_classes, noise_classes, tiny
from torch.nn.functional import cross_entropy

from bilevel import OptionError
from bilevel.applications.few_shot import TaskSampler, adapt_and_evaluate
from bilevel.applications.networks import few_shot_cnn


def test_prototypes_score_by_minus_the_squared_distance_and_learn():
    z = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = scores(z, 2)
    query, mean = z[1, 2, 3], z[1, 0, :2].mean(0)
    assert found[1, 2 * 3 + 1, 0].item() == pytest.approx(-((query - mean) ** 2).sum().item())
    classes = coarse_classes()
    torch.manual_seed(0)
    network = few_shot_cnn(1, 8)
    network.train()(classes.images / 255)
    test = TaskSampler(classes.select(range(30, 40)), 5, 1, 3)
    before = evaluate_prototypes(network, test, tasks=200).accuracy
    train_prototypes(network, TaskSampler(classes.select(range(30)), 5, 1, 3, tasks=4), steps=80, rate=5e-3)
    assert evaluate_prototypes(network, test, tasks=200).accuracy > before + 0.1


def test_class_means_score_by_cosines_as_the_classifiers_do_where_they_start():
    z = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = scores(z, 2, "cosine")
    directions = z[1, 0, :2] / z[1, 0, :2].norm(dim=1, keepdim=True)
    wanted = torch.nn.functional.cosine_similarity(z[1, 2, 3], directions.mean(0), dim=0)
    assert found[1, 2 * 3 + 1, 0].item() == pytest.approx(wanted.item())
    classes = coarse_classes()
    torch.manual_seed(0)
    network = few_shot_cnn(1, 8)
    network.train()(classes.images / 255)
    test = TaskSampler(classes.select(range(30, 40)), 5, 2, 3)
    before = evaluate_prototypes(network, test, tasks=200, similarity="cosine")
    started = adapt_and_evaluate(network, test, tasks=200, steps=0).predictions
    assert (before.predictions == started).double().mean() > 0.999, "but for ties"
    train = TaskSampler(classes.select(range(30)), 5, 2, 3, tasks=4)
    train_prototypes(network, train, steps=80, rate=5e-3, scale=10.0, similarity="cosine")
    assert evaluate_prototypes(network, test, tasks=200, similarity="cosine").accuracy > before.accuracy + 0.1
    with pytest.raises(OptionError, match="similarity must be"):
        train_prototypes(network, train, steps=1, similarity="dot")


def test_the_softmax_of_prototypes_is_of_distances_times_their_scale(monkeypatch):
    sampler, seen = TaskSampler(noise_classes(), 3, 1, 2, tasks=2), []
    spy = lambda scores, labels: (seen.append(scores.detach().clone()), cross_entropy(scores, labels))[1]  # noqa: E731
    monkeypatch.setattr(prototypes, "cross_entropy", spy)
    for scale in (1.0, 0.25):
        train_prototypes(tiny(), sampler, steps=1, scale=scale)
    assert torch.allclose(seen[-1], 0.25 * seen[0], rtol=1e-5)
    with pytest.raises(OptionError, match="scale must be"):
        train_prototypes(tiny(), sampler, steps=1, scale=0.0)
