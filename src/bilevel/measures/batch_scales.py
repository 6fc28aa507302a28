"""Measures a problem with data on its first batches, for the first prices and the default learning rates.

    lam = sum |f_v| / sum |s|,   gamma = sum |f_v| / sum |g_vv s|

`problem_scales` measures a problem without data. With trials, the sizes are over all trials together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel._util.nested import Pair
from bilevel._util.tensor_lists import broadcast_trials
from bilevel.derivatives.penalised_objective import PenalisedObjective

# |f_v| times this is the first gamma |g_vv s|.
GAMMA_SHARE = 1.0
# The smallest and the largest default lower rate.
LOWER_RATES = (1e-4, 3e-2)
# At the default lower rate, a first step of Adam removes at most this share of f + lam g, to first order.
LOWER_SHARE = 0.06
POWER_ITERATIONS = 10
# Above `DEEP_RATE`, a step of Adam moves the product of the layers of v by at most `DEEP_SHARE`.
DEEP_RATE, DEEP_SHARE = 1e-3, 0.5


@dataclass
class BatchScales:
    """The sizes of a problem on its first batches.

    Fields:
        gamma, lam: The first prices.
        gamma_h: The first price of each constraint.
        shapes: The shapes of the constraints.
        coverage: The share of the Rows that one gradient reads.
        sizes: |f_z|, |s| and the smallest |h|, the scales of the certificate.
        f: The sums over the batches of f and of the entries of |grad_v f|.
        g: The same sums for g.
        most: The largest default lower rate. Default: `LOWER_RATES[1]`.
        sizes_h: |h| of each constraint.
    """

    gamma: float
    lam: float
    gamma_h: list[float]
    shapes: list[torch.Size]
    coverage: float
    sizes: tuple[float, float, float]
    f: tuple[float, float]
    g: tuple[float, float]
    most: float = LOWER_RATES[1]
    sizes_h: list[float] = field(default_factory=list)

    def lower_rate(self, lam: float | None) -> float:
        """Return Adam's default rate for v if it descends f + lam g, or only g without lam.

        Adam moves each entry by its rate: f + lam g falls by the rate times the sum of the entries of |f_v| + lam |s|.
        """
        (f, f_sum), (g, s_sum) = self.f, self.g
        value, fall = (g, s_sum) if lam is None else (f + lam * g, f_sum + lam * s_sum)
        rate = LOWER_SHARE * abs(value) / max(fall, 1e-300)
        return min(max(rate, LOWER_RATES[0]), self.most)


def measure(d: PenalisedObjective, pairs: Sequence[Pair], accumulate: int) -> BatchScales:
    """Measure a problem on its first batches, after `prepare`, at the present u and v."""
    f_v = f_z = slope = bent = coverage = 0.0
    f_size, g_size = (0.0, 0.0), (0.0, 0.0)
    shapes: list[torch.Size] = []
    size_h: list[float] = []
    leaves, count = d.v.leaves, len(pairs)
    for pair in pairs:
        g, s = d.slope([pair])
        g_size = (g_size[0] + g.sum().item(), g_size[1] + _entries(d, s))
        slope += d.size(s).item()
        bent += d.size(d.hessian_product([pair], s, with_u=False)).item()
        with d.differentiating_u(True) as inputs:
            d.lower(pair[1])
            f, values = d.upper(pair[0]), d.constraints(pair[0])
            wrt = [*leaves, *inputs()]
            first = d.mean_dense_over_ranks(d.gradient(f, wrt, retain=True))
            (value,) = d.mean_over_ranks([f.detach()])
            f_v += d.size(first[: len(leaves)]).item()
            f_z += d.size(first).item()
            f_size = (f_size[0] + value.sum().item(), f_size[1] + _entries(d, first[: len(leaves)]))
            if d.u.rows:
                tapes = zip(d.all_rows(d.row_reads), d.u.rows, strict=True)
                read = [len(torch.unique(torch.cat([i for i, _ in tape]))) / len(r) for tape, r in tapes if tape]
                coverage += max(read, default=0.0) / count
            shapes = shapes or [h.shape for h in values]
            size_h = size_h or [0.0] * len(values)
            for i, h in enumerate(values):
                slopes = d.mean_dense_over_ranks(d.gradient(h, wrt, cotangent=[torch.ones_like(h)], retain=True))
                pulled = d.size(slopes).item()
                size_h[i] += pulled / math.sqrt(max(1, h.numel()))
    length = 1.0 + d.size(leaves).item()
    if not bent > 1e-12 * max(slope, 1e-300):
        direction = d.mean_dense_over_ranks([torch.randn_like(leaf) for leaf in leaves])
        product = d.hessian_product(pairs[:1], [x / d.size(direction) for x in direction], with_u=False)
        bent = count * max(d.size(product).item() ** 2 * length, 1e-12)
    sizes = [s / count * length for s in size_h]
    return BatchScales(
        gamma=GAMMA_SHARE * f_v / bent if f_v > 0 else 1.0,
        lam=f_v / slope if slope > 0 and f_v > 0 else 1.0,
        gamma_h=[(f_v / count) / max((s / count) ** 2 * 0.1 * length, 1e-12) or 1.0 for s in size_h],
        shapes=shapes,
        coverage=min(1.0, coverage * accumulate) or 1.0,
        sizes=(f_z / count or 1.0, slope / count or 1.0, min(sizes, default=1.0) or 1.0),
        f=f_size,
        g=g_size,
        most=_largest_rate(d),
        sizes_h=sizes,
    )


def _largest_rate(d: PenalisedObjective) -> float:
    """Return the largest default lower rate for a network of many layers.

    At its first weights the loss of a deep network hardly falls. A step that removes 6% of it would be as long as the
    weights, and would leave no unit active.
    """
    layers = [leaf.detach() for leaf in d.v.leaves if leaf.ndim > 1]
    count = sum(leaf.numel() for leaf in d.v.shards or d.v.leaves if leaf.ndim > 1)
    size = d.size(layers).item() / math.sqrt(count) if len(layers) > 1 else 0.0
    if size == 0.0:
        return LOWER_RATES[1]
    return min(max(DEEP_RATE, DEEP_SHARE * size / len(layers)), LOWER_RATES[1])


def largest_curvature(d: PenalisedObjective, pairs: Sequence[Pair], generator: torch.Generator) -> Tensor:
    """Return the largest |g_vv| on any of these batches, after `prepare`, for each trial; 1 if it is zero."""
    start, trials = [], d.problem.trials
    for leaf in d.v.leaves:  # every trial starts from the same direction
        one = leaf.shape if trials is None else leaf.shape[1:]
        direction = torch.randn(one, generator=generator, dtype=leaf.dtype).to(leaf.device)
        start.append(direction.expand(leaf.shape))
    found = []
    for pair in pairs:
        x, size = start, d.norm(start)
        for _ in range(POWER_ITERATIONS):
            x = d.hessian_product([pair], [t / broadcast_trials(size, t) for t in x], with_u=False)
            size = torch.where((bend := d.norm(x)) > 0, bend, torch.ones_like(bend))
        found.append(size)
    return torch.stack(found).amax(0)


def gamma_now(d: PenalisedObjective, pairs: Sequence[Pair]) -> Tensor:
    """Return gamma at the present v, without a host read; zero or not finite if it cannot be measured."""
    found = [(d.first_order([pair], None), pair) for pair in pairs]
    f_v = torch.stack([d.size(gradients.v) for gradients, _ in found]).sum()
    bends = [d.size(d.hessian_product([pair], gradients.slope, with_u=False)) for gradients, pair in found]
    return GAMMA_SHARE * f_v / torch.stack(bends).sum()


def _entries(d: PenalisedObjective, tensors: Sequence[Tensor]) -> float:
    return d.whole(torch.stack([t.detach().abs().sum() for t in tensors]).sum()).item()
