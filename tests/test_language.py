"""Turns of phrase that are hard to read do not come back: see `language` for what is counted, and where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import PATTERNS, ROOT, counted, hits, rate

CEILINGS = {
    "src": 2.0,
    **{f"src/bilevel/{path.name}": 2.0 for path in (ROOT / "src" / "bilevel").iterdir() if any(path.glob("*.py"))},
    "src/bilevel/methods/penalty": 2.0,
    "src/bilevel/report/templates": 2.0,
    "studies/src": 2.0,
    "studies/src/bilevel_studies/pages": 2.0,
    "studies/tests": 2.0,
    "README.md": 0.0,
    "docs": 0.5,
    "docs/results.md": 2.0,
    "docs/results": 2.0,
}
"""Hits in 1,000 words at most; a folder counts without the folders in it that have their own number."""


def area(name: str) -> str:
    """The longest key of CEILINGS that a path begins with."""
    return max((key for key in CEILINGS if name == key or name.startswith(f"{key}/")), key=len)


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    places = {ROOT / key for key in CEILINGS if (ROOT / key).exists()}
    _, table = counted(place for place in places if not any(other in place.parents for other in places))
    return {key: rate(counts for name, counts in table.items() if area(name) == key) for key in CEILINGS}


@pytest.mark.parametrize("key", CEILINGS)
def test_rate_is_below_the_ceiling(rates, key):
    assert rates[key] <= CEILINGS[key], (
        f"{key} has {rates[key]:.2f} hits in 1,000 words, and may have {CEILINGS[key]}. "
        f"See python tests/language.py {key}"
    )


def test_errors_warnings_help_and_endings_of_runs_have_no_hits():
    found, table = counted([ROOT / "src", ROOT / "studies" / "src"], messages=True)
    assert sum(counts["words"] for counts in table.values()) > 5000, "the messages were not found"
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "code",
    [
        'def f(x):\n    raise ValueError(f"{x} may be wrong")',
        'error = OptionError("x may be wrong")',
        'warn_user("x may be wrong")',
        'Seed = Annotated[int, typer.Option(help="It may be " "any number.")]',
        'def run(x: Annotated[str, typer.Argument()]):\n    """It may run."""',
        'class Status(enum.Enum):\n    """Plain."""\n\n    LOST = "It may be lost."',
        'NEXT = {Status.LOST: "you may try again"}',
    ],
)
def test_message_is_found(code, tmp_path):
    path = tmp_path / "message.py"
    path.write_text(f'"""It may be long."""\n\n# It may be short.\n{code}\n')
    (hit,), _ = hits(path, messages=True)
    assert hit.pattern == "may"
    assert hit.line > 3


HITS = {
    "where": [
        "Zero where there are none.",
        "Where it is asked for, the state is kept.",
        "The error, where known.",
        "None where a rank has no data.",
        "It is kept where that is possible.",
    ],
    "what is, that of": ["It is what is left.", "The rate is that of u.", "Those of v are held.", "That which ends."],
    "of which": ["A set, some of which is empty.", "Of these, one is kept."],
    "go on": ["The run goes on.", "It can be gone on from.", "Go on from there."],
    "anew": ["It starts anew."],
    "alone": ["It moves v alone."],
    "of its own": ["It has a generator of its own.", "It ends by itself."],
    "beside": ["The file beside it."],
    ", too": ["It moves v, too.", "(It reads v, too)"],
    "is no": ["It is no solution."],
    "tell": ["The callbacks are told.", "It tells the ranks."],
    "besides": ["Besides, it is nearer.", "What is at hand by now."],
    "may": ["It may be a list."],
}
PLAIN = [
    "The folder where the files are.",
    "It says where a run stands.",
    "It stays where it is.",
    "Where it happened.",
    "Leave it alone.",
    "It is no longer needed.",
    "There is no such file.",
    "On 3 May it was made.",
    "It too is kept.",
    "If it is asked for, stop.",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_is_found_in_a_docstring_a_comment_a_message_and_a_document(pattern, tmp_path):
    for sentence in HITS[pattern]:
        for name, text in {
            "docstring.py": f'"""First line.\n\n{sentence}\n"""',
            "comment.py": f"x = 1\n\n# {sentence}",
            "message.py": f'def f(x):\n    raise ValueError(\n        f"{{x}}: {sentence}")',
            "document.md": f"# Title\n\n{sentence}\n",
            "template.md.j2": f"{{# a note #}}\n\n{sentence}\n",
            "page.html": f"{{% block body %}}\n<h1>Title</h1>\n<p class='x'>{sentence}</p>\n",
            "script.js": f"const x = 1;\n\n// {sentence}\n",
            "string.js": f'let x;\n\nconst text = "{sentence}";\n',
        }.items():
            path = tmp_path / name
            path.write_text(text + "\n")
            found, words = hits(path)
            assert (pattern, 3) in [(hit.pattern, hit.line) for hit in found], (name, sentence)
            assert words >= 3


def test_plain_sentences_code_and_names_are_left_alone(tmp_path):
    document, module = tmp_path / "plain.md", tmp_path / "plain.py"
    document.write_text("\n\n".join([*PLAIN, "```\nIt may go on anew.\n```", "Call `may(go on)`."]))
    module.write_text(
        '"""Doc.\n\n    >>> f("it may go on")\n"""\n\nkeys = {"may": 1, "alone": "beside"}\nanew = alone = 1\n'
    )
    assert hits(document)[0] == []
    assert hits(module)[0] == []


def test_sentence_that_is_broken_over_lines_is_found_and_given_whole(tmp_path):
    path = Path(tmp_path / "broken.md")
    path.write_text("One sentence. The run\ngoes\non from there. Another.\n")
    (hit,), words = hits(path)
    assert (hit.line, hit.sentence) == (2, "The run goes on from there.")
    assert words == 9
