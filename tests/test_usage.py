"""Help and wrong use of every command."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from bilevel.applications.comparison.compare import METHODS
from bilevel.applications.comparison.synthetic_problems import examples
from bilevel.applications.default_classifier import KINDS
from bilevel.applications.few_shot.tasks import BACKBONES, TRAINING
from bilevel.cli import commands
from bilevel.cli.compare_run import EVALUATIONS
from bilevel.cli.denoise_run import FIT
from bilevel.cli.main import build_app, main
from bilevel.cli.tune_run import FOLDS


def run(capsys, *arguments):
    code = main(arguments)
    output, errors = capsys.readouterr()
    return code, output, " ".join(errors.split())


def every_command():
    """(how it is called, the command) of all of them."""
    waiting = [("bilevel", get_command(build_app()))]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        waiting += [(f"{path} {name}", each) for name, each in getattr(command, "commands", {}).items()]


COMMANDS = dict(every_command())


@pytest.mark.parametrize("path", COMMANDS)
def test_help_shows_arguments_and_options_in_sentences(path, capsys):
    command = COMMANDS[path]
    code, output, _ = run(capsys, *path.split()[1:], "--help")
    assert code == 0
    names = {"bilevel fewshot": "[DATA]", "bilevel compare": "{PROBLEM}", "bilevel predict": "{RUN} {NEW}"}
    data = dict.fromkeys(("bilevel denoise", "bilevel tune", "bilevel poison"), "{DATA}")
    ending = (names | data).get(path, "COMMAND [ARGS]..." if hasattr(command, "commands") else "")
    assert re.match(rf"Usage: {path} \[OPTIONS\]\s*{re.escape(ending)}\n\n", output), output[:200]
    for param in command.params:
        assert param.help.endswith((".", ")")), f"{path}: the help of {param.name} is not a sentence"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("denoise", "Missing argument 'DATA'."),
        ("compare", "Missing argument 'PROBLEM'."),
        ("denoise digits --noise abc", "Invalid value for '--noise'"),
        ("denoise digits --steps 0", "Invalid value for '--steps'"),
        ("denoise digits --noise-kind asymetric", "Invalid value for '--noise-kind'"),
        ("denoise digits --sed 3", "No such option: --sed"),
        ("denoise digits mnist", "unexpected extra argument"),
        ("doctor now", "unexpected extra argument"),
        ("reproduce tunning", "No such command 'tunning'. Did you mean 'tuning'?"),
        ("denois digits", "No such command 'denois'. Did you mean 'denoise'"),
        ("--verison", "No such option: --verison"),
    ],
)
def test_what_typer_refuses_ends_with_code_2_and_says_where_help_is(arguments, told, capsys):
    code, output, errors = run(capsys, *arguments.split())
    assert (code, output) == (2, "")
    assert told in errors
    assert "for help." in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("poison digits --cost 3", "--cost 3 is for --audit; give --audit as well."),
        ("poison digits --audit --cost 300", "--cost must be above 0 and at most 100; got 300.0."),
        ("compare sum --seconds -1", "--seconds must be above 0; got -1.0."),
        ("compare sum --steps 3 --evaluations 9", "--evaluations and --steps are different ways to set the budget"),
        (
            "compare sum --methods penalty:gama=1",
            "--methods: penalty has no option 'gama'. Did you mean 'gamma'? It has mode, curvature, gamma,",
        ),
        ("compare sum --methods algorithm-2:gama=1", "--methods: algorithm-2 has no option 'gama'."),
    ],
)
def test_options_that_do_not_go_together_get_one_sentence(arguments, told, capsys):
    code, output, errors = run(capsys, *arguments.split())
    assert (code, output) == (2, "")
    assert errors.startswith(f"bilevel: {told}")


def test_names_and_numbers_in_help_are_those_of_the_library():
    """They are written out, so that help does not import torch."""
    assert commands.NETWORKS.split(", ") == list(KINDS)
    assert set(commands.DENOISE_METHODS.split(", ")) == set(FIT)
    assert set(commands.COMPARE_METHODS.split(", ")) == set(METHODS)
    assert commands.PROBLEMS.split(", ") == [example.name for example in examples()]
    assert commands.BACKBONES.split(", ") == list(BACKBONES)
    helps = {(path, param.name): param.help for path, each in COMMANDS.items() for param in each.params}
    assert f"By default {EVALUATIONS:,}." in helps["bilevel compare", "evaluations"]
    assert f"By default {FOLDS}." in helps["bilevel tune", "folds"]
    for name, plan in TRAINING.items():
        assert f"{plan.decay:g} for {name}" in helps["bilevel fewshot", "decay"]
        assert f"{plan.scale:g} for {name}" in helps["bilevel fewshot", "scale"]


def test_fewshot_has_at_most_18_options():
    assert sum(param.param_type_name == "option" for param in COMMANDS["bilevel fewshot"].params) <= 18
