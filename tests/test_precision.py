"""Mixed precision: bfloat16 products of the user's functions, float32 everywhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from test_digits import digits, lower, upper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from bilevel import Callback, CheckpointError, OptionError, Penalty, Problem, Rows, Status, solve
from bilevel.applications.networks import cifar_cnn, cosine_logits, few_shot_cnn, linear, mlp, mnist_cnn
from bilevel.derivatives.mixed_precision import reduced
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.problem.variables import Variable

COUNT = 40
"""Examples of a batch."""


def images(size: int, channels: int) -> tuple[Tensor, Tensor]:
    """2 COUNT of scikit-learn's digits, as large as the network asks."""
    x, y = load_digits(return_X_y=True)
    small = torch.from_numpy(x[: 2 * COUNT]).float().reshape(-1, 1, 8, 8) / 8 - 1
    large = interpolate(small, size=(size, size), mode="bilinear").repeat(1, channels, 1, 1)
    return large, torch.from_numpy(y[: 2 * COUNT])


def pair(size: int, channels: int) -> tuple[Any, Any]:
    x, y = images(size, channels)
    return (x[:COUNT], y[:COUNT]), (x[COUNT:], y[COUNT:], torch.arange(COUNT))


def classified() -> nn.Module:
    return nn.Sequential(few_shot_cnn(), nn.Linear(64, 10))


def smooth() -> nn.Module:
    """The few-shot network without kinks."""
    network = few_shot_cnn()
    for i, module in enumerate(network):
        if isinstance(module, nn.ReLU):
            network[i] = nn.Softplus()
        if isinstance(module, nn.MaxPool2d):
            network[i] = nn.AvgPool2d(2)
    return nn.Sequential(network, nn.Linear(64, 10))


def trained(network: nn.Module, batch: Any, steps: int = 15) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(network(batch[0]), batch[1]).backward()
        optimizer.step()
    optimizer.zero_grad()


def penalised(problem: Problem, u: Any, v: Any, batch: Any, precision: str | None, curvature: str) -> Gradients:
    """The derivative of F with gamma 1 and nu 0.01, from the same draws and buffers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        upper_variable, lower_variable = Variable(u, "u"), Variable(copy.deepcopy(v), "v")
        d = PenalisedObjective(problem, upper_variable, lower_variable, curvature, precision)
        nu = [torch.full_like(leaf, 0.01, requires_grad=False) for leaf in lower_variable.leaves]
        return d.penalised(d.prepare([batch], graph=True), Prices(torch.tensor(1.0), nu), with_u=True)


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    x, y = (torch.cat([t.detach().double().reshape(-1) for t in tensors]) for tensors in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


def in_u(gradients: Gradients) -> list[Tensor]:
    return [*gradients.u, *(g for parts in gradients.rows for _, g in parts)]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int, float]] = {
    "linear": (linear, 28, 1, 0.995),
    "mlp": (mlp, 28, 1, 0.995),
    "mnist_cnn": (mnist_cnn, 28, 1, 0.995),
    "cifar_cnn": (cifar_cnn, 32, 3, 0.995),
    # Rounding makes another pixel win in a pool and another ReLU open; after batch normalisation values lie close
    # together. That costs 0.006 to 0.015 of the cosine, of the first-order slope as of F; without kinks, nothing.
    "few_shot_cnn": (classified, 28, 1, 0.98),
    "few_shot_cnn without kinks": (smooth, 28, 1, 0.995),
}


@pytest.mark.parametrize("steps", [0, 15])
@pytest.mark.parametrize("name", NETWORKS)
def test_penalised_gradient_points_the_way_of_the_one_in_float32(name, steps):
    make, size, channels, least = NETWORKS[name]
    batch = pair(size, channels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        v, u = make(), Rows(COUNT, init=torch.randn(COUNT))
        trained(v, batch[1], steps)
    full, half = (penalised(Problem(upper, lower), u, v, batch, p, "exact") for p in (None, "bf16"))
    assert cosine(full.v, half.v) >= least
    assert cosine(in_u(full), in_u(half)) >= least
    assert cosine(full.slope, half.slope) >= least
    lengths = [float(torch.cat([t.reshape(-1) for t in g.v]).norm()) for g in (full, half)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)  # bfloat16 has 8 bits; F multiplies two slopes
    assert {t.dtype for t in (half.f, half.g, *half.v, *half.slope, *in_u(half))} == {torch.float32}
    assert any(not torch.equal(a, b) for a, b in zip(full.v, half.v, strict=True))  # or nothing was rounded


@pytest.mark.parametrize("steps", [0, 15])
def test_representation_of_a_few_shot_problem_gets_its_gradient_through_prepare(steps):
    batch = pair(28, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        u, v = few_shot_cnn(), torch.randn(64, 10, requires_grad=True)
        trained(nn.Sequential(u, nn.Linear(64, 10)), batch[1], steps)

    def features(u: nn.Module, batches: Any) -> list[tuple[Tensor, Tensor]]:
        made = [(u(x), y) for x, y, *_ in batches]
        seen.extend(f.dtype for f, _ in made)
        return made

    def loss(part: int) -> Callable[[Any, Tensor, Any], Tensor]:
        return lambda u, v, made: cross_entropy(8 * cosine_logits(made[part][0], v), made[part][1])

    seen: list[torch.dtype] = []
    problem = Problem(loss(0), loss(1), prepare=features)
    full, half = (penalised(problem, u, v, batch, p, "exact") for p in (None, "bf16"))
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert cosine(full.v, half.v) >= 0.995
    assert cosine(full.u, half.u) >= 0.98  # the kinks of the network, as above


def test_difference_of_gradients_points_the_way_of_the_one_in_float32():
    batch = pair(28, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        v, u = linear(), Rows(COUNT, init=torch.randn(COUNT))
        trained(v, batch[1])
    full, half = (penalised(Problem(upper, lower), u, v, batch, p, "difference") for p in (None, "bf16"))
    assert cosine(full.v, half.v) >= 0.995
    assert cosine(in_u(full), in_u(half)) >= 0.995


# -- whole runs --------------------------------------------------------------------------------------------------------


class Sight(Callback):
    """Every dtype that the weights of the user's functions are multiplied in, and of the variables they read."""

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.inside = 0
        self.outside = 0

    def upper(self, u: Rows, v: nn.Module, batch: Any) -> Tensor:
        self.products.add(v(batch[0]).dtype)
        self.inside += torch.is_autocast_enabled("cpu")
        self.outside += not torch.is_autocast_enabled("cpu")
        return upper(u, v, batch)


