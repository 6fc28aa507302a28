"""Classical small bilevel problems with their best known values: see `cases`."""

from bilevel_studies.classical.case import Case, Verdict, cases, judge, run

__all__ = ["Case", "Verdict", "cases", "judge", "run"]
