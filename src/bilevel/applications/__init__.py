"""Bilevel problems ready made: each module turns what a user has into a `Problem` and scores the `Solution`."""
