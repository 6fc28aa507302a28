"""Table 4: seconds for 10,000 upper iterations on the four problems, the paper's beside ours."""

from __future__ import annotations

from bilevel_studies.synthetic.results import Results
from bilevel_studies.synthetic.study import LOWER_STEPS, METHODS, NUMBERS

PAPER = {
    "sum": {1: (7.4, 15.0, 17.4, 17.2), 5: (14.3, 51.4, 39.3, 34.3), 10: (23.2, 95.4, 60.9, 57.0)},
    "difference": {1: (7.7, 18.5, 17.2, 17.4), 5: (17.3, 62.7, 37.9, 35.0), 10: (22.4, 115.0, 64.2, 52.7)},
    "sum-singular": {1: (8.2, 18.8, 19.8, 19.1), 5: (17.4, 72.4, 47.1, 38.6), 10: (28.7, 125.0, 80.6, 62.7)},
    "difference-singular": {1: (7.9, 19.5, 20.4, 19.6), 5: (16.9, 72.8, 48.4, 40.2), 10: (28.3, 138.0, 81.2, 58.0)},
}
"""Mean seconds by problem and T, in the order of METHODS, on the authors' machine."""


def seconds(results: Results, problem: str, T: int) -> dict[str, float]:
    """Ours, of one eager run, by method."""
    return {name: results.clock(problem, name)[T][0] for name in METHODS}


def rows(results: Results) -> list[list[str]]:
    """The table as text: for each method the paper's seconds and ours of one eager run."""
    out = []
    for problem, number in NUMBERS.items():
        for T in LOWER_STEPS:
            row = [f"{number}", f"{T}"]
            for i, name in enumerate(METHODS):
                mean, deviation = results.clock(problem, name)[T]
                row.append(f"{PAPER[problem][T][i]:g} / {mean:.1f}±{deviation:.1f}")
            out.append(row)
    return out


def compiled(results: Results) -> tuple[float, float]:
    """The least and the most seconds of 10,000 compiled steps of all trials of a pair, over all methods and T."""
    found = [1e4 * results.seconds(p, name, T) for p in NUMBERS for name in METHODS for T in LOWER_STEPS]
    return min(found), max(found)
