"""Compare methods on one problem."""
