"""`bilevel reproduce`: run the studies of the paper again and print their tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bilevel import OptionError
from bilevel._util.checks import one_of
from bilevel_studies.option_lists import shares, words
from bilevel_studies.study import Kept, Report, Study, side_by_side

if TYPE_CHECKING:
    import torch

    from bilevel.running.run_many import RunItem

app = typer.Typer(no_args_is_help=True, help="Run a study of the paper again and print its tables.")

Out = Annotated[Path, typer.Option(help="Folder for cells, tables and figures. Finished cells are not run again.")]
Results = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the study's JSON file with all results: studies/results in a checkout. By default --out."
    ),
]
NoRun = Annotated[bool, typer.Option("--no-run", help="Run nothing; write the tables of the results so far.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version that takes a minute.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that run cells at the same time.")]
Ray = Annotated[str | None, typer.Option("--ray", help="Address of a Ray cluster that runs the cells instead.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="Begin no cell after this many minutes.")]
Sitting = Annotated[
    float | None,
    typer.Option(
        "--minutes", min=0, help="Save the running cell after this time in minutes; run again to continue it."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds of each cell.")]
Words = str | None


@app.command()
def synthetic(
    out: Out = Path("runs/synthetic"),
    results: Results = None,
    quick: Quick = False,
    workers: Workers = 2,
    ray: Ray = None,
    json: Json = False,
) -> None:
    """The four synthetic problems: GD, RMD, ApproxGrad and Penalty (Section 3.1, Appendices D.4 and E.1)."""
    from bilevel_studies.synthetic import runs, study, tables

    scale = study.QUICK if quick else study.FULL
    report = partial(tables.report, scale)
    Study("synthetic", out, report, results, json=json, workers=workers, address=ray).run(study.cells(scale), runs.run)


@app.command()
def complexity(
    out: Out = Path("runs/complexity"), results: Results = None, quick: Quick = False, json: Json = False
) -> None:
    """Time and memory of one hypergradient against T, U and V, next to Table 1."""
    from bilevel_studies import complexity as study

    sizes = study.QUICK if quick else study.FULL
    report = partial(study.report, sizes)
    Study("complexity", out, report, results, json=json).run(study.cells(sizes), study.run)


@app.command()
def classical(
    out: Out = Path("runs/classical"),
    results: Results = None,
    quick: Quick = False,
    workers: Workers = 2,
    ray: Ray = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Classical small problems with constraints at both levels, next to their best known values."""
    from bilevel_studies.classical import study

    run = Study("classical", out, study.report, results, no_run, json, workers=workers, address=ray)
    run.run(study.cells(quick=quick), study.run_cell)


