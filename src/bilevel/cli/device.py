"""`--device`: cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""

from __future__ import annotations

import torch

from ..errors import OptionError


def device_of(text: str) -> torch.device:
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(text)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises all three
        raise OptionError(
            f"--device must be auto, cpu, or a GPU that is here, as cuda or cuda:0; got {text!r}."
        ) from None
    return found
