"""Few-shot learning: tasks, classifiers, derivatives through the representation, and learning itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from bilevel_studies.image_models import move_slightly
from common import Each, needs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from bilevel import ApproxGrad, BilevelError, Callback, OptionError, ReverseMode, Run
from bilevel.applications.few_shot import (
    CosineClassifier,
    Episodes,
    TaskSampler,
    Validation,
    adapt,
    adapt_and_evaluate,
    default_method,
    embed,
    meta_train,
)
from bilevel.applications.few_shot.evaluation import Best
from bilevel.applications.few_shot.meta_train import GAMMA
from bilevel.applications.networks import few_shot_cnn
from bilevel.data.class_images import ImageClasses, load_classes
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Prices
from bilevel.problem.variables import Variable
from bilevel.results import History


def noise_classes(classes: int = 12, images: int = 8, side: int = 16, *, spread: int = 40) -> ImageClasses:
    """Each class has a picture of its own, each image of it some noise."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (classes, 1, 1, side, side))
    x = pictures + rng.integers(-spread, spread + 1, (classes, images, 1, side, side))
    return ImageClasses(
        torch.from_numpy(np.clip(x, 0, 255).astype(np.uint8)).flatten(0, 1),
        (images,) * classes,
        tuple(f"class {i}" for i in range(classes)),
    )


