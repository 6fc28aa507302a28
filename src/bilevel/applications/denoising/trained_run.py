"""The classifier of a finished run of `bilevel denoise`, with the preparation of its inputs.

The run folder has `preparation.json`, with the kind of the network, the classes and the rules of the inputs, and
`model.safetensors`, the weights. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from bilevel._util.atomic_files import read_json
from bilevel._util.checks import ShortRepr
from bilevel.applications.default_classifier import KINDS, classifier
from bilevel.applications.training import probabilities
from bilevel.data import Labelled
from bilevel.data.named_sets import NAMES
from bilevel.data.preparation import NewRows, Rules, new_rows, rules_from_json, rules_to_json
from bilevel.errors import BilevelError, DataError, OptionError, reason

PREPARATION, WEIGHTS = "preparation.json", "model.safetensors"
# The form of preparation.json.
FORM = 1


@dataclass(frozen=True, repr=False)
class TrainedRun(ShortRepr):
    """The classifier of a run of `bilevel denoise`; `bilevel.load` makes one.

    Fields:
        classes: The names of the classes.
        network: The trained network, in evaluation mode. It takes prepared inputs.
        rules: How new rows become inputs: as those of the run did.
        shape: The shape of one input of the network.

    >>> from bilevel.data.arrays import ColumnScale
    >>> rules = ColumnScale(2, (0, 1), (0.0, 0.0), (1.0, 1.0))
    >>> run = TrainedRun(("no", "yes"), nn.Linear(2, 2), rules, (2,))
    >>> run.predict_proba(np.zeros((3, 2))).shape
    (3, 2)
    """

    classes: tuple[str, ...]
    network: nn.Module
    rules: Rules
    shape: tuple[int, ...]

    def rows(self, data: Any) -> NewRows:
        """Return new data as prepared inputs, with the name of each row and notes for the user."""
        return new_rows(self.rules, data, self.shape)

    def probabilities(self, rows: NewRows) -> np.ndarray:
        """Return the probability of each class for prepared inputs, float64."""
        found = probabilities(self.network, torch.from_numpy(rows.x)).double()
        return (found / found.sum(1, keepdim=True)).numpy()

    def predict_proba(self, data: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `classes`.

        Args:
            data: New data in the form of the run's data: the path of a file or folder, a pandas.DataFrame, an array, or
                a list of image files. Labels are not needed.
        """
        return self.probabilities(self.rows(data))

    def predict(self, data: Any) -> np.ndarray:
        """Return the class of each row; for `data` see `predict_proba`."""
        found: np.ndarray = np.array(self.classes, dtype=object)[self.predict_proba(data).argmax(1)]
        return found


def described(data: Labelled, kind: str) -> dict[str, Any]:
    """Return the contents of preparation.json; `kind` is the kind of the network."""
    return {
        "form": FORM,
        "model": kind,
        "source": data.name if data.name in NAMES else "",
        "shape": list(data.x.shape[1:]),
        "classes": list(data.classes),
        "rules": rules_to_json(data.transformer),
    }


def load(run: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu") -> TrainedRun:
    """Return the classifier of a finished run of `bilevel denoise`.

    Args:
        run: The folder of the run.
        model: The network of the run, with any weights, if --model named a Python file. None (default): one that
            `bilevel denoise` makes.
        device: The device of the network. Default: "cpu".

    >>> try:
    ...     load("runs/denoise-table").predict("new.csv")
    ... except DataError:
    ...     print("There is no such run here.")
    There is no such run here.
    """
    folder = Path(run)
    held = read_json(folder / PREPARATION)
    if not (folder / "result.json").exists() or not held:
        raise DataError(
            f"{folder} must hold a finished run of `bilevel denoise`, with {PREPARATION} and result.json; it does not. "
            "Runs of versions before 0.2 have no preparation."
        )
    try:
        classes, shape, rules = tuple(held["classes"]), tuple(held["shape"]), rules_from_json(held["rules"])
        network = (model or _network(held, shape, torch.device(device))).to(device)
        load_model(network, str(folder / WEIGHTS), device=str(device))
    except BilevelError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be loaded: {reason(error)}.") from None
    return TrainedRun(classes, network.eval(), rules, shape)


def _network(held: Mapping[str, Any], shape: tuple[int, ...], device: torch.device) -> nn.Module:
    if held["model"] not in KINDS:
        raise OptionError(f"model must be the network that {held['model']} makes, because the run used it; got None.")
    return classifier(held["model"], shape, len(held["classes"]), device=device, seed=0, source=held["source"]).network
