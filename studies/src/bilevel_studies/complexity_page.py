"""The page of the complexity study: Table 1 beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel._util.atomic_files import write_whole
from bilevel.running.run_many import Found, Settings
from bilevel_studies import figures
from bilevel_studies.complexity import FULL, TABLE, TOLERANCE, Exponent, Sizes, exponents
from bilevel_studies.markdown import table


def write(sizes: Sizes, results: Sequence[tuple[Settings, Found]], folder: Path) -> dict[str, Any]:
    """Write the figure and the page into a folder; returns the summary."""
    found = exponents(sizes, results)
    figures.exponents(found, folder / "complexity.png")
    write_whole(folder / "complexity.md", page(sizes, found))
    decisive = [e for e in found if e.quantity != "seconds"]
    return {
        "exponents": [
            {
                "method": e.method,
                "quantity": e.quantity,
                "variable": e.variable,
                "found": round(e.found, 3),
                "table": round(e.table, 3),
                "holds": e.holds,
            }
            for e in found
        ],
        "decisive": len(decisive),
        "holds": sum(e.holds for e in decisive),
    }


def page(sizes: Sizes, found: Sequence[Exponent]) -> str:
    decisive = [e for e in found if e.quantity != "seconds"]
    held = sum(e.holds for e in decisive)
    base = ", ".join(f"{name} = {value:,}" for name, value in sizes.base.items())
    ranges = ", ".join(f"{name} from {min(sizes.of(name)):,} to {max(sizes.of(name)):,}" for name in "TUV")
    misses = [f"{e.method}, {e.quantity} in {e.variable} ({e.found:.2f})" for e in decisive if not e.holds]
    parts = [
        "# Complexity, measured",
        f"Written by `bilevel reproduce complexity{'' if sizes == FULL else ' --quick'}`. Table 1 of the paper says "
        "how time and memory of one hypergradient grow with T (lower steps), U and V (the sizes of u and v), with c "
        "the time of one gradient of g or of one product with its Hessian.",
        f"Problem: a weighted regression, one weight an example (U examples, V coefficients). {ranges}; the others are "
        f"{base} meanwhile. Time is counted: the floating-point operations of an upper step over those of one gradient "
        "of g. Memory is measured: the most bytes that the tensors of the step took at one time, graphs included. "
        "Seconds are shown and decide nothing: with tensors this small they are mostly those of the calls.",
        f"## {held} of {len(decisive)} exponents agree with Table 1",
        f"k in x^k, fitted over the larger sizes / that of the table's formula at the same sizes. They agree within "
        f"{TOLERANCE:g}." + (f" Those that do not: {'; '.join(misses)}." if misses else ""),
        _exponents(found),
        "![Gradients and bytes of one upper step against T, U and V](complexity.png)",
        "## What an upper step costs",
        _numbers(found),
        _beside(found),
        "## To run it again",
        "```bash\nbilevel reproduce complexity --out runs/complexity --page docs/results\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _exponents(found: Sequence[Exponent]) -> str:
    rows = []
    for name, row in TABLE.items():
        mine = [e for e in found if e.method == name]
        cells = [name, row.time, row.space]
        for quantity in ("gradients", "bytes", "seconds"):
            for e in (e for e in mine if e.quantity == quantity):
                cells.append(f"{e.found:.2f} / {e.table:.2f}".replace("-0.00", "0.00"))
        rows.append(cells)
    heads = [f"{what} in {variable}" for what in ("time", "memory", "seconds") for variable in "TUV"]
    return table(["method", "time, Table 1", "space, Table 1", *heads], rows)


def _numbers(found: Sequence[Exponent]) -> str:
    rows = []
    for e in found:
        if e.quantity == "gradients":
            memory = next(o for o in found if (o.method, o.quantity, o.variable) == (e.method, "bytes", e.variable))
            cells = [
                f"{size:,}: {value:,.4g} ({held / 1024:,.0f} KiB)"
                for (size, value), (_, held) in zip(e.values, memory.values, strict=True)
            ]
            rows.append([e.method, e.variable, *cells])
    width = max(len(row) for row in rows)
    return table(["method", "against", *(["gradients (memory)"] * (width - 2))], rows)


def _beside(found: Sequence[Exponent]) -> str:
    """The others at the largest T, as multiples of Penalty."""
    last = {(e.method, e.quantity): e.values[-1] for e in found if e.variable == "T"}
    size = last["Penalty", "gradients"][0]
    parts = []
    for name in TABLE:
        if name != "Penalty":
            work, memory = (last[name, q][1] / last["Penalty", q][1] for q in ("gradients", "bytes"))
            parts.append(f"{name} {work:.2g} times the gradients and {memory:.2g} times the memory")
    return f"Beside Penalty, at T = {size}, a step takes: {'; '.join(parts)}. ApproxGrad solves by conjugate gradients."