@app.command()
def denoising(
    dataset: Annotated[
        Words, typer.Option(help="Data sets, with commas. Default: all on a GPU, digits on a CPU.")
    ] = None,
    noise: Annotated[
        Words, typer.Option(help="Shares of wrong labels, with commas: 0.25,0.5. Default: the paper's.")
    ] = None,
    kind: Annotated[Words, typer.Option(help="symmetric or asymmetric wrong labels. Default: both.")] = None,
    columns: Annotated[Words, typer.Option(help="Columns of the table, with commas: ours,oracle.")] = None,
    parts: Annotated[Words, typer.Option(help="table, hyper-cleaning, how-few, with commas. Default: all.")] = None,
    seeds: Seeds = 5,
    passes: Annotated[int | None, typer.Option(min=1, help="Length of a run of cifar10-wrn.")] = None,
    workers: Workers = 1,
    minutes: Sitting = None,
    device: Device = "auto",
    out: Out = Path("runs/denoising"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Denoising: Table 2, hyper-cleaning, and how few trusted examples are enough (Section 3.2, Appendix D.1)."""
    from bilevel_studies.denoising import cells, small, study, tables

    where = device_of(device)
    names = words("--dataset", dataset, cells.DATASETS)
    if dataset is None and where.type != "cuda":
        names = ["digits"]
    one_of("--kind", kind, (study.SYMMETRIC, study.ASYMMETRIC), optional=True)
    all_parts = ("table", small.HYPER_CLEANING, small.HOW_FEW)
    wanted = ["table"] if parts is None and dataset is not None else words("--parts", parts, all_parts)
    found: list[RunItem] = []
    if "table" in wanted:
        found += cells.cells(
            names, shares(noise), kind, words("--columns", columns, tuple(study.COLUMNS)), seeds, passes
        )
    found += [cell for cell in small.cells() if cell.settings["part"] in wanted]
    run = Study("denoising", out, tables.report, results, no_run, json, minutes, workers, possible=_with_data)
    function = partial(cells.run, device=where, checkpoints=run.states, deadline=run.deadline)
    run.run(found, side_by_side(function, workers))


@app.command()
def denoising_speed(
    device: Device = "auto",
    seeds: Seeds = 1,
    minutes: Minutes = None,
    out: Out = Path("runs/denoising-speed"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Denoising: accuracy against time, Penalty and ApproxGrad (Figure 4(a)). An MLP without a GPU."""
    _figure("speed", device, seeds, minutes, out, results, no_run, json)


@app.command()
def denoising_steps(
    device: Device = "auto",
    seeds: Seeds = 1,
    minutes: Minutes = None,
    out: Out = Path("runs/denoising-steps"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Denoising: accuracy and time of an upper step against T (Figure 5(a)). An MLP without a GPU."""
    _figure("steps", device, seeds, minutes, out, results, no_run, json)


def _figure(
    part: str, device: str, seeds: int, minutes: float | None, out: Path, results: Path | None, no_run: bool, json: bool
) -> None:
    from bilevel_studies.denoising import cells, speed

    where = device_of(device)
    report = partial(speed.report, part)
    run = Study(f"denoising-{part}", out, report, results, no_run, json, minutes, possible=_with_data)
    function = partial(cells.run, device=where, checkpoints=run.states, deadline=run.deadline)
    run.run(speed.cells(part, "cnn" if where.type == "cuda" else "mlp", seeds), function)


@app.command()
def poisoning(
    parts: Annotated[Words, typer.Option(help="choice, table, weight, table-6, effect-of-T, with commas.")] = None,
    attacks: Annotated[Words, typer.Option(help="untargeted, targeted, with commas. Default: both.")] = None,
    columns: Annotated[Words, typer.Option(help="Columns of the table, with commas: penalty,rmd.")] = None,
    seeds: Seeds = 5,
    workers: Workers = 1,
    ray: Ray = None,
    minutes: Minutes = None,
    out: Out = Path("runs/poisoning"),
    results: Results = None,
    page: Annotated[Path | None, typer.Option(help="Folder in which to write the page: docs/results.")] = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Poisoning MNIST: Table 5, Table 6, the effect of T and the points (Appendices D.2 and E.4)."""
    from bilevel_studies.poisoning import runs, study, tables
    from bilevel_studies.render import write

    wanted = words("--parts", parts, study.PARTS)
    kinds = words("--attacks", attacks, tuple(study.PAPER))
    some = words("--columns", columns, tuple(study.COLUMNS))
    first = study.choice_cells(kinds, some) if study.CHOICE in wanted else []
    run = Study("poisoning", out, tables.report, results, no_run, json, minutes, workers, ray)
    run.run(first, runs.run, lambda kept: study.cells(wanted, kinds, some, seeds, study.best(kept)))
    if page is not None:
        write("poisoning", run.store.all(), page)


@app.command()
def clean_label(
    features: Annotated[str, typer.Option(help="inception, efficientnet (bilevel\\[...]), or small.")] = "inception",
    targets: Annotated[int | None, typer.Option(min=1, help="Test photographs. Default: all.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Targets in one tensor.")] = 32,
    choose: Annotated[
        int, typer.Option(min=0, help="Further photographs for choosing the settings of Penalty; 0: the paper's.")
    ] = 12,
    ray: Ray = None,
    minutes: Minutes = None,
    device: Device = "auto",
    out: Out = Path("runs/clean-label"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """One clean-label poison point for a target: the smallest distortion that flips it (Section 3.4, Figure 3)."""
    from bilevel_studies.poisoning import clean_label as study
    from bilevel_studies.poisoning.clean_label_features import FEATURES, photos

    one_of("--features", features, tuple(FEATURES))
    where = device_of(device)
    gpus = float(where.type == "cuda")
    run = Study("clean-label", out, study.report, results, no_run, json, minutes, 1, ray, gpus)
    rows = [] if no_run else study.order(len(photos("test", 32)[1]))
    first, last = rows[: max(0, len(rows) - choose)], rows[max(0, len(rows) - choose) :]
    run.run(
        study.choice_cells(features, last) if last else [],
        partial(study.run, device=where),
        lambda kept: study.cells(features, first[:targets], study.best(kept, features), chunk=chunk),
    )


@app.command()
def deep_victim(
    targets: Annotated[int, typer.Option(min=1, max=1000, help="Test images, drawn with a fixed seed.")] = 20,
    rows: Annotated[int, typer.Option(min=100, help="Training images of the victim; 1% of them are poison.")] = 5000,
    choose: Annotated[
        int, typer.Option(min=0, help="Further images for choosing the tether of Penalty; 0: the default.")
    ] = 2,
    workers: Workers = 1,
    minutes: Minutes = None,
    device: Device = "auto",
    out: Out = Path("runs/deep-victim"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Clean-label poison against a network that is trained from scratch: beyond the paper."""
    from bilevel_studies.poisoning import deep_victim as study

    run = Study("deep-victim", out, study.report, results, no_run, json, minutes, workers)
    run.run(
        study.choice_cells(choose, rows=rows),
        side_by_side(partial(study.run, device=device_of(device)), workers),
        lambda kept: study.cells(targets, rows=rows, tether=study.best(kept, rows)),
    )


@app.command()
def tuning(
    parts: Annotated[Words, typer.Option(help="linear, ridge, network, scale, curve, with commas.")] = None,
    dataset: Annotated[Words, typer.Option(help="a9a, digits, text, with commas. Default: all.")] = None,
    seeds: Seeds = 3,
    minutes: Minutes = None,
    workers: Workers = 1,
    ray: Ray = None,
    out: Out = Path("runs/tuning"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Tuning: penalties of linear models next to other ways, a network, a million hyper-parameters (Eq. 2)."""
    from bilevel_studies.tuning import data, study, tables

    cells = study.cells(words("--parts", parts, study.PARTS), words("--dataset", dataset, data.DATASETS), seeds)

    def report(kept: Sequence[Kept], folder: Path) -> Report:
        """Make the tables of all parts, from these seeds only."""
        found = {frozenset(settings.items()): result for settings, result in kept}
        shown = [cell.settings for cell in study.cells(seeds=seeds)]
        return tables.report([(s, found[key]) for s in shown if (key := frozenset(s.items())) in found], folder)

    Study("tuning", out, report, results, no_run, json, minutes, workers, ray).run(cells, study.run)


@app.command()
def fairness(
    out: Out = Path("runs/fairness"),
    results: Results = None,
    quick: Quick = False,
    workers: Workers = 1,
    ray: Ray = None,
    minutes: Minutes = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """A bound on the parity gap of a classifier, and a network with its last layer on the simplex (a9a)."""
    from bilevel_studies.fairness import study

    run = Study("fairness", out, study.report, results, no_run, json, minutes, workers, ray)
    run.run(study.cells(quick=quick), study.run_cell)


@app.command()
def field(
    problems: Annotated[Words, typer.Option(help="cleaning 0.5, 0.7 or 0.9, ijcnn1, quadratics, with commas.")] = None,
    methods: Annotated[Words, typer.Option(help="penalty, soba, srba, amigo, stocbio, f2sa, with commas.")] = None,
    seeds: Seeds = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="CPU seconds of a run.")] = 20.0,
    minutes: Minutes = None,
    out: Out = Path("runs/field"),
    results: Results = None,
    page: Annotated[Path | None, typer.Option(help="Folder in which to write the page: docs/results.")] = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """The problems of benchopt's benchmark_bilevel: Penalty() next to SOBA, SRBA, AmIGO, StocBiO and F2SA.

    One run at a time, each on one thread: CPU seconds of runs that share a machine cannot be compared.
    """
    from bilevel_studies.field import runs, study, tables
    from bilevel_studies.render import write

    some = words("--problems", problems, tuple(study.PROBLEMS)), words("--methods", methods, tuple(study.METHODS))
    run = Study("field", out, tables.report, results, no_run, json, minutes)
    run.run(
        study.cells(*some, seeds, seconds),
        runs.run,
        lambda kept: study.cells(*some, seeds, seconds, study.best_factors(kept)),
    )
    if page is not None:
        write("field", run.store.all(), page)


@app.command()
def fewshot(
    context: typer.Context,
    parts: Annotated[
        Words, typer.Option(help="table, effect-of-T, time, choices, with commas. Default: all but choices.")
    ] = None,
    dataset: Annotated[Words, typer.Option(help="omniglot, cifar-fs, with commas. Default: both.")] = None,
    methods: Annotated[Words, typer.Option(help="penalty, prototypes, cosines, approx-grad, paper, rmd.")] = None,
    backbones: Annotated[Words, typer.Option(help="conv4, resnet, with commas. Default: both.")] = None,
    seeds: Seeds = 1,
    quick: Quick = False,
    workers: Workers = 1,
    minutes: Sitting = None,
    device: Device = "auto",
    out: Out = Path("runs/few-shot"),
    results: Results = None,
    no_run: NoRun = False,
    json: Json = False,
) -> None:
    """Few-shot learning: Table 3, accuracy against time and the effect of T (Section 3.3, Figures 4(b) and 5(b)).

    A cell takes a minute or two on an H200, and hours on a CPU. --quick runs Omniglot only.
    """
    from bilevel_studies.few_shot import runs, study, tables

    own = ("parts", "dataset", "methods", "backbones", "seeds")
    sources = zip(own, map(context.get_parameter_source, own), strict=True)
    given = [f"--{name}" for name, source in sources if source is not None and source.name != "DEFAULT"]
    if quick and given:
        raise OptionError(f"{' and '.join(given)} must be left out with --quick, which has its own cells.")
    usual = ",".join((study.TABLE, study.EFFECT) + ((study.TIME,) if workers == 1 else ()))
    wanted = words("--parts", parts or usual, study.PARTS)
    if study.TIME in wanted and workers > 1:
        raise OptionError("--parts time measures the time of a step. It needs --workers 1.")
    cells = study.small_cells()
    if not quick:
        names, some = words("--dataset", dataset, study.DATASETS), words("--methods", methods, tuple(study.METHODS))
        cells = study.cells(wanted, names, some, seeds, words("--backbones", backbones, ("conv4", "resnet")))
    where = device_of(device)
    if where.type == "cpu" and not (quick or no_run):
        print("note: a cell takes hours on a CPU. --quick tries all methods; --minutes saves a cell.", file=sys.stderr)
    run = Study("few-shot", out, tables.report, results, no_run, json, minutes, workers)
    function = partial(runs.run, device=where, folder=run.states, deadline=run.deadline)
    run.run(cells, side_by_side(function, workers))


def device_of(text: str) -> torch.device:
    from bilevel.cli import option_values

    return option_values.device_of(text)


def _with_data(cells: list[RunItem]) -> list[RunItem]:
    """Return the cells whose data are here; report the others."""
    from bilevel_studies.denoising.cells import missing

    absent: dict[str, Any] = missing([cell.settings["dataset"] for cell in cells])
    for dataset, why in absent.items():
        print(f"bilevel: Nothing runs on {dataset}: {why}", file=sys.stderr)
    return [cell for cell in cells if cell.settings["dataset"] not in absent]
