"""N-way K-shot tasks, drawn as the numbers of their images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bilevel._util.checks import agreeing, in_range
from bilevel.data.class_images import ImageClasses
from bilevel.errors import OptionError

# The number of meta-batches in a pass; each pass has its own seed.
EPISODES = 100


class TaskSampler:
    """Draws meta-batches of `tasks` (30) tasks: `ways` classes, with `shots` images to learn from and `queries` (15) to
    test on.

    Iteration yields `episodes` (100) tensors (tasks, ways, shots + queries) with the numbers of the images, the images
    to learn from first, drawn by torch's global generator. No class and no image is twice in a task.

    >>> TaskSampler(classes, ways=5, shots=1).draw(2).shape  # doctest: +SKIP
    torch.Size([2, 5, 16])
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
        in_range("ways", ways, least=2, whole=True)
        for name, value in {"shots": shots, "queries": queries, "tasks": tasks, "episodes": episodes}.items():
            in_range(name, value, least=1, whole=True)
        if ways > len(classes.names):
            raise OptionError(
                f"ways must be at most the number of classes that tasks are drawn from, {len(classes.names)} (a folder "
                f"is split into three parts, and the smallest has 16% of its classes); got {ways}. Give more "
                "classes, or ask for fewer ways."
            )
        few = [count for count in classes.counts if count < shots + queries]
        if few:
            name = classes.names[classes.counts.index(min(few))]
            raise OptionError(
                f"shots + queries must be at most the number of images of every class; got {shots} + {queries}, and "
                f"{len(few)} of {len(classes.counts)} classes {agreeing(len(few), 'has', 'have')} fewer, {name!r} the "
                f"least, {min(few)}. Ask for fewer of them, or give more images."
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
        """Return the image numbers of this many tasks."""
        drawn = torch.rand(tasks, len(self.classes.names), generator=generator).topk(self.ways).indices
        counts = self._counts[drawn][..., None]
        most, wanted = int(self._counts.max()), self.shots + self.queries
        order = torch.rand(tasks, self.ways, most, generator=generator)
        order.masked_fill_(torch.arange(most) >= counts, -1.0)
        return self._firsts[drawn][..., None] + order.topk(wanted).indices

    def labels(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the class within the task of each image to learn from, and of each query, sorted by class."""
        ways = torch.arange(self.ways, device=device)
        return ways.repeat_interleave(self.shots), ways.repeat_interleave(self.queries)
