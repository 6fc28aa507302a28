"""How a step runs: as written, compiled, or as a CUDA graph."""
