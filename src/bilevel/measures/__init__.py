"""Measure a problem: scales, minima of the lower level, certificates, checks."""
