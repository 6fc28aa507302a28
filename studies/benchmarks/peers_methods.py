"""Hyper-cleaning by each library, on one task: every method is a function of the task, a setting and a watch.

    lower g: cross-entropy on a batch of noisy examples, weighted by sigmoid(u) and divided by the sum of the weights
    upper f: cross-entropy on a batch of trusted examples

A method moves u until `watch.look(u)` says that the budget of CPU seconds is spent. Peers' u is one tensor under
`torch.optim.Adam`, as their users write it; ours is `Rows`.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BATCH = 100
NOISY = 5000
TRIAL = 200
"""Steps of a short run before the clock starts, which measures the time of a step."""
MODELS = {"linear": (), "mlp": (300,)}


# -- the task ----------------------------------------------------------------------------------------------------------


class Batches:
    """Batches of the same rows' tensors, in a new order at every pass."""

    def __init__(self, *tensors: Tensor, size: int = BATCH) -> None:
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        count = len(self.tensors[0])
        order = torch.randperm(count)
        for i in range(0, count - self.size + 1, self.size):
            rows = order[i : i + self.size]
            yield tuple(t[rows] for t in self.tensors)

    def forever(self) -> Iterator[tuple[Tensor, ...]]:
        return itertools.chain.from_iterable(self for _ in itertools.count())


@dataclass
class Task:
    """MNIST with half of 5,000 labels wrong, and a trusted set; a fifth of it is held out from every method."""

    model: str
    seed: int
    x: Tensor
    y: Tensor
    wrong: Tensor
    x_trusted: Tensor
    y_trusted: Tensor
    x_held: Tensor
    y_held: Tensor
    x_test: Tensor
    y_test: Tensor

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        sizes = [784, *MODELS[self.model], 10]
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def noisy(self) -> Batches:
        return Batches(self.x, self.y, torch.arange(len(self.x)))

    def trusted(self) -> Batches:
        return Batches(self.x_trusted, self.y_trusted)


