"""Ctrl-C in the first second of a command, while it imports: one line and exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bilevel.cli.starting import is_command

SCRIPT = "import sys\nfrom bilevel.cli.main import main\nsys.exit(main())\n"
"""What an installer makes of the entry point."""


def interrupted(command: list[str], rank: int = 0) -> tuple[int, str, str]:
    """The exit code of a process that is interrupted while it imports torch, and what it says on both streams."""
    environment = os.environ | {"RANK": str(rank)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=interruptible
    )
    maps, end = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 120
    while "libtorch" not in maps.read_text() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def interruptible() -> None:
    """As from a terminal: a test that itself runs in the background has SIGINT ignored, and hands that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.skipif(not Path("/proc").exists(), reason="what a process has loaded is found in /proc")
def test_ctrl_c_while_the_command_imports_ends_with_one_line_and_its_exit_code(tmp_path):
    script = tmp_path / "bilevel"
    script.write_text(SCRIPT)
    said = "bilevel: Stopped by Ctrl-C.\n"
    assert interrupted([sys.executable, "-m", "bilevel", "--version"]) == (130, "", said)
    assert interrupted([sys.executable, str(script), "--version"]) == (130, "", said)
    assert interrupted([sys.executable, "-m", "bilevel", "--version"], rank=1) == (130, "", "")


def test_the_command_is_told_from_programs_that_use_the_library():
    assert is_command(["-m"], ["python", "-m", "bilevel", "demo"])
    assert is_command(["-m"], ["python", "-mbilevel"])
    assert is_command(["/home/me/.venv/bin/bilevel", "demo"], ["python", "/home/me/.venv/bin/bilevel", "demo"])
    assert not is_command(["-m"], ["python", "-m", "bilevel.cli.diagnosis"])
    assert not is_command(["-m"], ["python", "-m", "mytool", "--backend", "bilevel"])
    assert not is_command(["-m"], ["python", "-mytool", "bilevel"])
    assert not is_command(["study.py", "-m", "bilevel"], ["python", "study.py", "-m", "bilevel"])
    assert not is_command(["/home/me/bilevel/study.py"], ["python", "/home/me/bilevel/study.py"])
    assert not is_command([""], ["python"])
    assert not is_command([], ["python"])


def test_a_program_that_uses_the_library_keeps_its_own_ctrl_c(tmp_path):
    (tmp_path / "study.py").write_text(
        "import bilevel, signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    subprocess.run([sys.executable, str(tmp_path / "study.py")], check=True, preexec_fn=interruptible)
