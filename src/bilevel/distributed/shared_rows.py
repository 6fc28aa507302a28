"""Rows that any rank has read, with their gradients on all ranks.

Every rank holds all rows and moves them by the same gradients. A rank differentiates the rows of its own examples; the
index and the gradient of each of them, O(batch) numbers, are gathered on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bilevel.distributed.process_group import ProcessGroup
from bilevel.problem.rows import Parts, Rows


def all_rows(ranks: ProcessGroup, parts: Parts, variables: Sequence[Rows]) -> Parts:
    """Return the rows that any rank has read, with their part of the mean gradient: the same on every rank."""
    counts = ranks.all_gather_counts([sum(len(index) for index, _ in pairs) for pairs in parts])
    found: Parts = []
    for pairs, rows, sizes in zip(parts, variables, counts, strict=True):
        if max(sizes) == 0:
            found.append([])
            continue
        own, like = sizes[ranks.rank], rows.values
        index = torch.zeros(max(sizes), dtype=torch.int64, device=like.device)
        gradient = like.new_zeros(max(sizes), *like.shape[1:])
        if pairs:
            index[:own] = torch.cat([i for i, _ in pairs])
            gradient[:own] = torch.cat([g.detach().reshape(-1, *like.shape[1:]) for _, g in pairs]) / ranks.size
        every = [ranks.all_gather(x) for x in (index, gradient)]
        joined, moved = (torch.cat([x[:n] for x, n in zip(all_, sizes, strict=True)]) for all_ in every)
        found.append([(joined, moved)])
    return found
