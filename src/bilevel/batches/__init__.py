"""The sources of batches, and how they are read."""
