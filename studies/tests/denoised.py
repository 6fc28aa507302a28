"""Cells and results of the denoising studies, for their tests."""

from bilevel_studies.denoising import speed as denoising_speed


def digits(column, noise=0.25, seed=0, kind="symmetric", passes=(1, 1)):
    return {"dataset": "digits", "noise": noise, "kind": kind, "column": column, "seed": seed, "passes": list(passes)}


def table_row(text, title="MNIST, 25% symmetric"):
    return next(line for line in text.splitlines() if line.startswith(f"| {title} |"))


def curve(part, name, T, seconds, test, ms):
    settings = next(c.settings for c in denoising_speed.cells(part, "mlp") if c.settings["method"] == name)
    found = {
        "curves": {"seconds": seconds, "test": test, "validation": test, "train": test},
        "accuracy": test[-1],
        "ms_per_step": ms,
        "seconds": seconds[-1],
        "steps": 9,
        "device": "CPU",
        "load": 0.5,
    }
    return settings | {"T": T}, found
