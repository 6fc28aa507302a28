"""Reviews to make pages of, and what is read from a page."""

import base64
import io
import json
import re

import numpy as np
from PIL import Image

from bilevel.report.page import Table
from bilevel.report.review_page import Review, Suspect

COMMAND = "bilevel denoise --apply decisions.csv data --out cleaned"
NASTY = [
    "</script><script>document.title='broken'</script>",
    "<!-- <script>",
    'a "quoted", name.png',
    "two\nlines",
    "naïve 🐍 name",
    "שלום/عربي.png",
    "&amp; &lt;b&gt;",
    "=1+1",
    " edges ",
    "line\u2028separator",
]


def review(count=30, classes=("cat", "dog", "cow"), **changes):
    """Suspects whose importance rises with their index; given labels go round, the next class is suggested."""
    names = max(len(classes), 1)
    suspects = [
        Suspect(10 * i, f"file-{i}.png", i % names, (i + 1) % names, 0.4 * i / max(count, 1), 0.9) for i in range(count)
    ]
    fields = {
        "run": "a run",
        "title": "A title",
        "outcome": "It went well.",
        "good": True,
        "accuracy": Table("How well", ["Trained on", "Accuracy"], [["all", "70"], ["weighted", "90"]]),
        "classes": classes,
        "history": {"step": [1, 2, 3], "upper": [3.0, 2.0, 1.0], "lower": [3.0, 2.5, 2.0]},
        "importance": np.linspace(0, 1, 10 * count + 100),
        "suspects": suspects,
        "pictures": None,
        "fields": None,
        "command": COMMAND,
        "settings": [("Seed", "0")],
        "notes": ["A note."],
    }
    return Review(**(fields | changes))


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def decoded(uri):
    head, body = uri.split(",", 1)
    return head, np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))
