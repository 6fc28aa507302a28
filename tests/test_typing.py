"""What users write is well typed: `solution.u` has the type of what was passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
HERE = Path(__file__).parent


def checked(cache: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "--config-file", os.devnull]
    environment = os.environ | {"MYPYPATH": str(HERE.parent / "src")}
    command += ["--follow-imports", "silent", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_examples_of_the_guide_pass_mypy_strict_and_a_wrong_type_does_not(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torch\nfrom bilevel import Penalty, Problem, solve\n"
        "def run(problem: Problem, u: torch.Tensor, v: torch.nn.Linear) -> None:\n"
        "    solution = solve(problem, Penalty(), u, v, max_steps=1)\n"
        "    solution.u.bias\n    solve(problem, Penalty(), 3, v, max_steps=1)\n"
        "    step: str = solution.history['f'][-1]\n"
    )
    found = checked(tmp_path / "cache", HERE / "typed_examples.py", wrong)  # one run: reading torch takes seconds
    assert found.returncode == 1, found.stdout + found.stderr
    assert "typed_examples.py" not in found.stdout, found.stdout
    assert "Found 3 errors in 1 file (checked 2 source files)" in found.stdout
    assert '"Tensor" has no attribute "bias"' in found.stdout
    assert 'Value of type variable "U" of "solve" cannot be "int"' in found.stdout
    assert '(expression has type "float", variable has type "str")' in found.stdout
