"""`--model`: a kind of network, or a function of a Python file that makes one."""

from __future__ import annotations

import torch
from torch import nn

from ..applications.classifiers import KINDS, Classifier, classifier
from ..data import Labelled
from ..errors import OptionError
from ..options import did_you_mean
from ..replay import seeded
from . import python_file


def classifier_of(model: str, data: Labelled, source: str, device: torch.device, seed: int) -> Classifier:
    """The network for data that was read from `source`, as the user names it."""
    shape, classes = tuple(data.x.shape[1:]), len(data.classes)
    if not python_file.is_file(model):
        if model not in KINDS:
            raise OptionError(
                f"--model has no {model!r}.{did_you_mean(model, KINDS)} It is one of {', '.join(KINDS)}, or "
                "path.py:make."
            )
        return classifier(model, shape, classes, device=device, seed=seed, source=source)
    path, make = python_file.load(model, "--model must be a kind or a Python file")
    if not callable(make):
        raise OptionError(f"--model must name a function make(shape, classes), as in {path.name}:make.")
    with seeded(seed):
        try:
            network = make(shape, classes)
        except Exception as error:
            raise OptionError(f"the function in {path} could not be run: {python_file.told(error)}") from error
    if not isinstance(network, nn.Module):
        made = model.rsplit(":", 1)[1]
        raise OptionError(f"{made} in {path} must return an nn.Module; got {type(network).__name__}.")
    try:
        with torch.no_grad():
            scores = network.eval().to(device)(data.x[:2].to(device)).shape
    except Exception as error:
        raise OptionError(
            f"the network of {path} does not take inputs of shape {shape}: {python_file.told(error)}"
        ) from error
    if tuple(scores) != (2, classes):
        raise OptionError(
            f"the network of {path} must give one score for each of the {classes} classes; it gives shape "
            f"{tuple(scores)} for two inputs."
        )
    return Classifier(network.train(), model)
