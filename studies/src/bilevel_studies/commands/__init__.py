"""`bilevel reproduce`: the paper's studies, run again and written as pages."""

from __future__ import annotations

import typer

from bilevel_studies.commands import classical, denoising, fairness, fewshot, poisoning, synthetic, tuning

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a study of the paper again and write what was found as a page.",
)
app.command("synthetic")(synthetic.synthetic)
app.command("complexity")(synthetic.complexity)
app.command("classical")(classical.classical)
app.command("denoising")(denoising.denoising)
app.command("denoising-speed")(denoising.denoising_speed)
app.command("denoising-steps")(denoising.denoising_steps)
app.command("poisoning")(poisoning.poisoning)
app.command("clean-label")(poisoning.clean_label)
app.command("deep-victim")(poisoning.deep_victim)
app.command("tuning")(tuning.tuning)
app.command("fairness")(fairness.fairness)
app.command("fewshot")(fewshot.fewshot)
