"""The victim of a poisoning attack: what it minimises, and how it is trained from scratch.

    g(v; X, Y) = mean over the rows of l(h(x; v), y) + decay/2 |W|^2                       (W: the weights, not biases)

A recipe describes how g is minimised. The attack's pre-training and every evaluation call `trained`, which starts at
the model's first weights each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel._util.checks import in_range, one_of
from bilevel._util.random_state import seeded
from bilevel.applications.training import fit
from bilevel.errors import OptionError, ProblemError

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps (scores, labels) to one number for each row."""
Features = Callable[[Tensor], Tensor]
"""A map of inputs that the victim does not train; the model acts on its output."""
GRADIENT = 1e-7
"""L-BFGS stops when no entry of the gradient is larger."""
ROWS = 256
"""The number of inputs that are passed to a feature map at once."""


def row_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row."""
    return cross_entropy(scores, labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a victim is trained.

    `optimizer="lbfgs"` minimises g on all data, for convex victims; "adam" (default) uses batches and a rate that falls
    linearly to zero. `steps` (1,000) are those of Adam, or the most iterations of L-BFGS. `rate` (1e-3), `batch` (100)
    and `seed` (0) are of Adam. `decay` (0) is the weight decay.

    >>> Recipe(optimizer="lbfgs", decay=0.01).describe()
    {'optimizer': 'lbfgs', 'steps': 1000, 'decay': 0.01}
    """

    optimizer: Literal["lbfgs", "adam"] = "adam"
    steps: int = 1000
    rate: float = 1e-3
    batch: int = 100
    decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, ("lbfgs", "adam"))
        for name in ("steps", "batch"):
            in_range(name, getattr(self, name), least=1, whole=True)
        in_range("rate", self.rate, above=0)
        in_range("decay", self.decay, least=0)
        in_range("seed", self.seed, least=0, whole=True)

    def describe(self) -> dict[str, Any]:
        """Return the options that apply, for the record of a result."""
        all_of_it = asdict(self)
        return {k: v for k, v in all_of_it.items() if self.optimizer == "adam" or k not in ("rate", "batch", "seed")}


def weights(model: nn.Module) -> list[Tensor]:
    """Return the parameters that decay shrinks: those with two dimensions or more."""
    return [p for p in model.parameters() if p.requires_grad and p.ndim > 1]


def decayed(model: nn.Module, decay: float) -> Tensor | float:
    """Return decay/2 |W|^2. A model that stores its weights in another form returns them from `decayed_weights()`."""
    if not decay:
        return 0.0
    own: Iterable[Tensor] = model.decayed_weights() if hasattr(model, "decayed_weights") else weights(model)  # type: ignore[operator]
    return decay / 2 * torch.stack([torch.sum(w * w) for w in own]).sum()


def trained(first: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, *, loss: Loss = row_losses) -> nn.Module:
    """Return a copy of the model, trained from these first weights on (x, y), in evaluation mode."""
    model = copy.deepcopy(first)
    device = next(model.parameters()).device
    x, y = x.to(device), y.to(device)
    model.train()
    if recipe.optimizer == "lbfgs":
        with seeded(recipe.seed, device):
            _lbfgs(model, x, y, recipe, loss)
    else:
        fit(
            model,
            x,
            y,
            steps=recipe.steps,
            batch=recipe.batch,
            rate=recipe.rate,
            seed=recipe.seed,
            loss=lambda model, x, y, w: loss(model(x), y).mean() + decayed(model, recipe.decay),
        )
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise ProblemError("training the victim diverged. Give a recipe with a smaller rate, or scale the inputs.")
    return model.eval()


def _lbfgs(model: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, loss: Loss) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=recipe.steps,
        tolerance_grad=GRADIENT,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y).mean() + decayed(model, recipe.decay)
        if bool(value.isnan()):  # the line search would fail with a traceback
            raise ProblemError(
                "the victim's loss is not a number. Give a model whose scores are finite on these inputs."
            )
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    optimizer.zero_grad()


@torch.no_grad()
def mapped(features: Features | None, x: Tensor, device: torch.device) -> Tensor:
    """Return the features of inputs, computed a few rows at a time, or the inputs if there is no map."""
    if features is None:
        return x.to(device)
    found = [features(part.to(device)) for part in torch.split(x, ROWS)]
    rows = torch.cat(found)
    if len(rows) != len(x):
        raise OptionError(f"features must give one row for each input; got {len(rows)} rows for {len(x)} inputs.")
    return rows
