"""`make_derivatives`: the derivatives of a problem in one process, over ranks, or with a sharded v."""

from __future__ import annotations

from bilevel.derivatives.mixed_precision import Precision
from bilevel.derivatives.penalised_objective import Curvature, Derivatives
from bilevel.distributed.process_group import ProcessGroup
from bilevel.distributed.rank_derivatives import RankDerivatives
from bilevel.distributed.sharded_derivatives import ShardedDerivatives
from bilevel.errors import OptionError
from bilevel.problem.problem import Problem
from bilevel.problem.variables import Variable


def make_derivatives(
    problem: Problem,
    u: Variable,
    v: Variable,
    *,
    ranks: ProcessGroup | None = None,
    precision: Precision | None = None,
    curvature: Curvature = "auto",
    accumulate: int = 1,
) -> Derivatives:
    """Return the derivatives of a problem: of this process, or of the means over `ranks`.

    Args:
        problem: The problem, of which ranks refuse `start_lower` and `trials`.
        u: The upper variable.
        v: The lower variable; `fully_shard` can have divided it among the ranks.
        ranks: The processes that share the batches; None: this process has them all.
        precision: The precision of the user's functions; None: that of the variables.
        curvature: How products with second derivatives are formed (see `Penalty.curvature`).
        accumulate: How many batches a gradient averages. A sharded v needs 1.
    """
    if ranks is None:
        return Derivatives(problem, u, v, curvature, precision)
    if problem.start_lower is not None:
        raise OptionError(
            "start_lower cannot be used under torchrun: v belongs to one batch there, and ranks have different ones. "
            "Run it in one process."
        )
    if problem.trials is not None:
        raise OptionError("trials cannot be used with data under torchrun. Run them in one process.")
    if curvature == "gram":
        raise OptionError("curvature='gram' cannot be used under torchrun. Use curvature='auto'.")
    if not (u.shards or v.shards):
        return RankDerivatives(problem, u, v, ranks, curvature, precision)
    if u.shards:
        raise OptionError("u cannot be sharded by fully_shard: only v can. Pass a u that is not sharded.")
    for refused, name in ((problem.project_lower is not None, "project_lower"), (accumulate > 1, "accumulate")):
        if refused:
            raise OptionError(f"{name} cannot be used if v is sharded by fully_shard. Use a v that is not sharded.")
    return ShardedDerivatives(problem, u, v, ranks, curvature, precision)
