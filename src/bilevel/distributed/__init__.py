"""Means and derivatives over ranks."""
