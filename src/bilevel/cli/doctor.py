"""`bilevel doctor`: what is installed and what works here, the first thing to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = (
    "bilevel",
    "torch",
    "numpy",
    "safetensors",
    "typer",
    "scikit-learn",
    "scipy",
    "joblib",
    "pillow",
    "pooch",
    "matplotlib",
    "jinja2",
    "pandas",
    "pyarrow",
    "tensorboard",
    "ray",
)
ENGINES = {"double_backward": "double backward", "graph": "CUDA graph capture", "compile": "torch.compile"}


def command(json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False) -> None:
    """Show versions, devices, whether compiling and graph capture work here, data found, and free disk space.

    Paste it into a bug report. It has paths of this machine, and nothing of your data.
    """
    from torch.utils.collect_env import get_env_info, pretty_str

    from bilevel.cli.progress import waiting
    from bilevel.cli.run_folder import to_json

    with waiting("collecting versions"):
        environment = get_env_info()  # type: ignore[no-untyped-call]
    places = (Path.cwd(), Path(tempfile.gettempdir()))
    found = {
        "versions": versions(),
        "environment": environment._asdict(),
        "data": data_sets(),
        "disk_free": {str(path): shutil.disk_usage(path).free for path in places},
    }
    if not json:
        print(pretty_str(environment), *lines(found), sep="\n", flush=True)  # type: ignore[no-untyped-call]
    engines = {}
    for name, trial in (("double_backward", _double_backward), ("graph", _graph), ("compile", _compile)):
        with waiting(f"trying {ENGINES[name]}"):
            engines[name] = try_engine(trial)
        if not json:
            outcome = "yes" if engines[name]["works"] else "no"
            print(f"  {ENGINES[name]} works: {outcome}, {engines[name]['note']}", flush=True)
    if json:
        print(to_json({**found, "engines": engines}))


def versions() -> dict[str, str | None]:
    """Return the versions of this library and of the packages that it can use; None if one is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return the parts that are not torch's as text."""
    return [
        "",
        "packages",
        *(f"  {name} {version or 'is not installed'}" for name, version in found["versions"].items()),
        f"data ($BILEVEL_DATA is {os.environ.get('BILEVEL_DATA', 'not set')})",
        *(f"  {name}: {place or f'not here; {how_to_get(name)}'}" for name, place in found["data"].items()),
        "disk",
        *(f"  {path}: {free / 2**30:.1f} GiB free" for path, free in found["disk_free"].items()),
        "engines",
    ]


def data_sets() -> dict[str, str | None]:
    """Return where each set that is read by name is; None if it is not here."""
    from bilevel._util.optional import how_to_install
    from bilevel.errors import MissingPackageError

    try:
        from bilevel.data import class_sets, named

        places = {name: named.found_in(name, known) for name, known in named.SETS.items()}
        places |= {name: class_sets.found_in(name) for name in class_sets.NAMES}
    except (MissingPackageError, ModuleNotFoundError) as error:
        return {"none can be read": how_to_install(error.name or "sklearn", "apps")}
    found = {name: None if path is None else str(path) for name, path in places.items()}
    return {"digits": "comes with scikit-learn", **found}


def how_to_get(name: str) -> str:
    """Return what brings a named set here."""
    from bilevel.data import class_sets

    if name in class_sets.FOLDERS:
        return f"put it into $BILEVEL_DATA/{class_sets.FOLDERS[name][0]} (see docs/few-shot.md for its files)"
    return "it is downloaded when it is first used"


def try_engine(trial: Callable[[], str]) -> dict[str, Any]:
    """Return whether something works here, and where, or why not."""
    from bilevel.errors import reason

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, which are no reason
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
    if not torch.allclose(found, slope(x), atol=1e-5):
        raise RuntimeError("the compiled gradient differs from the eager one")
    return f"on {x.device.type}"


def _graph() -> str:
    """Replay a step as a CUDA graph, as `engine="graph"` does."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA GPU")
    x = torch.ones(8, device="cuda")
    (torch.sin(x) * x).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (torch.sin(x) * x).sum()
    x.fill_(2)
    graph.replay()
    if not torch.allclose(y, (torch.sin(x) * x).sum()):
        raise RuntimeError("the replayed value differs from the eager one")
    return f"on {torch.cuda.get_device_name()}"


def _double_backward() -> str:
    """Differentiate a derivative, as the exact curvature does."""
    import torch

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    if not torch.equal(curvature, 6 * x):
        raise RuntimeError("the second derivative is wrong")
    return f"on {x.device.type}"
