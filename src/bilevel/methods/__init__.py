"""The methods, one algorithm a file.

They share `base`, `options`, `minibatch_run`, `two_lower_variables` and `unrolled`.
"""
