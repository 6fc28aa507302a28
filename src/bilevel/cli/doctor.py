"""`bilevel doctor`: what is here, the first thing to paste in a bug report."""

from __future__ import annotations

import json as text
from typing import Annotated, Any

import typer

from ..wording import counted


def command(json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False) -> None:
    """Show versions, devices, whether compiling and graph capture work here, data found, and free disk.

    Paste it in a bug report. It holds paths of this machine, and nothing of your data.
    """
    from ..doctor import examine

    found = examine()
    typer.echo(text.dumps(found, indent=2) if json else "\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """The findings for people."""
    from ..doctor import how_to_get

    absent = [name for name, version in found["versions"].items() if version is None]
    present = [f"{name} {version}" for name, version in found["versions"].items() if version is not None]
    shown = ["versions", *(f"  {version}" for version in present)]
    if absent:
        shown.append(f"  not installed: {', '.join(absent)}")
    system = found["system"]
    cores = "an unknown number of cores" if system["cores"] is None else counted(system["cores"], "core")
    shown += ["system", f"  {system['platform']}, {cores}, torch uses {counted(system['threads'], 'thread')}"]
    if system["memory_free"] is not None:
        shown.append(f"  {_size(system['memory_free'])} of memory free")
    shown.append("devices")
    for device in found["devices"]:
        memory = f", {_size(device['memory'])}, CUDA {device['cuda']}" if "memory" in device else ""
        shown.append(f"  {device['name']}: {device['model']}{memory}")
    names = {"compile": "torch.compile", "graph": "CUDA graph capture", "double_backward": "double backward"}
    shown.append("what works here")
    for key, name in names.items():
        engine = found["engines"][key]
        shown.append(f"  {name}: {'yes' if engine['works'] else 'no'}, {engine['note']}")
    shown.append("data")
    shown += [f"  {name}: {place or f'not here; {how_to_get(name)}'}" for name, place in found["data"].items()]
    shown += ["environment", *(f"  {name}={value}" for name, value in found["environment"].items())]
    shown += ["disk", *(f"  {path}: {_size(free)} free" for path, free in found["disk_free"].items())]
    return shown


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
