"""Bilevel optimization in PyTorch by the penalty method: no Hessian is inverted."""

from .callbacks import Callback, CSVHistory, EarlyStopping, Progress, Run, TensorBoard
from .check import Check, check
from .errors import (
    BilevelError,
    BilevelWarning,
    CheckpointError,
    DataError,
    OptionError,
    ProblemError,
    RankError,
    VariableError,
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
    "Simplex", "Solution", "Status", "TensorBoard", "ValueFunction", "ValueGap", "VariableError", "__version__",
    "check", "solve", "weighted_mean",
]  # fmt: skip
