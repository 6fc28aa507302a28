"""How time and memory of an upper iteration grow: with N rows of u, V weights, T lower steps and the batch.

    python studies/benchmarks/scale.py                     one CPU thread, at most 16 GiB
    python studies/benchmarks/scale.py --limit 4 --axes N T
    python studies/benchmarks/scale.py --device cuda       one GPU
    python studies/benchmarks/scale.py --write             the page, from the results so far

Results go to studies/results/scale.json as they come; one that is there already is not measured again (--again does).
On the CPU every point is a separate process, whose peak is read by getrusage, and none is started that is expected to
pass --limit. Unless a point says otherwise: the MLP 784-300-10, 10,000 rows, T = 2, batches of 100 and 100, exact
curvature, eager.

`largest` looks for the largest problem that fits, by whole `solve` calls of two steps, which also hold a copy of
everything to go back to; each size is chosen from the bytes that the last one took.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from step import Store, lower, penalty, started, surroundings, table, upper, write
from torch import Tensor, nn

from bilevel import Problem, Rows, solve
from bilevel.applications import networks as models

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "studies" / "results" / "scale.json"
GIB = 2**30
WHOLE = {"cpu": 24.0, "cuda": 139.0}
"""GiB that the largest problem is stated for."""
LIMIT = {"cpu": 16.0, "cuda": 132.0}
MODEST = 0.005 * GIB
"""Memory below this belongs to the libraries and is left out of the fits."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One problem, and how it is run."""

    model: str = "mlp"
    width: int = 300
    rows: int = 10_000
    lower_steps: int = 2
    batch: int = 100
    whole: bool = False
    """By a call of `solve` rather than step by step"""


