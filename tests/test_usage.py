"""Help and wrong use of every command: names are those of the documents, and what is wrong is one sentence."""

import re

import pytest
from typer.main import get_command

from bilevel.cli.main import app, main


def run(capsys, *arguments):
    code = main(arguments)
    output, errors = capsys.readouterr()
    return code, output, errors


def every_command():
    """(how it is called, the command) of all of them."""
    waiting = [("bilevel", get_command(app))]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        waiting += [(f"{path} {name}", each) for name, each in getattr(command, "commands", {}).items()]


@pytest.mark.parametrize(("path", "command"), [pytest.param(*each, id=each[0]) for each in every_command()])
def test_help_shows_arguments_in_capitals_and_flags_without_a_type(path, command, capsys):
    code, output, _ = run(capsys, *path.split()[1:], "--help")
    assert code == 0
    usage = " ".join(re.search(r"Usage: (.*?)\n\s*\n", output, re.DOTALL)[1].split())
    names = {"bilevel fewshot": " [DATA]", "bilevel compare": " PROBLEM"}
    data = dict.fromkeys(("bilevel denoise", "bilevel tune", "bilevel poison"), " DATA")
    ending = (names | data).get(path, " COMMAND [ARGS]..." if hasattr(command, "commands") else "")
    assert usage == f"{path} [OPTIONS]{ending}"
    assert "<bool>" not in output
    assert "default: (" not in output
    for param in command.params:
        assert param.help.endswith((".", ")")), f"{path}: the help of {param.name} is no sentence"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "denoise",
            "DATA is needed: digits, mnist, fashion-mnist, cifar10, svhn; or a .npz, .csv or .parquet file, or "
            "a folder of images in class folders.",
        ),
        ("compare", "PROBLEM is needed: sum, difference, sum-singular, difference-singular, or a Python file."),
        ("denoise digits --noise abc", "--noise must be a number; got 'abc'."),
        ("denoise digits --noise=abc", "--noise must be a number; got 'abc'."),
        ("denoise digits --noise", "--noise needs a value. `bilevel denoise -h` lists what there is."),
        ("denoise digits --steps 0", "--steps must be a whole number of at least 1; got 0."),
        ("denoise digits --steps 2 --steps 1.5", "--steps must be a whole number of at least 1; got 1.5."),
        ("tune digits --caution -1", "--caution must be a number of at least 0; got -1."),
        (
            "denoise digits --noise-kind asymetric",
            "--noise-kind must be one of symmetric, asymmetric; got 'asymetric'. Did you mean 'asymmetric'?",
        ),
        (
            "denoise digits --sed 3",
            "denoise has no option --sed. Did you mean '--seed'? `bilevel denoise -h` lists what there is.",
        ),
        ("denoise digits --resume true", "--resume takes no value; got 'true'."),
        ("denoise digits --resume=true", "--resume takes no value. `bilevel denoise -h` lists what there is."),
        ("denoise digits mnist", "denoise takes DATA alone beside its options; 'mnist' is too many."),
        ("doctor now", "doctor takes nothing beside its options; 'now' is too many."),
        (
            "reproduce tunning",
            "reproduce has no command 'tunning'. Did you mean 'tuning'? The commands are synthetic, "
            "complexity, classical, denoising, denoising-speed, denoising-steps, poisoning, clean-label, deep-victim, "
            "tuning, fairness, fewshot.",
        ),
        ("reproduce tuning --seeds 0", "--seeds must be a whole number of at least 1; got 0."),
        ("--verison", "There is no option --verison. Did you mean '--version'? `bilevel -h` lists what there is."),
        ("poison digits --cost 3", "--cost 3 is what --audit looks for; give --audit, too."),
        ("poison digits --audit --cost 300", "--cost must be above 0 and at most 100 points; got 300."),
        (
            "compare sum --methods penalty:gama=1",
            "--methods: penalty has no option 'gama'. Did you mean 'gamma'? It has mode, curvature, gamma,",
        ),
        ("compare sum --methods algorithm-2:gama=1", "--methods: algorithm-2 has no option 'gama'."),
    ],
)
def test_wrong_use_gets_one_sentence(arguments, told, capsys):
    code, output, errors = run(capsys, *arguments.split())
    assert (code, output) == (2, "")
    assert errors.startswith(f"bilevel: {told}")
    assert errors.count("\n") == 1
