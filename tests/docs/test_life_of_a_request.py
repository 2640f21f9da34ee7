"""The page on the life of a request has eight numbered steps, and every file that it names exists."""

from __future__ import annotations

import re

from .commands import DOCS, ROOT

PAGE = (DOCS / "life-of-a-request.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\n\n|\Z)", PAGE, re.M | re.S)
FILE = re.compile(r"`((?:core|plugins)/[\w/.]+\.py)`")


def test_there_are_eight_steps_in_order() -> None:
    assert [number for number, _ in STEPS] == [str(n) for n in range(1, 9)]


def test_each_step_names_a_file() -> None:
    assert not [number for number, text in STEPS if not FILE.search(text)]


def test_every_file_exists() -> None:
    missing = [f"step {number}: {path}" for number, text in STEPS for path in FILE.findall(text)]
    missing = [entry for entry in missing if not (ROOT / entry.partition(": ")[2]).is_file()]
    assert not missing, "docs/life-of-a-request.md names files that do not exist: " + ", ".join(missing)
