"""Repeat a step in place: a GPU captures it once as a CUDA graph and replays the graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bilevel.engines.engine import Engines
from bilevel.optim.variable_optimizer import Descent


def repeat(step: Callable[[Tensor], None], count: int, moved: Sequence[Tensor], descent: Descent | None = None) -> None:
    """Call step(1), step(1 - 1/count), ..., step(1/count). The argument is the factor of a rate that falls to zero.

    A step changes only the tensors `moved`, and the state of `descent` if there is one. It reads no value on the host.
    """
    like = moved[0]
    engines = Engines("graph" if like.is_cuda else "eager", _Host(moved, descent), gradients=count)
    for left in (1 - torch.arange(count, dtype=like.dtype, device=like.device) / count).unbind():
        engines.outer.wrap(step)(left)


def let_go(device: torch.device) -> None:
    """Release the memory of graphs that are no longer used. This is impossible while a graph is captured."""
    if device.type == "cuda":
        gc.collect()  # a run and its graphs refer to each other
        torch.cuda.empty_cache()


class _Host:
    """The interface that an engine needs (see `bilevel.engines.engine`)."""

    def __init__(self, moved: Sequence[Tensor], descent: Descent | None) -> None:
        self.moved, self.descent = moved, descent
        device, size = moved[0].device, sum(tensor.numel() for tensor in moved)
        v = SimpleNamespace(device=device, size=size)
        self.derivatives: Any = SimpleNamespace(v=v, lower_evaluations=0, upper_evaluations=0)

    def live(self) -> list[Tensor]:
        held = [] if self.descent is None else pytree.tree_leaves(self.descent.state_dict())
        return [*self.moved, *(tensor for tensor in held if isinstance(tensor, Tensor))]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.descent is None or self.descent.optimizer is None else [self.descent.optimizer]

    def obstacle(self) -> str:
        return ""
