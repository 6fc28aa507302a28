"""`bilevel predict`: the classes of new rows, by the classifier of a run of `bilevel denoise`.

Importing this module does not import torch.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel._util.atomic_files import atomic_write, read_json
from bilevel._util.checks import counted, require
from bilevel.cli.commands import DeviceOption, JsonOption
from bilevel.cli.run_folder import report_result
from bilevel.errors import DataError, OptionError

# The names of the columns of probabilities begin with this.
PROBABILITY = "probability of "


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of `bilevel denoise`.")],
    new: Annotated[
        Path,
        typer.Argument(
            metavar="NEW",
            help="New rows in the form of the run's data: a .csv, .parquet or .npz file, or a folder of images. Labels "
            "are not needed.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The .csv file to write, by default predictions-NEW.csv in RUN.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="path.py:make, if the run was made with this --model.", show_default=False)
    ] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Predict the classes of new rows with the classifier of a run.

    Writes a row for each new row: its number or its file, the predicted class, and the probability of each class. The
    inputs are prepared as they were in the run.
    """
    require("sklearn", extra="apps")
    out = out or run / f"predictions-{new.stem}.csv"
    if out.suffix.lower() != ".csv" or out.exists():
        raise OptionError(f"--out must be a new .csv file; got {str(out)!r}, which {_fault(out)}.")
    result = predicted(run, new, out, model, device)
    report_result(result, {"predictions": out}, json=json)


def _fault(out: Path) -> str:
    return "exists" if out.exists() else "ends otherwise"


def predicted(run: Path, new: Path, out: Path, model: str | None, device: str) -> dict[str, Any]:
    """Write the predictions, and return the result to show."""
    from bilevel.applications.denoising.trained_run import PREPARATION, load
    from bilevel.cli.option_values import device_of, network

    where, made = device_of(device), None
    if model is not None:
        held = read_json(run / PREPARATION)
        arguments = tuple(held.get("shape", ())), len(held.get("classes", ()))
        made = network(model, "--model", "make(shape, classes)", arguments, seed=0)
    trained = load(run, model=made, device=where)
    rows = trained.rows(new)
    found = trained.probabilities(rows)
    names = [trained.classes[i] for i in found.argmax(1)]
    first = "index" if rows.names[0].isdigit() else "file"
    header = [first, "predicted_label", *(PROBABILITY + name for name in trained.classes)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror}).") from None
    with atomic_write(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row, name, shares in zip(rows.names, names, found.tolist(), strict=True):
            writer.writerow([row, name, *(f"{share:.6f}" for share in shares)])
    counts = {name: names.count(name) for name in trained.classes}
    most = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1])[:10])
    return {
        "command": "predict",
        "status": "done",
        "message": f"{counted(len(names), 'row')} predicted: {most}.",
        "run": str(run),
        "data": str(new),
        "out": str(out),
        "rows": len(names),
        "predicted": counts,
        "notes": list(rows.notes),
    }
