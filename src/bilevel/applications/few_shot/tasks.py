"""N-way K-shot tasks, drawn as the numbers of their images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bilevel._util.checks import in_range
from bilevel._util.text import agreeing
from bilevel.data.class_images import ImageClasses
from bilevel.errors import OptionError

EPISODES = 100
"""Meta-batches of a pass, each pass from a seed of its own; they could go on without end."""


class TaskSampler:
    """Meta-batches of tasks: `ways` classes each, `shots` images of a class to learn from and `queries` to be tried on.

    Iterated over, it yields tensors (tasks, ways, shots + queries) of numbers of images, those to learn from first, by
    draws of torch's global generator. No class is twice in a task, and no image.
    """

    def __init__(
        self,
        classes: ImageClasses,
        ways: int,
        shots: int,
        queries: int = 15,
        *,
        tasks: int = 30,
        episodes: int = EPISODES,
    ) -> None:
        for name, value in (("ways", ways), ("shots", shots), ("queries", queries), ("tasks", tasks)):
            in_range(name, value, least=2 if name == "ways" else 1, whole=True)
        in_range("episodes", episodes, least=1, whole=True)
        if ways > len(classes.names):
            raise OptionError(
                f"ways must be at most the number of classes that tasks are drawn from, {len(classes.names)} (of a "
                f"folder, those of one of its three parts, the least of which has 16%); got {ways}. Give more classes, "
                "or ask for fewer ways."
            )
        few = [count for count in classes.counts if count < shots + queries]
        if few:
            name = classes.names[classes.counts.index(min(few))]
            raise OptionError(
                f"shots + queries must be at most the number of images of every class; got {shots} + {queries}, and "
                f"{len(few)} of {len(classes.counts)} classes {agreeing(len(few), 'has', 'have')} fewer, {name!r} the "
                f"least, {min(few)}. Ask for "
                "fewer of them, or give more images."
            )
        self.classes, self.ways, self.shots, self.queries = classes, ways, shots, queries
        self.tasks, self.episodes = tasks, episodes
        self._firsts, self._counts = torch.tensor(classes.firsts), torch.tensor(classes.counts)

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.episodes):
            yield self.draw(self.tasks)

    def draw(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """The image numbers of this many tasks."""
        drawn = torch.rand(tasks, len(self.classes.names), generator=generator).topk(self.ways).indices
        counts = self._counts[drawn][..., None]
        most, wanted = int(self._counts.max()), self.shots + self.queries
        order = torch.rand(tasks, self.ways, most, generator=generator)
        order.masked_fill_(torch.arange(most) >= counts, -1.0)
        return self._firsts[drawn][..., None] + order.topk(wanted).indices

    def labels(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The class within the task of each image to learn from and of each to be tried on, class by class."""
        ways = torch.arange(self.ways, device=device)
        return ways.repeat_interleave(self.shots), ways.repeat_interleave(self.queries)
