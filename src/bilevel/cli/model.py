"""`--model`: a kind of network, or a function of a Python file that makes one."""

from __future__ import annotations

import torch

from bilevel._util.checks import did_you_mean
from bilevel.applications.default_classifier import KINDS, Classifier, classifier
from bilevel.cli import python_file
from bilevel.data import Labelled
from bilevel.errors import OptionError


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
    path, network = python_file.network(model, "--model", "make(shape, classes)", (shape, classes), seed)
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
