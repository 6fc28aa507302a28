"""The methods, one algorithm a file. `base`, `options`, `minibatch_run`, `two_lower_variables`, `unrolled` are shared."""
