"""`solve` and what surrounds a run: loop, callbacks, checkpoints, starts."""
