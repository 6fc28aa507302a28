"""The synthetic problems, and the complexity of one hypergradient."""

from __future__ import annotations

from pathlib import Path

from bilevel.cli.options import JsonOption
from bilevel_studies.commands.shared import (
    OutOption,
    PageOption,
    QuickOption,
    RayOption,
    WorkersOption,
    end,
    folders_of,
    run,
    where_of,
)


def synthetic(
    out: OutOption = Path("runs/synthetic"),
    page: PageOption = None,
    quick: QuickOption = False,
    workers: WorkersOption = 2,
    ray: RayOption = None,
    json: JsonOption = False,
) -> None:
    """The four synthetic problems: GD, RMD, ApproxGrad and Penalty (Section 3.1, Appendices D.4 and E.1)."""
    from bilevel_studies.synthetic import page as synthetic_page
    from bilevel_studies.synthetic import runs as synthetic_runs
    from bilevel_studies.synthetic import study
    from bilevel_studies.synthetic.results import Results

    scale = study.QUICK if quick else study.FULL
    cells = study.cells(scale)
    folders = folders_of(out, page)
    store = run("synthetic", cells, folders, synthetic_runs.run, where_of(workers, ray))
    summary = synthetic_page.write(Results(scale, store), folders[1].path)
    held = sum(claim["holds"] for claim in summary["claims"])
    message = f"{held} of {len(summary['claims'])} claims of the paper hold."
    if quick:
        message = f"A quick run of {scale.steps} steps, which say nothing of the paper's claims."
    end("synthetic", message, summary, folders, json)


def complexity(
    out: OutOption = Path("runs/complexity"),
    page: PageOption = None,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Time and memory of one hypergradient against T, U and V, beside Table 1."""
    from bilevel_studies import complexity as study
    from bilevel_studies import complexity_page

    sizes = study.QUICK if quick else study.FULL
    cells = study.cells(sizes)
    folders = folders_of(out, page)
    store = run("complexity", cells, folders, study.run, where_of(1, None))
    found = [(cell.settings, result) for cell in cells if (result := store.get(cell)) is not None]
    summary = complexity_page.write(sizes, found, folders[1].path)
    message = f"{summary['holds']} of {summary['decisive']} exponents agree with Table 1."
    summary |= {"seconds": round(store.session.seconds, 3), "resumed": store.session.kept > 0}
    end("complexity", message, summary, folders, json)