def tiny(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return few_shot_cnn(1, 4).to(dtype)


# -- tasks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(3, 9), min_size=3, max_size=9), st.integers(0, 10_000), st.data())
def test_a_task_has_distinct_classes_and_distinct_images_of_them(counts, seed, data):
    ways = data.draw(st.integers(2, len(counts)))
    shots = data.draw(st.integers(1, min(counts) - 1))
    queries = data.draw(st.integers(1, min(counts) - shots))
    classes = ImageClasses(
        torch.zeros(sum(counts), 1, 4, 4, dtype=torch.uint8), tuple(counts), tuple(map(str, range(len(counts))))
    )
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    index = TaskSampler(classes, ways, shots, queries).draw(5, torch.Generator().manual_seed(seed))
    assert index.shape == (5, ways, shots + queries)
    for task in index:
        owners = owner[task]
        assert (owners == owners[:, :1]).all()
        assert len(set(owners[:, 0].tolist())) == ways
        assert all(len(set(row.tolist())) == shots + queries for row in task)


def test_every_class_and_every_image_is_drawn_about_equally_often():
    classes = noise_classes(6, 4)
    sampler = TaskSampler(classes, 2, 1, 1)
    drawn = sampler.draw(6000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn.flatten(), minlength=24).double()
    # Each of the 24 images is in a task with probability 1/6: 1,000 times, with a deviation of 29.
    assert (counts - 1000).abs().max() < 5 * 29


def test_tasks_that_cannot_be_are_refused_by_name():
    classes = noise_classes(4, 6)
    with pytest.raises(OptionError, match=r"drawn from, 4 .*; got 5\. Use more classes"):
        TaskSampler(classes, 5, 1, 2)
    with pytest.raises(OptionError, match=r"got 2 \+ 5, and 4 of 4 classes have fewer, 'class 0' the least, 6\."):
        TaskSampler(classes, 2, 2, 5)
    with pytest.raises(OptionError, match="shots must be at least 1; got 0"):
        TaskSampler(classes, 2, 0, 5)


def test_rotations_are_new_classes_of_turned_images():
    classes = noise_classes(3, 2)
    turned = classes.rotated()
    assert len(turned.names) == len(set(turned.names)) == 12
    assert turned.names[3].endswith(" 90°")
    assert torch.equal(turned.images[6:12], torch.rot90(classes.images, 1, (2, 3)))
    assert torch.equal(turned.select([5]).images, torch.rot90(classes.select([2]).images, 1, (2, 3)))


# -- classifiers -----------------------------------------------------------------------------------------------------


def test_scores_are_cosines_times_the_scale():
    v = CosineClassifier(2, 3, 4, scale=7.0, dtype=torch.float64)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    w = v.weight.detach()
    for task in range(2):
        for i in range(5):
            for c in range(4):
                product = x[task, i] @ w[task, :, c]
                expected = 7 * product / (x[task, i].norm() * w[task, :, c].norm())
                assert v(x)[task, i, c].item() == pytest.approx(expected.item(), rel=1e-12)


def test_adapting_many_tasks_at_once_is_adapting_each_alone():
    support = torch.randn(3, 8, 6, dtype=torch.float64)
    together = adapt(support, 4, steps=20)
    for task in range(3):
        alone = adapt(support[task : task + 1], 4, steps=20)
        assert torch.allclose(alone.weight[0], together.weight[task], rtol=1e-10)


def test_adapting_lowers_the_loss_of_the_support_from_the_class_means():
    torch.manual_seed(0)
    support = torch.randn(2, 6, 5) + 2.0
    labels = torch.arange(3).repeat_interleave(2)
    losses = []
    for steps in (0, 100):
        v = adapt(support, 3, steps=steps, proximity=0.0)
        losses.append(cross_entropy(v(support).flatten(0, 1), labels.repeat(2)).item())
    assert losses[1] < 0.7 * losses[0]


def test_proximity_holds_the_weights_at_the_class_means():
    """At the minimum of g the pull of the loss equals proximity times the distance from the means."""
    torch.manual_seed(0)
    support = torch.randn(2, 6, 5, dtype=torch.float64)
    v = adapt(support, 3, steps=2000, proximity=2.0)
    loss = cross_entropy(v(support).flatten(0, 1), torch.arange(3).repeat_interleave(2).repeat(2), reduction="sum") / 6
    (pull,) = torch.autograd.grad(loss, [v.weight])
    apart = v.weight.detach() - adapt(support, 3, steps=0).weight.detach()
    assert torch.allclose(pull, -2.0 * apart, atol=1e-8)
    assert apart.norm() > 0.01


def test_class_means_are_the_mean_directions_of_each_class():
    support = torch.randn(2, 6, 5)
    v = adapt(support, 3, steps=0)
    expected = normalize(support[1, 2:4], dim=-1).mean(0)
    assert torch.allclose(v.weight[1, :, 1], expected / expected.norm(), atol=1e-6)


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "proximity"), [(1.0, 0.0), (10.0, 1.0)])
def test_second_derivatives_through_batch_norm_and_pooling_match_differences(scale, proximity):
    """dF of u and v, F = f + <nu, s> + gamma/2 |s|^2, against F itself along random directions, in float64."""
    u = tiny(dtype=torch.float64)
    sampler = TaskSampler(noise_classes(), 3, 2, 2, tasks=2)
    episodes = Episodes(sampler, torch.device("cpu"), proximity=proximity)
    v = CosineClassifier(2, 4, 3, scale=scale, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    batch = [(sampler.draw(2, generator), torch.zeros(0))]
    d = PenalisedObjective(episodes.problem(), Variable(u, "u"), Variable(v, "v"), "exact")
    with torch.no_grad():  # not the class means, where parts of s are small
        v.weight.copy_(torch.randn(v.weight.shape, generator=generator, dtype=torch.float64))
    nu = torch.randn(v.weight.shape, generator=generator, dtype=torch.float64)
    prices = Prices(gamma=torch.tensor(3.0, dtype=torch.float64), nu=[nu])
    u.train()

    def value() -> float:
        support, query = episodes.prepare(u, batch[0])
        f, g = (getattr(episodes, name)(u, v, (support, query)) for name in ("upper", "lower"))
        (s,) = torch.autograd.grad(g, [v.weight])
        return float(f.detach() + (nu * s).sum() + 1.5 * s.square().sum())

    found = d.penalised(d.prepare(batch, graph=True), prices, with_u=True)
    for leaves, slopes in (([v.weight], found.v), (list(u.parameters()), found.u)):
        directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in leaves]
        exact = sum(float((a * b).sum()) for a, b in zip(slopes, directions, strict=True))
        ends = []
        step = 1e-7  # small, so that no unit crosses its kink and no other pixel wins in a pool
        for sign in (1, -1):
            with torch.no_grad():
                for x, direction in zip(leaves, directions, strict=True):
                    x.add_(direction, alpha=sign * step)
            ends.append(value())
            with torch.no_grad():
                for x, direction in zip(leaves, directions, strict=True):
                    x.sub_(direction, alpha=sign * step)
        # The difference of two values near 10 is rounded by 1e-15 * 10 / 1e-7.
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(exact, rel=1e-5, abs=1e-6)


# -- learning --------------------------------------------------------------------------------------------------------


def short(**options: Any) -> dict[str, Any]:
    return {"steps": 6, "method": default_method(), "seed": 1, **options}


def state(network: nn.Module) -> list[Tensor]:
    return [t.clone() for t in network.state_dict().values()]


