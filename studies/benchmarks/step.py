"""The time of one upper iteration against the first-order floor: the tables of docs/performance.md.

    python studies/benchmarks/step.py                          one CPU thread, all models, T = 1, 2, 5, 20
    python studies/benchmarks/step.py --device cuda            float32, tf32 and bf16
    python studies/benchmarks/step.py --device cuda --profile  where the time of an iteration goes
    python studies/benchmarks/step.py --precision              how far bf16 (on CUDA also tf32) turns the gradient
    python studies/benchmarks/step.py --write                  the page, from the results so far

Results go to studies/results/step.json as they come; one that is there already is not measured again (--again does),
and engines that a row lacks are added to it. `--merge FILE` takes over results that were written elsewhere with --out.

The floor is what any first-order method has to pay: the same forward and backward passes of f and g, T of them in v and
one in v and u, with the same optimizers, in plain torch. A step of `solve` is timed as `solve` makes it: the state of
the method, stepped. Subjects take turns, round by round; a ratio is the median over rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from bilevel import BilevelWarning, OptionError, Penalty, Problem, Rows
from bilevel.applications import networks as models
from bilevel.batches.sources import Sources
from bilevel.derivatives.mixed_precision import reduced
from bilevel.derivatives.penalised_objective import PenalisedObjective
from bilevel.derivatives.prices import Gradients, Prices
from bilevel.measures.problem_check import variables
from bilevel.methods.base import MethodState, RunContext
from bilevel.optim.variable_optimizer import RowAdam
from bilevel.problem.variables import Variable

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "studies" / "results" / "step.json"
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (models.linear, 100),
    "mlp": (models.mlp, 100),
    "cnn": (models.mnist_cnn, 200),
}
"""The builder, and the size of each of the two batches."""
STEPS = (1, 2, 5, 20)
CURVATURES = ("auto", "exact", "gram", "difference")
ENGINES = {"cpu": ("eager", "compile"), "cuda": ("eager", "graph", "compile+graph")}
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "tf32", "bf16")}
POOL = 8
"""Batches of each source; they are drawn in turn, so that no step sees the batch of the last one."""
ENOUGH = 0.3
"""Seconds that a subject runs in each round, at the least one iteration."""


def upper(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(v(batch[0]), batch[1])


def lower(u: Rows, v: nn.Module, batch: Any) -> Tensor:
    x, y, row = batch
    w = torch.sigmoid(u[row])
    return (w * cross_entropy(v(x), y, reduction="none")).sum() / w.sum()


def started(
    problem: Problem, method: Penalty, u: Any, v: Any, data: Any, *, engine: str = "eager", precision: str | None = None
) -> MethodState:
    """The state of a run, as `solve` makes it."""
    upper_variable, lower_variable = variables(problem, u, v)
    given = {
        "problem": problem,
        "u": upper_variable,
        "v": lower_variable,
        "sources": Sources(data, 0, lower_variable.device),
        "max_steps": 10**6,
        "tolerance": None,
        "accumulate": 1,
        "generator": torch.Generator().manual_seed(0),
        "engine": engine,
        "precision": precision,
    }
    known = {field.name for field in dataclasses.fields(RunContext)}
    return method.init(RunContext(**{name: value for name, value in given.items() if name in known}))


def penalty(lower_steps: int, curvature: str) -> Penalty:
    """Both levels move from the first step on. The Gram form is timed without multipliers: there it saves most."""
    options = {"multipliers": False} if curvature == "gram" else {}
    return Penalty(lower_steps=lower_steps, curvature=curvature, warm_up=0.0, **options)


# -- the timed steps -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Work:
    """A model, its batches and its importances; every subject has its own copy."""

    model: nn.Module
    data: tuple[list[Any], list[Any]]
    rows: int
    device: torch.device
    precision: str

    @classmethod
    def make(cls, name: str, device: torch.device, precision: str, channels_last: bool) -> Work:
        build, size = MODELS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build().to(device)
        draw = torch.Generator().manual_seed(1)
        order = torch.channels_last if channels_last else torch.contiguous_format
        model = model.to(memory_format=order) if channels_last else model

        def batch(i: int) -> tuple[Tensor, Tensor, Tensor]:
            x = torch.randn(size, 1, 28, 28, generator=draw).to(device, memory_format=order)
            y = torch.randint(10, (size,), generator=draw).to(device)
            return x, y, torch.arange(i * size, (i + 1) * size, device=device)

        data = [batch(i)[:2] for i in range(POOL)], [batch(i) for i in range(POOL)]
        return cls(model, data, POOL * size, device, precision)

    @property
    def autocast(self) -> Any:
        return "bf16" if self.precision == "bf16" else None

    def variables(self) -> tuple[Rows, nn.Module]:
        return Rows(self.rows, device=self.device), copy.deepcopy(self.model)


class Floor:
    """T gradients of f + g in v, one in v and u, and the optimizers' steps: the last moves both, as ours does."""

    def __init__(self, work: Work, lower_steps: int, *, compiled: bool = False) -> None:
        self.work, self.lower_steps = work, lower_steps
        self.u, self.v = work.variables()
        self.leaves = list(self.v.parameters())
        # The optimizer as the method under test sets it up, so that both pay the same for it.
        model = started(Problem(upper, lower), penalty(1, "exact"), *work.variables(), work.data)
        group = model.lower.optimizer.param_groups[0]  # type: ignore[attr-defined]
        options = {name: group[name] for name in ("fused", "foreach", "capturable") if group.get(name)}
        self.optimizer = torch.optim.Adam(self.leaves, lr=1e-3, **options)
        self.rows = RowAdam(self.u)
        self.rate = torch.full((), 1e-3, device=work.device)
        self.value = torch.compile(self._value) if compiled else self._value
        self.move = torch.compile(self.optimizer.step) if compiled else self.optimizer.step
        self.turn = 0

    def _value(self, importance: Tensor, upper_batch: Any, lower_batch: Any) -> Tensor:
        with reduced(self.work.autocast, self.work.device):
            x, y, _ = lower_batch
            w = torch.sigmoid(importance)
            g = (w * cross_entropy(self.v(x), y, reduction="none")).sum() / w.sum()
            return upper(self.u, self.v, upper_batch).float() + g.float()

    def draw(self) -> list[Any]:
        self.turn += 1
        return [source[self.turn % POOL] for source in self.work.data]

    def step(self, _: int) -> None:
        self.iterate([self.draw() for _ in range(self.lower_steps + 1)])

    def iterate(self, draws: Sequence[Any]) -> None:
        for pair in draws[:-1]:
            value = self.value(self.u.values[pair[1][2]], *pair)
            self._set(torch.autograd.grad(value, self.leaves))
            self.move()
        pair = draws[-1]
        index = pair[1][2]
        leaf = self.u.values[index].detach().requires_grad_()
        *slopes, slope = torch.autograd.grad(self.value(leaf, *pair), [*self.leaves, leaf])
        self._set(slopes)
        self.move()
        self.rows.step(index, slope, self.rate)

    def _set(self, gradients: Sequence[Tensor]) -> None:
        for leaf, d in zip(self.leaves, gradients, strict=True):
            leaf.grad = d if d.stride() == leaf.stride() else torch.empty_like(leaf).copy_(d)


