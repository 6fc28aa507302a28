"""The stochastic mode on digits with wrong labels, and on least squares with a known answer: the tables of
docs/results/minibatch.md.

    python studies/benchmarks/digits_study.py                      all tables, 8 seeds (10 held-out seeds for the first)
    python studies/benchmarks/digits_study.py --seeds 2 --tables target cotangent
    python studies/benchmarks/digits_study.py --write              the page, from the results so far

Results go to `build/digits_study.jsonl` as they come; a run that is there already is not made again. The first table
has one run a seed. All others have their seeds side by side in one problem, the sum of the seeds' objectives: blocks
that share no variable, with one gamma and one lam for all.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from store import Store
from torch import Tensor, nn

from bilevel import Penalty, Problem, Rows, solve
from bilevel.measures import batch_scales

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "minibatch.md"
HELD_OUT = 600
"""The first of the seeds that no constant is chosen on."""
MODELS = {"softmax": (), "mlp64": (64,), "mlp128": (128,)}
IN_TURN = {"lower_steps": 5, "joint": False, "rate": 1e-2}
"""The earlier way: five steps on v, then one on u only."""
SGD = torch.optim.SGD

WHAT_MATTERS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "lower_steps=5, joint=False, lower rate 1e-2": IN_TURN,
    "lam_factor=1": {"lam_factor": 1.0},
    "gamma_factor=1.3": {"gamma_factor": 1.3},
    "gamma_factor=1.3, lam_factor=1": {"gamma_factor": 1.3, "lam_factor": 1.0},
    "the first gamma 3 times": {"gamma_share": 3.0},
    "the first gamma a third": {"gamma_share": 0.3},
    "warm_up=0": {"warm_up": 0.0},
    "lower rate 1e-3": {"rate": 1e-3},
    "lower_steps=1": {"lower_steps": 1},
    "lower_steps=5": {"lower_steps": 5},
    "lower_batches='shared'": {"lower_batches": "shared"},
    "solve(precision='bf16')": {"precision": "bf16"},
    "multipliers=False": {"multipliers": False},
}
RATES: dict[str, dict[str, Any]] = {
    f"{name}, {decay}, rate_power={power:g}": {"rate_power": power, "decay": decay} | optimizer
    for name, optimizer, decay, powers in (
        ("Adam", {}, "linear", (0.5, 1.0)),
        ("Adam", {}, "constant", (0.0,)),
        ("SGD 0.1", {"sgd": 0.1}, "constant", (0.0, 1.0)),
        ("SGD 0.3", {"sgd": 0.3}, "constant", (0.0, 1.0)),
        ("SGD 1", {"sgd": 1.0}, "constant", (0.0, 1.0)),
    )
    for power in powers
}
ROBUST: dict[str, dict[str, Any]] = {
    "batches of 20": {"batch": 20},
    "batches of 200": {"batch": 200},
    "400 steps": {"steps": 400},
    "20% noise": {"noise": 0.2},
    "60% noise": {"noise": 0.6},
    "50 trusted": {"trusted": 50},
    "300 trusted": {"trusted": 300},
    "lower loss x 10": {"scale_g": 10.0},
    "4,000 steps": {"steps": 4000},
}
DEFAULTS = "matters/the defaults"
"""The run of the row `same` too: it is the default."""
COTANGENTS = ("same", "running")
SQUARES = {name: (name, 20) for name in COTANGENTS} | {
    f"{name}, batches of 100": (name, 100) for name in ("same", "running")
}
SQUARES["same, full batches"] = ("same", 200)


# -- digits ------------------------------------------------------------------------------------------------------------


class Batches:
    """Batches of the same rows' tensors, in a new order at every pass; the dimension of the examples is `dim`."""

    def __init__(self, tensors: Sequence[Tensor], size: int, dim: int = 0) -> None:
        self.tensors, self.dim = tensors, dim
        self.count = tensors[0].shape[dim]
        self.size = min(size, self.count)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(self.count)
        for i in range(0, self.count - self.size + 1, self.size):
            yield tuple(t.index_select(self.dim, order[i : i + self.size]) for t in self.tensors)