# -- networks ----------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A transformer that reads an image row by row. Its attention is plain: the fused one has no double backward."""

    def __init__(self, width: int, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.read = nn.Linear(28, width)
        self.place = nn.Parameter(torch.zeros(28, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "mix": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "after": nn.LayerNorm(width),
                    "think": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.squeeze(1)) + self.place
        for block in self.blocks:
            x = x + block["out"](self._attend(block["mix"](block["before"](x))))
            x = x + block["think"](block["after"](x))
        return self.head(x.mean(1))

    def _attend(self, mixed: Tensor) -> Tensor:
        n, length, width = mixed.shape
        q, k, v = mixed.reshape(n, length, 3, self.heads, width // 3 // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(n, length, width // 3)


def network(point: Point, device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        match point.model:
            case "mlp":
                return models.mlp(hidden=(point.width,))
            case "deep mlp":
                return models.mlp(hidden=(point.width, point.width))
            case "cnn":
                return models.mnist_cnn()
            case "transformer":
                return Encoder(point.width)
            case _:
                return models.wide_resnet()


def deep_width(weights: float) -> int:
    """The width of a deep MLP with about this many weights."""
    return max(8, round((math.sqrt(796.0**2 + 4 * weights) - 796) / 2))


# -- one point ---------------------------------------------------------------------------------------------------------


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(point: Point, device: torch.device) -> dict[str, Any]:
    """Seconds of an iteration, and the memory that the problem takes at its peak."""
    shape = (3, 32, 32) if point.model == "WRN-28-10" else (1, 28, 28)
    draw = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        x, y = torch.randn(point.batch, *shape, generator=draw), torch.randint(10, (point.batch,), generator=draw)
        rows = torch.randint(point.rows, (point.batch,), generator=draw)
        return x.to(device), y.to(device), rows.to(device)

    data = [batch()[:2] for _ in range(2)], [batch() for _ in range(2)]
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = peak(device)
    v, u = network(point, device), Rows(point.rows, device=device)
    count = sum(p.numel() for p in v.parameters())
    problem, method = Problem(upper, lower), penalty(point.lower_steps, "exact")
    times: list[float] = []
    began = time.perf_counter()
    if point.whole:
        solve(problem, method, u, v, data, max_steps=2, engine="eager", seed=0, hypergradient=False)
        times.append(time.perf_counter() - began)
    else:
        state = started(problem, method, u, v, data)
        state.step(0)
        while len(times) < 5 and (len(times) < 2 or sum(times) < 20):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            state.step(len(times) + 1)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times), "bytes": peak(device) - base, "weights": count, "rows": point.rows}


def apart(point: Point, device: torch.device, timeout: float) -> dict[str, Any]:
    """`run`; on the CPU in a separate process. A point that fails says why."""
    if device.type == "cuda":
        try:
            return run(point, device)
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
    command = [sys.executable, __file__, "--point", json.dumps(dataclasses.asdict(point))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {timeout:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- what grows --------------------------------------------------------------------------------------------------------


def axes(device: str) -> dict[str, list[tuple[float, Point]]]:
    """Points by what grows in them, each with its size."""
    gpu = device == "cuda"
    weights = [10**k for k in (5, 6, 7, 8, *([9] if gpu else []))]
    widths = (48, 144, 456, *((1440,) if gpu else ()))
    batches = (50, 100, 200, 400, 800, 1600, 3200, *((6400, 12800) if gpu else ()))
    return {
        "N": [(n, Point(rows=n)) for n in (10**4, 10**5, 10**6, 10**7)],
        "V, MLP": [(n, Point(model="deep mlp", width=deep_width(n), lower_steps=1)) for n in weights],
        "V, transformer": [(12 * 4 * w**2, Point(model="transformer", width=w, lower_steps=1)) for w in widths],
        "WRN-28-10": [(36.5e6, Point(model="WRN-28-10", lower_steps=1, batch=75 if gpu else 2))],
        "T": [(t, Point(lower_steps=t)) for t in (1, 2, 5, 10, 20, 50, 100)],
        "batch": [(b, Point(batch=b)) for b in batches],
    }


def expected(found: Sequence[tuple[float, dict[str, Any]]], size: float) -> float:
    """Estimate the bytes of a point of this size from the last one measured."""
    known = [(s, r["bytes"]) for s, r in found if r.get("bytes", 0) > MODEST]
    return known[-1][1] * size / known[-1][0] if known else 0.0


def grow(store: Store, device: torch.device, names: Sequence[str], limit: float, timeout: float) -> None:
    for name in names:
        seen: list[tuple[float, dict[str, Any]]] = []
        for size, point in axes(device.type).get(name, ()):
            if expected(seen, size) > limit:
                print(f"{name} {size:.0f}: left out, it could pass the limit", flush=True)
                break
            key = f"{device.type}/{name}/{size:.0f}"
            store.make(key, lambda p=point: apart(p, device, timeout) | {"batch": p.batch, "T": p.lower_steps})
            seen.append((size, store.results[key]))
            if "failed" in store.results[key]:
                break


def largest(store: Store, device: torch.device, limit: float, timeout: float) -> None:
    """The most weights, and the most rows, within the limit."""
    starts: dict[str, tuple[float, Any]] = {
        "V": (1e7, lambda n: Point(model="deep mlp", width=deep_width(n), lower_steps=1, batch=20, whole=True)),
        "N": (1e7, lambda n: Point(rows=int(n), lower_steps=1, batch=100, whole=True)),
    }
    for name, (start, make) in starts.items():
        size, tried = start, 0
        while tried < 4:
            key = f"{device.type}/largest {name}/{size:.0f}"
            point = make(size)
            store.make(key, lambda p=point: apart(p, device, timeout))
            found, tried = store.results[key], tried + 1
            if "failed" in found:
                break
            room = 0.93 * limit / found["bytes"] * size
            if room < 1.2 * size:
                break
            # Small problems say little of large ones: not more than tenfold at once.
            size = float(f"{min(room, 10 * size):.2g}")


def exponent(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 3:
        return ""
    x, y = np.log([p[0] for p in points]), np.log([p[1] for p in points])
    return f"{np.polyfit(x, y, 1)[0]:.2f}"


def pages(store: Store, device: str) -> list[str]:
    results = store.found(f"{device}/")
    if not results:
        return []
    fits, rows = [], []
    for name in axes(device):
        found = [(float(key.split("/")[1]), r) for key, r in results.items() if key.split("/")[0] == name]
        found.sort(key=lambda item: item[0])
        good = [(size, r) for size, r in found if "seconds" in r]
        if len(good) > 1:
            span = f"{good[0][0]:,.0f} to {good[-1][0]:,.0f}"
            half = good[len(good) // 2 - 1 :] if len(good) > 3 else good
            fits.append(
                [
                    name,
                    span,
                    exponent([(s, r["seconds"]) for s, r in good]),
                    exponent([(s, r["seconds"]) for s, r in half]),
                    exponent([(s, r["bytes"]) for s, r in good if r["bytes"] > MODEST]),
                    exponent([(s, r["bytes"]) for s, r in half if r["bytes"] > MODEST]),
                ]
            )
        for size, r in found:
            if "failed" in r:
                rows.append([name, f"{size:,.0f}", "", "", "", "", r["failed"], ""])
            else:
                rows.append(
                    [
                        name,
                        f"{size:,.0f}",
                        f"{r['weights']:,}",
                        f"{r['rows']:,}",
                        str(r["T"]),
                        str(r["batch"]),
                        f"{1e3 * r['seconds']:,.1f}",
                        f"{r['bytes'] / 2**20:,.0f}",
                    ]
                )
    lines = [
        store.results.get(f"surroundings/{device}", ""),
        "",
        *table(["grows", "from, to", "time", "time, upper half", "memory", "memory, upper half"], fits),
        "",
        *table(["grows", "size", "V", "N", "T", "batch", "ms an iteration", "MiB"], rows),
    ]
    return lines + list(_largest_lines(results, device))


def _largest_lines(results: dict[str, Any], device: str) -> Iterator[str]:
    for name, word in (("V", "weights"), ("N", "rows")):
        found = [r for key, r in results.items() if key.startswith(f"largest {name}/") and "bytes" in r]
        if not found:
            continue
        best = max(found, key=lambda r: r[word])
        each = best["bytes"] / best[word]
        yield ""
        yield (
            f"Largest {name} run: {best[word]:,} {word} in {best['bytes'] / GIB:.1f} GiB, {each:.0f} bytes each; two "
            f"steps and the certificate in {best['seconds']:.0f} s. At that rate {WHOLE[device]:.0f} GiB hold "
            f"{WHOLE[device] * GIB / each:.2g} {word}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--axes", nargs="+", choices=[*axes("cuda"), "largest"], default=[*axes("cuda"), "largest"])
    parser.add_argument("--limit", type=float, help="GiB; default 16 on the CPU, 132 on the GPU")
    parser.add_argument("--timeout", type=float, default=300, help="most seconds of a point (CPU)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure again what has results")
    parser.add_argument("--write", action="store_true", help="measure nothing; write the page")
    parser.add_argument("--merge", type=Path, help="measure nothing; take over these results and write the page")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(given.device)
    if given.point is not None:
        run(Point(width=8, rows=16, batch=4), device)  # what the libraries load on first use is not the problem's
        print(json.dumps(run(Point(**json.loads(given.point)), device)))
        return
    store = Store(given.out, given.again)
    limit = GIB * (given.limit or LIMIT[device.type])
    if given.merge is not None:
        store.merge(given.merge)
    elif not given.write:
        store.results[f"surroundings/{device.type}"] = surroundings(device.type)
        grow(store, device, [name for name in given.axes if name != "largest"], limit, given.timeout)
        if "largest" in given.axes:
            largest(store, device, limit, given.timeout)
    sections = {"scale:cpu": pages(store, "cpu"), "scale:cuda": pages(store, "cuda")}
    print("\n\n".join("\n".join(lines) for lines in sections.values() if lines))
    if given.out == RESULTS:
        write(sections)


if __name__ == "__main__":
    main()
