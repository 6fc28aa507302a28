"""Problems without data that a fixed scale or a single precision gets wrong: how the defaults end, and in what time.

    python studies/benchmarks/without_data.py run [--parts penalties,start-up,cleaning,random]
    python studies/benchmarks/without_data.py write          put the tables into docs/results/without-data.md

The parts: penalties of linear models next to `implicit_reference`; the README's example in a new process; data cleaning
of the field's benchmark with all examples at once; random problems of `scaled_problems`. Every run is `Penalty()`
without options. Results are kept after each run, so the command can be stopped and called again. MNIST, ijcnn1 and a9a
are read from BILEVEL_DATA, or from ../shared/data. All times are of one thread; ours and the reference's are measured
one after the other.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from environment import ROOT, commit
from implicit_reference import Array, Logistic, Model, Ridge, Split, implicit, minimised
from scaled_problems import KINDS, Exact, scaled_problem
from store import Store
from torch import Tensor
from torch.nn import functional

from bilevel import BilevelWarning, Box, Callback, Penalty, Problem, Run, solve

PAGE = ROOT / "docs" / "results" / "without-data.md"
KEPT = ROOT / "studies" / "results" / "without-data.jsonl"
DATA = Path(os.environ.get("BILEVEL_DATA", ROOT.parent / "shared" / "data"))
SEEDS, COUNT, STEPS = 5, 200, 3000
SHARES = (0.5, 0.7, 0.9)
COLUMNS = ("seconds", "evaluations of g", "endings")
# f is near the reference's if it is at most this share above it.
NEAR = 0.02
# At most this share of the possible decrease of phi is missing at a solution.
MISSING = {"float64": 1e-4, "float32": 1e-3}


# -- penalties of linear models -------------------------------------------------------------------------------------


def halves(x: Array, y: Array, classes: int = 0) -> Split:
    """Return two random halves; standardised, and so are targets that are numbers."""
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    y = y if classes else (y - y.mean()) / y.std()
    n = len(y) // 2
    return Split(x[:n], y[:n], x[n:], y[n:])


def readme() -> tuple[Model, Array, tuple[float, float]]:
    torch.manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64)
    y = (x[:, :3].sum(1) + torch.randn(400, dtype=torch.float64)).numpy()
    x = x.numpy()
    return Ridge(Split(x[:40], y[:40], x[40:], y[40:])), np.zeros(8), (-6, 6)


def diabetes() -> tuple[Model, Array, tuple[float, float]]:
    from sklearn.datasets import load_diabetes

    return Ridge(halves(*load_diabetes(return_X_y=True))), np.zeros(10), (-10, 6)


def bundled(name: str, classes: int) -> Callable[[], tuple[Model, Array, tuple[float, float]]]:
    """Return a case with a set of scikit-learn: one penalty for each feature."""

    def case() -> tuple[Model, Array, tuple[float, float]]:
        from sklearn import datasets

        split = halves(*getattr(datasets, f"load_{name}")(return_X_y=True), classes)
        return Logistic(split, classes), np.full(split.x.shape[1], -4.0), (-10, 6)

    return case


def tabular(name: str, *, single: bool) -> Callable[[], tuple[Model, Array, tuple[float, float]]]:
    """Return a case with ijcnn1 or a9a: one penalty for each feature, or for all."""

    def case() -> tuple[Model, Array, tuple[float, float]]:
        kept = np.load(DATA / "tabular" / f"{name}.npz")
        split = halves(kept["X_train"].astype(float), (kept["y_train"] > 0).astype(int), 2)
        return Logistic(split, 2), np.full(1 if single else split.x.shape[1], -4.0), (-10, 6)

    return case


PENALTIES = {
    "README": readme,
    "diabetes": diabetes,
    "breast cancer": bundled("breast_cancer", 2),
    "wine": bundled("wine", 3),
    "digits": bundled("digits", 10),
    "ijcnn1": tabular("ijcnn1", single=False),
    "a9a, one penalty": tabular("a9a", single=True),
}


def stated(model: Model, start: Array, dtype: torch.dtype) -> tuple[Problem, Tensor, Tensor]:
    """Return the problem of a model as a user states it, and its start."""
    x, y, x_valid, y_valid = (torch.from_numpy(a) for a in model.data)
    u = torch.from_numpy(start).to(dtype, copy=True).requires_grad_()
    if isinstance(model, Ridge):
        x, y, x_valid, y_valid = (t.to(dtype) for t in (x, y, x_valid, y_valid))
        v = torch.zeros(x.shape[1], dtype=dtype, requires_grad=True)
        return (
            Problem(
                lambda u, v, _: ((x_valid @ v - y_valid) ** 2).mean(),
                lambda u, v, _: ((x @ v - y) ** 2).mean() + (u.exp() * v**2).sum(),
            ),
            u,
            v,
        )
    x, x_valid = (torch.cat([t, torch.ones(len(t), 1)], 1).to(dtype) for t in (x, x_valid))
    v = torch.zeros(x.shape[1], model.columns, dtype=dtype, requires_grad=True)

    def loss(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if model.columns == 1:
            return functional.binary_cross_entropy_with_logits((x @ v)[:, 0], y.to(v.dtype))
        return functional.cross_entropy(x @ v, y)

    return (
        Problem(
            lambda u, v, _: loss(v, x_valid, y_valid),
            lambda u, v, _: loss(v, x, y) + (u.exp()[:, None] * v[:-1] ** 2).sum() / 2,
        ),
        u,
        v,
    )


def reference(name: str, *, tight: bool = False) -> dict[str, Any]:
    model, start, bounds = PENALTIES[name]()
    began = time.perf_counter()
    _, f, evaluations = minimised(model, start, bounds, tight=tight)
    return {
        "f": f,
        "seconds": time.perf_counter() - began,
        "evaluations": evaluations,
        "f at the start": implicit(model)(start)[0],
    }


def penalty(name: str, dtype: str, seed: int) -> dict[str, Any]:
    model, start, bounds = PENALTIES[name]()
    problem, u, v = stated(model, start, getattr(torch, dtype))
    problem = Problem(problem.upper, problem.lower, project_upper=Box(*bounds))
    clock = Clock()
    ended = ours(problem, u, v, seed, callbacks=[clock])
    # More runs of the reference right after ours, so that their times can be compared.
    default = reference(name)
    both = {"default": default["seconds"], "tight": reference(name, tight=True)["seconds"]}
    reached = clock.reached((1 + NEAR) * default["f"])
    return ended | {
        "true f": implicit(model)(u.detach().double().numpy())[0],
        "reference": both,
        "seconds to the reference's f": reached,
    }


class Clock(Callback):
    """Notes the time and f after each step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.began = time.perf_counter()

    def log(self, run: Run) -> None:
        self.marks.append((time.perf_counter() - self.began, run.history["f"][-1]))

    def reached(self, f: float) -> float:
        """Return the seconds until f was at most this."""
        return next((seconds for seconds, value in self.marks if value <= f), math.inf)


