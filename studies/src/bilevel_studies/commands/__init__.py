"""`bilevel reproduce`: the paper's studies, run again and written as pages."""

from __future__ import annotations

import typer

from bilevel.cli.command import Command, Group
from bilevel_studies.commands import classical, denoising, fairness, fewshot, poisoning, synthetic, tuning

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Run a study of the paper again and write what was found as a page."
)
app.command("synthetic", cls=Command)(synthetic.synthetic)
app.command("complexity", cls=Command)(synthetic.complexity)
app.command("classical", cls=Command)(classical.classical)
app.command("denoising", cls=Command)(denoising.denoising)
app.command("denoising-speed", cls=Command)(denoising.denoising_speed)
app.command("denoising-steps", cls=Command)(denoising.denoising_steps)
app.command("poisoning", cls=Command)(poisoning.poisoning)
app.command("clean-label", cls=Command)(poisoning.clean_label)
app.command("deep-victim", cls=Command)(poisoning.deep_victim)
app.command("tuning", cls=Command)(tuning.tuning)
app.command("fairness", cls=Command)(fairness.fairness)
app.command("fewshot", cls=Command)(fewshot.fewshot)