def test_the_representation_is_computed_once_for_each_upper_step():
    sampler = TaskSampler(noise_classes(), 3, 1, 2, tasks=2)
    network, calls = tiny(), [0]
    network.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    seen: list[int] = []
    watch = Each(lambda run: seen.append(calls[0]))
    meta_train(network, sampler, **short(callbacks=[watch], log_every=1))
    assert len(seen) == 7
    assert set(np.diff(seen)) == {1}


def coarse_classes(classes: int = 40, images: int = 6) -> ImageClasses:
    """Each class has a coarse pattern of its own; most of an image is noise and its brightness."""
    rng = np.random.default_rng(1)
    patterns = np.kron(rng.normal(size=(classes, 1, 1, 4, 4)), np.ones((4, 4)))
    x = patterns + 1.2 * rng.normal(size=(classes, images, 1, 16, 16)) + 2 * rng.normal(size=(classes, images, 1, 1, 1))
    return ImageClasses(
        torch.from_numpy(np.clip(128 + 25 * x, 0, 255).astype(np.uint8)).flatten(0, 1),
        (images,) * classes,
        tuple(f"class {i}" for i in range(classes)),
    )


RATE = partial(torch.optim.Adam, lr=5e-3)


@pytest.mark.parametrize(
    "method",
    [
        default_method(upper_rate=5e-3),
        default_method(upper_rate=5e-3, gamma=40.0),
        ApproxGrad(lower_steps=3, damping=0.1, upper_optimizer=RATE),
        ReverseMode(lower_steps=3, upper_optimizer=RATE),
    ],
    ids=["penalty", "a higher price", "approx-grad", "rmd"],
)
def test_every_method_learns_a_representation_for_classes_it_has_not_seen(method):
    classes = coarse_classes()
    train, test = classes.select(range(30)), classes.select(range(30, 40))
    torch.manual_seed(0)
    network = few_shot_cnn(1, 8)
    tasks = TaskSampler(test, 5, 1, 3)
    # In training mode once, so that what an untrained network lacks is not the statistics of its batches.
    network.train()(train.images / 255)
    before = adapt_and_evaluate(network, tasks, tasks=200)
    solution = meta_train(network, TaskSampler(train, 5, 1, 3, tasks=4), steps=80, method=method, seed=0)
    after = adapt_and_evaluate(network, tasks, tasks=200)
    assert all(np.isfinite(solution.history["upper"]))
    assert after.accuracy > before.accuracy + 0.2
    assert not network.training


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    ends = []
    for seed in (1, 1, 2):
        network = tiny()
        meta_train(network, TaskSampler(noise_classes(), 3, 1, 2, tasks=2), **short(seed=seed))
        ends.append(state(network))
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


def test_a_run_that_is_stopped_goes_on_bit_for_bit_with_its_accuracies(tmp_path):
    class Stop(Callback):
        def log(self, run: Run) -> bool:
            return run.step >= 3

    sampler = TaskSampler(noise_classes(), 3, 1, 2, tasks=2)
    ends, rows = [], []
    for name, stops in (("straight", [()]), ("stopped", [(Stop(),), ()])):
        for callbacks in stops:
            network = tiny()
            watch = Validation(network, sampler, every=2, tasks=5, file=tmp_path / name / "accuracy.json")
            meta_train(
                network,
                sampler,
                **short(callbacks=[watch, *callbacks], log_every=1),
                checkpoint=tmp_path / name / "c",
                resume=True,
            )
        ends.append(state(network))
        rows.append([(row["step"], row["accuracy"]) for row in watch.rows])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == [2, 4, 6]


def test_the_best_step_on_validation_tasks_is_kept_and_put_back(tmp_path):
    network = tiny()
    best = Best(network, tmp_path / "best")
    assert best.restore() is None
    for step, accuracy in ((2, 0.5), (4, 0.8), (6, 0.8), (8, 0.7)):
        with torch.no_grad():
            for tensor in network.state_dict().values():
                tensor.fill_(step)
        best.update(step, accuracy)
    for one in (best, Best(network, tmp_path / "best")):  # the other is in a later process
        with torch.no_grad():
            next(network.parameters()).zero_()
        assert one.restore() == (4, 0.8)
        assert all((tensor == 4).all() for tensor in network.state_dict().values())


def test_validation_that_keeps_has_the_weights_of_its_best_row():
    network, sampler, held = tiny(), TaskSampler(noise_classes(), 3, 1, 2, tasks=2), {}

    class Note(Callback):
        def log(self, run: Run) -> None:
            held[run.step] = state(network)

    watch = Validation(network, sampler, every=2, tasks=5, keep=True)
    meta_train(network, sampler, **short(callbacks=[watch, Note()], log_every=1))
    step, accuracy = watch.best.restore()
    assert accuracy == max(row["accuracy"] for row in watch.rows)
    assert all(torch.equal(a, b) for a, b in zip(held[step], state(network), strict=True))


