"""Bilevel optimization in PyTorch by the penalty method."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bilevel.applications.denoising.trained_run import load
    from bilevel.certificates import Certificate
    from bilevel.distributed.weighted_mean import weighted_mean
    from bilevel.errors import (
        BilevelError,
        BilevelWarning,
        CheckpointError,
        DataError,
        MissingPackageError,
        OptionError,
        ProblemError,
        RankError,
        RunError,
        VariableError,
        WriteError,
    )
    from bilevel.measures.problem_check import Check, check
    from bilevel.methods.alternating import Alternating
    from bilevel.methods.approx_grad import ApproxGrad
    from bilevel.methods.f2sa import F2SA
    from bilevel.methods.forward_mode import ForwardMode
    from bilevel.methods.penalty import Penalty
    from bilevel.methods.reverse_mode import ReverseMode
    from bilevel.methods.sama import SAMA
    from bilevel.methods.soba import SOBA
    from bilevel.methods.srba import SRBA
    from bilevel.methods.value_function import ValueFunction
    from bilevel.methods.value_gap import ValueGap
    from bilevel.problem import Ball, Box, Problem, Rows, Simplex
    from bilevel.results import History, Solution, Status
    from bilevel.running.callbacks import Callback, CSVHistory, EarlyStopping, Progress, Run, TensorBoard
    from bilevel.running.pessimistic import solve_pessimistic
    from bilevel.running.run_many import run_many
    from bilevel.running.solve import solve

    __version__: str

__all__ = [
    "F2SA",
    "SAMA",
    "SOBA",
    "SRBA",
    "Alternating",
    "ApproxGrad",
    "Ball",
    "BilevelError",
    "BilevelWarning",
    "Box",
    "CSVHistory",
    "Callback",
    "Certificate",
    "Check",
    "CheckpointError",
    "DataError",
    "EarlyStopping",
    "ForwardMode",
    "History",
    "MissingPackageError",
    "OptionError",
    "Penalty",
    "Problem",
    "ProblemError",
    "Progress",
    "RankError",
    "ReverseMode",
    "Rows",
    "Run",
    "RunError",
    "Simplex",
    "Solution",
    "Status",
    "TensorBoard",
    "ValueFunction",
    "ValueGap",
    "VariableError",
    "WriteError",
    "__version__",
    "check",
    "load",
    "run_many",
    "solve",
    "solve_pessimistic",
    "weighted_mean",
]

_MODULES = {
    "applications.denoising.trained_run": ["load"],
    "distributed.weighted_mean": ["weighted_mean"],
    "errors": [name for name in __all__ if name.endswith(("Error", "Warning"))],
    "measures.problem_check": ["Check", "check"],
    "methods.alternating": ["Alternating"],
    "methods.approx_grad": ["ApproxGrad"],
    "methods.f2sa": ["F2SA"],
    "methods.forward_mode": ["ForwardMode"],
    "methods.penalty": ["Penalty"],
    "methods.reverse_mode": ["ReverseMode"],
    "methods.sama": ["SAMA"],
    "methods.soba": ["SOBA"],
    "methods.srba": ["SRBA"],
    "methods.value_function": ["ValueFunction"],
    "methods.value_gap": ["ValueGap"],
    "problem": ["Ball", "Box", "Problem", "Rows", "Simplex"],
    "certificates": ["Certificate"],
    "results": ["History", "Solution", "Status"],
    "running.callbacks": ["CSVHistory", "Callback", "EarlyStopping", "Progress", "Run", "TensorBoard"],
    "running.run_many": ["run_many"],
    "running.pessimistic": ["solve_pessimistic"],
    "running.solve": ["solve"],
}
_MODULE_OF = {name: f"bilevel.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562): `import bilevel` does not import torch."""
    if name == "__version__":
        found: object = _version()
    elif name in _MODULE_OF:
        found = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'bilevel' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("bilevel")
    except PackageNotFoundError:
        return "not installed"