def read_mnist(folder: Path) -> tuple[np.ndarray, ...]:
    def read(name: str, offset: int) -> np.ndarray:
        with gzip.open(folder / f"{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=offset)

    return (
        read("train-images-idx3-ubyte", 16).reshape(-1, 784),
        read("train-labels-idx1-ubyte", 8),
        read("t10k-images-idx3-ubyte", 16).reshape(-1, 784),
        read("t10k-labels-idx1-ubyte", 8),
    )


def make_task(mnist: tuple[np.ndarray, ...], model: str, trusted: int, seed: int, noise: float = 0.5) -> Task:
    x, y, x_test, y_test = mnist
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))[: NOISY + trusted]
    noisy, held, kept = np.split(order, [NOISY, NOISY + trusted // 5])
    wrong = np.zeros(NOISY, bool)
    wrong[rng.permutation(NOISY)[: round(noise * NOISY)]] = True
    labels = np.where(wrong, (y[noisy] + rng.integers(1, 10, NOISY)) % 10, y[noisy])
    image: Callable[[np.ndarray], Tensor] = lambda a: torch.as_tensor(a.astype("float32") / 255)  # noqa: E731
    label: Callable[[np.ndarray], Tensor] = lambda a: torch.as_tensor(a.astype("int64"))  # noqa: E731
    return Task(
        model,
        seed,
        image(x[noisy]),
        label(labels),
        torch.as_tensor(wrong),
        image(x[kept]),
        label(y[kept]),
        image(x[held]),
        label(y[held]),
        image(x_test),
        label(y_test),
    )


def weighted(logits: Tensor, y: Tensor, u: Tensor) -> Tensor:
    w = torch.sigmoid(u)
    return (w * F.cross_entropy(logits, y, reduction="none")).sum() / w.sum()


def detection(u: Tensor, wrong: Tensor) -> tuple[float, float]:
    """F1 of "importance < 1/2 means a wrong label", and the AUC of the importances."""
    u = u.detach()
    if not bool(torch.isfinite(u).all()):
        return 0.0, 0.5
    found = u < 0
    hit = int((found & wrong).sum())
    f1 = 2 * hit / max(1, int(found.sum()) + int(wrong.sum()))
    # Mann-Whitney, ties counted half
    _, place, many = torch.unique(u, return_inverse=True, return_counts=True)
    rank = (many.cumsum(0).double() - (many.double() - 1) / 2)[place]
    right = ~wrong
    n, m = int(right.sum()), int(wrong.sum())
    return f1, float((rank[right].sum() - n * (n + 1) / 2) / (n * m))


@dataclass
class Watch:
    """Counts the CPU seconds of a run without its measurements, which are made every `every` seconds."""

    wrong: Tensor
    budget: float
    every: float = 0.1
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    steps: int = 0
    most_steps: int | None = None
    _started: float = 0.0
    _next: float = 0.0

    def start(self) -> None:
        self._started, self._next = time.process_time(), 0.0

    def seconds(self) -> float:
        return time.process_time() - self._started

    def look(self, u: Tensor, *, step: bool = True) -> bool:
        """Note where u is; whether the run is to end."""
        now = time.process_time()
        spent = now - self._started
        self.steps += step
        done = spent >= self.budget or (self.most_steps is not None and self.steps >= self.most_steps)
        if spent >= self._next or done:
            self.curve.append((round(spent, 3), *(round(a, 4) for a in detection(u, self.wrong))))
            self._next = spent + self.every
            self._started += time.process_time() - now
        return done


@dataclass(frozen=True)
class Setting:
    upper: float = 0.1
    lower: float = 1e-3
    steps: int = 5
    options: dict[str, Any] = field(default_factory=dict)


# -- ours --------------------------------------------------------------------------------------------------------------


def penalty(task: Task, setting: Setting, watch: Watch) -> Tensor:
    """`solve` with `Penalty`. `max_steps` fills the budget; a short run before the clock measures a step."""
    from bilevel import Callback, Penalty, Problem, Rows, solve

    options = dict(setting.options)
    if options.pop("rates", True):
        options["upper_optimizer"] = partial(torch.optim.Adam, lr=setting.upper)
        options["lower_optimizer"] = partial(torch.optim.Adam, lr=setting.lower)
        options["lower_steps"] = setting.steps
    elif setting.steps != 5:
        options["lower_steps"] = setting.steps
    for level in ("upper", "lower"):
        if (rate := options.pop(f"{level}_rate", None)) is not None:
            options[f"{level}_optimizer"] = partial(torch.optim.Adam, lr=rate)
    method, engine = Penalty(**({"cotangent": "same", "decay": "linear"} | options)), {}

    def upper(u: Rows, v: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(v(batch[0]), batch[1])

    def lower(u: Rows, v: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return weighted(v(batch[0]), batch[1], u[batch[2]])

    class Look(Callback):
        def __init__(self, u: Rows) -> None:
            self.u = u

        def log(self, run: Any) -> bool:
            watch.steps = run.step
            return watch.look(self.u.values, step=False) and watch.most_steps is None

    class Clock(Callback):
        def start(self, run: Any) -> None:
            self.began = time.process_time()

        def log(self, run: Any) -> None:
            self.seconds = time.process_time() - self.began

    def run(steps: int, every: int, callback: Callback | None = None) -> Rows:
        u, v = Rows(len(task.x)), task.network()
        callbacks = [Look(u) if callback is None else callback]
        solve(
            Problem(upper, lower),
            method,
            u,
            v,
            (task.trusted(), task.noisy()),
            max_steps=steps,
            seed=task.seed,
            log_every=every,
            hypergradient=False,
            callbacks=callbacks,
            **engine,
        )
        return u

    if watch.most_steps is not None:
        watch.start()
        return run(watch.most_steps, watch.most_steps).values
    run(2, 2, Clock())  # costs that are paid once
    clock, started = Clock(), time.process_time()
    run(TRIAL, TRIAL, clock)
    around = time.process_time() - started - clock.seconds  # the first evaluations, and the certificate
    cost = clock.seconds / TRIAL
    steps = int(0.97 * (watch.budget - around) / cost)
    watch.start()
    u = run(steps, max(1, round(watch.every / cost)))
    watch.look(u.values, step=False)
    return u.values


# -- by hand -----------------------------------------------------------------------------------------------------------


def value_penalty(task: Task, setting: Setting, watch: Watch) -> Tensor:
    """A first-order penalty on g(u, v) - g(u, z): z descends g, v descends f + price * g, u the difference."""
    price = setting.options.get("price", 0.2)
    v, z = task.network(), task.network()
    u = torch.zeros(len(task.x), requires_grad=True)
    adam = partial(torch.optim.Adam, lr=setting.lower)
    move_v, move_z, move_u = adam(v.parameters()), adam(z.parameters()), torch.optim.Adam([u], lr=setting.upper)
    noisy, trusted = task.noisy().forever(), task.trusted().forever()
    watch.start()
    for k in itertools.count(1):
        (x, y, row), (a, b) = next(noisy), next(trusted)
        losses = [F.cross_entropy(m(x), y, reduction="none") for m in (v, z)]
        w = torch.sigmoid(u[row])
        share = (w / w.sum()).detach()
        move_v.zero_grad()
        move_z.zero_grad()
        (F.cross_entropy(v(a), b) + price * (share * losses[0]).sum() + (share * losses[1]).sum()).backward()
        move_v.step()
        move_z.step()
        if k % setting.steps == 0:
            (u.grad,) = torch.autograd.grad((w * (losses[0] - losses[1]).detach()).sum() / w.sum(), u)
            move_u.step()
            if watch.look(u):
                return u
    raise AssertionError


# -- peers -------------------------------------------------------------------------------------------------------------


def unrolled_higher(task: Task, setting: Setting, watch: Watch) -> Tensor:
    """higher: T steps of its differentiable Adam, then one step on u; weights and moments continue from there."""
    import higher

    model = task.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lower)
    u = torch.zeros(len(task.x), requires_grad=True)
    move_u = torch.optim.Adam([u], lr=setting.upper)
    noisy, trusted = task.noisy().forever(), task.trusted().forever()
    watch.start()
    while True:
        with higher.innerloop_ctx(model, optimizer, copy_initial_weights=True) as (fast, inner):
            for _ in range(setting.steps):
                x, y, row = next(noisy)
                inner.step(weighted(fast(x), y, u[row]))
            x, y = next(trusted)
            (u.grad,) = torch.autograd.grad(F.cross_entropy(fast(x), y), u)
            move_u.step()
            with torch.no_grad():
                for i, (p, q) in enumerate(zip(model.parameters(), fast.parameters(), strict=True)):
                    p.copy_(q)
                    held = inner.state[0][i]
                    optimizer.state[p] = {k: a.detach() if isinstance(a, Tensor) else a for k, a in held.items()}
        if watch.look(u):
            return u


def unrolled_torchopt(task: Task, setting: Setting, watch: Watch) -> Tensor:
    """torchopt: T steps of `MetaAdam(eps_root=1e-12)`, then one step on u."""
    import torchopt

    model = task.network()
    inner = torchopt.MetaAdam(model, lr=setting.lower, eps_root=1e-12)
    u = torch.zeros(len(task.x), requires_grad=True)
    move_u = torch.optim.Adam([u], lr=setting.upper)
    noisy, trusted = task.noisy().forever(), task.trusted().forever()
    watch.start()
    while True:
        for _ in range(setting.steps):
            x, y, row = next(noisy)
            inner.step(weighted(model(x), y, u[row]))
        x, y = next(trusted)
        (u.grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), u)
        move_u.step()
        torchopt.stop_gradient(model)
        torchopt.stop_gradient(inner)
        if watch.look(u):
            return u


def betty(task: Task, setting: Setting, watch: Watch, *, kind: str, **config: Any) -> Tensor:
    """Betty: `ImplicitProblem` at both levels, `unroll_steps=T`."""
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.logging import logger_base
    from betty.problems import ImplicitProblem

    logger_base.get_logger().setLevel(logging.WARNING)

    class Importance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Parameter(torch.zeros(len(task.x)))

        def forward(self, row: Tensor) -> Tensor:
            return self.u[row]

    class Upper(ImplicitProblem):
        def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
            return F.cross_entropy(self.inner(batch[0]), batch[1])

    class Lower(ImplicitProblem):
        def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
            return weighted(self.inner_call(batch[0]), batch[1], self.outer(batch[2]))

        def inner_call(self, x: Tensor) -> Tensor:
            return self.module(x)

    importance, model = Importance(), task.network()
    upper = Upper(
        "outer",
        Config(retain_graph=True),
        importance,
        torch.optim.Adam(importance.parameters(), lr=setting.upper),
        train_data_loader=task.trusted(),
    )
    lower = Lower(
        "inner",
        Config(type=kind, unroll_steps=setting.steps, **config),
        model,
        torch.optim.Adam(model.parameters(), lr=setting.lower),
        train_data_loader=task.noisy(),
    )
    watch.start()
    engine = Engine(
        [upper, lower], EngineConfig(strategy="default"), {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
    )
    engine.train()
    while True:
        for _ in range(setting.steps):
            engine.global_step += 1
            engine.train_step()
        if watch.look(importance.u):
            return importance.u


LOSSES = "peers_losses"
"""BOAT imports its losses by name; this module holds them while it runs."""


def boat(task: Task, setting: Setting, watch: Watch, *, kind: str) -> Tensor:
    """BOAT: `run_iter`, one pair of batches an iteration, which is all that its interface takes."""
    from boat_torch import Problem

    def lower(batch: dict[str, Tensor], importance: nn.Module, model: nn.Module, **given: Any) -> Tensor:
        return weighted(model(batch["x"], **given), batch["y"], importance.u[batch["row"]])

    def upper(batch: dict[str, Tensor], importance: nn.Module, model: nn.Module, **given: Any) -> Tensor:
        # BOAT differentiates f in u too; zero times u keeps u in its graph.
        return F.cross_entropy(model(batch["x"], **given), batch["y"]) + 0 * importance.u.sum()

    module = types.ModuleType(LOSSES)
    module.lower, module.upper = lower, upper  # type: ignore[attr-defined]
    sys.modules[LOSSES] = module
    importance, model = nn.Module(), task.network()
    importance.u = nn.Parameter(torch.zeros(len(task.x)))
    unrolled = kind == "RAD"
    inner, outer = (
        torch.optim.Adam(model.parameters(), lr=setting.lower),
        torch.optim.Adam(importance.parameters(), lr=setting.upper),
    )
    sgd = setting.options.get("sgd", 0.1)
    config = {
        "fo_op": None if unrolled else kind,
        "gm_op": ["NGD"] if unrolled else None,
        "na_op": ["RAD"] if unrolled else None,
        "lower_level_model": model,
        "upper_level_model": importance,
        "lower_level_var": list(model.parameters()),
        "upper_level_var": list(importance.parameters()),
        "lower_level_opt": inner,
        "upper_level_opt": outer,
        "lower_iters": setting.steps,
        "device": "cpu",
        "fo_ol_batch_input": False,
        "accumulate_grad": False,
        "copy_last_param": True,
        "return_grad": False,
        "loss_log_path": os.devnull,
        "RGT": {"truncate_iter": 0},
        "GDA": {"alpha_init": 0.0, "alpha_decay": 0.9},
        "FOA": {},
        "PTT": {"truncate_iter": 0},
        "PGDO": {
            "y_hat_lr": sgd,
            "gamma_init": 0.2,
            "gamma_max": 0.2,
            "gamma_argmax_step": 1,
            "update_y_ahead": False,
            "penalty": "difference",
        },
        "VFO": {"y_hat_lr": sgd, "eta": 0.5, "u1": 0.1},
        "MESO": {"eta": sgd, "gamma_1": 0.1, "c0": 0.5, "y_hat_lr": sgd},
    }
    losses = {f"{a}_level_loss": {"function": f"{LOSSES}.{a}", "params": {}} for a in ("lower", "upper")}
    problem = Problem(config, losses).build_ll_solver().build_ul_solver()
    # It rewrites a file with all losses so far at every iteration, which would cost more than the method.
    problem.save_losses = lambda **_: None
    noisy, trusted = task.noisy().forever(), task.trusted().forever()
    watch.start()
    for k in itertools.count():
        (x, y, row), (a, b) = next(noisy), next(trusted)
        problem.run_iter({"x": x, "y": y, "row": row}, {"x": a, "y": b}, k)
        problem._log_results.clear()
        if watch.look(importance.u):
            return importance.u
    raise AssertionError


# -- the end, the same for all -----------------------------------------------------------------------------------------


def final_training(task: Task, importance: Tensor | None, trusted: bool = True, steps: int = 1500) -> dict[str, float]:
    """A new network on the noisy examples weighted by their importances, and the trusted ones with weight 1."""
    parts = [] if importance is None else [(task.x, task.y, importance.detach().float())]
    if trusted:
        parts.append((task.x_trusted, task.y_trusted, torch.ones(len(task.x_trusted))))
    model = task.network()
    torch.manual_seed(task.seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = Batches(*(torch.cat(same) for same in zip(*parts, strict=True))).forever()
    for k in range(steps):
        x, y, w = next(batches)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - k / steps)
        optimizer.zero_grad()
        ((w * F.cross_entropy(model(x), y, reduction="none")).sum() / w.sum().clamp_min(1e-6)).backward()
        optimizer.step()
    with torch.no_grad():
        test, held = model(task.x_test), model(task.x_held)
        return {
            "accuracy": float((test.argmax(1) == task.y_test).double().mean()),
            "held_accuracy": float((held.argmax(1) == task.y_held).double().mean()),
            "held_loss": float(F.cross_entropy(held, task.y_held)),
        }


METHODS: dict[str, Callable[[Task, Setting, Watch], Tensor]] = {
    "bilevel": penalty,
    "value penalty": value_penalty,
    "higher": unrolled_higher,
    "torchopt": unrolled_torchopt,
    "betty darts": partial(betty, kind="darts"),
    "betty sama": partial(betty, kind="sama"),
    "betty neumann": partial(betty, kind="neumann", neumann_iterations=5, neumann_alpha=0.1),
    "betty cg": partial(betty, kind="cg", cg_iterations=1),
    "boat pgdo": partial(boat, kind="PGDO"),
    "boat vfo": partial(boat, kind="VFO"),
    "boat meso": partial(boat, kind="MESO"),
    "boat rad": partial(boat, kind="RAD"),
}


def detected(u: Tensor, task: Task) -> dict[str, float]:
    f1, auc = detection(u, task.wrong)
    return {"f1": f1, "auc": auc}


def measure(task: Task, method: str, setting: Setting, budget: float) -> dict[str, Any]:
    """One run and its final training."""
    torch.manual_seed(task.seed)
    watch = Watch(task.wrong, budget)
    u = METHODS[method](task, setting, watch).detach()
    seconds = watch.curve[-1][0]
    finite = bool(torch.isfinite(u).all())
    found = final_training(task, torch.sigmoid(u) if finite else torch.full_like(u, 0.5))
    return (
        found
        | detected(u, task)
        | {
            "seconds": seconds,
            "steps": watch.steps,
            "finite": finite,
            "curve": watch.curve,
        }
    )


def references(names: Sequence[str], task: Task) -> Iterator[tuple[str, dict[str, float]]]:
    ones = torch.ones(len(task.x))
    runs = {
        "trusted only": (None, True),
        "plain": (ones, True),
        "clean labels known": ((~task.wrong).float(), True),
    }
    for name in names:
        importance, trusted = runs[name]
        yield name, final_training(task, importance, trusted)
