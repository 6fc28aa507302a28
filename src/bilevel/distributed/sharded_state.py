"""Converts the state of a run with a sharded v into the state of one process, and back.

For a checkpoint, the tensors that `fully_shard` has divided, and the parts of the state that are shaped like them, are
gathered one tensor at a time on the host of rank 0, which writes them. A run that resumes at any number of ranks takes
its own shard of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bilevel.errors import CheckpointError
from bilevel.problem import Variable


def gather_state(
    u: Variable, v: Variable, method: dict[str, Any], like_v: Sequence[str], *, first: bool
) -> dict[str, Any]:
    """Return u, v and the method's state for a checkpoint. All ranks call it; only the first one gets gathered tensors.

    `like_v` names the entries of the method's state that hold a tensor for each tensor of v, as paths with slashes.
    """
    found: dict[str, Any] = {"u": dict(u.tensors()), "v": dict(v.tensors()), "method": dict(method)}
    if v.shards:

        def gathered(sharded: Any) -> Tensor | None:
            whole = sharded.detach().full_tensor()
            return whole.cpu() if first else None

        found["v"] = {key: gathered(t) if hasattr(t, "full_tensor") else t for key, t in found["v"].items()}
        _convert_like_v(found["method"], like_v, v.shards, lambda local, like: gathered(_as_shard(local, like)))
    return found


def split_state(u: Variable, v: Variable, saved: dict[str, Any], like_v: Sequence[str]) -> dict[str, Any]:
    """Return this rank's part of the state that `gather_state` has made."""
    found = saved | {"u": dict(saved["u"]), "v": dict(saved["v"]), "method": dict(saved["method"])}
    if v.shards:
        found["v"] = {
            key: _divided(found["v"][key], held) if hasattr(held, "to_local") else found["v"][key]
            for key, held in v.tensors().items()
        }
        _convert_like_v(found["method"], like_v, v.shards, lambda whole, like: _divided(whole, like).to_local())
    return found


def _convert_like_v(
    method: dict[str, Any], like_v: Sequence[str], shards: Sequence[Any], convert: Callable[[Any, Any], Any]
) -> None:
    """Replace each tensor of the state that is shaped like a tensor w of v by `convert(tensor, w)`."""
    for path in like_v:
        *outer, last = path.split("/")
        node = method
        for key in outer:
            node[key] = dict(node[key])
            node = node[key]
        node[last] = _converted(node[last], None, shards, convert)


def _converted(node: Any, like: Any, shards: Sequence[Any], convert: Callable[[Any, Any], Any]) -> Any:
    """Convert the tensors in `node`. The last entries of a list, and keys that are numbers, belong to tensors of v."""
    if isinstance(node, Tensor):  # counters and rates have no dimensions, shards have
        return convert(node, like) if node.dim() and like is not None else node
    if isinstance(node, dict):
        return {
            key: _converted(item, shards[int(key)] if key.isdigit() else like, shards, convert)
            for key, item in node.items()
        }
    if isinstance(node, (list, tuple)):
        others = len(node) - len(shards)
        likes = [*[None] * others, *shards] if others >= 0 else [like] * len(node)
        return [_converted(x, y, shards, convert) for x, y in zip(node, likes, strict=True)]
    return node


def _as_shard(local: Tensor, like: Any) -> Any:
    """Return the sharded tensor whose parts are the `local` tensors of the ranks, divided as `like` is."""
    if local.shape != like.to_local().shape:
        raise CheckpointError(
            f"the state of the optimizer of v has a tensor of shape {tuple(local.shape)} for a shard of shape "
            f"{tuple(like.to_local().shape)}, and cannot be gathered. Use Adam or SGD for lower_optimizer."
        )
    return type(like).from_local(
        local.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _divided(whole: Tensor, like: Any) -> Any:
    """Return the tensor divided as `like` is. Every rank passes all of it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)
