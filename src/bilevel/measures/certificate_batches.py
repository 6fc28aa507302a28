"""Chooses the batches that a certificate is measured on, and takes means over them.

A pass over all data of an objective is made if it takes at most a tenth of the evaluations that the run made of this
objective. Evaluations stand for time: so two runs with the same seed measure on the same batches. Otherwise, the
first batches of a pass stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import summed
from bilevel.batches.rank_shares import BatchShare, leaves_of
from bilevel.batches.sources import END, Source, Sources, known_length
from bilevel.certificates import DataShare
from bilevel.derivatives.penalised_objective import PenalisedObjective

# The share of a run's evaluations that a certificate can take.
SHARE = 0.1
# A recorded step (see `bilevel.engines`) is up to this much faster than the same evaluations in a certificate.
RECORDED = 4
# The largest and the least number of batches that stand for all, and the number after Ctrl-C.
BATCHES, LEAST, QUICK = 64, 16, 4


@dataclass(frozen=True)
class Allowed:
    """How many evaluations of f and of g a certificate can take. `quick`: the user waits, so take few batches."""

    upper: float
    lower: float
    quick: bool = False

    @classmethod
    def by_run(cls, d: PenalisedObjective, engine: str, *, quick: bool) -> Allowed:
        """Return a tenth of the evaluations of the run."""
        share = SHARE if engine == "eager" else SHARE / RECORDED
        return cls(share * d.upper_evaluations, share * d.lower_evaluations, quick)

    @classmethod
    def sample(cls) -> Allowed:
        """Return what is enough for the first `BATCHES` batches of each source, but for no pass over more."""
        return cls(BATCHES, 2 * BATCHES)


class _Pass:
    """The batches of one source: all of them if `most` allows it, otherwise the first ones."""

    def __init__(self, source: Source, most: float, *, quick: bool) -> None:
        few = QUICK if quick else max(LEAST, min(int(most), BATCHES))
        self.source, self.most = source, few
        held, self.whole = source.peek(few)
        self.held: list[Any] | None = held
        self.known = known_length(source.items)
        if not (self.whole or quick) and most > BATCHES and (self.known is None or self.known <= most):
            self.held, self.most = None, int(most)  # read again for each mean, so that memory does not grow

    def __call__(self) -> Iterator[Any]:
        """Yield the batches."""
        if self.held is not None:
            yield from self.held
            return
        with closing(self.source.first_pass()) as found:
            yield from islice(found, self.most)
            self.whole = self.whole or next(found, END) is END


class Batches:
    """The batches of one objective, to take means over.

    Arguments:
        d: The derivatives of the run.
        read: Starts a pass, as pairs of batches.
        side: 0 for f, 1 for g: the batch of a pair whose examples count.
        source: What `read` reads; None if that is no pass over data.
    """

    def __init__(
        self, d: PenalisedObjective, read: Callable[[], Iterator[Pair]], side: int, source: _Pass | None = None
    ) -> None:
        self.d, self.side, self.source = d, side, source
        self._read = read
        # The numbers of batches and of examples in the last mean; None: not known.
        self.count, self.examples = 0, 0 if source else None

    def first(self, most: int) -> Batches:
        """Return the first batches, at most `most`."""
        return Batches(self.d, lambda: islice(self._read(), most), self.side)

    def mean(self, evaluate: Callable[[list[Pair]], list[Tensor]], *, graph: bool = False) -> list[Tensor]:
        """Return the mean over batches of what `evaluate` returns, weighted by their numbers of examples.

        If the tensors of a batch do not have one common number of rows, all batches count alike. `graph`: with the
        graph of `prepare`.
        """
        total: list[Tensor] = []
        weights: list[float] = []
        sized = True
        for pair in self._read():
            size = self._size(pair[self.side])
            sized = sized and size is not None
            weights.append(size if sized and size else weights[0] if weights else 1.0)
            part = [x.detach() * weights[-1] for x in evaluate(self.d.prepare([pair], graph=graph))]
            total = summed([total, part]) if total else part
        counted = sized and self.source is not None and self.d.problem.prepare is None
        self.count, self.examples = len(weights), round(sum(weights) * self.d.rank_count) if counted else None
        return [x / sum(weights) for x in total]

    def _size(self, batch: Any) -> float | None:
        """Return the number of examples in a batch: the rows of its tensors, as a mean over ranks."""
        given = batch.batch if isinstance(batch, BatchShare) else batch
        rows = {len(t) if t.ndim else 0 for t in leaves_of(given) if isinstance(t, Tensor)}
        if len(rows) != 1 or 0 in rows:
            return None
        whole = isinstance(batch, BatchShare) and batch.shared
        count = rows.pop() / (self.d.rank_count if whole else 1)
        if not self.d.shared:
            return count
        return self.d.mean_over_ranks([torch.tensor(count, device=self.d.v.device)])[0].item()

    def share(self) -> DataShare:
        """Return how much of the data the last mean was over."""
        source = self.source
        whole = None if source is None else self.count if source.whole else source.known
        return DataShare(self.count, self.examples, whole)


def choose(
    d: PenalisedObjective, sources: Sources, episode: Sequence[Pair] | None, allowed: Allowed
) -> tuple[Batches, Batches]:
    """Return the batches of f and of g.

    `episode`: the batches to which v belongs, if every step has a separate lower problem.
    """
    if episode is not None or sources.pair is None:
        held = [(None, None)] if episode is None else list(episode)
        return Batches(d, lambda: iter(held), 0), Batches(d, lambda: iter(held), 1)
    # The evaluations of a batch: f, and again for constraints; grad_v g, and a product with g_vv.
    each_f = 2 if d.problem.equalities or d.problem.inequalities else 1
    each_g = 4 if d.curvature == "difference" else 2
    upper = _Pass(sources.pair[0], allowed.upper / each_f, quick=allowed.quick)
    lower = _Pass(sources.pair[1], allowed.lower / each_g, quick=allowed.quick)
    if d.problem.prepare is not None:

        def pairs() -> Iterator[Pair]:
            return _together(upper, lower)

        return Batches(d, pairs, 0, upper), Batches(d, pairs, 1, lower)
    return (
        Batches(d, lambda: ((x, None) for x in upper()), 0, upper),
        Batches(d, lambda: ((None, x) for x in lower()), 1, lower),
    )


def _together(upper: _Pass, lower: _Pass) -> Iterator[Pair]:
    """Yield pairs of batches until both passes have ended; the shorter one begins again."""
    longer = [upper(), lower()]
    ended = [False, False]
    while True:
        pair = [next(batches, END) for batches in longer]
        for i, again in enumerate((upper, lower)):
            if pair[i] is END:
                ended[i], longer[i] = True, again()
                pair[i] = next(longer[i])
        if all(ended):
            return
        yield pair[0], pair[1]
