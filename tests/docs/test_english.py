"""Rules of English that a program can check, over docstrings, comments and pages of the whole repository.

CONTRIBUTING.md has the rules. `python tests/docs/test_english.py [PATH ...]` lists the offences in the given files and
folders, or in all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "plugins", "src", "benchmarks", "tests", "examples", "docs", ".ci")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
QUOTES = {"CONTRIBUTING.md", "tests/docs/test_english.py"}
"""Files that quote the forbidden words to forbid them."""

OPENING = re.compile(r"(?:Of|By|Whoever|Nobody|Somebody|Who|What)\b")
"""Openings of docstrings that are fragments. They are followed by a space or punctuation."""
PEOPLE = re.compile(r"\b(?:nobody|somebody|whoever)\b", re.I)
COMMENT = re.compile(r"#.*(?:nobody|somebody|whoever)", re.I)
"""A quick first look, so that only files with such a line are split into tokens."""


def files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.suffix in (".py", ".md"))


def offences(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return [f"{n}: {found[0]}" for n, line in enumerate(text.splitlines(), 1) for found in PEOPLE.finditer(line)]
    found = [f"{line + below}: {what}" for line, doc in docstrings(text) for below, what in in_docstring(doc)]
    if COMMENT.search(text):
        found += [f"{line}: {m[0]}" for line, comment in comments(text) for m in PEOPLE.finditer(comment)]
    return found


def in_docstring(doc: str) -> Iterator[tuple[int, str]]:
    """Yield (lines below the first, offence)."""
    if opening := OPENING.match(doc.lstrip()):
        yield 0, f"a docstring begins with {opening[0]!r}"
    yield from ((doc.count("\n", 0, found.start()), found[0]) for found in PEOPLE.finditer(doc))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield every bare string with its line: docstrings, and the strings below attributes that document them."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        for part in ast.iter_child_nodes(waiting.pop()):
            match part:
                case ast.Expr(ast.Constant(str(doc))):
                    yield part.lineno, doc
                case ast.stmt() | ast.excepthandler() | ast.match_case():
                    waiting.append(part)


def comments(text: str) -> Iterator[tuple[int, str]]:
    import io
    import tokenize

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def report(paths: Iterable[Path]) -> list[str]:
    named = ((file, file.resolve().relative_to(ROOT).as_posix()) for file in files(paths))
    return [f"{name}:{what}" for file, name in named if name not in QUOTES for what in offences(file)]


def test_english() -> None:
    found = report(ROOT / name for name in (*FOLDERS, *PAGES))
    assert not found, f"{len(found)} offences (CONTRIBUTING.md, English):\n" + "\n".join(found)


def test_the_check_finds_each_kind_of_offence(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        '"""Of a file."""\nx = 1\n"""What it is."""\ny = "#"  # Nobody reads it\n"""Returns, by Whoever."""\n'
    )
    assert offences(file) == [
        "1: a docstring begins with 'Of'",
        "3: a docstring begins with 'What'",
        "5: Whoever",
        "4: Nobody",
    ]
    page = tmp_path / "page.md"
    page.write_text("Plain.\nTold to somebody.\n")
    assert offences(page) == ["2: somebody"]


if __name__ == "__main__":
    print("\n".join(report([Path(path) for path in sys.argv[1:]] or [ROOT / name for name in (*FOLDERS, *PAGES)])))
