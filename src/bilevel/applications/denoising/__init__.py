"""Denoising: learn one importance for each training example, and train on it."""

from bilevel.applications.denoising.denoise import denoise

__all__ = ["denoise"]
