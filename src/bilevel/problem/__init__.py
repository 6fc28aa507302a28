"""The problem to solve: `Problem`, its variables, rows and projections."""

from bilevel.problem.problem import Objective, Problem, Projection
from bilevel.problem.projections import Ball, Box, Simplex
from bilevel.problem.rows import Parts, Rows, together
from bilevel.problem.variables import Variable

__all__ = ["Ball", "Box", "Objective", "Parts", "Problem", "Projection", "Rows", "Simplex", "Variable", "together"]
