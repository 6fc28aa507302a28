"""The code of README and docs runs."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
from typer.main import get_command

import bilevel
from bilevel.cli.main import app

ROOT = Path(__file__).parent.parent
NAMES = ("guide", "denoising", "poisoning", "tuning", "distributed", "few-shot")
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]


def blocks():
    for page in PAGES:
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)):
            yield pytest.param(code, id=f"{page}-{i}")


@pytest.mark.parametrize("code", list(blocks()))
def test_the_code_of_the_documents_runs(code):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "document", "exec"), {})


def test_the_first_example_of_the_readme_is_short_and_finds_the_useless_features():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(compile(code, "readme", "exec"), names)
    u = names["u"]
    # The first three features carry the signal: their penalties end at the lower bound, all others far above it.
    assert u[:3].max() < -5
    assert u[3:].min() > -2


def test_links_of_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def documents():
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md")]


def commands():
    """(page, command, the rest of the line) of every command in the documents."""
    top = get_command(app)
    for page in documents():
        for line in re.findall(r"(?<![\w/.-])bilevel ([a-z][^\n`#|]*)", page.read_text()):
            command, words = top, line.split()
            while words and words[0] in getattr(command, "commands", ()):
                command = command.commands[words.pop(0)]
            if command is not top and not hasattr(command, "commands"):
                yield page, command, " ".join(words)


def test_commands_of_the_documents_have_the_options_that_they_show():
    seen = 0
    for page, command, rest in commands():
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            assert option in known, f"{page.name}: {command.name} has no {option}"
            seen += 1
    assert seen > 50


def test_names_and_files_in_the_documents_are_there():
    for page in documents():
        text = page.read_text()
        for name in set(re.findall(r"`(bilevel(?:\.[A-Za-z_]\w*)+)`", text)):
            found = bilevel
            for i, part in enumerate(name.split(".")[1:], start=2):
                if not hasattr(found, part):
                    importlib.import_module(".".join(name.split(".")[:i]))
                found = getattr(found, part)
        for file in set(re.findall(r"\b(?:tests|docs|benchmarks)/[\w./-]+\.(?:py|md|json|png)\b", text)):
            assert (ROOT / file).exists(), f"{page.name} names {file}"
