"""Helpers that know nothing of bilevel optimization."""
