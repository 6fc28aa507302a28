"""What this machine has of what the library uses: versions, devices, compilers, data, and room on the disk."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from bilevel_studies.poisoning import photographs
from torch import Tensor

from bilevel import __version__
from bilevel.data import class_images, named_sets
from bilevel.data.arrays import free_memory
from bilevel.errors import reason

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "safetensors",
    "matplotlib",
    "pillow",
    "typer",
    "rich",
    "jinja2",
    "pandas",
    "pyarrow",
    "tensorboard",
    "ray",
)
PHOTOS = photographs.ARCHIVE.parent.name


def parts(trying: Callable[[str], AbstractContextManager[object]] = nullcontext) -> Iterator[tuple[str, Any]]:
    """What there is to say, each with its name, as it is found; `trying` surrounds each trial of an engine.

    The trials come last: that of a compiler takes seconds.
    """
    yield "versions", versions()
    yield (
        "system",
        {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_free": free_memory(),
        },
    )
    yield "devices", devices()
    yield "data", data()
    names = ("BILEVEL_DATA", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    yield "environment", {name: os.environ[name] for name in names if name in os.environ}
    places = (Path.cwd(), Path(tempfile.gettempdir()))
    yield "disk_free", {str(path): shutil.disk_usage(path).free for path in places}
    found = {}
    for name, attempt in {"double_backward": _twice, "graph": _captured, "compile": _compiled}.items():
        with trying(name):
            found[name] = tried(attempt)
    yield "engines", found


def versions() -> dict[str, str | None]:
    """Of Python, this library, and the packages it uses; None of one that is not installed."""
    found: dict[str, str | None] = {"bilevel": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, Any]]:
    """The CPU, and the GPUs that torch sees."""
    found: list[dict[str, Any]] = [{"name": "cpu", "model": platform.processor() or platform.machine()}]
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found.append(
            {
                "name": f"cuda:{i}",
                "model": about.name,
                "memory": about.total_memory,
                "capability": f"{about.major}.{about.minor}",
                "cuda": torch.version.cuda,
            }
        )
    return found


def tried(attempt: Callable[[], str]) -> dict[str, Any]:
    """Whether something works here, and where it does not, why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, which are no reason
            return {"works": True, "note": attempt()}
    except Exception as error:  # compilers and drivers raise anything
        return {"works": False, "note": reason(error)}


def data() -> dict[str, str | None]:
    """Where each set is found that is read by name; None where it is not here."""
    found = {name: named_sets.found_in(name) for name in named_sets.SETS}
    found |= {name: class_images.found_in(name) for name in class_images.NAMES}
    found |= {PHOTOS: photographs.archive_here()}
    return {"digits": "comes with scikit-learn"} | {n: None if path is None else str(path) for n, path in found.items()}


def how_to_get(name: str) -> str:
    """What brings a set here that is not."""
    if name in named_sets.SETS:
        return "it is downloaded at its first use"
    if name == PHOTOS:
        return f"`bilevel reproduce clean-label` reads {photographs.ARCHIVE.name} in $BILEVEL_DATA/{PHOTOS}"
    return f"put it into $BILEVEL_DATA/{class_images.FOLDERS[name][0]} (see docs/few-shot.md for its files)"


def _compiled() -> str:
    """A gradient recorded and compiled by inductor, as `engine="compile"` does it.

    On a CPU without its vector instructions: inductor tries those out one by one the first time, for half a minute.
    """
    from torch._inductor import compile as compile_graph
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.linspace(-1, 1, 64, device=_device())
    slope = torch.func.grad(_bent)
    graph = make_fx(slope)(x)
    try:
        found = compile_graph(graph, [x], options={"cpp.vec_isa_ok": False})(x)
    finally:
        valid_vec_isa_list.cache_clear()  # it would hold for what this process compiles later, too
    if not torch.allclose(found, slope(x), atol=1e-5):
        raise RuntimeError("the compiled gradient is another than the plain one")
    return f"on {x.device.type}"


def _captured() -> str:
    """A step replayed as a CUDA graph, as `engine="graph"` uses it."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA GPU")
    x = torch.ones(8, device="cuda")
    _bent(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _bent(x)
    x.fill_(2)
    graph.replay()
    if not torch.allclose(y, _bent(x)):
        raise RuntimeError("the replayed value is another than the plain one")
    return f"on {torch.cuda.get_device_name()}"


def _twice() -> str:
    """A derivative of a derivative, which the exact curvature needs."""
    x = torch.ones(3, dtype=torch.float64, device=_device(), requires_grad=True)
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    if not torch.equal(curvature, 6 * x):
        raise RuntimeError("the second derivative is wrong")
    return f"on {x.device.type}"


def _bent(x: Tensor) -> Tensor:
    return (torch.sin(x) * x).sum()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
