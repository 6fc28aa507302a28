"""Bilevel optimization in PyTorch by the penalty method: no Hessian is inverted."""

from bilevel.cli import starting as _starting  # noqa: F401  (before what takes long to import)

# isort: split
from bilevel.distributed.weighted_mean import weighted_mean
from bilevel.errors import (
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
from bilevel.measures.problem_check import Check, check
from bilevel.methods.alternating import Alternating
from bilevel.methods.approx_grad import ApproxGrad
from bilevel.methods.forward_mode import ForwardMode
from bilevel.methods.penalty import Penalty
from bilevel.methods.reverse_mode import ReverseMode
from bilevel.methods.value_function import ValueFunction
from bilevel.methods.value_gap import ValueGap
from bilevel.problem.problem import Problem
from bilevel.problem.projections import Ball, Box, Simplex
from bilevel.problem.rows import Rows
from bilevel.results import Certificate, History, Solution, Status
from bilevel.running.callbacks import Callback, CSVHistory, EarlyStopping, Progress, Run, TensorBoard
from bilevel.running.run_many import run_many
from bilevel.running.solve import solve

__version__ = "0.1.0"

__all__ = [
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
    "run_many",
    "solve",
    "weighted_mean",
]