def run(precision: str | None, *, model: str = "mlp", steps: int = 600, **options: Any) -> Any:
    trusted, noisy, right = digits(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        v = nn.Linear(64, 10) if model == "softmax" else nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    u = Rows(len(right))
    problem = options.pop("problem", Problem(upper, lower))
    options = {"method": Penalty(cotangent="same"), "seed": 0, "max_steps": steps} | options
    return solve(problem, options.pop("method"), u, v, (trusted, noisy), precision=precision, **options), right


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [t for item in state for t in tensors(item)] if isinstance(state, (list, tuple)) else []


@pytest.mark.parametrize(("model", "least"), [("softmax", 0.96), pytest.param("mlp", 0.98, marks=pytest.mark.slow)])
def test_digits_are_told_apart_as_well_as_in_float32(model, least):
    solution, right = run("bf16", model=model)
    assert solution.status is Status.MAX_STEPS
    auc = roc_auc_score(right, solution.u.values.numpy())
    assert auc >= least  # what tests/test_digits.py asks of float32
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    full, _ = run(None, model=model)
    accuracy = [float((s.v(x.float() / 16).argmax(1) == y).double().mean()) for s in (full, solution)]
    assert abs(accuracy[0] - accuracy[1]) <= 0.02  # seeds differ by that much, and so do two orders of one sum
    assert abs(auc - roc_auc_score(right, full.u.values.numpy())) <= 0.01


def test_variables_moments_and_prices_stay_float32_and_the_certificate_is_in_full_precision():
    sight = Sight()

    class Last(Callback):
        def log(self, run: Any) -> bool:
            seen.append((sight.inside, sight.outside))
            return False

    seen: list[tuple[int, int]] = []
    problem = Problem(sight.upper, lower)
    solution, _ = run("bf16", steps=10, problem=problem, callbacks=[Last()])
    assert seen[-1][1] == 0  # all steps, and the scales before them, under autocast
    assert sight.inside == seen[-1][0]  # and nothing after them
    assert sight.outside > 0
    assert sight.products == {torch.bfloat16, torch.float32}
    state = [t for t in tensors(solution.state) if t.is_floating_point()]
    assert {t.dtype for t in state if t.dtype != torch.float64} == {torch.float32}
    assert {p.dtype for p in solution.v.parameters()} == {torch.float32}
    assert solution.u.values.dtype == torch.float32
    measured, _ = run("bf16", steps=10)
    u, v = Variable(measured.u, "u"), Variable(measured.v, "v")
    d = PenalisedObjective(Problem(upper, lower), u, v)
    _, noisy, _ = digits(0)
    # The mean slope over the same batches, which the loader draws in another order: equal up to float32's rounding of
    # a mean over batches of unequal size.
    whole = [(None, [torch.cat(parts) for parts in zip(*noisy, strict=True)])]
    _, slope = d.slope(whole)
    found = torch.cat([s.reshape(-1) for s in slope]).norm()
    assert measured.certificate.lower_residual == pytest.approx(float(found), rel=0.1)


def test_run_in_bf16_resumes_bit_for_bit(tmp_path):
    straight, _ = run("bf16", steps=12)

    class Stop(Callback):
        def log(self, run: Any) -> bool:
            return run.step >= 5

    run("bf16", steps=12, checkpoint=tmp_path, every=5, callbacks=[Stop()])
    resumed, _ = run("bf16", steps=12, checkpoint=tmp_path, resume=True)
    assert torch.equal(straight.u.values, resumed.u.values)
    for a, b in zip(straight.v.parameters(), resumed.v.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("first", "second"), [("bf16", None), (None, "bf16")])
def test_checkpoint_of_another_precision_is_refused(tmp_path, first, second):
    run(first, steps=4, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="its precision differ"):
        run(second, steps=4, checkpoint=tmp_path, resume=True)


def test_run_under_the_callers_own_autocast_never_reads_weights_of_an_earlier_step():
    alone, _ = run("bf16", steps=8)
    with torch.autocast("cpu", torch.bfloat16):
        within, _ = run("bf16", steps=8)
    # The caller's autocast also rounds the products of the certificate, which nothing else depends on.
    for a, b in zip(alone.v.parameters(), within.v.parameters(), strict=True):
        assert torch.equal(a, b)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fp16", "bfloat16", torch.bfloat16, 16, True])
def test_other_precisions_are_refused(value):
    with pytest.raises(OptionError, match="precision must be None or 'bf16'; got"):
        run(value, steps=2)


def test_variables_that_are_not_float32_are_refused(quadratic):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match="it rounds only their products; u is float64"):
        solve(quadratic.problem, Penalty(), u, v, quadratic.data(), max_steps=2, precision="bf16")
    rows = Rows(3, dtype=torch.float64)
    with pytest.raises(OptionError, match="u is float64"):
        solve(Problem(upper, lower), Penalty(), rows, nn.Linear(64, 10), digits(0)[:2], max_steps=2, precision="bf16")
    with pytest.raises(OptionError, match=r"v\['weight'\] is float64"):
        solve(
            Problem(upper, lower),
            Penalty(),
            Rows(3),
            nn.Linear(64, 10).double(),
            digits(0)[:2],
            max_steps=2,
            precision="bf16",
        )