class CapturedFloor(Floor):
    """The floor as one CUDA graph; the batches are copied into its buffers."""

    def __init__(self, work: Work, lower_steps: int, *, compiled: bool = False) -> None:
        super().__init__(work, lower_steps, compiled=compiled)
        self.held = [[[t.clone() for t in part] for part in self.draw()] for _ in range(lower_steps + 1)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.iterate(self.held)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.iterate(self.held)
        self.flat = [t for pair in self.held for part in pair for t in part]

    def step(self, _: int) -> None:
        new = [t for _ in range(self.lower_steps + 1) for part in self.draw() for t in part]
        torch._foreach_copy_(self.flat, new)
        self.graph.replay()


class RefusedError(Exception):
    """What cannot be timed, and why."""


FLOORS: dict[str, tuple[str, Callable[[Work, int], Any]]] = {
    "floor": ("eager", Floor),
    "floor, compile": ("compile", lambda work, count: Floor(work, count, compiled=True)),
    "floor, graph": ("graph", CapturedFloor),
    "floor, compile+graph": ("compile+graph", lambda work, count: CapturedFloor(work, count, compiled=True)),
}
"""Each with the engine that it is the floor of."""


def floors(engines: Sequence[str]) -> dict[str, Callable[[Work, int], Any]]:
    """Return the plain columns and the columns of some engines."""
    return {name: make for name, (engine, make) in FLOORS.items() if engine in ("eager", *engines)}


def subject(work: Work, lower_steps: int, engine: str, curvature: str) -> MethodState:
    """A run of the penalty method; refuses one that the library would not run this way."""
    try:
        method = penalty(lower_steps, curvature)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", BilevelWarning)
            state = started(
                Problem(upper, lower), method, *work.variables(), work.data, engine=engine, precision=work.autocast
            )
            state.step(0)
    except OptionError as error:
        raise RefusedError(str(error)) from error
    reasons = [str(item.message) for item in told if issubclass(item.category, BilevelWarning)]
    if getattr(state, "engine", engine) != engine:
        raise RefusedError(" ".join(reasons) or f"it runs as {state.engine!r}.")  # type: ignore[attr-defined]
    if reasons:
        raise RefusedError(reasons[0])
    return state


# -- timing ------------------------------------------------------------------------------------------------------------


def elapsed(run: Callable[[int], Any], count: int, start: int, device: torch.device) -> float:
    """Seconds an iteration, over `count` of them."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for k in range(count):
            run(start + k)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count
    began = time.perf_counter()
    for k in range(count):
        run(start + k)
    return (time.perf_counter() - began) / count


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Set full float32 products, or tf32."""
    held = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = held


def measure(
    work: Work, lower_steps: int, engines: Sequence[str], curvatures: Sequence[str], rounds: int, enough: float
) -> dict[str, Any]:
    """Milliseconds of every subject, ratios to the floors, and what was not timed."""
    torch.compiler.reset()  # or the compiled floors of many cells share one budget of recompilations
    runs: dict[str, Any] = {}
    first: dict[str, float] = {}
    notes: dict[str, str] = {}

    def add(name: str, make: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            runs[name] = make()
            runs[name].step(1)
        except (RefusedError, RuntimeError) as error:
            notes[name] = str(error).strip().splitlines()[0]
            runs.pop(name, None)
        first[name] = time.perf_counter() - began

    for name, make in floors(engines).items():
        add(name, lambda make=make: make(work, lower_steps))
    for engine in engines:
        for curvature in curvatures:
            add(f"{engine}, {curvature}", lambda e=engine, c=curvature: subject(work, lower_steps, e, c))
    counts = {}
    for name, run in runs.items():
        elapsed(run.step, 2, 2, work.device)
        counts[name] = max(1, round(enough / elapsed(run.step, 1, 4, work.device)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name, run in runs.items():
            times[name].append(elapsed(run.step, counts[name], 5 + i * counts[name], work.device))
    ratios = {
        floor: {
            name: statistics.median(a / b for a, b in zip(values, times[floor], strict=True))
            for name, values in times.items()
        }
        for floor in FLOORS
        if floor in times
    }
    return {
        "ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "ratio": ratios,
        "rounds": rounds,
        "notes": notes,
        "first_seconds": {name: value for name, value in first.items() if name in runs},
    }


def profile(work: Work, lower_steps: int, engines: Sequence[str]) -> dict[str, Any]:
    """The kernels of one iteration: how many, how long, the rest of the time, and the ten that take most."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    runs: dict[str, Any] = {}
    makers: dict[str, Callable[[], Any]] = {
        name: lambda m=make: m(work, lower_steps) for name, make in floors(engines).items()
    }
    makers |= {f"{e}, auto": lambda e=e: subject(work, lower_steps, e, "auto") for e in engines}
    found: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            runs[name] = run = make()
        except (RefusedError, RuntimeError) as error:
            found[name] = {"note": str(error).strip().splitlines()[0]}
            continue
        for k in range(3):
            run.step(k + 1)
        wall = statistics.median(elapsed(run.step, 1, 4 + k, work.device) for k in range(5))
        torch.cuda.synchronize()
        with recorder(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run.step(10)
            torch.cuda.synchronize()
        kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not _mark(e)]
        busy: dict[str, list[float]] = {}
        for event in kernels:
            busy.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
        total = sum(sum(values) for values in busy.values())
        top = sorted(busy.items(), key=lambda item: -sum(item[1]))[:10]
        found[name] = {
            "kernels": len(kernels),
            "kernel_ms": total,
            "wall_ms": 1e3 * wall,
            "gap_ms": 1e3 * wall - total,
            "top": [{"name": n[:100], "calls": len(t), "ms": sum(t)} for n, t in top],
        }
    return found


def _mark(event: Any) -> bool:
    """Whether an event of the profiler is a span around kernels rather than one of them."""
    return getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep", "## "))


# -- precision ---------------------------------------------------------------------------------------------------------


def few_shot() -> nn.Module:
    return nn.Sequential(models.few_shot_cnn(), nn.Linear(64, 10))


def smooth() -> nn.Module:
    """The few-shot network without kinks: Softplus for ReLU, means for maxima."""
    network = models.few_shot_cnn()
    for i, module in enumerate(network):
        if isinstance(module, nn.ReLU):
            network[i] = nn.Softplus()
        if isinstance(module, nn.MaxPool2d):
            network[i] = nn.AvgPool2d(2)
    return nn.Sequential(network, nn.Linear(64, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "linear": (models.linear, 28, 1),
    "mlp": (models.mlp, 28, 1),
    "MNIST CNN": (lambda: models.mnist_cnn(dropout=False), 28, 1),
    "CIFAR-10 network": (lambda: models.cifar_cnn(dropout=False), 32, 3),
    "few-shot network": (few_shot, 28, 1),
    "the same without kinks": (smooth, 28, 1),
}
EXAMPLES = 100
"""Of each batch of the precision table."""
SMALL = 1e-4
"""Tensors whose gradient is a smaller share of the whole are not compared: a bias before batch normalisation has
gradient zero, and what is computed of it is rounding."""


def pictures(size: int, channels: int) -> tuple[Tensor, Tensor]:
    """Ten smooth pictures, one a class, each seen 2 EXAMPLES / 10 times under smooth noise."""
    draw = torch.Generator().manual_seed(2)
    y = torch.arange(2 * EXAMPLES) % 10
    coarse = torch.randn(10, channels, 7, 7, generator=draw)[y] + torch.randn(len(y), channels, 7, 7, generator=draw)
    return interpolate(coarse, size=(size, size), mode="bilinear"), y


def turned(name: str, device: torch.device, precision: str, steps: int) -> dict[str, float]:
    """The penalised gradient in this precision next to the float32 one, after some steps of training."""
    make, size, channels = NETWORKS[name]
    x, y = (t.to(device) for t in pictures(size, channels))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        v = make().to(device)
        u = Rows(EXAMPLES, init=torch.randn(EXAMPLES), device=device)
    batch = (x[:EXAMPLES], y[:EXAMPLES]), (x[EXAMPLES:], y[EXAMPLES:], torch.arange(EXAMPLES, device=device))

    def at(mode: str) -> Gradients:
        with products(mode):
            mine = Variable(copy.deepcopy(v), "v")
            d = PenalisedObjective(
                Problem(upper, lower), Variable(u, "u"), mine, "exact", "bf16" if mode == "bf16" else None
            )
            nu = [torch.zeros_like(leaf, requires_grad=False) for leaf in mine.leaves]
            return d.penalised([batch], Prices(torch.ones((), device=device), nu), with_u=True)

    with products("float32"):
        optimizer = torch.optim.Adam(v.parameters(), lr=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            lower(u, v, batch[1]).backward()
            optimizer.step()
        optimizer.zero_grad()
    full, low = at("float32"), at(precision)

    def flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().double().reshape(-1) for t in tensors])

    def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        p, q = flat(a), flat(b)
        return float(p @ q / (p.norm() * q.norm()))

    def rows(gradients: Gradients) -> list[Tensor]:
        return [g for parts in gradients.rows for _, g in parts]

    whole = float(flat(full.v).norm())
    errors = [
        float((a.double() - b.double()).norm() / a.double().norm())
        for a, b in zip(full.v, low.v, strict=True)
        if float(a.norm()) > SMALL * whole
    ]
    return {
        "cosine_v": cosine(full.v, low.v),
        "cosine_u": cosine(rows(full), rows(low)),
        "cosine_slope": cosine(full.slope, low.slope),
        "worst_tensor": max(errors),
    }


# -- results and the page ----------------------------------------------------------------------------------------------


class Store:
    """Results by name, in a JSON file that is written again after each."""

    def __init__(self, path: Path, again: bool = False) -> None:
        self.path, self.again = path, again
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def make(self, key: str, run: Callable[[], Any]) -> None:
        if key in self.results and not self.again:
            return
        began = time.perf_counter()
        self.results[key] = run()
        self.save()
        print(f"{key}  {time.perf_counter() - began:.0f} s", flush=True)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.results, indent=1, sort_keys=True) + "\n")
        partial.replace(self.path)

    def merge(self, path: Path) -> None:
        """Take over results measured elsewhere; what only the cells here have stays in them."""
        for key, new in json.loads(path.read_text()).items():
            self.results[key] = added(self.results.get(key, {}), new) if key.startswith("step/") else new
        self.save()

    def found(self, prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in self.results.items() if key.startswith(prefix)}


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A cell with the measurements of both; the new ones replace the old."""
    ratios = {f: old.get("ratio", {}).get(f, {}) | new["ratio"].get(f, {}) for f in old.get("ratio", {}) | new["ratio"]}
    parts = {name: old.get(name, {}) | new[name] for name in ("ms", "notes", "first_seconds")}
    return new | parts | {"ratio": ratios}


def surroundings(device: str) -> str:
    """What the numbers were measured on."""
    kind = torch.cuda.get_device_name() if device == "cuda" else f"one CPU thread ({cpu_capability()})"
    return f"torch {torch.__version__.split('+')[0]}, {kind}."


def cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "| " + " | ".join(["---"] * len(head)) + " |"] + [
        f"| {' | '.join(row)} |" for row in rows
    ]


def step_lines(store: Store, device: str) -> list[str]:
    """Milliseconds of the floors, and of each way of taking the step with its ratios to the plain floor and its own."""
    found = store.found(f"step/{device}/")
    if not found:
        return []
    order = list(MODELS)
    cells = sorted(found.items(), key=lambda item: (order.index(item[0].split("/")[0]), _sizes(item[0])))
    names: list[str] = []
    for _, value in cells:
        names += [name for name in value["ms"] if name not in names]
    floor_names = [name for name in FLOORS if name in names]
    names = floor_names + [name for name in names if name not in floor_names]
    rows = []
    for key, value in cells:
        model, steps, *rest = key.split("/")
        ratios = value["ratio"]
        row = [model, steps.removeprefix("T"), ", ".join(rest)]
        for name in names:
            if name not in value["ms"]:
                row.append("")
            elif name in floor_names:
                row.append(f"{value['ms'][name]:.3g}")
            else:
                own = next(floor for floor, (engine, _) in FLOORS.items() if engine == name.split(",")[0])
                bases = [floor for floor in dict.fromkeys(("floor", own)) if floor in ratios]
                row.append(f"{value['ms'][name]:.3g} ({', '.join(f'{ratios[b][name]:.2f}' for b in bases)})")
        rows.append(row)
    head = ["model", "T", "precision", *names]
    notes = sorted({f"{name}: {why}" for _, value in cells for name, why in value["notes"].items()})
    lines = [store.results.get(f"surroundings/{device}", ""), "", *table(head, rows)]
    return lines + (["", "Not timed:", "", *(f"- {note}" for note in notes)] if notes else [])


def _sizes(key: str) -> tuple[int, int, str]:
    _, steps, *rest = key.split("/")
    return int(steps.removeprefix("T")), ("float32", "tf32", "bf16").index(rest[0].split(",")[0]), rest[0]


def profile_lines(store: Store) -> list[str]:
    lines: list[str] = []
    for key, value in store.found("profile/").items():
        floor = value.get("floor", {}).get("kernel_ms")
        rows = [
            [
                name,
                str(p["kernels"]),
                f"{p['kernel_ms']:.2f}",
                f"{p['wall_ms']:.2f}",
                f"{p['gap_ms']:.2f}",
                f"{p['kernel_ms'] / floor:.2f}" if floor else "",
            ]
            for name, p in value.items()
            if "kernels" in p
        ]
        head = ["", "kernels", "kernel ms", "wall ms", "gaps ms", "kernel time of the floor's"]
        lines += ["", f"{key.replace('/', ', ')}:", "", *table(head, rows)]
        shown = [name for name in value if "kernels" in value[name]]
        if shown:
            top = [[t["name"].replace("|", "\\|"), str(t["calls"]), f"{t['ms']:.3f}"] for t in value[shown[-1]]["top"]]
            lines += ["", f"The ten kernels that take most of `{shown[-1]}`:", ""]
            lines += table(["kernel", "calls", "ms"], top)
    return lines[1:]


def precision_lines(store: Store) -> list[str]:
    rows = []
    for key, value in store.found("precision/").items():
        device, precision, name, steps = key.split("/")
        rows.append(
            (
                (list(NETWORKS).index(name), device, precision, int(steps)),
                [
                    name,
                    "at the start" if steps == "0" else f"after {steps} steps",
                    f"{precision}, {device}",
                    *(f"{value[column]:.4f}" for column in ("cosine_v", "cosine_u", "cosine_slope")),
                    f"{100 * value['worst_tensor']:.1f}%",
                ],
            )
        )
    head = ["network", "weights", "precision", "cosine in v", "cosine in u", "cosine of grad_v g", "worst tensor"]
    return table(head, [row for _, row in sorted(rows)]) if rows else []


def write(sections: dict[str, list[str]], page: Path = PAGE) -> None:
    """Put each section between its markers; the words around them stay, and so does a section without results."""
    text = page.read_text()
    for name, lines in sections.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if lines and begin and end:
            text = before + begin + "\n".join(lines) + "\n" + end + after
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS), help="lower steps (T)")
    parser.add_argument("--engines", nargs="+", help="default: all that the device has")
    parser.add_argument("--curvatures", nargs="+", choices=CURVATURES, default=list(CURVATURES))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--channels-last", action="store_true", help="the CNN and its batches in that layout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--enough", type=float, default=ENOUGH, help="seconds of a subject in a round")
    parser.add_argument("--profile", action="store_true", help="profile iterations instead (CUDA)")
    parser.add_argument("--precision", action="store_true", help="measure gradients instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure again what has results")
    parser.add_argument("--write", action="store_true", help="measure nothing; write the page")
    parser.add_argument("--merge", type=Path, help="measure nothing; take over these results and write the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(given.out, given.again)
    device = torch.device(given.device)
    engines = given.engines or ENGINES[device.type]
    modes = given.precisions or PRECISIONS[device.type]
    if given.profile and device.type != "cuda":
        parser.error("--profile needs --device cuda")
    if given.merge is not None:
        store.merge(given.merge)
    elif not given.write:
        store.results[f"surroundings/{device.type}"] = surroundings(device.type)
        if given.precision:
            for name in NETWORKS:
                for mode in given.precisions or (("bf16",) if device.type == "cpu" else ("tf32", "bf16")):
                    for steps in (0, 30):
                        key = f"precision/{device.type}/{mode}/{name}/{steps}"
                        store.make(key, lambda n=name, m=mode, s=steps: turned(n, device, m, s))
        else:
            measure_all(store, given, device, engines, modes)
    sections = {
        "step:cpu": step_lines(store, "cpu"),
        "step:cuda": step_lines(store, "cuda"),
        "profile": profile_lines(store),
        "precision": precision_lines(store),
    }
    print("\n\n".join("\n".join(lines) for lines in sections.values() if lines))
    if given.out == RESULTS:
        write(sections)


def measure_all(
    store: Store, given: argparse.Namespace, device: torch.device, engines: Sequence[str], modes: Sequence[str]
) -> None:
    for name in given.models:
        for steps in given.steps:
            for mode in modes:
                last = given.channels_last and name == "cnn"
                key = f"{name}/T{steps}/{f'{mode}, channels last' if last else mode}"
                with products(mode):
                    work = Work.make(name, device, mode, last)
                    if given.profile:
                        store.make(f"profile/{key}", lambda w=work, t=steps: profile(w, t, engines))
                    else:
                        complete(store, f"step/{device.type}/{key}", work, steps, engines, given)


def complete(store: Store, key: str, work: Work, steps: int, engines: Sequence[str], given: argparse.Namespace) -> None:
    """Measure the engines that this cell lacks, next to their own floors, and add them to it."""
    old = {} if store.again else store.results.get(key, {})
    known = {*old.get("ms", ()), *old.get("notes", ())}
    missing = [e for e in engines if any(f"{e}, {c}" not in known for c in given.curvatures)]
    if not missing:
        return
    began = time.perf_counter()
    new = measure(work, steps, missing, given.curvatures, given.rounds, given.enough)
    store.results[key] = added(old, new)
    store.save()
    print(f"{key}  {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
