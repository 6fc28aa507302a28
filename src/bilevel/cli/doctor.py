"""`bilevel doctor`: what is here, the first thing to paste in a bug report."""

from __future__ import annotations

import json as text
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from bilevel._util.text import counted
from bilevel.cli.progress import waiting


def command(json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False) -> None:
    """Show versions, devices, whether compiling and graph capture work here, data found, and free disk.

    Paste it in a bug report. It holds paths of this machine, and nothing of your data.
    """
    from bilevel.cli.diagnosis import parts

    found = {}
    for name, part in parts(_trying):
        found[name] = part
        if not json:
            typer.echo("\n".join(lines({name: part})))
    if json:
        typer.echo(text.dumps(found, indent=2))


def lines(found: dict[str, Any]) -> list[str]:
    """The findings for people."""
    return [line for name, part in found.items() for line in SECTIONS[name](part)]


def _trying(engine: str) -> AbstractContextManager[object]:
    return waiting(f"trying {ENGINES[engine]}{', which takes seconds' if engine == 'compile' else ''}")


def _versions(found: dict[str, str | None]) -> list[str]:
    absent = [name for name, version in found.items() if version is None]
    present = [f"  {name} {version}" for name, version in found.items() if version is not None]
    return ["versions", *present, *([f"  not installed: {', '.join(absent)}"] if absent else [])]


def _system(found: dict[str, Any]) -> list[str]:
    cores = "an unknown number of cores" if found["cores"] is None else counted(found["cores"], "core")
    shown = ["system", f"  {found['platform']}, {cores}, torch uses {counted(found['threads'], 'thread')}"]
    return shown if found["memory_free"] is None else [*shown, f"  {_size(found['memory_free'])} of memory free"]


def _devices(found: list[dict[str, Any]]) -> list[str]:
    shown = ["devices"]
    for device in found:
        memory = f", {_size(device['memory'])}, CUDA {device['cuda']}" if "memory" in device else ""
        shown.append(f"  {device['name']}: {device['model']}{memory}")
    return shown


def _engines(found: dict[str, dict[str, Any]]) -> list[str]:
    shown = [f"  {ENGINES[key]}: {'yes' if one['works'] else 'no'}, {one['note']}" for key, one in found.items()]
    return ["what works here", *shown]


def _data(found: dict[str, str | None]) -> list[str]:
    from bilevel.cli.diagnosis import how_to_get

    return ["data", *(f"  {name}: {place or f'not here; {how_to_get(name)}'}" for name, place in found.items())]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


ENGINES = {"compile": "torch.compile", "graph": "CUDA graph capture", "double_backward": "double backward"}
SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "versions": _versions,
    "system": _system,
    "devices": _devices,
    "data": _data,
    "environment": lambda found: ["environment", *(f"  {name}={value}" for name, value in found.items())],
    "disk_free": lambda found: ["disk", *(f"  {path}: {_size(free)} free" for path, free in found.items())],
    "engines": _engines,
}
