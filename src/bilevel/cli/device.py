"""`--device`: cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""

from __future__ import annotations

import os

import torch

from bilevel._util.text import counted
from bilevel.distributed.process_group import world
from bilevel.errors import OptionError


def device_of(text: str) -> torch.device:
    if text == "auto":
        if torch.cuda.is_available() and world() > 1:  # each rank of a machine has a GPU of its own
            text = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        else:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(text)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises all three
        count = torch.cuda.device_count()
        if count:
            allowed, here = "auto, cpu, cuda or cuda:0", f"torch finds {counted(count, 'CUDA GPU')} here"
        else:
            allowed, here = "auto or cpu", "torch finds no CUDA GPU here"
        raise OptionError(f"--device must be {allowed}; {here}, got {text!r}.") from None
    return found
