"""The problem to solve: `Problem`, its variables, rows and projections."""
