"""Start-up: what help, the version and `import bilevel` must not import, and what a command says without its extra."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import bilevel
from bilevel._util.checks import require
from bilevel.cli.main import main

HEAVY = {"torch", "numpy", "sklearn", "scipy", "matplotlib", "PIL", "pandas", "pyarrow", "jinja2", "joblib", "ray"}
COMMANDS = ("denoise", "poison", "tune", "fewshot", "compare", "doctor")


def imported(*command: str) -> set[str]:
    """The top-level packages that a process imports."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, env=os.environ, timeout=300
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_and_version_import_nothing_heavy(arguments):
    assert not imported("-m", "bilevel", *arguments) & (HEAVY | {"rich"})


def test_import_bilevel_imports_nothing_but_itself():
    assert not imported("-c", "import bilevel") & (HEAVY | {"typer", "rich", "safetensors"})


def test_the_solver_imports_torch_and_no_optional_package():
    found = imported("-c", "from bilevel import Penalty, Problem, solve; import bilevel; dir(bilevel)")
    assert "torch" in found
    assert not found & (HEAVY - {"torch", "numpy"} | {"typer", "rich"})


def test_every_public_name_is_found_and_listed():
    for name in bilevel.__all__:
        assert getattr(bilevel, name) is not None
    assert set(bilevel.__all__) <= set(dir(bilevel))
    with pytest.raises(AttributeError, match="'bilevel' has no attribute 'solv'"):
        bilevel.solv  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "module", "package"),
    [
        ("denoise digits", "sklearn", "scikit-learn"),
        ("tune digits", "sklearn", "scikit-learn"),
        ("poison digits", "sklearn", "scikit-learn"),
        ("fewshot omniglot", "PIL", "pillow"),
        ("compare sum", "matplotlib", "matplotlib"),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(arguments, module, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 1
    output, errors = capsys.readouterr()
    assert (output, errors) == ("", f"bilevel: This needs {package}: pip install 'bilevel[apps]'.\n")
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_later_gets_the_same_sentence(tmp_path, monkeypatch, capsys):

    def load(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas.core")

    monkeypatch.setattr("bilevel.cli.denoise_run.load", load)
    assert main(["denoise", "t.csv", "--label", "b", "--trusted", "1", "--out", str(tmp_path)]) == 1
    assert "This needs pandas: pip install 'bilevel[tables]'." in capsys.readouterr().err


def test_a_module_that_an_optional_package_itself_misses_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "optional_package.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        require("optional_package", extra="apps")