def split(seed: int, noise: float = 0.4, trusted: int = 100) -> dict[str, Tensor]:
    """Trusted, noisy and 400 test digits; `clean` says which labels of the noisy part are right."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x_trusted, x, y_trusted, y = train_test_split(x, y, train_size=trusted, stratify=y, random_state=seed)
    x, x_test, y, y_test = train_test_split(x, y, test_size=400, stratify=y, random_state=seed)
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(y), bool)
    wrong[rng.permutation(len(y))[: round(noise * len(y))]] = True
    labels = np.where(wrong, (y + rng.integers(1, 10, len(y))) % 10, y)
    parts = {
        "x_trusted": x_trusted,
        "y_trusted": y_trusted,
        "x": x,
        "y": labels,
        "truth": y,
        "clean": ~wrong,
        "x_test": x_test,
        "y_test": y_test,
    }
    return {key: torch.as_tensor(value) for key, value in parts.items()}


def network(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [64, *MODELS[kind], 10]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def stacked(v: Sequence[Tensor], x: Tensor) -> Tensor:
    """The same network with a leading dimension of seeds."""
    for i in range(0, len(v), 2):
        x = torch.baddbmm(v[i + 1].unsqueeze(1), x if i == 0 else x.relu(), v[i].transpose(1, 2))
    return x


def losses(v: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(stacked(v, x).transpose(1, 2), y, reduction="none")


def penalty(options: dict[str, Any]) -> Penalty:
    """`Penalty` with these options; `rate` and `sgd` are short for a lower optimizer."""
    given = {key: value for key, value in options.items() if key not in ("gamma_share", "precision")}
    if (rate := given.pop("rate", None)) is not None:
        given["lower_optimizer"] = partial(torch.optim.Adam, lr=rate)
    if (rate := given.pop("sgd", None)) is not None:
        given["lower_optimizer"] = partial(SGD, lr=rate)
    options = {"cotangent": "same"} | given
    return Penalty(**(options if options["cotangent"] == "tracked" else {"decay": "linear"} | options))


def digits(
    kind: str,
    seeds: Sequence[int],
    options: dict[str, Any],
    *,
    batch: int = 100,
    steps: int = 1200,
    noise: float = 0.4,
    trusted: int = 100,
    scale_f: float = 1.0,
    scale_g: float = 1.0,
) -> list[dict[str, Any]]:
    """One run for all the seeds, of this many gradients; one result for each."""
    steps //= options.get("lower_steps", 0) + 1
    parts = [split(seed, noise, trusted) for seed in seeds]
    data = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
    models = [list(network(kind, seed).parameters()) for seed in seeds]
    v = [torch.stack([p.detach() for p in same]).requires_grad_() for same in zip(*models, strict=True)]
    count = data["x"].shape[1]
    rows = torch.arange(len(seeds) * count).reshape(len(seeds), count)
    u = Rows(len(seeds) * count)

    def upper(u: Rows, v: list[Tensor], pair: tuple[Tensor, ...]) -> Tensor:
        return scale_f * losses(v, *pair).mean(1).sum()

    def lower(u: Rows, v: list[Tensor], triple: tuple[Tensor, ...]) -> Tensor:
        x, y, row = triple
        w = torch.sigmoid(u[row])
        return scale_g * ((w * losses(v, x, y)).sum(1) / w.sum(1)).sum()

    sources = (
        Batches((data["x_trusted"], data["y_trusted"]), batch, 1),
        Batches((data["x"], data["y"], rows), batch, 1),
    )
    problem = Problem(upper, lower)
    if options.get("epsilon") == "scale":
        first = solve(problem, penalty({}), u, v, sources, max_steps=1, seed=seeds[0], hypergradient=False)
        size = float(np.hypot(first.history["grad_u"][0], first.history["grad_v"][0]))
        return digits(kind, seeds, options | {"epsilon": 0.1 * size}, batch=batch, steps=steps, noise=noise)
    started = time.process_time()
    share = options.get("gamma_share", batch_scales.GAMMA_SHARE)
    with mock.patch.object(batch_scales, "GAMMA_SHARE", share):
        solution = solve(
            problem,
            penalty(options),
            u,
            v,
            sources,
            max_steps=steps,
            seed=seeds[0],
            hypergradient=False,
            precision=options.get("precision"),
        )
    seconds = (time.process_time() - started) / len(seeds)
    with torch.no_grad():
        right = stacked(v, data["x_test"]).argmax(2) == data["y_test"]
    scores = u.values.reshape(len(seeds), count).numpy()
    return [
        {
            "auc": float(roc_auc_score(part["clean"].numpy(), score)),
            "accuracy": float(good.double().mean()),
            "seconds": seconds,
            "status": solution.status.name,
        }
        for part, score, good in zip(parts, scores, right, strict=True)
    ]


def trained(
    kind: str, seeds: Sequence[int], labels: str, *, steps: int = 1200, rate: float = 3e-3
) -> list[dict[str, float]]:
    """Plain training with Adam and linear decay, as many steps as v gets; `stopped` is at the best trusted loss."""
    parts = [split(seed) for seed in seeds]
    data = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
    x, y = data["x_trusted" if labels == "y_trusted" else "x"], data[labels]
    models = [list(network(kind, seed).parameters()) for seed in seeds]
    v = [torch.stack([p.detach() for p in same]).requires_grad_() for same in zip(*models, strict=True)]
    optimizer = torch.optim.Adam(v, lr=rate)
    best, stopped = torch.full((len(seeds),), float("inf")), torch.zeros(len(seeds), dtype=torch.float64)
    batches = itertools.chain.from_iterable(Batches((x, y), 100, 1) for _ in itertools.count())

    def accuracy() -> Tensor:
        return (stacked(v, data["x_test"]).argmax(2) == data["y_test"]).double().mean(1)

    for k, pair in zip(range(steps), batches, strict=False):
        optimizer.param_groups[0]["lr"] = rate * (1 - k / steps)
        optimizer.zero_grad()
        losses(v, *pair).mean(1).sum().backward()
        optimizer.step()
        if k % 25 == 24:
            with torch.no_grad():
                loss = losses(v, data["x_trusted"], data["y_trusted"]).mean(1)
                stopped = torch.where(loss < best, accuracy(), stopped)
                best = torch.minimum(loss, best)
    with torch.no_grad():
        return [{"accuracy": float(a), "stopped": float(b)} for a, b in zip(accuracy(), stopped, strict=True)]


# -- least squares with a known answer ---------------------------------------------------------------------------------


def least_squares(
    kind: str, seeds: Sequence[int], options: dict[str, Any], *, steps: int = 1000, batch: int = 20
) -> list[dict[str, Any]]:
    """`ridge`: one log-penalty. `groups`: the weights of four groups of examples with noise 0.5, 1, 2 and 4.

    200 training and 200 validation examples, 20 features, float64. The answer is the minimiser of the
    validation loss at the exact lower solution, by L-BFGS.
    """
    many, size, count = len(seeds), 20, 200
    groups = (torch.arange(count) % 4).expand(many, count)
    noise = torch.tensor([0.5, 1.0, 2.0, 4.0]) if kind == "groups" else torch.full((4,), 2.0)
    drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
    draw: Callable[..., Tensor] = lambda *shape: torch.stack(  # noqa: E731
        [torch.randn(*shape, generator=g, dtype=torch.float64) for g in drawn]
    )
    x, x_valid, beta = draw(count, size), draw(count, size), 0.4 * draw(size, 1)
    y = (x @ beta).squeeze(2) + noise[groups].double() * draw(count)
    y_valid = (x_valid @ beta).squeeze(2) + draw(count)

    def weights(u: Tensor, group: Tensor) -> Tensor:
        """Of the examples, with mean 1."""
        return 4 * u.softmax(1).gather(1, group) if kind == "groups" else torch.ones_like(group, dtype=u.dtype)

    def ridge(u: Tensor) -> Tensor:
        return u.exp() if kind == "ridge" else torch.full_like(u[:, :1], 0.1)

    def upper(u: Tensor, v: Tensor, pair: tuple[Tensor, ...]) -> Tensor:
        return (((pair[0] @ v).squeeze(2) - pair[1]) ** 2).mean(1).sum() / 2

    def lower(u: Tensor, v: Tensor, triple: tuple[Tensor, ...]) -> Tensor:
        a, b, group = triple
        fit = (weights(u, group) * ((a @ v).squeeze(2) - b) ** 2).mean(1)
        return (fit + ridge(u).squeeze(1) * (v**2).sum((1, 2))).sum() / 2

    def exact(u: Tensor) -> Tensor:
        w = weights(u, groups).unsqueeze(2)
        bend = x.mT @ (w * x) / count + ridge(u).unsqueeze(2) * torch.eye(size, dtype=u.dtype)
        return torch.linalg.solve(bend, x.mT @ (w * y.unsqueeze(2)) / count)

    def curve(u: Tensor) -> Tensor:
        return (((x_valid @ exact(u)).squeeze(2) - y_valid) ** 2).mean(1) / 2

    start = torch.zeros(many, 4 if kind == "groups" else 1, dtype=torch.float64)
    best = start.clone().requires_grad_()
    search = torch.optim.LBFGS([best], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def evaluate() -> Tensor:
        search.zero_grad()
        total = curve(best).sum()
        total.backward()
        return total

    search.step(evaluate)
    u, v = start.clone().requires_grad_(), torch.zeros(many, size, 1, dtype=torch.float64).requires_grad_()
    sources = Batches((x_valid, y_valid), batch, 1), Batches((x, y, groups), batch, 1)
    solution = solve(
        Problem(upper, lower), penalty(options), u, v, sources, max_steps=steps, seed=seeds[0], hypergradient=False
    )
    with torch.no_grad():
        missed = (curve(u) - curve(best)) / (curve(start) - curve(best))
        shown = [t.softmax(1) if kind == "groups" else t for t in (u, best)]
        error = (shown[0] - shown[1]).abs().mean(1)
        lead = (shown[0] - shown[1])[:, 0]
    return [
        {"missed": float(m), "error": float(e), "lead": float(d), "status": solution.status.name}
        for m, e, d in zip(missed, error, lead, strict=True)
    ]


# -- the runs and the page ---------------------------------------------------------------------------------------------


def of(store: Store, prefix: str, seeds: Sequence[int]) -> Any:
    return store.results.get(f"{prefix}/{seeds[0]}-{seeds[-1]}")


def plan(store: Store, tables: Sequence[str], kinds: Sequence[str], seeds: Sequence[int], held: Sequence[int]) -> None:
    span = f"{seeds[0]}-{seeds[-1]}"
    for kind in kinds:
        if "target" in tables:
            for seed in held:
                store.make(f"target/{kind}/{seed}-{seed}", lambda k=kind, s=seed: digits(k, [s], {}))
            for labels in ("y", "y_trusted", "truth"):
                name = f"reference/{labels}/{kind}/{held[0]}-{held[-1]}"
                store.make(name, lambda k=kind, n=labels: trained(k, held, n))
            store.make(f"previous/{kind}/{held[0]}-{held[-1]}", lambda k=kind: digits(k, held, IN_TURN))
        if kind == "mlp128":
            continue
        if {"matters", "cotangent"} & set(tables):
            store.make(f"{DEFAULTS}/{kind}/{span}", lambda k=kind: digits(k, seeds, {}))
        for table, variants in (("matters", WHAT_MATTERS), ("rates", RATES)):
            for name, options in variants.items() if table in tables else ():
                store.make(f"{table}/{name}/{kind}/{span}", lambda k=kind, o=options: digits(k, seeds, o))
        for name, setting in ROBUST.items() if "robust" in tables else ():
            store.make(
                f"robust/{name}/{kind}/{span}", lambda k=kind, s=setting: digits(k, seeds, **({"options": {}} | s))
            )
        for name in COTANGENTS[1:] if "cotangent" in tables else ():
            store.make(f"cotangent/{name}/{kind}/{span}", lambda k=kind, c=name: digits(k, seeds, {"cotangent": c}))
    for kind in ("ridge", "groups") if "squares" in tables else ():
        for name, (cotangent, batch) in SQUARES.items():
            options = {"cotangent": cotangent}
            store.make(
                f"squares/{name}/{kind}/{span}",
                lambda k=kind, o=options, b=batch: least_squares(k, seeds, o, batch=b),
            )


def cell(results: Sequence[dict[str, Any]] | None, key: str, unit: str) -> str:
    """mean (least to most); how many runs diverged, if any."""
    if not results:
        return ""
    values = np.array([r[key] for r in results]) * (100 if unit == ".1f" else 1)
    lost = sum(r.get("status") == "DIVERGED" for r in results)
    note = f", {lost} diverged" if lost else ""
    return f"{values.mean():{unit}} ({values.min():{unit}} to {values.max():{unit}}){note}"


def rows_of(store: Store, table: str, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    head = ["| | AUC, softmax | accuracy, softmax | AUC, MLP | accuracy, MLP |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        key = DEFAULTS if name == "same" else f"{table}/{name}"
        found = [of(store, f"{key}/{kind}", seeds) for kind in ("softmax", "mlp64")]
        if any(found):
            cells = [cell(r, key, unit) for r in found for key, unit in (("auc", ".3f"), ("accuracy", ".1f"))]
            head.append(f"| {name} | " + " | ".join(cells) + " |")
    return head


def page(store: Store, seeds: Sequence[int], held: Sequence[int]) -> dict[str, list[str]]:
    target = [
        "| | AUC | accuracy | seconds | AUC, in turn | accuracy, in turn | plain | early stop | "
        "trusted only | clean labels |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in MODELS:
        runs = [r for s in held for r in of(store, f"target/{kind}", [s]) or []]
        if not runs:
            continue
        before = of(store, f"previous/{kind}", held)
        plain, alone, truth = (of(store, f"reference/{labels}/{kind}", held) for labels in ("y", "y_trusted", "truth"))
        cells = [
            cell(runs, "auc", ".3f"),
            cell(runs, "accuracy", ".1f"),
            f"{np.mean([r['seconds'] for r in runs]):.1f}",
            cell(before, "auc", ".3f"),
            cell(before, "accuracy", ".1f"),
            cell(plain, "accuracy", ".1f"),
            cell(plain, "stopped", ".1f"),
            cell(alone, "accuracy", ".1f"),
            cell(truth, "accuracy", ".1f"),
        ]
        target.append(f"| {kind} | " + " | ".join(cells) + " |")
    squares = [
        "| cotangent | ridge: gain missed | ridge: error of u | groups: gain missed | groups: error of a weight | "
        "groups: weight of the cleanest group, found less exact |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in SQUARES:
        one, four = (of(store, f"squares/{name}/{kind}", seeds) for kind in ("ridge", "groups"))
        columns = ((one, "missed"), (one, "error"), (four, "missed"), (four, "error"), (four, "lead"))
        squares.append(f"| {name} | " + " | ".join(cell(r, key, ".3f") for r, key in columns) + " |")
    return {
        "target": target,
        "matters": rows_of(store, "matters", list(WHAT_MATTERS), seeds),
        "robust": rows_of(store, "robust", list(ROBUST), seeds),
        "rates": rows_of(store, "rates", list(RATES), seeds),
        "cotangent": rows_of(store, "cotangent", COTANGENTS, seeds),
        "squares": squares,
    }


def write(tables: dict[str, list[str]]) -> None:
    """Put the tables between the page's markers `<!-- name -->` and `<!-- end -->`; the words around them stay."""
    text = PAGE.read_text()
    for name, lines in tables.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        if after:
            text = f"{before}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"
    PAGE.write_text(text)


def main() -> None:
    names = ("target", "matters", "robust", "rates", "cotangent", "squares")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="seeds a table (the first table has two more)")
    parser.add_argument("--tables", nargs="+", choices=names, default=names)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "digits_study.jsonl")
    parser.add_argument("--write", action="store_true", help="make no run; write the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(given.results)
    seeds = range(given.seeds)
    held = range(HELD_OUT, HELD_OUT + given.seeds + 2)
    if not given.write:
        plan(store, given.tables, given.models, seeds, held)
    tables = page(store, seeds, held)
    if given.write:
        write(tables)
    else:
        print("\n\n".join("\n".join(tables[name]) for name in given.tables))


if __name__ == "__main__":
    main()
