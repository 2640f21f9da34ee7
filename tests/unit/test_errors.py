"""How messages show names and values that come from untrusted files."""

from pathlib import Path

import pytest

from dovetail.core.errors import shown

NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("model.norm", "'model.norm'"),
        ("\x1b[31mred\u202e\n", r"'\x1b[31mred\u202e\n'"),
        ("\ud800", r"'\ud800'"),
        (Path("a/b c.safetensors"), "a/b c.safetensors"),
        (Path("a/\x1b[2J"), r"a/\x1b[2J"),
        (ValueError("line\nline"), r"line\nline"),
        ({"factor": 4.0}, "{'factor': 4.0}"),
        (None, "None"),
    ],
)
def test_untrusted_values_are_escaped(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 100_000, Path("x" * 100_000), {"x" * 10_000: [10**4000] * 9}, NESTED])
def test_long_and_deep_values_are_cut(value):
    text = shown(value, 60)
    assert len(text) <= 60 and "..." in text


def test_both_ends_of_a_long_name_remain():
    assert shown("model." + "x" * 500 + ".weight", 30) == "'model.xxxxxx...xxxxxx.weight'"
