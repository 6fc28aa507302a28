"""The code of README and docs runs."""

import re
import warnings
from pathlib import Path

import pytest

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
