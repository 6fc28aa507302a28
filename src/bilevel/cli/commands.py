"""The commands and their options. Importing this module does not import torch: a command imports what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bilevel._util.checks import require
from bilevel.errors import OptionError

# The kinds of `applications.default_classifier`, written here because that module imports torch.
NETWORKS = "auto, linear, mlp, cnn"
DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="digits, mnist, fashion-mnist, cifar10 or svhn; a .npz, .csv or .parquet file; or a folder with a folder "
        "of images for each class.",
        show_default=False,
    ),
]
LabelOption = Annotated[str | None, typer.Option(help="The column of the labels in a table.")]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.", show_default=True)
]
SeedOption = Annotated[int, typer.Option(min=0, help="The seed of all random numbers.")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Continue the stopped run in --out, with the same options, or start a new one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
DENOISE_METHODS = "penalty, algorithm-1, algorithm-2, alternating, reverse-mode, approx-grad, value-function, value-gap"
COMPARE_METHODS = f"{DENOISE_METHODS}, forward-mode, soba, srba, f2sa, sama, stocbio, amigo"
PROBLEMS = "sum, difference, sum-singular, difference-singular"
BACKBONES = "conv4, resnet"
FEWSHOT_DATA = "omniglot, cifar-fs, mini-imagenet, or a folder with a folder of images for each class"
# Options that a finished few-shot run does not use.
OF_TRAINING = ("train_ways", "meta_batch", "steps", "decay", "scale", "rotations", "resume")
TASKS = ("ways", "shots", "queries", "tasks", "seed")
AttackOption = Annotated[
    Literal["untargeted", "targeted", "clean-label"],
    typer.Option(
        help="The goal: less accuracy (untargeted), one class taken for another (targeted), or one test row taken for "
        "another class because of points whose labels are right (clean-label)."
    ),
]
AuditOption = Annotated[
    bool,
    typer.Option(
        "--audit",
        help="Look for the smallest share of poison (clean label: the smallest epsilon) that is enough, and test "
        "whether bilevel's own denoiser notices the points.",
    ),
]
# Options that do not change what a run computes.
NOT_OF_THE_RESULT = ("out", "device", "resume", "json", "apply", "evaluate", "embed")


def poison(
    context: typer.Context,
    data: DataArgument,
    attack: AttackOption = "untargeted",
    points: Annotated[int | None, typer.Option(min=1, help="Poison points to add.")] = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="The same as a share of the training rows, which exclude the test and validation rows. Without either "
            "option: 0.03, or one point for clean-label."
        ),
    ] = None,
    target_class: Annotated[str | None, typer.Option(help="Targeted: the class to be misclassified.")] = None,
    as_class: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="The class to predict instead of --target-class, or for the row of --target. For a row, by default "
            "the class of the nearest validation row of another class.",
        ),
    ] = None,
    target: Annotated[int | None, typer.Option(min=0, help="Clean label: a row of the test set, from 0.")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="The largest change of a point; by default any change is allowed. The unit is a pixel in [0, 1] for "
            "l2, 1/255 of a pixel for linf, and in tables the standard deviation of a column."
        ),
    ] = None,
    norm: Annotated[Literal["l2", "linf"], typer.Option(help="The norm that --epsilon bounds.")] = "l2",
    test: Annotated[
        str | None, typer.Option(help="A file or folder in the format of DATA, which no attack sees.")
    ] = None,
    label: LabelOption = None,
    rows: Annotated[int | None, typer.Option(min=10, help="Draw this many rows for training; all by default.")] = None,
    model: Annotated[
        str, typer.Option(help=f"The victim: {NETWORKS}, or path.py:make with make(shape, classes).")
    ] = "linear",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the attack.")] = 300,
    audit: AuditOption = False,
    cost: Annotated[
        float | None, typer.Option(help="The loss of accuracy, in points, that --audit looks for; by default 5.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/poison-DATA.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Find out what a few poisoned training examples can do to a classifier, on your own data.

    The attack moves points that are added to the training set. Its effect is measured by training the victim from
    scratch on the clean rows and the points (a network under a clean-label attack: its last layer), on test rows that
    the attack never sees. The run folder has poison.npz, result.json and report.html. It is meant for audits of your
    own pipelines: see docs/poisoning-ethics.md.
    """
    require("sklearn", extra="apps")
    from bilevel.cli import poison_run

    options = asked(context, "poison")
    options["as"] = options.pop("as_class")
    poison_run.run(options, out, device, resume, json)


