"""The figures of the synthetic study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from bilevel_studies.plots import STYLE, new_figure, save_figure
from bilevel_studies.synthetic.results import Array, Results
from bilevel_studies.synthetic.study import LAMS, LOWER_STEPS, METHODS, NUMBERS, PAIRS, PROBLEMS, SENSITIVITY

COLORS = {
    "GD": "#7f7f7f",
    "RMD": "#2ca02c",
    "ApproxGrad": "#ff7f0e",
    "Penalty": "#1f77b4",
    "FMD": "#d62728",
    "ValueGap": "#9467bd",
    "ValueFunction": "#8c564b",
}
DASHES: dict[int, Any] = {1: (0, (1, 1.2)), 5: (0, (4, 2)), 10: "-", 100: (0, (6, 1.5, 1, 1.5))}
FLOOR = 1e-12


@matplotlib.rc_context(STYLE)
def convergence(results: Results, pair: str, path: Path) -> None:
    """Draw Figures 1 and 2: for each problem of a pair and each T, the mean of every method over its trials."""
    steps = [*LOWER_STEPS, 100]
    figure = new_figure(8.8, 4.6)
    axes = figure.subplots(2, len(steps), sharex="col", sharey="row")
    for row, problem in zip(axes, PAIRS[pair], strict=True):
        for cell, T in zip(row, steps, strict=True):
            for name in METHODS if T < 100 else ("RMD",):
                x, errors = results.curves(problem, name, T)
                _trials(cell, x, errors, COLORS[name], name)
            cell.set_title(f"Example {NUMBERS[problem]}, T = {T}")
            cell.set_yscale("log")
            cell.xaxis.set_major_formatter(_thousands)
        row[0].set_ylabel("error")
    for cell in axes[-1]:
        cell.set_xlabel("upper steps")
    save_figure(figure, path, legend_of=axes[0][0])


@matplotlib.rc_context(STYLE)
def ablation(results: Results, path: Path) -> None:
    """Draw Figure 7: Penalty on Example 1 for each T and first lam, with nu (top) and without."""
    figure = new_figure(8.0, 4.4)
    axes = figure.subplots(2, len(LOWER_STEPS), sharex=True, sharey=True)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.85, len(LAMS)))
    for row, multipliers in zip(axes, (True, False), strict=True):
        for cell, T in zip(row, LOWER_STEPS, strict=True):
            x, means = results.ablated(T, multipliers)
            for lam, values, shade in zip(LAMS, means.T, shades, strict=True):
                cell.semilogy(x, np.maximum(values, FLOOR), color=shade, label=f"lam = {lam:g}")
            cell.set_title(f"T = {T}, {'with' if multipliers else 'without'} nu")
            cell.xaxis.set_major_formatter(_thousands)
        row[0].set_ylabel("mean error")
    for cell in axes[-1]:
        cell.set_xlabel("upper steps")
    save_figure(figure, path, legend_of=axes[0][0])


@matplotlib.rc_context(STYLE)
def sensitivity(results: Results, path: Path) -> None:
    """Draw Appendix D.4: the last mean error against each of four options."""
    names = {
        "gamma": "first gamma",
        "epsilon": "first epsilon",
        "gamma_factor": "c_gamma",
        "epsilon_factor": "c_epsilon",
    }
    figure = new_figure(8.0, 2.4)
    axes = figure.subplots(1, len(SENSITIVITY), sharey=True)
    for cell, option in zip(axes, SENSITIVITY, strict=True):
        for (problem, rows), color in zip(results.varied(option).items(), ("#1f77b4", "#d62728"), strict=True):
            values, ends = zip(*rows, strict=True)
            cell.plot(values, np.maximum(ends, FLOOR), "o-", ms=3, color=color, label=f"Example {NUMBERS[problem]}")
        cell.set_yscale("log")
        if option in ("gamma", "epsilon"):
            cell.set_xscale("log")
        cell.set_xlabel(names[option])
    axes[0].set_ylabel("last mean error")
    save_figure(figure, path, legend_of=axes[0])


@matplotlib.rc_context(STYLE)
def budget(results: Results, path: Path) -> None:
    """Draw the error of every run against its gradients of g, and the number of gradients that all runs took."""
    figure = new_figure(8.0, 5.6)
    axes = figure.subplots(2, 2, sharex=True)
    for cell, problem in zip(axes.flat, PROBLEMS, strict=True):
        for (name, T), cost in results.gradients.items():
            x, errors = results.curves(problem, name, T)
            mean = np.maximum(errors.mean(1), FLOOR)
            cell.plot(x[1:] * cost, mean[1:], color=COLORS[name], ls=DASHES[T], lw=1.1, label=f"{name}, T = {T}")
        evaluations, means = _default_curve(results, problem)
        cell.plot(2 * evaluations, means, color="black", lw=2, label="Penalty(), no option")
        cell.axvline(results.budget, color="black", lw=0.8, ls=":")
        cell.set(xscale="log", yscale="log", title=f"Example {NUMBERS[problem]}")
        cell.set_xlim(left=10)
    for cell in axes[-1]:
        cell.set_xlabel("gradients of g")
    for cell in axes[:, 0]:
        cell.set_ylabel("mean error")
    save_figure(figure, path, legend_of=axes[0][0])


def _default_curve(results: Results, problem: str) -> tuple[Array, Array]:
    """Return the mean error of `Penalty()` against evaluations; a trial that has ended keeps its last error."""
    found = results.default(problem)
    grid = np.unique(np.concatenate([np.array(e, dtype=float) for e in found["evaluations"]]))
    rows = []
    for evaluations, errors in zip(found["evaluations"], found["errors"], strict=True):
        at = np.searchsorted(np.array(evaluations[: len(errors)]), grid, "right") - 1
        rows.append(np.array(errors)[at])
    return grid, np.maximum(np.mean(rows, axis=0), FLOOR)


def _trials(cell: Any, x: Array, errors: Array, color: str, label: str) -> None:
    """Draw every trial as a thin line, and their mean on top."""
    cell.plot(x, np.maximum(errors, FLOOR), color=color, lw=0.4, alpha=0.18)
    cell.plot(x, np.maximum(errors.mean(1), FLOOR), color=color, lw=1.8, label=label)


def _thousands(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
