"""The methods, one algorithm a file. Start from `value_gap` to write another: CONTRIBUTING.md says how.

They share `base`, `options`, `minibatch_run`, `adjoint_run`, `single_loop`, `two_lower_variables` and `unrolled`.
"""
