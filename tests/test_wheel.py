"""The wheel in a clean environment: four packages solve the README's example, and each command names what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def run(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == code, done.stderr[-2000:] + done.stdout[-2000:]
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and its required packages only."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("bilevel-*.whl")
    assert wheel.stat().st_size < 2**20
    venv.create(folder / "env", with_pip=True)
    run(folder / "env/bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    return folder / "env" / "bin"


def test_required_packages_are_four(place: Path) -> None:
    code = (
        "import importlib.metadata as m, re; "
        "print(*(re.split('[^a-z]', r)[0] for r in m.requires('bilevel') if 'extra' not in r))"
    )
    assert run(place / "python", "-c", code).stdout.split() == ["torch", "numpy", "safetensors", "typer"]


def test_example_of_the_readme_runs(place: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "Converged" in run(place / "python", "-c", code).stdout


@pytest.mark.parametrize(
    "words",
    [
        ("denoise", "digits", "--noise", "0.2", "--trusted", "100"),
        ("tune", "digits"),
        ("poison", "digits"),
        ("fewshot", "omniglot"),
        ("compare", "sum"),
    ],
)
def test_command_without_its_extra_says_what_to_install(place: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(place / "bilevel", *words, "--out", tmp_path / "run", code=1)
    assert re.search(r"This needs [\w-]+: pip install 'bilevel\[\w+\]'\.", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_work_without_any_extra(place: Path) -> None:
    assert "denoise" in run(place / "bilevel", "--help").stdout
    assert run(place / "bilevel", "--version").stdout.startswith("bilevel ")
