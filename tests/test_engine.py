"""All engines take the path of the eager one, and step aside with one warning where they cannot."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel import BilevelWarning, Box, Callback, Penalty, Problem, Rows, Solution, solve
from bilevel.engines.engine import COMPILE_FROM, Captured, Compiled, Engines
from bilevel.errors import OptionError

COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler, as torch.compile does"
)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ENGINES = [
    # The record itself, run operator by operator; compiling it takes a minute and is among the slow tests.
    pytest.param("compile", "recorded"),
    pytest.param("compile", "cpu", marks=[COMPILER, pytest.mark.slow]),
    pytest.param("compile", "cuda", marks=CUDA),
    pytest.param("graph", "cuda", marks=CUDA),
    pytest.param("compile+graph", "cuda", marks=CUDA),
]
ONE_BATCH, PARTIAL = [8, 8, 8], [8, 8, 5]


@pytest.fixture
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "recorded":
        monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)
        return "cpu"
    return str(request.param)


def network(*, norm: bool = False, dropout: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh()]
        return nn.Sequential(*layers, *([nn.Dropout(0.3)] if dropout else []), nn.Linear(6, 3)).double()


def batches(sizes: list[int], *, rows: bool, seed: int) -> list[Any]:
    generator, found, start = torch.Generator().manual_seed(seed), [], 0
    for n in sizes:
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (n,), generator=generator)
        found.append((x, y, torch.arange(start, start + n)) if rows else (x, y))
        start += n
    return found


def upper(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(v(batch[0]), batch[1])


def lower(u: Any, v: nn.Module, batch: Any) -> Tensor:
    w = torch.sigmoid(u[batch[2]])
    return (w * cross_entropy(v(batch[0]), batch[1], reduction="none")).sum() / w.sum()


def run(
    engine: str,
    device: str,
    problem: Problem | None = None,
    *,
    sizes: list[int] | None = None,
    steps: int = 7,
    net: dict[str, bool] | None = None,
    solving: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Solution, list[Tensor]]:
    """A short run, and all tensors it ends with."""
    sizes = sizes or ONE_BATCH
    v, u = network(**(net or {})).to(device), Rows(24, dtype=torch.float64, device=device)
    data = batches(ONE_BATCH, rows=False, seed=0), batches(sizes, rows=True, seed=1)
    method = Penalty(**({"lower_steps": 2} | options))
    solution = solve(
        problem or Problem(upper, lower),
        method,
        u,
        v,
        data,
        max_steps=steps,
        seed=3,
        engine=engine,
        hypergradient=False,
        **(solving or {}),
    )
    return solution, [*(t.detach().clone() for t in v.state_dict().values()), u.values.clone()]


def same(a: tuple[Solution, list[Tensor]], b: tuple[Solution, list[Tensor]]) -> None:
    """One path, to rounding in float64: a step that is wrong anywhere is off by far more."""
    for name in a[0].history.rows().__next__():
        if name not in ("seconds", "advanced", "solver"):
            assert a[0].history[name] == pytest.approx(b[0].history[name], rel=1e-8, abs=1e-10), name
    assert a[0].history["advanced"] == b[0].history["advanced"]
    for x, y in zip(a[1], b[1], strict=True):
        # Adam's first steps turn rounding of a gradient that is zero, as a bias before BatchNorm has, into a step.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize(
    ("net", "options"),
    [
        ({}, {"warm_up": 0.3, "advances": 3}),
        ({"norm": True, "dropout": True}, {"warm_up": 0.0}),
        ({}, {"cotangent": "running", "lower_optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}),
    ],
    ids=["schedule", "dropout-and-batch-norm", "running-and-sgd"],
)
def test_engine_takes_the_path_of_eager(engine, device, net, options):
    found = run(engine, device, net=net, **options)
    assert found[0].engine == engine
    same(found, run("eager", device, net=net, **options))


@pytest.mark.parametrize(("engine", "device"), ENGINES[:1], indirect=["device"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_record_of_another_optimizer_takes_the_path_of_eager(engine, device, optimizer):
    options = {"warm_up": 0.0, "lower_optimizer": partial(optimizer, lr=0.01)}
    found = run(engine, device, **options)
    assert found[0].engine == engine
    same(found, run("eager", device, **options))


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
def test_constraints_projections_and_running_cotangent(engine, device):
    def budget(u: Any, v: Any, batch: Any) -> Tensor:
        return v[0].weight.square().sum() - 1.0

    problem = Problem(upper, lower, inequalities=budget, project_upper=Box(-0.05, 0.05), project_lower=Box(-1.0, 0.3))
    options = {"warm_up": 0.0, "cotangent": "running", "lower_steps": 1}
    found = run(engine, device, problem, **options)
    assert found[0].engine == engine
    same(found, run("eager", device, problem, **options))


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
def test_lower_constraints_take_the_path_of_eager(engine, device):
    """The multipliers and their moments live on between steps, too. On a GPU their steps are not compiled."""
    problem = Problem(
        upper,
        lower,
        lower_inequalities=lambda u, v, _: v[0].weight.square().sum() - 1.0,
        lower_equalities=lambda u, v, _: v[0].bias.sum() - 0.1,
    )
    options = {"warm_up": 0.3, "advances": 3, "lower_steps": 1}
    refused = device == "cuda" and "compile" in engine
    with pytest.warns(BilevelWarning, match="are not compiled") if refused else nullcontext():
        found = run(engine, device, problem, **options)
    assert found[0].engine == ({"compile": "eager", "compile+graph": "graph"}[engine] if refused else engine)
    expected = run("eager", device, problem, **options)
    same(found, expected)
    for name, values in expected[0].multipliers.items():
        for x, y in zip(values, found[0].multipliers[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize("whole", [0, 10**6], ids=["steps", "whole"])
def test_batch_that_comes_twice_in_an_iteration_is_two_inputs_of_its_record(engine, device, whole, monkeypatch):
    monkeypatch.setattr("bilevel.engines.engine.WHOLE", whole)
    options = {"warm_up": 0.0, "lower_steps": 4, "steps": 5}  # three batches, five draws; at first in the same order
    found = run(engine, device, **options)
    assert found[0].engine == engine
    same(found, run("eager", device, **options))


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
def test_partial_batch_is_recorded_once_and_takes_the_path_of_eager(engine, device, monkeypatch):
    made = []
    for kind in (Compiled, Captured):
        plain = kind._make
        monkeypatch.setattr(
            kind, "_make", lambda self, step, tensors, plain=plain: made.append(self.name) or plain(self, step, tensors)
        )
    found = run(engine, device, sizes=PARTIAL, warm_up=0.0, lower_steps=1, steps=12)
    same(found, run("eager", device, sizes=PARTIAL, warm_up=0.0, lower_steps=1, steps=12))
    assert found[0].engine == engine
    # Two steps, two shapes of the lower batch; "compile" alone compiles whole iterations of full batches.
    assert made.count("compile") == {"compile": 5, "compile+graph": 4}.get(engine, 0)
    # Whole iterations of full batches, and the single steps of mixed ones.
    assert made.count("graph") == (5 if "graph" in engine else 0)


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize("start", [True, False])
def test_episodes_take_the_path_of_eager(engine, device, start):
    def prepare(u: Tensor, pair: Any) -> Any:
        (x, y), (a, b, _) = pair
        return (x @ u).tanh(), y, (a @ u).tanh(), b

    def begin(v: Tensor, prepared: Any) -> None:
        v.copy_(prepared[2][:3].T.mean(1, keepdim=True).expand(5, 3))

    def solved(engine: str) -> tuple[Solution, list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        v = torch.zeros(5, 3, dtype=torch.float64, device=device, requires_grad=True)
        problem = Problem(
            lambda u, v, p: cross_entropy(p[0] @ v, p[1]),
            lambda u, v, p: cross_entropy(p[2] @ v, p[3]) + 0.1 * v.square().sum(),
            prepare=prepare,
            start_lower=begin if start else None,
        )
        data = batches(ONE_BATCH, rows=False, seed=0), batches(ONE_BATCH, rows=True, seed=1)
        method = Penalty(lower_steps=3, warm_up=0.0)
        solution = solve(problem, method, u, v, data, max_steps=5, seed=0, engine=engine, hypergradient=False)
        return solution, [u.detach(), v.detach()]

    found = solved(engine)
    assert found[0].engine == engine
    same(found, solved("eager"))


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize("warm_up", [0.0, 0.25, 0.75])
def test_resumed_run_is_that_of_the_straight_one_bit_for_bit(engine, device, warm_up, tmp_path):
    def solved(folder: Any, *, resume: bool = False, limit: int | None = None) -> list[Tensor]:
        solving = {"checkpoint": folder, "every": 3, "resume": resume}
        if limit is not None:
            solving |= {"callbacks": [Ender(limit)], "log_every": 1}
        options = {"net": {"dropout": True}, "warm_up": warm_up, "lower_steps": 1, "solving": solving}
        return run(engine, device, sizes=PARTIAL, steps=8, **options)[1]

    straight = solved(tmp_path / "straight")
    solved(tmp_path / "broken", limit=4)
    for x, y in zip(solved(tmp_path / "broken", resume=True), straight, strict=True):
        assert torch.equal(x, y)


def noise(x: Tensor) -> Tensor:
    return x + 0.3 * torch.randn_like(x)


def shift(x: Tensor) -> Tensor:
    """A random shift of every example, as of a crop: by indices, since a slice would be read on the host."""
    by = torch.randint(x.shape[1], (len(x), 1), device=x.device)
    return x.gather(1, (torch.arange(x.shape[1], device=x.device) + by) % x.shape[1])


def flip(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1, device=x.device) < 0.5, x.flip(1), x)


def augmented(change: Callable[[Tensor], Tensor]) -> Problem:
    return Problem(
        lambda u, v, batch: upper(u, v, (change(batch[0]), *batch[1:])),
        lambda u, v, batch: lower(u, v, (change(batch[0]), *batch[1:])),
    )


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize("change", [noise, shift, flip])
def test_augmentation_by_torch_takes_the_path_of_eager(engine, device, change):
    found = run(engine, device, augmented(change), sizes=PARTIAL, warm_up=0.3)
    assert found[0].engine == engine
    same(found, run("eager", device, augmented(change), sizes=PARTIAL, warm_up=0.3))


@pytest.mark.parametrize(("engine", "device"), [("eager", "recorded"), *ENGINES], indirect=["device"])
@pytest.mark.parametrize("whole", [0, 10**6], ids=["steps", "whole"])
def test_augmentation_by_torch_is_drawn_anew_in_every_step(engine, device, whole, monkeypatch):
    """With one batch, and u and v that stay, g changes by the draws alone."""
    monkeypatch.setattr("bilevel.engines.engine.WHOLE", whole)
    still = partial(torch.optim.Adam, lr=0.0)
    options = {"sizes": [8], "warm_up": 0.0, "lower_optimizer": still, "upper_optimizer": still}
    plain = run(engine, device, **options)[0].history["lower"]
    drawn = run(engine, device, augmented(noise), **options)[0].history["lower"]
    assert plain == pytest.approx([plain[0]] * 7, rel=1e-12)
    distances = [abs(a - b) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert len(distances) == 21
    assert min(distances) > 1e-6


class Ender(Callback):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def log(self, run: Any) -> bool:
        return run.step >= self.limit


def reading(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return lower(u, v, batch) * (1.0 if batch[0].sum().item() > -1e9 else 2.0)


def reading_after_a_draw(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return reading(u, v, (noise(batch[0]), *batch[1:]))


def drawing(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return lower(u, v, batch) * (1 + 0.1 * float(np.random.rand()))


def drawing_plainly(u: Any, v: nn.Module, batch: Any) -> Tensor:
    return lower(u, v, batch) * (1 + 0.1 * random.random())


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize(
    ("objective", "options", "solving", "words"),
    [
        (reading, {}, {}, "reads a value on the host"),
        (reading_after_a_draw, {}, {}, "reads a value on the host"),
        (drawing, {}, {}, "numpy's generator"),
        (drawing_plainly, {}, {}, "numpy's generator"),
        (lower, {"curvature": "difference"}, {}, "curvature='difference'"),
        (lower, {}, {"accumulate": 2}, "accumulate=2"),
        (lower, {"lower_optimizer": partial(torch.optim.NAdam, lr=0.01)}, {}, "lower_optimizer is NAdam"),
        (lower, {"lower_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)}, {}, "is SGD"),
    ],
    ids=["host-read", "host-read-after-a-draw", "numpy", "python", "difference", "accumulate", "nadam", "dampening"],
)
def test_what_cannot_be_recorded_runs_eagerly_with_one_warning(engine, device, objective, options, solving, words):
    problem, found = Problem(upper, objective), []
    for name in (engine, "eager"):
        np.random.seed(0)
        random.seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(run(name, device, problem, solving=solving, **options))
        told = [str(w.message) for w in caught if issubclass(w.category, BilevelWarning)]
        if name != "eager":
            assert sum(words in text for text in told) == len(told) >= 1
            assert len(told) == 1
        assert found[-1][0].engine == "eager"
    if objective not in (drawing, drawing_plainly):
        for x, y in zip(found[0][1], found[1][1], strict=True):
            assert torch.equal(x, y)


class Plain:
    """What an engine asks of a run, where nothing is recorded."""

    def __init__(self, device: str, obstacle: str = "") -> None:
        self.derivatives: Any = type("D", (), {"v": type("V", (), {"device": torch.device(device), "size": 1000})})
        self._obstacle = obstacle

    def live(self) -> list[Tensor]:
        return []

    def optimizers(self) -> list[Any]:
        return []

    def obstacle(self) -> str:
        return self._obstacle


@pytest.mark.parametrize(
    ("device", "gradients", "obstacle", "chosen"),
    [
        ("cpu", COMPILE_FROM["cpu"] - 1, "", "eager"),
        ("cpu", COMPILE_FROM["cpu"], "", "compile"),
        ("cuda", 10, "", "graph"),
        ("cuda", COMPILE_FROM["cuda"], "", "compile+graph"),
        ("cuda", COMPILE_FROM["cuda"], "no.", "eager"),
        ("mps", 10**9, "", "eager"),
    ],
)
def test_auto_picks_by_device_and_length_in_silence(device, gradients, obstacle, chosen):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engines("auto", Plain(device, obstacle), gradients=gradients).name == chosen


def test_unknown_engine_and_graph_without_a_gpu_are_refused():
    with pytest.raises(OptionError, match="engine must be one of 'auto', 'eager'"):
        run("fast", "cpu")
    for engine in ("graph", "compile+graph"):
        with pytest.raises(OptionError, match="needs u and v on a CUDA device"):
            run(engine, "cpu")


def test_deterministic_mode_refuses_an_engine():
    u, v = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    problem = Problem(lambda u, v, _: (u * v).sum(), lambda u, v, _: ((u - v) ** 2).sum())
    with pytest.raises(OptionError, match="not used in deterministic mode"):
        solve(problem, Penalty(), u, v, max_steps=2, engine="compile")


@COMPILER
def test_compiled_run_takes_the_path_of_eager_and_variables_keep_their_identity():
    data = batches(ONE_BATCH, rows=False, seed=0), batches(ONE_BATCH, rows=True, seed=1)
    found = []
    for engine in ("eager", "compile"):
        v, u = network(dropout=True), Rows(24, dtype=torch.float64)
        held = [(p.data_ptr(), p.stride()) for p in v.parameters()]
        method = Penalty(lower_steps=2, warm_up=0.0)
        solution = solve(
            Problem(upper, lower), method, u, v, data, max_steps=5, seed=0, engine=engine, hypergradient=False
        )
        assert solution.engine == engine
        assert [(p.data_ptr(), p.stride()) for p in v.parameters()] == held
        assert all(p.requires_grad and p.grad is None for p in v.parameters())
        found.append((solution, [*(p.detach() for p in v.parameters()), u.values]))
    same(*found)


def pictures(device: str, *, precision: torch.dtype) -> tuple[list[Any], list[Any]]:
    draw = torch.Generator().manual_seed(2)

    def batch(start: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(6, 2, 8, 8, generator=draw, dtype=precision).to(device, memory_format=torch.channels_last)
        return x, torch.randint(3, (6,), generator=draw).to(device), torch.arange(start, start + 6, device=device)

    return [batch(0)[:2] for _ in range(2)], [batch(0), batch(6)]


@pytest.mark.parametrize(("engine", "device"), ENGINES, indirect=["device"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_channels_last_convolutions_and_fused_adam_take_the_path_of_eager(engine, device, precision):
    """Gradients of such weights come in either layout; a fused optimizer reads them as if in the parameter's own."""
    dtype = torch.float64 if precision is None else torch.float32
    adam = partial(torch.optim.Adam, lr=0.01, fused=True)
    found = []
    for name in (engine, "eager"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            v = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Softplus(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        v = v.to(device, dtype).to(memory_format=torch.channels_last)
        u = Rows(12, dtype=dtype, device=device)
        method = Penalty(lower_steps=1, warm_up=0.0, lower_optimizer=adam, gamma=0.1, lam=1.0)
        solution = solve(
            Problem(upper, lower),
            method,
            u,
            v,
            pictures(device, precision=dtype),
            max_steps=4,
            seed=0,
            engine=name,
            precision=precision,
            hypergradient=False,
        )
        assert solution.engine == name
        assert v[2].weight.is_contiguous(memory_format=torch.channels_last)
        found.append([*(p.detach().double() for p in v.parameters()), u.values.double()])
    for x, y in zip(*found, strict=True):
        # In bfloat16 a product is good to one part in 256, and Adam's first steps amplify a gradient near zero. The
        # fused kernel of a GPU corrects its moments in float32.
        tolerance = {("cpu", None): 1e-9, ("cuda", None): 1e-5}.get((device, precision), 0.02)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


def test_auto_compiles_a_shorter_run_of_a_large_v_too():
    for size, chosen in ((1000, "eager"), (10**7, "compile")):
        host = Plain("cpu")
        host.derivatives.v.size = size
        assert Engines("auto", host, gradients=5000).name == chosen


@pytest.mark.parametrize(("engine", "device"), ENGINES[:1], indirect=["device"])
def test_batch_of_what_a_record_would_freeze_runs_eagerly(engine, device):
    def kept(u: Any, v: nn.Module, batch: Any) -> Tensor:
        return lower(u, v, batch[:3]) * float(batch[3].mean())

    data = batches(ONE_BATCH, rows=False, seed=0), [(*b, np.ones(2)) for b in batches(ONE_BATCH, rows=True, seed=1)]
    with pytest.warns(BilevelWarning, match="a batch holds ndarray"):
        solution = solve(
            Problem(upper, kept),
            Penalty(),
            Rows(24, dtype=torch.float64),
            network(),
            data,
            max_steps=3,
            seed=0,
            engine=engine,
            hypergradient=False,
        )
    assert solution.engine == "eager"


@pytest.mark.parametrize(("engine", "device"), ENGINES[:1], indirect=["device"])
def test_sparse_batch_runs_eagerly(engine, device):
    def kept(u: Any, v: nn.Module, batch: Any) -> Tensor:
        return lower(u, v, (batch[0].to_dense(), *batch[1:]))

    data = (
        batches(ONE_BATCH, rows=False, seed=0),
        [(x.to_sparse(), *rest) for x, *rest in batches(ONE_BATCH, rows=True, seed=1)],
    )
    with pytest.warns(BilevelWarning, match=r"a batch holds a tensor of layout torch.sparse_coo") as caught:
        solution = solve(
            Problem(upper, kept),
            Penalty(),
            Rows(24, dtype=torch.float64),
            network(),
            data,
            max_steps=3,
            seed=0,
            engine=engine,
            hypergradient=False,
        )
    assert len(caught) == 1
    assert solution.engine == "eager"


@pytest.mark.parametrize(("engine", "device"), ENGINES[:1], indirect=["device"])
def test_records_are_limited_in_number_with_one_warning(engine, device, monkeypatch):
    monkeypatch.setattr("bilevel.engines.recording.MOST_UNITS", 3)
    with pytest.warns(BilevelWarning, match="has recorded 3 steps") as caught:
        found = run(engine, device, sizes=[3, 4, 5, 6], warm_up=0.0, steps=12)
    assert len(caught) == 1
    same(found, run("eager", device, sizes=[3, 4, 5, 6], warm_up=0.0, steps=12))


@pytest.mark.parametrize("steps", [4, 40])
def test_run_resumed_over_another_horizon_measures_gamma_once_and_does_not_warm_up_again(steps, tmp_path):
    short, options = {"checkpoint": tmp_path, "callbacks": [Ender(3)], "log_every": 1}, {"warm_up": 0.25, "advances": 0}
    first = run("eager", "cpu", steps=8, solving=short, **options)[0].history
    assert first["upper_rate"][2] > 0
    again = {"checkpoint": tmp_path, "resume": True}
    with pytest.warns(BilevelWarning, match="max_steps"):
        second = run("eager", "cpu", steps=steps, solving=again, **options)[0].history
    assert all(rate > 0 for rate in second["upper_rate"][2:])
    assert second["gamma"][2:] == [first["gamma"][2]] * (steps - 2)
