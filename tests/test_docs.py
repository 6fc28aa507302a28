"""The code of README and docs runs."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
from typer.main import get_command

import bilevel
from bilevel.applications.tuning import linear_tuning
from bilevel.cli.main import build_app
from bilevel.sklearn import TunedRidge

denoising = importlib.import_module("bilevel.applications.denoising.denoise")  # functions have these names
tuning = importlib.import_module("bilevel.applications.tuning.tune")
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


@pytest.mark.parametrize("folder", ["methods", "methods/penalty", "optim", "running"])
def test_contributing_lists_every_file_of_the_folder(folder):
    (section,) = re.findall(r"## The tree\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    listed = set(re.findall(r"`(\w+\.py)`", section))
    files = {path.name for path in (ROOT / "src" / "bilevel" / folder).glob("*.py")}
    assert files - {"__init__.py"} <= listed


def documents():
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md")]


def commands():
    """(page, command, the rest of the line) of every command in the documents, but the history of those that went."""
    top = get_command(build_app())
    for page in documents():
        if page.name == "CHANGELOG.md":
            continue
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


PAGES_OF = {"denoise": "denoising", "tune": "tuning", "poison": "poisoning", "fewshot": "few-shot"}
SHARED = {"--out", "--device", "--seed", "--resume", "--json", "--steps", "--label"}
"""Options that several commands have, and that their help says enough of."""


@pytest.mark.parametrize("name", PAGES_OF)
def test_the_page_of_a_command_names_its_options_and_no_others(name):
    text = (ROOT / "docs" / f"{PAGES_OF[name]}.md").read_text()
    others = "|".join(each for each in get_command(build_app()).commands if each != name)
    own = re.sub(rf"`bilevel ({others}) [^`]*`", "", text)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own))
    params = [param for param in get_command(build_app()).commands[name].params if param.param_type_name == "option"]
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    assert named <= known, f"{name} has no {', '.join(named - known)}"
    missing = [param.opts for param in params if not {*param.opts, *param.secondary_opts} & (named | SHARED)]
    assert not missing, f"docs/{PAGES_OF[name]}.md does not name {missing}"


def test_numbers_that_help_names_are_those_of_the_python_interface():
    """What --help says of defaults that are computed elsewhere."""
    options = {
        (name, param.name): param.help
        for name, command in get_command(build_app()).commands.items()
        for param in command.params
        if param.param_type_name == "option"
    }
    assert f"{denoising.PASSES} passes" in options["denoise", "steps"]
    few, many = denoising.LEAST_STEPS
    said = f"at least {few:,}, or {many:,} with more than {denoising.FEW:,} rows"
    assert said in options["denoise", "steps"]
    convex = inspect.signature(linear_tuning.tune_linear).parameters["steps"].default
    assert f"by default {convex}, and {tuning.STEPS:,} for an mlp" in options["tune", "steps"]
    assert TunedRidge().folds == 5
    assert TunedRidge().steps == convex
    assert "By default 5." in options["tune", "folds"]


def test_names_and_files_in_the_documents_are_there():
    for page in documents():
        text = page.read_text()
        for name in set(re.findall(r"`(bilevel(?:\.[A-Za-z_]\w*)+)`", text)):
            found = bilevel
            for i, part in enumerate(name.split(".")[1:], start=2):
                if not hasattr(found, part):
                    importlib.import_module(".".join(name.split(".")[:i]))
                found = getattr(found, part)
        folders = r"(?<![\w./-])(?:tests|docs|studies|benchmarks)"
        for file in set(re.findall(rf"{folders}/[\w./-]+\.(?:py|md|json|png)\b", text)):
            assert (ROOT / file).exists(), f"{page.name} names {file}"