def test_deterministic_mode_refuses_it():
    u, v = (torch.zeros(2, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, _: ((v - 1) ** 2).sum(), lambda u, v, _: ((v - u) ** 2).sum())
    with pytest.raises(OptionError, match="precision must be None in deterministic mode"):
        solve(problem, Penalty(), u, v, max_steps=2, precision="bf16")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_importances_of_a_network_that_fits_its_data_have_the_direction_of_float32_on_a_gpu():
    """What is left of small losses: a loss that autocast itself brings to float32 has a cosine of 0.83 here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, u = mlp().cuda(), Rows(COUNT, init=torch.randn(COUNT), device="cuda")
    upper_batch, lower_batch = (tuple(t.cuda() for t in part) for part in pair(28, 1))
    trained(network, lower_batch, steps=60)

    def found(precision: str | None) -> list[Tensor]:
        v = Variable(copy.deepcopy(network), "v")
        d = PenalisedObjective(Problem(upper, lower), Variable(u, "u"), v, "exact", precision)
        nu = [torch.zeros_like(leaf, requires_grad=False) for leaf in v.leaves]
        prices = Prices(torch.ones((), device="cuda"), nu)
        return in_u(d.penalised([(upper_batch, lower_batch)], prices, with_u=True))

    assert cosine(found("bf16"), found(None)) > 0.995


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: nn.functional.log_softmax(z, -1),
        lambda z: nn.functional.log_softmax(input=z, dim=-1),
        lambda z: z.softmax(-1),
        lambda z: torch.special.log_softmax(z, -1),
        lambda z: nn.functional.softmin(z, -1),
        lambda z: torch.logsumexp(z, -1),
        lambda z: cross_entropy(input=z, target=torch.zeros(3, dtype=torch.int64)),
        lambda z: nn.CrossEntropyLoss()(z, torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_loss_over_classes_gets_its_scores_in_float32(loss):
    """By a cast before the loss, not inside its kernel: the second derivative of that cast is exact."""
    with reduced("bf16", torch.device("cpu")):
        scores = nn.Linear(4, 5)(torch.randn(3, 4))
        found = loss(scores)
    assert scores.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    casts = [found.grad_fn]
    while casts and "ToCopy" not in type(casts[-1]).__name__:
        casts.append(next((node for node, _ in casts[-1].next_functions if node is not None), None))
        assert casts[-1] is not None