def tune(
    context: typer.Context,
    data: DataArgument,
    model: Annotated[
        Literal["logistic", "ridge", "mlp"],
        typer.Option(help="The model to tune: logistic for classes, ridge for numbers, mlp for either."),
    ] = "logistic",
    penalty: Annotated[
        Literal["per-feature", "per-layer", "single"],
        typer.Option(help="One penalty for each feature, for each layer of an mlp, or for all weights."),
    ] = "per-feature",
    test: Annotated[
        str | None, typer.Option(help="A file or folder in the format of DATA to measure the test loss on.")
    ] = None,
    label: LabelOption = None,
    numbers: Annotated[
        bool,
        typer.Option("--numbers", help="The labels are numbers, which an mlp predicts; for ridge they always are."),
    ] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="The number of folds that linear models are tuned on, all at once; at most the number of rows of the "
            "rarest class. By default 5.",
        ),
    ] = None,
    caution: Annotated[
        float | None,
        typer.Option(min=0, help="The cost of penalties that differ; 0 means no cost. By default the rows decide."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tuning steps; by default 100, and 1,000 for an mlp.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/tune-DATA.")] = None,
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one, and the CPU for linear models."),
    ] = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Tune the penalties of a model by gradient, on rows that are held out.

    The run folder has penalties.csv, the model, result.json, and report.html with a bar for each penalty, the path of
    the validation loss, and the losses of a grid of single penalties.
    """
    require("sklearn", extra="apps")
    from bilevel.cli import tune_run

    tune_run.run(asked(context, "tune"), out, device, resume, json)


def fewshot(
    context: typer.Context,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=f"{FEWSHOT_DATA}.", show_default=False)] = None,
    ways: Annotated[int, typer.Option(min=2, help="Classes of a task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Images of a class to learn from.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Images of a class to classify.")] = 15,
    train_ways: Annotated[
        int | None, typer.Option(min=2, help="Classes of a task in training; more can be better. By default --ways.")
    ] = None,
    backbone: Annotated[str, typer.Option(help=f"{BACKBONES}, or path.py:make with make(shape).")] = "conv4",
    meta_batch: Annotated[int, typer.Option(min=1, help="Tasks of a training step.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10_000,
    decay: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight decay of the representation (AdamW), for large networks and few images. By default 0 for "
            "conv4, 4 for resnet.",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="The factor on cosines; a large one on few images overfits. By default 10 for conv4, 20 for resnet."
        ),
    ] = None,
    rotations: Annotated[
        bool | None, typer.Option(help="Add rotated images as further classes. By default only for Omniglot.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks of the evaluation.")] = 600,
    evaluate: Annotated[
        Path | None, typer.Option(help="The folder of a finished run: evaluate it again, or embed with it.")
    ] = None,
    embed: Annotated[
        Path | None,
        typer.Option(help="A folder of new images: write their embeddings, with the run of --evaluate or a new one."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. By default runs/fewshot-DATA.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> None:
    """Learn one representation for many small tasks.

    The classes of DATA are split: the representation is learned on tasks of some of them, and tested on tasks of
    others, each with its own classifier that sees a few images. The run folder has representation.safetensors,
    result.json and report.html. `--evaluate RUN` measures it again: on the run's test classes, by default with its
    --ways, --shots, --queries, --tasks and --seed, or on all classes of another folder DATA that shares none with the
    run. With `--embed FOLDER` it embeds new images. --backbone then says where your network's file is now.
    """
    if data is None and evaluate is None:
        also = "" if embed is None else " --embed also works without DATA, with --evaluate RUN."
        raise OptionError(f"DATA is needed: {FEWSHOT_DATA}.{also}")
    require("PIL", extra="apps")
    require("sklearn", extra="apps")
    from bilevel.cli import fewshot_run

    moved = backbone if options_given(context, ("backbone",)) else None
    if evaluate is None:
        fewshot_run.run(asked(context, "fewshot"), embed, out, device, resume, json)
    elif embed is not None:
        refuse_options(context, ("data", *OF_TRAINING, *TASKS), "--evaluate and --embed, which need a run and images")
        fewshot_run.embed_with(evaluate, embed, moved, device, out, json)
    else:
        refuse_options(context, (*OF_TRAINING, "out"), "--evaluate: the run is finished, and has a folder")
        tasks_given = {name: context.params[name] for name in options_given(context, TASKS)}
        fewshot_run.evaluate_again(evaluate, data, tasks_given, moved, device, json)


def compare(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM",
            help=f"{PROBLEMS}; or a Python file: `path.py` with `problem`, `u`, `v` (and `data`, if any) at its top "
            "level, or `path.py:name` for an object with these attributes, a dict or tuple of them, or a function "
            "that returns one. A function name(seed) gives each trial its start.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas: {COMPARE_METHODS}. Options follow colons: "
            "reverse-mode:lower_steps=20:upper_rate=0.01. upper_rate and lower_rate are rates of Adam; "
            "soba, srba and f2sa take plain gradient steps with them, reverse-mode and forward-mode with lower_rate."
        ),
    ] = "penalty,approx-grad,reverse-mode,alternating",
    evaluations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The budget of each method in one trial: evaluations of g. A step-wise method takes as many upper "
            "steps as the budget allows; penalty, without data, ends with the step that uses it up. By default 5,000.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The budget in upper steps instead.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="The budget in seconds instead. The first few steps show how many fit."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="The number of starts, which are the same for every method.")] = 1,
    seed: SeedOption = 0,
    out: Annotated[
        Path, typer.Option(help="The folder to write to; methods that are finished in it are not run again.")
    ] = Path("runs/compare"),
    plot: Annotated[Path | None, typer.Option(help="The file of the plot. By default compare.png in --out.")] = None,
    json: JsonOption = False,
) -> None:
    """Run methods on one problem, from the same starts and with the same budget, and show how they end."""
    require("matplotlib", extra="apps")
    from bilevel.cli import compare_run

    budget = {"evaluations": evaluations, "steps": steps, "seconds": seconds}
    compare_run.run(problem, methods, budget, trials, seed, out, plot, json)


# -- the options of a call ---------------------------------------------------------------------------------------------


def asked(context: typer.Context, command: str) -> dict[str, Any]:
    """Return the options that the result of a run depends on, as config.json keeps them."""
    params = {name: value for name, value in context.params.items() if name not in NOT_OF_THE_RESULT}
    return {"command": command} | {name: str(v) if isinstance(v, Path) else v for name, v in params.items()}


def options_given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return the parameters that the command line has, even with their default value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def refuse_options(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Refuse parameters that the command line has, although they do not go with `reason`."""
    given = options_given(context, names)
    options = [param.metavar or param.opts[0] for param in context.command.params if param.name in given]
    if options:
        raise OptionError(f"{' and '.join(options)} must be left out with {reason}.")