def test_decay_draws_the_weights_of_the_representation_to_zero():
    sizes = []
    for decay in (0.0, 5.0):
        network = tiny()
        meta_train(network, TaskSampler(noise_classes(), 3, 1, 2, tasks=2), **short(method=default_method(decay=decay)))
        sizes.append(sum(float(p.detach().norm()) for p in network.parameters() if p.ndim > 1))
    assert sizes[1] < 0.99 * sizes[0]


def test_the_rate_of_the_classifiers_does_not_fall_with_that_of_the_representation():
    solution = meta_train(tiny(), TaskSampler(noise_classes(), 3, 1, 2, tasks=2), **short())
    assert len(set(solution.history["lower_rate"])) == 1
    assert solution.history["upper_rate"][-1] < 0.5 * solution.history["upper_rate"][0]


def test_evaluation_leaves_the_run_as_it_was_and_asks_each_image_alone():
    network = tiny().train()
    before, draws = state(network), torch.get_rng_state()
    sampler = TaskSampler(noise_classes(), 3, 1, 2)
    first = adapt_and_evaluate(network, sampler, tasks=10, seed=4)
    again = adapt_and_evaluate(network, sampler, tasks=10, seed=4)
    assert torch.equal(first.accuracies, again.accuracies)
    assert network.training
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(a, b) for a, b in zip(before, state(network), strict=True))
    images = noise_classes().images
    assert torch.allclose(embed(network, images[:5]), embed(network, images)[:5], atol=1e-6)


def test_seconds_of_training_do_not_depend_on_measuring_or_on_stops(tmp_path):
    def watch() -> Validation:
        sampler = TaskSampler(noise_classes(), 3, 1, 2)
        return Validation(tiny(), sampler, every=2, tasks=10, file=tmp_path / "accuracy.json")

    first = watch()
    first.start(Run("stochastic", 6, 0, History()))
    first.log(Run("stochastic", 6, 2, History(), seconds=10.0))
    assert first.spent > 0
    assert first.trained(10.0) == 10.0  # the measurement came after the seconds were taken
    assert first.trained(15.0 + first.spent) == pytest.approx(15.0)
    second = watch()
    second.start(Run("stochastic", 6, 2, History(), seconds=10.0))  # stopped there, and gone on with
    second.log(Run("stochastic", 6, 4, History(), seconds=16.0))
    assert [row["seconds"] for row in second.rows] == [10.0, 16.0]


def test_the_interval_is_that_of_the_mean_over_tasks():
    found = adapt_and_evaluate(tiny(), TaskSampler(noise_classes(), 3, 1, 2), tasks=50)
    a = found.accuracies.numpy()
    assert found.interval == pytest.approx(2.009575 * a.std(ddof=1) / np.sqrt(50)), "Student's t of 49 degrees"
    assert np.isnan(adapt_and_evaluate(tiny(), TaskSampler(noise_classes(), 3, 1, 2), tasks=1).interval)
    said = found.predictions.reshape(50, 3, 2)
    assert (said == torch.arange(3)[:, None]).double().mean((1, 2)).tolist() == pytest.approx(a.tolist())


def test_the_lower_rate_goes_with_the_proximity_and_the_price():
    rates = []
    for options in ({}, {"proximity": 1.0}, {"method": default_method(gamma=40.0)}):
        given = {"steps": 1, **options}
        rates += meta_train(tiny(), TaskSampler(noise_classes(), 3, 1, 2, tasks=2), **given).history["lower_rate"][-1:]
    assert rates == pytest.approx([0.006, 0.054, 0.0006])
    with pytest.raises(OptionError, match="gamma must be"):
        default_method(gamma=0.0)


def test_a_representation_that_gives_no_rows_is_refused():
    sampler = TaskSampler(noise_classes(), 3, 1, 2, tasks=2)
    with pytest.raises(OptionError, match="a row of features for each image"):
        meta_train(nn.Conv2d(1, 2, 3), sampler, **short())
    with pytest.raises(BilevelError, match="representation must have parameters"):
        meta_train(nn.Flatten(), sampler, **short())


