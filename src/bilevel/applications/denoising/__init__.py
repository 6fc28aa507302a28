"""Denoising: learn one importance for each training example, and train with these importances."""

from bilevel.applications.denoising.clean_dataset import Cleaned, Prepared, clean, prepare
from bilevel.applications.denoising.denoise import Denoised, denoise

__all__ = ["Cleaned", "Denoised", "Prepared", "clean", "denoise", "prepare"]
