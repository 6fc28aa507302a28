"""The state of a run as one process has it, from what each rank has of it, and back.

Tensors that `fully_shard` has divided, and the parts of the state that are shaped like them, are gathered for a
checkpoint one tensor at a time, on the host of the first rank, which writes it. A run that resumes from it, at any
number of ranks, takes its own shard of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bilevel.errors import CheckpointError
from bilevel.problem.variables import Variable

Convert = Callable[[Any, int], Any]
"""Of a tensor that is shaped like one of v, and the position of that one among them."""


def gather_state(
    u: Variable, v: Variable, method: dict[str, Any], like_v: Sequence[str], *, first: bool
) -> dict[str, Any]:
    """What a checkpoint has of u, v and the method's state. All ranks call it; the tensors are those of the first."""
    found: dict[str, Any] = {"u": dict(u.tensors()), "v": dict(v.tensors()), "method": dict(method)}
    if v.shards:

        def gathered(dtensor: Any) -> Tensor | None:
            whole = dtensor.detach().full_tensor()
            return whole.cpu() if first else None

        def gathered_like(local: Tensor, i: int) -> Tensor | None:
            return gathered(_sharded_like(v.shards[i], local))

        found["v"] = {key: gathered(t) if hasattr(t, "full_tensor") else t for key, t in found["v"].items()}
        _each_like_v(found["method"], like_v, len(v.shards), gathered_like)
    return found


def split_state(u: Variable, v: Variable, saved: dict[str, Any], like_v: Sequence[str]) -> dict[str, Any]:
    """This rank's part of what `gather_state` made."""
    found = saved | {"u": dict(saved["u"]), "v": dict(saved["v"]), "method": dict(saved["method"])}
    if v.shards:
        held = v.tensors()
        found["v"] = {
            key: _cut(held[key], whole) if hasattr(held.get(key), "to_local") else whole
            for key, whole in found["v"].items()
        }
        _each_like_v(found["method"], like_v, len(v.shards), lambda whole, i: _cut(v.shards[i], whole).to_local())
    return found


def _each_like_v(method: dict[str, Any], like_v: Sequence[str], count: int, convert: Convert) -> None:
    """Convert what is shaped like the tensors of v, where the state says that it has such."""
    for path in like_v:
        *outer, last = path.split("/")
        node = method
        for key in outer:
            node[key] = dict(node[key])
            node = node[key]
        node[last] = _converted(node[last], -1, count, convert)


def _converted(node: Any, position: int, count: int, convert: Convert) -> Any:
    """A list has one entry for each tensor of v, the last ones where there are more; so have keys that are numbers."""
    if isinstance(node, Tensor):  # a counter or a rate has no dimensions; shards have
        return convert(node, position) if node.dim() and position >= 0 else node
    if isinstance(node, dict):
        places = {key: int(key) if key.isdigit() else position for key in node}
        return {key: _converted(item, places[key], count, convert) for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        before = len(node) - count
        return [_converted(item, i - before, count, convert) for i, item in enumerate(node)]
    return node


def _sharded_like(shard: Any, local: Tensor) -> Any:
    """This rank's part of a tensor that is divided as v's own is."""
    from torch.distributed.tensor import DTensor

    if local.shape != shard.to_local().shape:
        raise CheckpointError(
            f"the state of the optimizer of v has a tensor of shape {tuple(local.shape)} for a shard of shape "
            f"{tuple(shard.to_local().shape)}, and cannot be gathered. Use Adam or SGD for lower_optimizer."
        )
    return DTensor.from_local(
        local.detach(), shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def _cut(like: Any, whole: Tensor) -> Any:
    """The tensor, divided as `like` is; every rank has all of it."""
    from torch.distributed.tensor import distribute_tensor

    own = whole.to(like.device, like.dtype)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)
