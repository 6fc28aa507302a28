"""Our SOBA next to the SOBA of benchopt's benchmark_bilevel: the same problem, batches and step sizes.

    python studies/benchmarks/field_soba.py CHECKOUT [--steps 2000]

CHECKOUT is a folder with benchmark_bilevel; the environment needs jax and benchopt. Its unchanged solver class gets
functions of ours in jax, the batches that its sampler draws are given to our SOBA, and the difference of u is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from bilevel_studies.field.problems import FieldProblem, problem
from bilevel_studies.field.runs import start
from bilevel_studies.field.study import TUNED

from bilevel import SOBA, solve

BATCH = 64


def logistic(v: Any, x: Any, y: Any) -> Any:
    z = x @ v
    return jnp.mean(jnp.logaddexp(0, z) - y * z)


def quadratic(v: Any, u: Any, a: Any, b: Any, c: Any, d: Any, e: Any, h: Any) -> Any:
    curved = ((a @ v) ** 2 + (b @ u) ** 2) / 2 + (c @ u) * (d @ v)
    return jnp.mean(curved) + jnp.mean(e, 0) @ v + jnp.mean(h, 0) @ u


# f and g of a problem in jax, as functions of v, u and rows.
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "ijcnn1": (lambda v, u, x, y: logistic(v, x, y), lambda v, u, x, y: logistic(v, x, y) + jnp.exp(u) @ v**2 / 2),
    "quadratics": (quadratic, quadratic),
}


def of_jax(function: Any, columns: Sequence[torch.Tensor]) -> Any:
    """Return a function with the arguments of the benchmark's."""
    rows = [jnp.asarray(column.numpy()) for column in columns]

    def sliced(inner_var: Any, outer_var: Any, start: Any = 0, batch_size: int = 1) -> Any:
        return function(inner_var, outer_var, *(jax.lax.dynamic_slice_in_dim(x, start, batch_size) for x in rows))

    return sliced


def theirs(field: FieldProblem, name: str, rates: tuple[float, float], steps: int) -> tuple[np.ndarray, list[Any]]:
    """Return u after some steps of the benchmark's SOBA, and the first rows of its batches of g and of f."""
    from benchmark_utils.minibatch_sampler import init_sampler
    from solvers.soba import Solver

    above, below = (len(rows[0]) for rows in field.rows)
    f, g = (of_jax(*pair) for pair in zip(FUNCTIONS[name], field.rows, strict=True))
    u, v = (jnp.asarray(x.detach().numpy()) for x in start(field, 0))
    solver = Solver.get_instance(
        step_size=rates[0], outer_ratio=rates[0] / rates[1], batch_size=BATCH, eval_freq=steps, random_state=1
    )
    solver.stopping_criterion = None
    solver.run_once = lambda count: None
    solver.set_objective(g, f, below, above, v, u)
    found = solver.one_epoch(solver.init(), steps)
    firsts = []
    for count, key in zip((below, above), jax.random.split(jax.random.PRNGKey(1), 2), strict=True):
        sampler, state = init_sampler(n_samples=count, batch_size=BATCH, key=key)
        one, drawn = jax.jit(sampler), []
        for _ in range(steps):
            first, *_, state = one(state)
            drawn.append(min(int(first), count - BATCH))
        firsts.append(drawn)
    return np.asarray(found["outer_var"]), firsts


def ours(field: FieldProblem, rates: tuple[float, float], steps: int, firsts: list[Any]) -> np.ndarray:
    """Return u after some steps of our SOBA on these batches."""
    u, v = start(field, 0)
    stated, _ = field.on_batches()
    below, above = (
        [[column[None, first : first + BATCH] for column in rows] for first in drawn]
        for rows, drawn in zip(field.rows[::-1], firsts, strict=True)
    )
    method = SOBA(lower_rate=rates[0], upper_rate=rates[1])
    solve(stated, method, u, v, (above, below), max_steps=steps, engine="eager", seed=0, hypergradient=False)
    return u.detach().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    chosen = parser.parse_args()
    sys.path.insert(0, str(chosen.checkout))
    for name in FUNCTIONS:
        field, rates = problem(name), TUNED[name]["soba"]
        u, firsts = theirs(field, name, rates, chosen.steps)
        mine = ours(field, rates, chosen.steps, firsts)
        moved = np.linalg.norm(u - start(field, 0)[0].detach().numpy())
        apart = np.linalg.norm(u - mine)
        print(f"{name}: u moved by {moved:.4g}, and ours is {apart:.2g} from it after {chosen.steps} steps")


if __name__ == "__main__":
    main()
