"""Plain training on weighted examples: against torch's own loop, and the same bits after a stop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from bilevel.applications.training import Trainer, fit, probabilities


def task(n: int = 60, *, dropout: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5 * dropout), nn.Linear(8, 3)), x, y


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_full_batches_are_those_of_a_plain_loop_with_a_falling_rate():
    model, x, y = task()
    w = torch.rand(60)
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for k in range(5):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - k / 5)
        losses = cross_entropy(other(x), y, reduction="none")
        optimizer.zero_grad()
        ((w * losses).sum() / w.sum()).backward()
        optimizer.step()
    fit(model, x, y, weights=w, steps=5, batch=60, rate=0.01)
    # Sums over a shuffled batch round differently in float32, and Adam's first steps divide by small numbers.
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-5)


def test_probabilities_of_classes_are_labels_too():
    model, x, y = task()
    other = copy.deepcopy(model)
    fit(model, x, y, steps=20, batch=20, seed=3)
    fit(other, x, one_hot(y, 3).float(), steps=20, batch=20, seed=3)
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-6)


def test_example_of_weight_zero_is_never_drawn():
    model, x, y = task()
    w = torch.ones(60)
    w[:10] = 0
    x[:10] = float("nan")
    fit(model, x, y, weights=w, steps=30, batch=25)
    assert bool(torch.isfinite(weights(model)).all())


def test_seed_sets_all_draws_and_the_global_generator_is_put_back():
    found = []
    for seed in (5, 5, 6):
        model, x, y = task(dropout=True)
        torch.manual_seed(77)
        fit(model, x, y, steps=10, batch=20, seed=seed)
        found.append((weights(model), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize("stop", [3, 10, 17])
def test_stopped_training_goes_on_with_the_same_bits(stop, tmp_path):
    class StopError(Exception):
        pass

    def on_progress(done: int) -> None:
        if done == stop:
            raise StopError

    straight, x, y = task(dropout=True)
    halves, again = copy.deepcopy(straight), copy.deepcopy(straight)
    fit(straight, x, y, steps=20, batch=20)
    with pytest.raises(StopError):
        fit(halves, x, y, steps=20, batch=20, checkpoint=tmp_path, on_progress=on_progress)
    done: list[int] = []
    fit(again, x, y, steps=20, batch=20, checkpoint=tmp_path, on_progress=done.append)
    assert torch.equal(weights(straight), weights(again))
    assert done == list(range(stop + 1, 21))


def test_a_training_that_is_killed_goes_on_from_the_tenth_that_it_had_ended(tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    def step(self: Trainer, *rest: object) -> torch.Tensor:
        done.append(1)
        if len(done) == 8:
            raise KilledError
        return plain(self, *rest)

    straight, x, y = task(dropout=True)
    killed, again = copy.deepcopy(straight), copy.deepcopy(straight)
    fit(straight, x, y, steps=20, batch=20)
    done: list[int] = []
    plain = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KilledError):
        fit(killed, x, y, steps=20, batch=20, checkpoint=tmp_path)
    heard: list[int] = []
    fit(again, x, y, steps=20, batch=20, checkpoint=tmp_path, on_progress=heard.append)
    assert heard == list(range(7, 21))  # saved at every second step
    assert torch.equal(weights(straight), weights(again))


def test_a_training_ends_where_its_watch_says_so_and_goes_on_from_there(tmp_path):
    straight, x, y = task(dropout=True)
    stopped, again = copy.deepcopy(straight), copy.deepcopy(straight)
    fit(straight, x, y, steps=20, batch=20)
    first: list[int] = []
    fit(
        stopped, x, y, steps=20, batch=20, checkpoint=tmp_path, on_progress=lambda done: first.append(done) or done == 7
    )
    assert first == list(range(1, 8))
    assert not stopped.training
    second: list[int] = []
    fit(again, x, y, steps=20, batch=20, checkpoint=tmp_path, on_progress=second.append)
    assert second == list(range(8, 21))
    assert torch.equal(weights(straight), weights(again))


def test_probabilities_are_those_of_evaluation_and_leave_the_mode():
    model, x, _ = task(dropout=True)
    model.train()
    found = probabilities(model, x, batch=7)
    assert model.training
    model.eval()
    torch.testing.assert_close(found, model(x).detach().softmax(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_are_those_of_the_cpu():
    model, x, y = task()
    other = copy.deepcopy(model)
    fit(model, x, y, steps=20, batch=20)
    other.cuda()
    fit(other, x, y, steps=20, batch=20)
    torch.testing.assert_close(weights(model), weights(other).cpu(), rtol=0, atol=1e-4)
