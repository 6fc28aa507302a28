"""On a GPU: the same answers, and the same bits after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bilevel import (
    F2SA,
    SAMA,
    SOBA,
    Alternating,
    ApproxGrad,
    Callback,
    ForwardMode,
    Penalty,
    Problem,
    ReverseMode,
    Rows,
    Status,
    ValueFunction,
    ValueGap,
    solve,
)
from bilevel.applications.tuning.tune_table import tune_table
from bilevel.data import Labelled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = {
    "penalty": Penalty(),
    "algorithm 2": Penalty.algorithm_2(),
    "alternating": Alternating(),
    **{f"approx grad, {s}": ApproxGrad(linear_solver=s, damping=0.1) for s in ("cg", "neumann", "adam")},
    "reverse mode": ReverseMode(momentum=0.5),
    "truncated": ReverseMode(truncate=2, lower_batches="shared"),
    "forward mode": ForwardMode(momentum=0.5),
    "value gap": ValueGap(),
    "soba": SOBA(),
    "f2sa": F2SA(),
    "sama": SAMA(),
    "value function": ValueFunction(),
}
each = pytest.mark.parametrize("name", METHODS)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run) -> bool:
        return run.step >= self.step


def run(mode: str, folder, device: str, *, stop: int | None = None, method=METHODS["penalty"]):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    row = torch.arange(40)
    callbacks = [StopAt(stop)] if stop else []
    options = {"seed": 0, "log_every": 1, "callbacks": callbacks, "checkpoint": folder, "resume": True}
    if mode == "deterministic":
        u, v = (torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
        x = x.to(device)
        problem = Problem(
            lambda u, v, _: ((x[:20] @ v - 1) ** 2).mean() + 0.1 * u @ u,
            lambda u, v, _: ((x[20:] @ v - x[20:] @ u) ** 2).mean() + 0.1 * v @ v,
            inequalities=lambda u, v, _: v.sum() - 0.3,
        )
        solution = solve(problem, method, u, v, max_steps=300, **options)
        return solution, torch.cat([u, v]).detach().cpu()
    # The dropout draws from the generator of the device, whose state a checkpoint holds, too.
    v = nn.Sequential(nn.Dropout(0.1 if mode == "noisy" else 0.0), nn.Linear(3, 1)).double().to(device)
    rows = not isinstance(method, ForwardMode)
    u = Rows(40, dtype=torch.float64, device=device) if rows else torch.zeros(40, dtype=torch.float64, device=device)
    u = u if rows else u.requires_grad_()
    problem = Problem(
        lambda u, v, b: (v(b[0]) ** 2).mean(),
        lambda u, v, b: (torch.sigmoid(u[b[1]])[:, None] * (v(b[0]) - 1) ** 2).mean(),
    )
    batches = [(x[i : i + 10], row[i : i + 10]) for i in range(0, 40, 10)]
    solution = solve(problem, method, u, v, (batches, batches), max_steps=40, **options)
    values = u.values if rows else u.detach()
    return solution, torch.cat([values, *(p.detach().reshape(-1) for p in v.parameters())]).cpu()


@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
def test_answer_is_that_of_the_cpu(mode, tmp_path):
    there, found = run(mode, tmp_path / "gpu", "cuda")
    here, expected = run(mode, tmp_path / "cpu", "cpu")
    assert there.status is here.status
    assert there.status is (Status.CONVERGED if mode == "deterministic" else Status.MAX_STEPS)
    # The deterministic run ends at a relative 1e-9. On a GPU torch's Adam counts its steps, and corrects its moments,
    # in float32; on the CPU in float64.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if mode == "deterministic" else 1e-4)


def test_resumed_run_of_the_deterministic_mode_has_the_same_bits(tmp_path):
    straight, expected = run("deterministic", tmp_path / "straight", "cuda")
    run("deterministic", tmp_path / "halves", "cuda", stop=max(2, straight.steps // 2))
    _, found = run("deterministic", tmp_path / "halves", "cuda")
    assert torch.equal(found, expected)


@each
@pytest.mark.parametrize("mode", ["stochastic", "noisy"])
def test_resumed_run_of_each_method_has_the_same_bits(name, mode, tmp_path):
    method = METHODS[name]
    _, expected = run(mode, tmp_path / "straight", "cuda", method=method)
    half, _ = run(mode, tmp_path / "halves", "cuda", stop=19, method=method)
    assert half.status is Status.STOPPED
    assert half.steps == 19
    _, found = run(mode, tmp_path / "halves", "cuda", method=method)
    assert torch.equal(found, expected)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    ("model", "penalty"), [("ridge", "per-feature"), ("logistic", "per-feature"), ("mlp", "single")]
)
def test_a_table_is_tuned_as_on_the_cpu(model, penalty):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(120, 5, generator=draw)
    y = x[:, 0] + 0.3 * torch.randn(120, generator=draw)
    y, classes = (y, ()) if model == "ridge" else ((y > 0).long(), ("down", "up"))
    data = Labelled("t", "table", x, y, classes, [str(i) for i in range(120)])
    options = {"caution": None if model == "mlp" else 1.0, "folds": 3, "steps": 20}
    ends = {device: tune_table(data, model, penalty, device=device, **options) for device in ("cpu", "cuda")}
    assert ends["cuda"].penalties.device.type == "cpu"
    exact = model != "mlp"  # on minibatches rounding alone leads elsewhere
    assert ends["cuda"].valid_loss == pytest.approx(ends["cpu"].valid_loss, rel=1e-6 if exact else 0.1)
    if exact:
        torch.testing.assert_close(ends["cuda"].penalties, ends["cpu"].penalties, rtol=1e-3, atol=0)
