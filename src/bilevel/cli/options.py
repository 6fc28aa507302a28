"""Arguments and options that several commands share. Importing this module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bilevel.errors import OptionError

if TYPE_CHECKING:
    import torch

NETWORKS = "auto, linear, mlp, cnn"
"""The kinds of `applications.default_classifier`, written here because that module imports torch."""
DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="digits, mnist, fashion-mnist, cifar10 or svhn; a .npz, .csv or .parquet file; or a folder with a folder "
        "of images for each class.",
        show_default=False,
    ),
]
LabelOption = Annotated[str | None, typer.Option(help="The column of the labels in a table.")]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.", show_default=True)
]
SeedOption = Annotated[int, typer.Option(min=0, help="The seed of everything that is random.")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in --out that was stopped, with the same options, or start one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
NOT_OF_THE_RESULT = ("out", "device", "resume", "json", "apply", "evaluate", "embed")
"""Options that do not change what a run computes."""


def asked(context: typer.Context, command: str) -> dict[str, Any]:
    """Return the options that the result of a run depends on, as config.json keeps them."""
    params = {name: value for name, value in context.params.items() if name not in NOT_OF_THE_RESULT}
    return {"command": command} | {name: str(v) if isinstance(v, Path) else v for name, v in params.items()}


def options_given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return the parameters that the command line has, even with their default value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def refuse_options(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Refuse parameters that the command line has, although they do not go with `reason`."""
    given = options_given(context, names)
    options = [param.metavar or param.opts[0] for param in context.command.params if param.name in given]
    if options:
        raise OptionError(f"{' and '.join(options)} must be left out with {reason}.")


def refuse_if(rules: Mapping[str, bool]) -> None:
    """Raise an OptionError with the first message whose condition holds."""
    for message, broken in rules.items():
        if broken:
            raise OptionError(message)


def device_of(text: str) -> torch.device:
    """Return the device that --device names."""
    import torch

    from bilevel.distributed.process_group import world

    gpu = torch.cuda.is_available()
    if text == "auto":
        # Each rank of a machine has its own GPU.
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if world() > 1 else "cuda"
        text = own if gpu else "cpu"
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises all three
        found = "auto, cpu, cuda or cuda:0" if gpu else "auto or cpu, because torch finds no CUDA GPU here"
        raise OptionError(f"--device must be {found}; got {text!r}.") from None
    return device
