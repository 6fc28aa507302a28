"""Table 1, measured: time and memory of one hypergradient against T, U and V.

    g = sum_i e^u_i log cosh(x_i v - y_i) + |v|^2 / 2       (one weight an example: u has U numbers, v has V)
    f = |Z v - t|^2 / 2

All work of g is in products with X. So the operations of an upper step, divided by the operations of one gradient of g,
are its cost in gradients, c in the table. Seconds are shown but do not decide. Memory is the peak of the bytes of a
step's tensors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from bilevel import ApproxGrad, ForwardMode, Penalty, Problem, ReverseMode
from bilevel.methods.base import Method
from bilevel_studies import plots
from bilevel_studies.cost import cost
from bilevel_studies.study import Found, Kept, Report, RunItem, Settings
from bilevel_studies.study import table as markdown

# Rows of Z.
VALID = 4
RATE = 1e-3
# The largest difference between a fitted exponent and the exponent of the table's formula at the same sizes.
TOLERANCE = 0.2


@dataclass(frozen=True)
class Sizes:
    """The values of each of T, U and V, and `base`, their values while another one varies."""

    T: Sequence[int]
    U: Sequence[int]
    V: Sequence[int]
    base: Mapping[str, int]

    def of(self, name: str) -> Sequence[int]:
        return {"T": self.T, "U": self.U, "V": self.V}[name]


FULL = Sizes(
    T=(8, 16, 32, 64, 128),
    U=(8, 16, 32, 64, 128),
    V=(256, 512, 1024, 2048, 4096),
    base={"T": 8, "U": 16, "V": 1024},
)
QUICK = Sizes(T=(8, 16, 32), U=(8, 16, 32), V=(128, 256, 512), base={"T": 4, "U": 8, "V": 256})


@dataclass(frozen=True)
class Row:
    """A method in Table 1."""

    time: str
    space: str
    # In c, of T, U and V.
    time_of: Callable[[int, int, int], float]
    space_of: Callable[[int, int, int], float]


# The paper's Table 1.
TABLE = {
    "FMD": Row("O(cUT)", "O(UV)", lambda T, U, V: U * T, lambda T, U, V: U * V),
    "RMD": Row("O(cT)", "O(U + VT)", lambda T, U, V: T, lambda T, U, V: U + V * T),
    "ApproxGrad": Row("O(cT)", "O(U + V)", lambda T, U, V: T, lambda T, U, V: U + V),
    "Penalty": Row("O(cT)", "O(U + V)", lambda T, U, V: T, lambda T, U, V: U + V),
}


def method(name: str, T: int) -> Method:
    """Return a method as in the table: lower gradient descent, and T products for the linear system of ApproxGrad."""
    match name:
        case "FMD":
            return ForwardMode(lower_steps=T, lower_rate=RATE, warm_up=0.0, decay="linear")
        case "RMD":
            return ReverseMode(lower_steps=T, lower_rate=RATE, warm_up=0.0, decay="linear")
        case "ApproxGrad":
            descent = partial(torch.optim.SGD, lr=RATE)
            return ApproxGrad(lower_steps=T, linear_solver="cg", warm_up=0.0, decay="linear", lower_optimizer=descent)
        case _:
            return Penalty.algorithm_1(lower_steps=T, lower_optimizer=partial(torch.optim.SGD, lr=RATE))


def regression(U: int, V: int) -> tuple[Problem, Tensor, Tensor]:
    """Return the problem with U upper and V lower variables, u and v."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X, y, Z, t = normal(U, V) / V**0.5, normal(U), normal(VALID, V) / V**0.5, normal(VALID)

    def rows(matrix: Tensor, v: Tensor) -> Tensor:
        return (matrix @ v[:, None])[:, 0]

    def upper(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return ((rows(Z, v) - t) ** 2).sum() / 2

    def lower(u: Tensor, v: Tensor, batch: None) -> Tensor:
        return (u.exp() * torch.log(torch.cosh(rows(X, v) - y))).sum() + (v * v).sum() / 2

    return Problem(upper, lower), torch.zeros(U, dtype=torch.float64).requires_grad_(), normal(V).requires_grad_()


def cells(sizes: Sizes) -> list[RunItem]:
    """Return a cell for every method and size."""
    points = [{**sizes.base, name: value} for name in "TUV" for value in sizes.of(name)]
    unique = list(dict.fromkeys((p["T"], p["U"], p["V"]) for p in points))
    return [RunItem({"method": m, "T": T, "U": U, "V": V}, weight=T * U * V) for m in TABLE for T, U, V in unique]


def run(settings: Settings) -> Found:
    problem, u, v = regression(settings["U"], settings["V"])
    return asdict(cost(problem, method(settings["method"], settings["T"]), u, v))


@dataclass(frozen=True)
class Exponent:
    """How a quantity grows with T, U or V."""

    method: str
    # `gradients`, `bytes` or `seconds`.
    quantity: str
    variable: str
    found: float
    # The exponent of the table's formula at the same sizes.
    table: float
    # (size, measured)
    values: Sequence[tuple[int, float]]

    @property
    def holds(self) -> bool:
        """True if it differs from the table's by at most TOLERANCE."""
        return abs(self.found - self.table) <= TOLERANCE


def exponents(sizes: Sizes, results: Sequence[tuple[Settings, Found]]) -> list[Exponent]:
    """Return the fitted exponents together with the exponents of Table 1, for every method and quantity."""
    known = {(s["method"], s["T"], s["U"], s["V"]): found for s, found in results}
    out = []
    for name, row in TABLE.items():
        for quantity, formula in (("gradients", row.time_of), ("bytes", row.space_of), ("seconds", row.time_of)):
            for variable in "TUV":
                points = [{**sizes.base, variable: value} for value in sizes.of(variable)]
                keys = [(p["T"], p["U"], p["V"]) for p in points]
                measured = [float(known[(name, *key)][quantity]) for key in keys]
                # The time of one gradient, c, grows with the size of X: seconds are compared with c times the count.
                work = [formula(*key) * (key[1] * key[2] if quantity == "seconds" else 1) for key in keys]
                at = sizes.of(variable)
                out.append(
                    Exponent(
                        name,
                        quantity,
                        variable,
                        slope(at, measured),
                        slope(at, work),
                        list(zip(at, measured, strict=True)),
                    )
                )
    return out


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit the exponent k of y ~ x^k to the upper half of the sizes, by least squares of the logarithms."""
    first = len(x) // 2
    a, b = ([math.log(value) for value in values[first:]] for values in (x, y))
    return statistics.linear_regression(a, b).slope


def report(sizes: Sizes, kept: Sequence[Kept], folder: Path) -> Report:
    """Draw the figure and return the tables."""
    found = exponents(sizes, kept)
    draw(found, folder / "complexity.png")
    decisive = [e for e in found if e.quantity != "seconds"]
    held = sum(e.holds for e in decisive)
    names = ("method", "quantity", "variable", "found", "table", "holds")
    summary = {"exponents": [{name: getattr(e, name) for name in names} for e in found]}
    tables = {"Exponents: found / Table 1": exponent_table(found), "Cost of an upper step": cost_table(found)}
    message = f"{held} of {len(decisive)} exponents agree with Table 1."
    return Report(summary | {"decisive": len(decisive), "holds": held}, tables, message)


def exponent_table(found: Sequence[Exponent]) -> str:
    shown = [(e.method, f"{e.found:.2f} / {e.table:.2f}".replace("-0.00", "0.00")) for e in found]
    rows = [
        [name, row.time, row.space, *(text for method, text in shown if method == name)] for name, row in TABLE.items()
    ]
    heads = [f"{what} in {variable}" for what in ("time", "memory", "seconds") for variable in "TUV"]
    return markdown(["method", "time, Table 1", "space, Table 1", *heads], rows)


def cost_table(found: Sequence[Exponent]) -> str:
    """Return the table of gradients, and memory in brackets, at each size."""
    held = {(e.method, e.variable): e.values for e in found if e.quantity == "bytes"}
    rows = []
    for e in (e for e in found if e.quantity == "gradients"):
        pairs = zip(e.values, held[e.method, e.variable], strict=True)
        cells = [f"{size:,}: {value:,.4g} ({most / 1024:,.0f} KiB)" for (size, value), (_, most) in pairs]
        rows.append([e.method, e.variable, *cells])
    return markdown(["method", "against", *["gradients (memory)"] * (len(rows[0]) - 2)], rows)


@matplotlib.rc_context(plots.STYLE)
def draw(found: Sequence[Exponent], path: Path) -> None:
    """Draw counted gradients (top) and bytes (bottom) of one upper step against T, U and V."""
    figure = plots.new_figure(8.0, 4.6)
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    for row, quantity, label in zip(axes, ("gradients", "bytes"), ("gradients of g", "bytes"), strict=True):
        for cell, variable in zip(row, "TUV", strict=True):
            for name, color in zip(TABLE, plots.COLORS, strict=False):
                one = next(e for e in found if (e.method, e.quantity, e.variable) == (name, quantity, variable))
                x, y = zip(*one.values, strict=True)
                cell.loglog(x, y, "o-", ms=3, color=color, label=name, base=2)
                cell.set_yscale("log", base=10)
            cell.set_xticks(x, [str(value) for value in x])
            cell.minorticks_off()
        row[0].set_ylabel(label)
    for cell, variable in zip(axes[-1], "TUV", strict=True):
        cell.set_xlabel(variable)
    plots.save_figure(figure, path, legend_of=axes[0][0])
