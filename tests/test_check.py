"""bilevel.check."""

from __future__ import annotations

import pytest
import torch
from common import Once, global_state, leaf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import bilevel
from bilevel import Problem, Rows


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_check_prints_and_returns_what_it_found_and_changes_nothing(capsys):
    v, u = network(), Rows(6)
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1, 0, 1])
    data = ([(x, y)], DataLoader([(x[i], y[i], i) for i in range(6)], 3, shuffle=True))

    def lower(u, v, batch):
        a, b, row = batch
        return (torch.sigmoid(u[row]) * cross_entropy(v(a), b, reduction="none")).mean()

    problem = Problem(lambda u, v, batch: cross_entropy(v(batch[0]), batch[1]), lower)
    tensors = {name: t.clone() for name, t in v.state_dict().items()}
    before, rows = global_state(), u.values.clone()
    found = bilevel.check(problem, u, v, data)
    assert global_state() == before
    assert torch.equal(u.values, rows)
    assert not u.values.requires_grad
    assert all(torch.equal(t, tensors[name]) for name, t in v.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in v.parameters())
    assert found.upper_size == 6
    assert found.lower_size == sum(p.numel() for p in v.parameters())
    assert found.upper > 0
    assert found.lower > 0
    assert found.upper_depends_on_v
    assert found.coupled
    assert found.double_backward == "yes"
    assert found.seconds_gradient > 0
    assert found.seconds_step > 0
    out, err = capsys.readouterr()
    assert out == f"{found}\n"
    assert err == ""
    assert "double backward" in out


def test_check_says_what_does_not_depend_on_what(capsys):
    found = bilevel.check(Problem(lambda u, v, _: u.sum(), lambda u, v, _: (v * v).sum()), leaf(1.0), leaf(1.0))
    assert not found.upper_depends_on_v
    assert not found.coupled
    out = capsys.readouterr().out
    assert "no: v cannot influence f" in out
    assert "no: u cannot influence v" in out


def attention(v: Tensor) -> Tensor:
    x = v * torch.ones(1, 1, 4, 4, dtype=torch.float64)  # with the dimension of heads: without it the kernel is another
    return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("operator", "name"), [(attention, "attention"), (Once.apply, "once_differentiable")], ids=["attention", "once"]
)
def test_check_names_the_operator_without_double_backward(operator, name, capsys):
    problem = Problem(lambda u, v, _: (v * v).sum(), lambda u, v, _: operator(v - u).square().sum())
    found = bilevel.check(problem, leaf(1.0), leaf(2.0))
    assert found.double_backward.startswith("no: ")
    assert name in found.double_backward
    assert found.double_backward in capsys.readouterr().out
