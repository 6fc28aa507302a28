"""Rows among ranks: which rank owns which, and how a rank reads and moves those of others.

A row may be drawn by any rank in any step. Its value and its moments live with its owner alone: of n rows, rank r of K
has those from n r / K to n (r + 1) / K. A read is two exchanges: every rank tells the row numbers that it wants, and
every owner hands out what it has of them. The gradients go to all ranks, O(batch) numbers, and each owner moves its own
rows. Where rows are not owned every rank has all of them, and moves all by the same gradients: nothing is exchanged to
read them.

No index is read on the host: a row that belongs to another rank is the last place of the block, which stands for all of
them, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bilevel.distributed.process_group import Ranks
from bilevel.distributed.weighted_mean import evaluating
from bilevel.errors import RankError
from bilevel.problem.rows import Parts, Rows


class Block:
    """The rows of one rank: a `Home`."""

    def __init__(self, values: Tensor, ranks: Ranks) -> None:
        self.ranks, self.count = ranks, len(values)
        bounds = [self.count * r // ranks.size for r in range(ranks.size + 1)]
        self.blocks = list(pairwise(bounds))
        self.start, self.stop = self.blocks[ranks.rank]
        self.held = values.new_zeros(self.stop - self.start + 1, *values.shape[1:])
        self.kept = self.held[:-1]
        self.kept.copy_(self.part(values))

    def part(self, whole: Tensor) -> Tensor:
        """What of a tensor with a row for each row belongs to this rank."""
        return whole[self.start : self.stop]

    def read(self, index: Tensor) -> Tensor:
        if not evaluating():
            raise RankError(
                "u can be read in the objectives and constraints alone while its rows are with their ranks. To read it "
                "in a callback, use Rows(..., owned=False)."
            )
        inside = (index >= -self.count) & (index < self.count)
        torch._assert_async(inside.all(), f"u was read at a row that it does not have; it has {self.count}.")
        (counts,) = self.ranks.counts([index.numel()])
        wanted = torch.zeros(max(counts), dtype=torch.int64, device=self.held.device)
        wanted[: index.numel()] = index.reshape(-1) % self.count
        found = [self._own(asked) for asked in self.ranks.each(wanted)] if max(counts) else []
        if not found:
            return self.held.new_zeros(*index.shape, *self.held.shape[1:])
        # One rank has each row, the others zero.
        return self.ranks.handed(found).sum(0)[: index.numel()].reshape(*index.shape, *self.held.shape[1:])

    def _own(self, index: Tensor) -> Tensor:
        """The rows at `index` that belong to this rank, and zero for the others."""
        place, own = self._place(index)
        return torch.where(self._beside(own), self.held[place], 0)

    def placed(self, index: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        place, own = self._place(index)
        return place, torch.where(self._beside(own), gradient, 0)

    def _place(self, index: Tensor) -> tuple[Tensor, Tensor]:
        own = (index >= self.start) & (index < self.stop)
        return torch.where(own, index - self.start, len(self.kept)), own

    def _beside(self, own: Tensor) -> Tensor:
        return own.reshape(-1, *[1] * (self.held.dim() - 1))

    def total(self, part: Tensor) -> Tensor:
        return self.ranks.total(part)

    def whole(self, like: Tensor | None) -> Tensor:
        found = self.kept.new_empty(self.count, *self.kept.shape[1:]) if like is None else like
        self.part(found).copy_(self.kept)
        for rank, (start, stop) in enumerate(self.blocks):
            if stop > start:
                self.ranks.same([found[start:stop]], rank)
        return found

    def at_first(self, part: Tensor) -> Tensor | None:
        """All that the ranks have, each a part like this one, on the host of the first rank."""
        return self.ranks.at_first(part, [stop - start for start, stop in self.blocks])


def share_out(variables: Sequence[Rows], ranks: Ranks | None) -> None:
    """Give each rank its own rows, where they are to be owned."""
    for rows in variables if ranks is not None else ():
        if rows.owned and ranks is not None:
            rows.settle(Block(rows.values, ranks))


def take_back(variables: Sequence[Rows]) -> None:
    """Leave rows whole that were not let go of yet: an error came before the first step."""
    for rows in variables:
        if rows.home is not None and rows.is_whole:
            rows.settle(None)


def all_rows(ranks: Ranks, parts: Parts, variables: Sequence[Rows]) -> Parts:
    """The rows that any rank has read, with their part of the mean gradient: the same on every rank."""
    if not parts:
        return []
    counts = ranks.counts([sum(len(index) for index, _ in pairs) for pairs in parts])
    found: Parts = []
    for pairs, rows, sizes in zip(parts, variables, counts, strict=True):
        if max(sizes) == 0:
            found.append([])
            continue
        own, like = sizes[ranks.rank], rows.kept
        index = torch.zeros(max(sizes), dtype=torch.int64, device=like.device)
        gradient = like.new_zeros(max(sizes), *like.shape[1:])
        if pairs:
            index[:own] = torch.cat([i for i, _ in pairs])
            gradient[:own] = torch.cat([g.detach().reshape(-1, *like.shape[1:]) for _, g in pairs]) / ranks.size
        every = [ranks.each(x) for x in (index, gradient)]
        joined, moved = (torch.cat([x[:n] for x, n in zip(all_, sizes, strict=True)]) for all_ in every)
        found.append([(joined, moved)])
    return found
