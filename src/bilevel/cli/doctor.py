"""`bilevel doctor`: the packages, data and engines of this machine, for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel.errors import MissingPackageError, reason

PACKAGES = {
    *("bilevel", "torch", "numpy", "safetensors", "typer", "scikit-learn", "scipy", "joblib", "pillow", "pooch"),
    *("matplotlib", "jinja2", "pandas", "pyarrow", "tensorboard", "ray"),
}


def command(json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False) -> None:
    """Show versions, devices, whether compiling and graph capture work here, data found, and free disk space.

    Paste it into a bug report. It contains paths of this machine, but none of your data.
    """
    from torch.utils.collect_env import get_env_info, pretty_str

    from bilevel.cli.progress import waiting
    from bilevel.cli.run_folder import to_json

    with waiting("collecting versions"):
        environment = get_env_info()  # type: ignore[no-untyped-call]
        found = {
            "versions": versions(),
            "environment": environment._asdict(),
            "data": data_sets(),
            "disk_free": shutil.disk_usage(Path.cwd()).free,
        }
    if not json:
        print(pretty_str(environment), *lines(found), sep="\n", flush=True)  # type: ignore[no-untyped-call]
    engines = {}
    for name, trial in (("CUDA graph capture", _graph), ("torch.compile", _compile)):
        with waiting(f"trying {name}"):
            engines[name] = try_engine(trial)
        if not json:
            print(f"{name} works: {'yes' if engines[name]['works'] else 'no'}, {engines[name]['note']}", flush=True)
    if json:
        print(to_json({**found, "engines": engines}))


def versions() -> dict[str, str]:
    """Return the versions of this library and of the installed packages that it uses."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    return {name: installed[name] for name in sorted(PACKAGES & installed.keys())}


def data_sets() -> dict[str, str | None]:
    """Return the path of each set that is read by name, or which package is missing to look for it.

    The path is None if the set is not on this machine.
    """
    from bilevel.data import class_images, named_sets

    found: dict[str, str | None] = {"digits": "comes with scikit-learn"}
    for module, names in ((named_sets, named_sets.SETS), (class_images, class_images.NAMES)):
        for name in names:
            try:
                path = module.found_in(name)
                found[name] = None if path is None else str(path)
            except MissingPackageError as error:
                found[name] = str(error)
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return versions, data and free space as lines of text."""
    missing = f"not here; $BILEVEL_DATA is {os.environ.get('BILEVEL_DATA', 'not set')}"
    data = [f"  {name}: {place or missing}" for name, place in found["data"].items()]
    versions = [f"  {name} {version}" for name, version in found["versions"].items()]
    free = f"{found['disk_free'] / 2**30:.1f} GiB free in this folder"
    return ["", "Packages:", *versions, "", "Data (docs/few-shot.md has the files of each set):", *data, "", free]


def try_engine(trial: Callable[[], str]) -> dict[str, Any]:
    """Return whether a trial works here, with the device, or the reason why it does not."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's warnings say nothing about whether it works
            return {"works": True, "note": trial()}
    except Exception as error:  # compilers and drivers raise anything
        return {"works": False, "note": reason(error)}


def _compile() -> str:
    """Compile a gradient by inductor, as `engine="compile"` does, but without the CPU's vector instructions.

    Inductor tries those one by one the first time, which takes half a minute.
    """
    import torch
    from torch._inductor import compile as compile_graph
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.linspace(-1, 1, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    slope = torch.func.grad(lambda x: (torch.sin(x) * x).sum())
    try:
        found = compile_graph(make_fx(slope)(x), [x], options={"cpp.vec_isa_ok": False})(x)
    finally:
        valid_vec_isa_list.cache_clear()  # later compilations of this process try them again
    torch.testing.assert_close(found, slope(x), atol=1e-5, rtol=0)
    return f"on {x.device.type}"


def _graph() -> str:
    """Replay a step as a CUDA graph, as `engine="graph"` does."""
    import torch

    x = torch.ones(8, device="cuda")
    x * x  # loads the kernel before the capture, which must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * x
    x.fill_(2)
    graph.replay()
    torch.testing.assert_close(y, x * x)
    return f"on {torch.cuda.get_device_name()}"
