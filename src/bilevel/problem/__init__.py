"""What is to be solved: `Problem`, its variables, rows and projections."""
