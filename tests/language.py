"""Counts turns of phrase that are hard to read in docstrings, comments, messages and documents.

    python tests/language.py [PATH ...]     a line for each hit, and the rate of each folder
    python tests/language.py --rates        the rates only
    python tests/language.py --messages     only errors, warnings, help and the endings of runs

Without a path: PLACES. PATTERNS names what is counted and what to write in its place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("src", "studies/src", "studies/tests", "README.md", "docs")
_RELATIVE = (
    r"(?<!place )(?<!folder )(?<!point )(?<!file )(?<!line )(?<!says )(?<!say )(?<!shows )(?<!show )(?<!know )"
    r"(?<!knows )(?<!see )(?<!find )(?<!from )(?<!is )(?<!are )(?<!to )(?<!of )(?<!near )(?<!exactly )"
    r"(?<!stays )(?<!stay )"
)
"""Words after which "where" means a place."""
PATTERNS: dict[str, tuple[str, str]] = {
    "where": (
        r"(?:(?<=[.:] )|(?<=^))where\b(?=[^.]*,)(?! (?:is|are|to|do|does)\b)(?! \S+ =)"  # begins a sentence
        r"|(?<=[,;(] )where\b(?! (?:to|do|does)\b)(?! \S+ =)"
        rf"|{_RELATIVE}(?-i:\bwhere) (?:it|there|that|they|no|not|a|an|the|this|these|all|asked|possible|needed)\b",
        "if",
    ),
    "what is, that of": (r"\b(?:what is|that of|those of|that which|those which)\b", "a noun, or a verb"),
    "of which": (r"\bof (?:which|whom|these)\b", "the subject first"),
    "go on": (r"\b(?:go|goes|gone|going|went) on\b", "continue, resume"),
    "anew": (r"\banew\b", "again, from scratch"),
    "alone": (r"(?<!leave )(?<!leaves )(?<!left )(?<!let )(?<!leave it )(?<!leave them )\balone\b", "only"),
    "of its own": (r"\b(?:of its own|of their own|by itself|by themselves)\b", "its; separately; automatically"),
    "beside": (r"\bbeside\b", "next to, together with"),
    ", too": (r", too(?=[.,;:)]|$)", "also"),
    "is no": (r"(?<!there )\bis no\b(?! longer)", "is not a"),
    "tell": (r"\b(?:told|tell|tells)\b", "report, say"),
    "besides": (
        r"\b(?:besides|learnt|nearer|likewise|afterwards|to be had|at hand|by now|amid)\b",
        "also, learned, closer, later, available, already",
    ),
    "may": (r"(?-i:\bmay\b)", "can"),
}
COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, (pattern, _) in PATTERNS.items()}


@dataclass(frozen=True)
class Hit:
    path: str
    line: int
    pattern: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.pattern}: {self.sentence}"


@dataclass(frozen=True)
class Text:
    """A passage, and the line of its file that each of its lines stands in."""

    lines: tuple[tuple[int, str], ...]

    def sentences(self) -> Iterator[tuple[list[tuple[int, int]], str]]:
        """Paragraphs as one line each, with (position, line) wherever a new line begins."""
        starts: list[tuple[int, int]] = []
        words = ""
        for number, line in [*self.lines, (0, "")]:
            if line.strip():
                words += " " * bool(words)
                starts.append((len(words), number))
                words += " ".join(line.split())
            elif words:
                yield starts, words
                starts, words = [], ""


def hits(path: Path, name: str | None = None, *, messages: bool = False) -> tuple[list[Hit], int]:
    """Return the hits of a file and its number of words; with `messages`, only of what users read while they work."""
    found, words = [], 0
    for text in spoken(path.read_text()) if messages else texts(path):
        for starts, paragraph in text.sentences():
            words += len(re.findall(r"[^\W\d_]{2,}", paragraph))
            for pattern, expression in COMPILED.items():
                for match in expression.finditer(paragraph):
                    line = max(number for position, number in starts if position <= match.start())
                    found.append(Hit(name or str(path), line, pattern, _sentence(paragraph, match.start())))
    return sorted(found, key=lambda hit: hit.line), words


def _sentence(paragraph: str, position: int) -> str:
    start = max(paragraph.rfind(mark, 0, position) for mark in (". ", "! ", "? "))
    ends = [end for mark in (". ", "! ", "? ") if (end := paragraph.find(mark, position)) >= 0]
    return paragraph[start + 2 if start >= 0 else 0 : min(ends) + 1 if ends else None]


def texts(path: Path) -> Iterator[Text]:
    return READERS[path.suffix](path.read_text())


def markdown(source: str) -> Iterator[Text]:
    """All but code blocks and the code within lines; a row of a table is a paragraph."""
    fenced, lines = False, []
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            line = ""
        if fenced:
            line = ""
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", line))
        own = plain.lstrip().startswith(("|", "- ", "* ", "#", "> "))
        lines += [(number, "")] * own + [(number, plain)] + [(number, "")] * plain.lstrip().startswith(("|", "#"))
    yield Text(tuple(lines))


def without_jinja(source: str) -> str:
    """Return a template without its tags and comments, on the same lines; a value counts as one word."""
    blank = re.sub(r"\{%.*?%\}|\{#.*?#\}", _line_breaks, source, flags=re.DOTALL)
    return re.sub(r"\{\{.*?\}\}", lambda value: "X" + _line_breaks(value), blank, flags=re.DOTALL)


def markdown_template(source: str) -> Iterator[Text]:
    return markdown(without_jinja(source))


def html(source: str) -> Iterator[Text]:
    """The text between tags, a paragraph for each element, and the attributes that users read or hear."""
    plain = without_jinja(source)
    for found in re.finditer(r'\b(?:aria-label|placeholder|title|alt)="([^"]*)"', plain):
        yield Text(((plain.count("\n", 0, found.start()) + 1, found[1]),))
    code = r"<(code|style|script)\b.*?</\1>|<!--.*?-->"
    plain = re.sub(code, lambda found: "X" + _line_breaks(found), plain, flags=re.DOTALL)
    plain = re.sub(r"</?(?:a|b|em|i|strong|bdi|span|small|kbd|abbr)\b[^>]*>", _line_breaks, plain)
    for number, line in _split_at_tags(plain):
        yield Text(tuple(enumerate(line.splitlines(), number)))


def javascript(source: str) -> Iterator[Text]:
    """Comments, and strings with a space in them."""
    comment = r"//[^\n]*(?:\n\s*//[^\n]*)*|/\*.*?\*/"
    string = r'"(?:[^"\\\n]|\\.)*"|`(?:[^`\\\n]|\\.)*`' + r"|'(?:[^'\\\n]|\\.)*'"
    for found in re.finditer(rf"(?<!:)({comment})|({string})", source, flags=re.DOTALL):
        words = re.sub(r"^\s*(?://|/?\*+/?)", "", found[0], flags=re.MULTILINE)
        if found[2]:
            words = re.sub(r"\$\{[^}]*\}", "X", found[0][1:-1])
        if " " in words.strip():
            yield Text(tuple(enumerate(words.splitlines(), source.count("\n", 0, found.start()) + 1)))


def _line_breaks(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _split_at_tags(source: str) -> Iterator[tuple[int, str]]:
    """Yield each passage between tags with the line where it begins."""
    start = 0
    for tag in [*re.finditer(r"<[^>]*>", source), None]:
        yield source.count("\n", 0, start) + 1, source[start : tag.start() if tag else None]
        start = tag.end() if tag else start


def python(source: str) -> Iterator[Text]:
    """Docstrings, other strings with a space in them, and comments."""
    tree = ast.parse(source)
    yield from _strings([tree])
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = re.sub(r"\b(?:fmt: \w+|noqa\S*.*|type: ignore\S*|isort: \w+)", "", token.string.lstrip("#"))
        if block and token.start[0] != block[-1][0] + 1:
            yield Text(tuple(block))
            block = []
        block.append((token.start[0], words))
    yield Text(tuple(block))


def spoken(source: str) -> Iterator[Text]:
    """Yield what users read while they work: errors, warnings, the help of commands, and how runs end."""
    roots: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            roots.append(node)
        elif isinstance(node, ast.Call):
            if _called(node) in ("warn_user", "warn") or _called(node).endswith(("Error", "Warning")):
                roots.append(node)
            roots += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        elif isinstance(node, ast.FunctionDef) and any(_of_typer(part) for part in ast.walk(node.args)):
            roots += [part for part in node.body[:1] if isinstance(part, ast.Expr)]  # the docstring is the help
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases):
            roots += [part for part in node.body if isinstance(part, ast.Assign)]
        elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["NEXT"]:
            roots.append(node)
    yield from _strings(roots)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _of_typer(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("typer.Option", "typer.Argument", "typer.Context")


def _strings(roots: Iterable[ast.AST]) -> Iterator[Text]:
    """Strings with a space in them; the values in an f-string are left out."""
    nodes = {id(node): node for root in roots for node in ast.walk(root)}
    outer = [node for node in nodes.values() if isinstance(node, ast.JoinedStr)]
    within = {id(part) for node in outer for part in ast.walk(node)} - {id(node) for node in outer}
    for node in nodes.values():
        if id(node) in within:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            words = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
        else:
            continue
        if " " in words.strip():
            yield Text(tuple(enumerate(_without_examples(words.splitlines()), node.lineno)))


def _without_examples(lines: list[str]) -> list[str]:
    """Docstrings without the lines that are run, and without code in backquotes."""
    plain = [re.sub(r"`[^`]*`", "X", line) for line in lines]
    return ["" if line.lstrip().startswith((">>>", "... ")) else line for line in plain]


READERS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".py": python,
    ".md": markdown,
    ".j2": markdown_template,
    ".html": html,
    ".js": javascript,
}


def files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_file():
            yield place
        else:
            yield from sorted(p for p in place.rglob("*") if p.suffix in READERS and p.is_file())


def counted(places: Iterable[Path], *, messages: bool = False) -> tuple[list[Hit], dict[str, Counter[str]]]:
    """All hits, and by file its words and the hits of each pattern."""
    found: list[Hit] = []
    table: dict[str, Counter[str]] = {}
    for path in files(places):
        if messages and path.suffix != ".py":
            continue
        name = str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)
        of_file, words = hits(path, name, messages=messages)
        found += of_file
        table[name] = Counter(hit.pattern for hit in of_file) + Counter({"words": words})
    return found, table


def rate(counts: Iterable[Counter[str]]) -> float:
    """Hits in a thousand words."""
    total = sum(counts, Counter())
    words = total.pop("words", 0)
    return 1000 * total.total() / words if words else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Count turns of phrase that are hard to read.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders")
    parser.add_argument("--rates", action="store_true", help="print the rates only")
    parser.add_argument("--messages", action="store_true", help="count errors, warnings, help and endings only")
    given = parser.parse_args()
    places = given.paths or [ROOT / place for place in PLACES if (ROOT / place).exists()]
    found, table = counted(places, messages=given.messages)
    if not given.rates:
        print(*found, sep="\n")
    folders = sorted({str(Path(name).parent) for name in table})
    print(f"\n{'folder':48} {'words':>7} {'hits':>5} {'per 1,000':>9}")
    for folder in folders:
        inside = [counts for name, counts in table.items() if str(Path(name).parent) == folder]
        total = sum(inside, Counter())
        print(f"{folder:48} {total['words']:7} {total.total() - total['words']:5} {rate(inside):9.1f}")
    total = sum(table.values(), Counter())
    print(f"{'all':48} {total['words']:7} {total.total() - total['words']:5} {rate(table.values()):9.1f}")
    total.pop("words", 0)
    for name, count in total.most_common():
        print(f"{count:6} {name} (better: {PATTERNS[name][1]})")


if __name__ == "__main__":
    main()
