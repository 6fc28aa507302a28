"""Bilevel optimization in PyTorch by the penalty method: no Hessian is inverted."""

from .cli import starting as _starting  # noqa: F401  (before what takes long to import)

# isort: split
from .callbacks import Callback, CSVHistory, EarlyStopping, Progress, Run, TensorBoard
from .cells import run_many
from .check import Check, check
from .errors import (
    BilevelError,
    BilevelWarning,
    CheckpointError,
    DataError,
    OptionError,
    ProblemError,
    RankError,
    RunError,
    VariableError,
    WriteError,
)
from .methods.alternating import Alternating
from .methods.approx_grad import ApproxGrad
from .methods.forward_mode import ForwardMode
from .methods.penalty import Penalty
from .methods.reverse_mode import ReverseMode
from .methods.value_function import ValueFunction
from .methods.value_gap import ValueGap
from .problem import Problem
from .projections import Ball, Box, Simplex
from .rows import Rows
from .solution import Certificate, History, Solution, Status
from .solve import solve
from .weighting import weighted_mean

__version__ = "0.1.0"

__all__ = [
    "Alternating", "ApproxGrad", "Ball", "BilevelError", "BilevelWarning", "Box", "CSVHistory", "Callback",
    "Certificate", "Check", "CheckpointError", "DataError", "EarlyStopping", "ForwardMode", "History",
    "OptionError", "Penalty", "Problem", "ProblemError", "Progress", "RankError", "ReverseMode", "Rows", "Run",
    "RunError", "Simplex", "Solution", "Status", "TensorBoard", "ValueFunction", "ValueGap", "VariableError",
    "WriteError", "__version__", "check", "run_many", "solve", "weighted_mean",
]  # fmt: skip
