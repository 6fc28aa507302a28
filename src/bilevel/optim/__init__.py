"""Optimizers and linear solvers for lists of tensors."""
