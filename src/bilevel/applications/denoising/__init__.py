"""Denoising: learn one importance for each training example, and train with these importances."""

from bilevel.applications.denoising.clean_dataset import Cleaned, Prepared, clean, prepare
from bilevel.applications.denoising.cross_validation import Estimate, cross_validate, rows_to_check
from bilevel.applications.denoising.denoise import Denoised, denoise
from bilevel.applications.denoising.trained_run import TrainedRun, load

__all__ = [
    "Cleaned",
    "Denoised",
    "Estimate",
    "Prepared",
    "TrainedRun",
    "clean",
    "cross_validate",
    "denoise",
    "load",
    "prepare",
    "rows_to_check",
]
