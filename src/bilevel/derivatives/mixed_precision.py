"""Mixed precision: the user's functions run under autocast; variables, moments and results stay float32.

Matrix products and convolutions of upper, lower, prepare and the constraints take bfloat16, forward, backward and in
the second backward. Their results are converted to float32 before differentiation, and gradients arrive in float32
because the variables are float32. The certificate is measured in full precision.

Losses over classes get their scores in float32 before autocast sees them. On CUDA, autocast itself uses one kernel that
reads bfloat16 and computes in float32; its second derivative is rounded to bfloat16 while large terms cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bilevel._util.nested import each_tensor
from bilevel.errors import OptionError
from bilevel.problem.variables import Variable

Precision = Literal["bf16"]
LOSSES: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.cross_entropy,
        functional.nll_loss,
        functional.log_softmax,
        functional.softmax,
        torch.log_softmax,
        torch.softmax,
        torch.logsumexp,
        Tensor.log_softmax,
        Tensor.softmax,
        Tensor.logsumexp,
        functional.softmin,
        torch.special.log_softmax,
        torch.special.softmax,
        torch.special.logsumexp,
    }
)


def reduced(precision: Precision | None, device: torch.device, batch: Any = None) -> AbstractContextManager[Any]:
    """Return the context that a user's function runs in at this precision; it yields the batch."""
    return nullcontext(batch) if precision is None else _autocast(device, batch)


@contextmanager
def _autocast(device: torch.device, batch: Any) -> Iterator[Any]:
    # Without the cache of casts. The cache outlives an evaluation if the caller is under autocast as well, and would
    # then return the weights from before the last step. It saves nothing if a forward pass reads each weight once, and
    # a captured graph must make its own casts.
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False), _WideLosses():
        yield batch


class _WideLosses(TorchFunctionMode):
    """Passes float32 to the functions in LOSSES."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in LOSSES:
            args, kwargs = widened(args), widened(kwargs)
        return function(*args, **(kwargs or {}))


def widened(value: Any) -> Any:
    """Return the value with every half-precision tensor in it converted to float32."""
    return each_tensor(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, value)


def refuse_precision(precision: object, *variables: Variable) -> None:
    """Refuse an unknown precision, or one that these variables cannot use."""
    if precision is None:
        return
    if precision not in get_args(Precision):
        raise OptionError(f"precision must be None or 'bf16'; got {precision!r}.")
    for variable in variables:
        for name, tensor in variable.named():
            if tensor.dtype != torch.float32:
                where = f"{variable.name}[{name!r}]" if name else variable.name
                raise OptionError(
                    f"precision='bf16' needs float32 variables, because it rounds only their products; {where} is "
                    f"{str(tensor.dtype).removeprefix('torch.')}. Convert it with .float(), or leave precision out."
                )