def test_moved_images_stay_near_and_differ():
    x = torch.zeros(6, 1, 28, 28)
    x[:, :, 10:18, 10:18] = 1.0
    torch.manual_seed(0)
    moved = move_slightly(x)
    assert moved.shape == x.shape
    assert not torch.allclose(moved[0], moved[1])
    assert (moved.sum((1, 2, 3)) - 64).abs().max() < 24  # at most 10% larger or smaller each way
    middle = (moved * torch.arange(28.0)).sum((1, 2, 3)) / moved.sum((1, 2, 3))
    assert (middle - 13.5).abs().max() < 0.08 * 14 + 0.5


@pytest.mark.slow
@needs("omniglot")
def test_omniglot_on_200_characters_is_above_90_percent():
    splits = load_classes("omniglot")
    train, test = splits.train.select(range(200)), splits.test.select(range(100))
    torch.manual_seed(0)
    network = few_shot_cnn()
    meta_train(network, TaskSampler(train, 10, 1, 5, tasks=2), steps=200, seed=0)
    found = adapt_and_evaluate(network, TaskSampler(test, 5, 1, 15), tasks=300)
    assert found.accuracy - found.interval > 0.90


@pytest.mark.slow
@needs("omniglot")
def test_the_lower_optimizer_is_the_users(tmp_path):
    sampler = TaskSampler(load_classes("omniglot").test.select(range(20)), 5, 1, 5)
    network = few_shot_cnn()
    still = adapt_and_evaluate(network, sampler, tasks=20, optimizer=partial(torch.optim.SGD, lr=0.0))
    means = adapt_and_evaluate(network, sampler, tasks=20, steps=0)
    assert torch.equal(still.accuracies, means.accuracies)


SCALES = pytest.mark.parametrize("scale", [10.0, 40.0])


@SCALES
def test_more_lower_steps_bring_the_penalised_objective_down_whatever_the_scale(scale):
    found = []
    for count in (1, 5, 20):
        torch.manual_seed(0)
        method = default_method(lower_steps=count, upper_rate=1e-12)
        sampler = TaskSampler(noise_classes(spread=200), 5, 1, 3, tasks=2)
        options = {"steps": 1, "seed": 1, "method": method, "scale": scale}
        last = meta_train(few_shot_cnn(1).double(), sampler, **options).history  # the last fall is 1e-7 of F
        f, residual = (last[name][-1] for name in ("upper", "residual"))
        found.append(f + 0.5 * GAMMA * residual**2)
    assert found[0] > found[1] > found[2]


@SCALES
@pytest.mark.parametrize("shots", [1, 3])
def test_by_default_the_representation_moves_as_the_hypergradient_says_whatever_the_scale(scale, shots):
    """Against the derivative of f at the minimum of g, by the implicit function theorem, in float64. Its size counts,
    too: where the lower steps are too few for the price, the part of the support comes out too small."""
    torch.manual_seed(0)
    sampler = TaskSampler(noise_classes(spread=200), 5, shots, 2, tasks=1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(noise_classes().images[0].numel(), 16, bias=False)).double()
    with torch.no_grad():  # brightness, which all images share, is no part of the features
        network[1].weight -= network[1].weight.mean(1, keepdim=True)
    start = network[1].weight.detach().clone()
    seen: list[Any] = []
    episodes = Episodes(sampler, torch.device("cpu"))
    prepare = Episodes.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Episodes, "prepare", lambda self, u, batch: (seen.append(batch), prepare(self, u, batch))[1])
        method = default_method(upper_optimizer=partial(torch.optim.SGD, lr=1e-6))
        meta_train(network, sampler, steps=1, method=method, scale=scale, seed=2)
    moved = start - network[1].weight.detach()
    with torch.no_grad():
        network[1].weight.copy_(start)

    prepared = episodes.prepare(network, seen[-1])
    v = adapt(prepared[0].detach(), 5, scale=scale, steps=3000)
    (slope,) = torch.autograd.grad(episodes.lower(network, v, prepared), [v.weight], create_graph=True)
    assert slope.norm() < 1e-8
    f = episodes.upper(network, v, prepared)
    direct, pull = torch.autograd.grad(f, [network[1].weight, v.weight], retain_graph=True)
    flat = slope.flatten()
    rows = [torch.autograd.grad(s, [v.weight], retain_graph=True)[0].flatten() for s in flat]
    price = torch.linalg.solve(torch.stack(rows), pull.flatten())
    (indirect,) = torch.autograd.grad(flat @ price, [network[1].weight])
    exact = direct - indirect
    assert indirect.norm() > 0.3 * direct.norm(), "the support has its part in it"
    assert (moved / 1e-6 - exact).norm() < 0.03 * exact.norm()
