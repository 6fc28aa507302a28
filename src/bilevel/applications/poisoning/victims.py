"""The victim of a poisoning attack: what it minimises, and how it is trained from scratch.

    g(v; X, Y) = mean over the rows of l(h(x; v), y) + decay/2 |W|^2                       (W: the weights, not biases)

A recipe describes how g is minimised. The attack's pre-training and every evaluation call `trained`, which starts at
the model's first weights each time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel import OptionError, ProblemError
from bilevel._util.checks import check_counts, in_range, one_of
from bilevel._util.random_state import seeded
from bilevel.applications.training import fit

# Maps (scores, labels) to one number for each row.
Loss = Callable[[Tensor, Tensor], Tensor]
# A map of inputs that the victim does not train; the model acts on its output.
Features = Callable[[Tensor], Tensor]
# L-BFGS stops when no entry of the gradient is larger.
GRADIENT = 1e-7
# The number of inputs that are passed to a feature map at once.
ROWS = 256
# The mean of p (1 - p), over classes and rows, of a softmax regression that is right most of the time.
CURVATURE = 0.03
# The least decay of a whitened model, as a share of the largest eigenvalue.
LEAST_DECAY = 1e-6


def row_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row."""
    return cross_entropy(scores, labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a victim is trained.

    Args:
        optimizer: "adam" (default) uses batches and a rate that falls linearly to zero. "lbfgs" minimises g on all
            data, for convex victims.
        steps: The number of steps of Adam, or the largest number of iterations of L-BFGS. Default: 1,000.
        rate: The learning rate of Adam. Default: 1e-3.
        batch: The number of examples in a batch of Adam. Default: 100.
        decay: The weight decay. Default: 0. A convex victim needs some for a unique minimum.
        seed: The seed of the batches of Adam. Default: 0.

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
        check_counts(steps=self.steps, batch=self.batch)
        in_range("rate", self.rate, above=0)
        in_range("decay", self.decay, least=0)
        in_range("seed", self.seed, least=0, whole=True)

    def describe(self) -> dict[str, Any]:
        """Return the options that apply, for the record of a result."""
        return {k: v for k, v in asdict(self).items() if self.optimizer == "adam" or k not in ("rate", "batch", "seed")}


def decayed(model: nn.Module, decay: float, weight: Tensor | None = None) -> Tensor | float:
    """Return decay/2 |W|^2; W is `weight` if given, else all parameters with two dimensions or more."""
    if not decay:
        return 0.0
    if weight is None and isinstance(model, Whitened):
        weight = model.weight()
    parts = [weight] if weight is not None else [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return decay / 2 * torch.stack([torch.sum(w * w) for w in parts]).sum()


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
        raise ProblemError("training the victim diverged. Use a recipe with a smaller rate, or scale the inputs.")
    return model.eval()


def _lbfgs(model: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, loss: Loss) -> None:
    optimizer = torch.optim.LBFGS(
        [p for p in model.parameters() if p.requires_grad],
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
                "the victim's loss is not a number. Use a model whose scores are finite on these inputs."
            )
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    optimizer.zero_grad()


@torch.no_grad()
def mapped(features: Features | None, x: Tensor, device: torch.device) -> Tensor:
    """Return the features of inputs, computed a few rows at a time, or the inputs if `features` is None."""
    if features is None:
        return x.to(device)
    rows = torch.cat([features(part.to(device)) for part in torch.split(x, ROWS)])
    if len(rows) != len(x):
        raise OptionError(f"features must give one row for each input; got {len(rows)} rows for {len(x)} inputs.")
    return rows


class Whitened(nn.Module):
    """A linear classifier whose weights are P z: softmax regression in whitened coordinates.

        scores = x W + b,     W = P z,     P = (curvature X'X/n + decay I)^(-1/2)

    In z, all directions of the inputs vary equally. With fewer rows than inputs, P is a multiple of the identity except
    in the directions of the rows, and is stored in that form. The penalty method penalises |grad_z g|^2, whose
    condition number is the square of the condition number of g. The victim that is attacked and trained in the end is
    the one in W.
    """

    def __init__(self, linear: nn.Linear, x: Tensor, decay: float) -> None:
        super().__init__()
        inputs, weight = x.flatten(1).double(), linear.weight.detach()
        self.few = len(inputs) < inputs.shape[1]
        self.rest = 0.0
        if self.few:
            _, sizes, rows = torch.linalg.svd(math.sqrt(CURVATURE / len(inputs)) * inputs, full_matrices=False)
            values, vectors = sizes.square(), rows.T
        else:
            values, vectors = torch.linalg.eigh(CURVATURE / len(inputs) * inputs.T @ inputs)
        least = max(decay, LEAST_DECAY * float(values.max()))
        values = values.clamp(min=0) + least
        first = weight.double().T
        if self.few:
            self.rest = least**-0.5
            inside = vectors.T @ first
            z = (vectors * values.sqrt()) @ inside + (first - vectors @ inside) / self.rest
            self.directions = nn.Buffer(vectors.to(weight.dtype))
            self.gains = nn.Buffer((values.rsqrt() - self.rest).to(weight.dtype)[:, None])
        else:
            z = (vectors * values.sqrt()) @ vectors.T @ first
            self.P = nn.Buffer(((vectors * values.rsqrt()) @ vectors.T).to(weight.dtype))
        self.z = nn.Parameter(z.to(weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def weight(self) -> Tensor:
        return self._times(self.z)

    def _times(self, columns: Tensor) -> Tensor:
        """Return P times columns."""
        if not self.few:
            return self.P @ columns
        return self.rest * columns + self.directions @ (self.gains * (self.directions.T @ columns))

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(x.flatten(1) @ self.weight())

    def mapped(self, x: Tensor) -> Tensor:
        """Return inputs in the coordinates of z, for `on_mapped`; computed once for inputs that do not move."""
        return self._times(x.flatten(1).T).T if self.few else x.flatten(1) @ self.P

    def on_mapped(self, x: Tensor) -> Tensor:
        return self._shifted(x @ self.z)

    def _shifted(self, scores: Tensor) -> Tensor:
        return scores if self.bias is None else scores + self.bias

    def together(self, mapped: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores of mapped inputs, the scores of plain inputs, and the weights, with one product P z."""
        weight = self.weight()
        return self.on_mapped(mapped), self._shifted(x.flatten(1) @ weight), weight


def whitened(model: nn.Module, x: Tensor, decay: float) -> Whitened | None:
    """Return the model in whitened coordinates if it is a softmax regression, with or without flattening; else None."""
    layers = [m for m in model.modules() if not isinstance(m, (nn.Sequential, nn.Flatten))]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        return None
    return Whitened(layers[0], x, decay)
