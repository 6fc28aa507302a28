"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="digits, mnist, fashion-mnist, cifar10, svhn; or a .npz, .csv or .parquet file, or a folder of images "
        "in class folders.",
        show_default=False,
    ),
]
LabelOption = Annotated[str | None, typer.Option(help="The column of the labels, in a table.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one.")]
SeedOption = Annotated[int, typer.Option(min=0, help="What everything random is drawn from.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from a run that was stopped, with the same options.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