def ours(
    problem: Problem, u: Tensor, v: Tensor, seed: int, max_steps: int = STEPS, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Solve without options; return how it ended."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BilevelWarning)  # that float32 has a lower tolerance
        solution = solve(problem, Penalty(), u, v, max_steps=max_steps, seed=seed, callbacks=callbacks, log_every=1)
    seconds, c = time.perf_counter() - began, solution.certificate
    return {
        "status": solution.status.name,
        "steps": solution.steps,
        "evaluations": solution.history["evaluations"][-1],
        "seconds": seconds,
        "f": c.upper,
        "hypergradient error": c.hypergradient_error,
        "tolerance": c.tolerance,
    }


START_UP = """
import time, torch
from bilevel import Box, Penalty, Problem, solve
torch.manual_seed(0)
x = torch.randn(400, 8, dtype=torch.float64)
y = x[:, :3].sum(1) + torch.randn(400, dtype=torch.float64)
f = lambda u, v, _: ((x[40:] @ v - y[40:]) ** 2).mean()
g = lambda u, v, _: ((x[:40] @ v - y[:40]) ** 2).mean() + (u.exp() * v**2).sum()
u, v = (torch.zeros(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
began = time.perf_counter()
solve(Problem(f, g, project_upper=Box(-6, 6)), Penalty(), u, v, max_steps=3000)
print(time.perf_counter() - began)
"""


def start_up() -> dict[str, Any]:
    """Return the seconds of the README's example in new processes, after the imports."""
    runs = [
        subprocess.run([sys.executable, "-c", START_UP], check=True, capture_output=True, text=True) for _ in range(5)
    ]
    return {"seconds": [float(run.stdout) for run in runs]}


# -- data cleaning --------------------------------------------------------------------------------------------------


def mnist() -> tuple[Array, Array]:
    def read(name: str, offset: int) -> Any:
        with gzip.open(DATA / "mnist" / f"train-{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=offset)

    return read("images-idx3-ubyte", 16).reshape(-1, 784).astype(float), read("labels-idx1-ubyte", 8).astype(int)


def cleaning(share: float, dtype: str) -> dict[str, Any]:
    """Solve data cleaning as benchopt's benchmark_bilevel states it, with all examples in each evaluation.

    20,000 images of MNIST, standardised, a share of them with random labels, and 5,000 validation images.
    g = mean(sigmoid(u_i) loss_i) + 0.2 |v|^2, softmax regression without bias, u = -2 at the start.
    """
    images, labels = mnist()
    draw = np.random.default_rng(32)
    order = draw.permutation(len(labels))
    first, valid = order[:20000], order[20000:25000]
    noisy, wrong = labels[first].copy(), draw.random(20000) < share
    noisy[wrong] = draw.integers(0, 10, int(wrong.sum()))
    center, spread = images[first].mean(0), images[first].std(0)
    spread[spread == 0] = 1
    kind = getattr(torch, dtype)
    x, x_valid = (torch.from_numpy((images[rows] - center) / spread).to(kind) for rows in (first, valid))
    y, y_valid = torch.from_numpy(noisy), torch.from_numpy(labels[valid])
    u = torch.full((20000,), -2.0, dtype=kind, requires_grad=True)
    v = torch.zeros(784, 10, dtype=kind, requires_grad=True)

    def upper(u: Tensor, v: Tensor, _: None) -> Tensor:
        return functional.cross_entropy(x_valid @ v, y_valid)

    def lower(u: Tensor, v: Tensor, _: None) -> Tensor:
        return (torch.sigmoid(u) * functional.cross_entropy(x @ v, y, reduction="none")).mean() + 0.2 * (v**2).sum()

    return ours(Problem(upper, lower), u, v, 0)


# -- random problems ------------------------------------------------------------------------------------------------


def random_problem(number: int, seed: int) -> dict[str, Any]:
    scaled = scaled_problem(number, seed)
    problem, u, v = scaled.problem()
    ended = ours(problem, u, v, 0)
    exact, w = Exact(scaled), u.detach().double() / scaled.scale
    dtype = str(scaled.dtype).removeprefix("torch.")
    missing, distance = exact.missing(w), exact.distance(w)
    return ended | {
        "kind": scaled.kind,
        "dtype": dtype,
        "missing": missing,
        "distance": distance,
        "solved": missing <= MISSING[dtype],
        "false": ended["status"] == "CONVERGED" and not distance <= 10 * ended["tolerance"],
    }


# -- all of it ------------------------------------------------------------------------------------------------------


def cells(parts: list[str], seed: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    if "start-up" in parts:
        yield "start-up", start_up
    if "penalties" in parts:
        for name in PENALTIES:
            yield f"reference/{name}", lambda name=name: reference(name)
            yield f"tight/{name}", lambda name=name: reference(name, tight=True)
            for dtype in ("float64", "float32") if name == "a9a, one penalty" else ("float64",):
                for k in range(SEEDS):
                    yield f"penalties/{name}/{dtype}/{k}", lambda name=name, dtype=dtype, k=k: penalty(name, dtype, k)
    if "cleaning" in parts:
        for share in SHARES:
            for dtype in ("float64", "float32"):
                yield f"cleaning/{share}/{dtype}", lambda share=share, dtype=dtype: cleaning(share, dtype)
    if "random" in parts:
        for number in range(COUNT):
            yield f"random/{seed}/{number}", lambda number=number: random_problem(number, seed)


def tables(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the tables of the page."""

    def of(prefix: str) -> list[dict[str, Any]]:
        return [value for key, value in results.items() if key.startswith(prefix)]

    heads = ("problem", "dtype", "f at the start", "reference", "reference, tight", "ours", "seconds")
    tuned = table(*heads, "times the reference's", "to its f", "times the tight one's", *COLUMNS[1:])
    for name in PENALTIES:
        known = results.get(f"reference/{name}")
        for dtype in MISSING:
            if known and (found := of(f"penalties/{name}/{dtype}/")):
                values = [one["true f"] for one in found]
                ratios = [
                    f"{median(one['seconds'] / one['reference'][kind] for one in found):.1f}"
                    for kind in ("default", "tight")
                ]
                levels = [known["f at the start"], known["f"], results[f"tight/{name}"]["f"]]
                near = median(
                    one.get("seconds to the reference's f", math.nan) / one["reference"]["default"] for one in found
                )
                ratios.insert(1, f"{near:.1f}")
                seconds, *rest = ended(found)
                between = f"{min(values):.5f} to {max(values):.5f}"
                tuned.append(row(name, dtype, *(f"{f:.5f}" for f in levels), between, seconds, *ratios, *rest))
    cleaned = table("random labels", "dtype", "f", "steps", *COLUMNS)
    for share in SHARES:
        for dtype in MISSING:
            for one in of(f"cleaning/{share}/{dtype}"):
                cleaned.append(row(f"{share:.0%}", dtype, f"{one['f']:.6f}", one["steps"], *ended([one])))
    drawn = table("kind", "dtype", "solved", "false `CONVERGED`", *COLUMNS)
    for kind in (*KINDS, "all"):
        for dtype in MISSING:
            if found := [one for one in of("random/") if one["dtype"] == dtype and kind in (one["kind"], "all")]:
                solved, false = (sum(one[key] for one in found) for key in ("solved", "false"))
                drawn.append(row(kind, dtype, f"{solved} of {len(found)}", false, *ended(found)))
    seconds = results.get("start-up", {}).get("seconds", [])
    first = table("README's example in a new process, after imports", "seconds")
    first.append(row("five processes", ", ".join(f"{one:.2f}" for one in seconds)))
    return {"penalties": tuned, "start-up": first, "cleaning": cleaned, "random": drawn}


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(*heads: str) -> list[str]:
    return [row(*heads), row(*["---"] * len(heads))]


def ended(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the median seconds and evaluations of g, and how the runs ended."""
    names = [one["status"].lower() for one in found]
    endings = ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names)))
    return f"{median(one['seconds'] for one in found):.2f}", f"{median(one['evaluations'] for one in found):g}", endings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "write"])
    parser.add_argument("--parts", default="start-up,penalties,random,cleaning", help="which parts to run")
    parser.add_argument("--seed", type=int, default=2, help="the seed of the random problems; 0 and 1 were looked at")
    parser.add_argument("--results", type=Path, default=KEPT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(options.results)
    if options.command == "run":
        for key, run in cells(options.parts.split(","), options.seed):
            store.make(key, lambda run=run: run() | {"commit": commit(ROOT / "src")})
    text = PAGE.read_text()
    for name, lines in tables(store.results).items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n" + "\n".join(lines) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    PAGE.write_text(text)
    print(PAGE)


if __name__ == "__main__":
    main()
