"""Tuning tables: what is read, what is refused, and how tables merge."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.files import write_file
from dovetail.core.interfaces.tuning import make_key
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.table import GpuFacts, Subject, TuningTable, merged, parse_table, read_table

KEY = make_key(weight="fp8", outputs=512, inputs=256)
HERE, OTHER = Subject("matmul", "a GPU", KEY), Subject("acme_scan", "a GPU", make_key(width=1.5))
TILE = {"tokens": 16, "outputs": 64, "inputs": 128, "tma": True}


def table(choices, origin="search"):
    return TuningTable.of(choices, origin)


def test_a_file_gives_the_same_table(tmp_path):
    by_rows = {(HERE, 64): None, (HERE, 16): TILE, (HERE, 40): {"library_rows": 64}}
    made = table({**by_rows, (OTHER, 8): {"lanes": 4, "how": "up", "fast": False}})
    write_file(tmp_path / "sub" / "table.json", made.text())
    found = read_table(tmp_path / "sub" / "table.json", "cache", CHECKS)
    assert found.entries == made.entries and found.hash() == made.hash()
    assert list(found.entries[HERE]) == [16, 40, 64] and found.counts() == {"cache": 4}
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["table.json"]


def test_a_file_in_the_home_folder_and_one_without_end(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_file(tmp_path / "table.json", table({(HERE, 16): TILE}).text())
    assert len(read_table(Path("~/table.json"), "cache", CHECKS)) == 1
    with pytest.raises(ConfigError, match="/dev/zero: a tuning table has at most 64 MiB"):
        read_table(Path("/dev/zero"), "cache", CHECKS)


def test_the_hash_is_of_the_entries_only():
    choices = {(HERE, rows): {**TILE, "stages": rows % 7 + 1} for rows in range(1, 20)}
    shuffled = random.sample(sorted(choices.items(), key=str), len(choices))
    assert table(dict(shuffled), "a").hash() == table(choices, "b").hash()
    assert table({**choices, (HERE, 3): None}).hash() != table(choices).hash()
    assert table({**choices, (HERE, 3): {**choices[HERE, 3], "tma": False}}).hash() != table(choices).hash()


def test_the_first_of_several_tables_applies():
    first, second = table({(HERE, 16): TILE}, "cache"), table({(HERE, 16): None, (HERE, 64): None}, "acme")
    both = merged([first, second])
    assert both.entries[HERE] == {16: TILE, 64: None} and both.counts() == {"acme": 1, "cache": 1}
    assert merged([second, first]).entries[HERE] == {16: None, 64: None}
    assert both.without("acme").hash() == first.hash()
    elsewhere = table({(HERE._replace(gpu="another"), 1): None})
    assert merged([both, elsewhere]).for_gpu("a GPU").hash() == both.hash()


def test_a_gpu_takes_the_entries_of_one_that_is_alike():
    facts, other = GpuFacts("9.0", 132), GpuFacts("9.0", 114)
    gpus = {"a GPU": facts, "small": other, "b GPU": facts}
    elsewhere = {(HERE._replace(gpu=name), 16): {**TILE, "stages": n} for n, name in enumerate(("b GPU", "small"), 3)}
    both = TuningTable.of({(HERE, 16): TILE, (OTHER, 1): None, **elsewhere}, "acme", gpus)
    found = parse_table(both.text(), "here", "acme").for_alike("new", facts)
    assert found.entries == {HERE._replace(gpu="new"): {16: TILE}, OTHER._replace(gpu="new"): {1: None}}
    assert found.counts() == {"a GPU": 2}
    assert both.for_alike("new", other).flat() == {(HERE._replace(gpu="new"), 16): {**TILE, "stages": 4}}
    assert not both.for_alike("new", GpuFacts("10.0", 132)).entries
    assert both.for_alike("a GPU", facts).flat() == {(HERE, 16): {**TILE, "stages": 3}}, "not its own entries"
    assert not table({(HERE, 16): TILE}).for_alike("new", facts).entries, "the facts are not known"


def changed(**fields):
    entry = {"op": "matmul", "gpu": "a GPU", "key": dict(KEY), "rows": {"16": TILE}} | fields
    return {"schema": "dovetail.tuning/1", "entries": [entry]}


WRONG = {
    "GPUs of another type": (changed() | {"gpus": []}, "`gpus` is not an object"),
    "a GPU without processors": (changed() | {"gpus": {"X1": {"capability": "9.0"}}}, "the GPU 'X1' lacks processors"),
    "a capability that is no text": (
        changed() | {"gpus": {"X1": {"capability": 9.0, "processors": 8}}},
        "capability of 'X1' is 9.0, not text",
    ),
    "no processors": (changed() | {"gpus": {"X1": {"capability": "9.0", "processors": 0}}}, "'X1' has 0 processors"),
    "an empty file": ("", "not JSON, or was cut off"),
    "a truncated file": (json.dumps(changed())[:-9], "cut off"),
    "a number that is none": (json.dumps(changed(rows={"1": {**TILE, "x": float("nan")}})), "NaN"),
    "too deep": ("[" * 100_000, "nested too deeply"),
    "another format": ([], "its schema is None"),
    "a later version": (changed() | {"schema": "dovetail.tuning/2"}, r"its schema is 'dovetail.tuning/2'; this"),
    "no entries": ({"schema": "dovetail.tuning/1"}, "lacks entries"),
    "an unknown field": (changed() | {"more": 1}, "unknown field 'more'"),
    "entries of another type": (changed() | {"entries": {}}, "not a list"),
    "an entry of another type": (changed() | {"entries": [3]}, "entry 1: it is not an object"),
    "an unknown field of an entry": (changed(us=3.5), "entry 1: it has an unknown field 'us'"),
    "no GPU": (changed(gpu=""), "`gpu` is ''"),
    "a key that is not flat": (changed(key={"shape": [1, 2]}), r"'shape': \[1, 2\]"),
    "no rows": (changed(rows=[]), "`rows` is not an object"),
    "rows below one": (changed(rows={"0": None}), "'0' is not a number of rows"),
    "rows that are no number": (changed(rows={"1e3": None}), "'1e3' is not a number of rows"),
    "too many rows": (changed(rows={"9999999": None}), "9999999 rows are more than"),
    "a choice of another type": (changed(rows={"16": "fast"}), "the choice for 16 rows is not an object"),
    "an infinite value": (json.dumps(changed(op="x", rows={"1": {"a": 5}})).replace("5", "1e999"), "inf, not text"),
    "the same rows twice": (
        {"schema": "dovetail.tuning/1", "entries": changed()["entries"] * 2},
        "entry 2: 16 rows occur twice",
    ),
    "an unknown tile": (changed(rows={"16": {**TILE, "swizzle": 3}}), "16 rows: a tile has no 'swizzle'; it has"),
    "a tile's value of another type": (changed(rows={"16": {**TILE, "stages": True}}), "stages is True, not a whole"),
    "a tile's flag of another type": (changed(rows={"16": {**TILE, "tma": 1}}), "tma is 1, not true or false"),
    "a size that no kernel has": (changed(rows={"16": {**TILE, "tokens": 48}}), "tokens is 48, not a power of two"),
    "a negative value": (changed(rows={"16": {**TILE, "split": -1}}), "split is -1"),
    "text as rows of the library": (
        changed(rows={"16": {"library_rows": "32"}}),
        "library_rows is '32', not a whole number",
    ),
    "a flag as rows of the library": (
        changed(rows={"1": {"library_rows": True}}),
        "library_rows is True, not a whole",
    ),
    "fewer rows of the library": (
        changed(rows={"16": {"library_rows": 15}}),
        "is 15, which is not from the entry's 16",
    ),
    "many rows of the library": (changed(rows={"16": {"library_rows": 33}}), "from the entry's 16 to 32"),
    "a tile of the library": (changed(rows={"16": {**TILE, "library_rows": 32}}), "tokens, outputs, inputs, tma for a"),
    "a kind without a library": (
        changed(key={**dict(KEY), "weight": "int8"}, rows={"16": {"library_rows": 32}}),
        "library_rows is for weights of bf16 and fp8, and this one is int8",
    ),
    "no split": (changed(rows={"16": {**TILE, "split": 0}}), "cannot be launched"),
    "outputs that no warp group has": (
        changed(rows={"16": {"tokens": 64, "outputs": 32, "inputs": 128, "specialized": True}}),
        "a specialized tile has 64, 128 or 256",
    ),
    "blocks narrower than a copy": (
        changed(rows={"16": {"tokens": 64, "outputs": 64, "inputs": 32, "specialized": True}}),
        "kernels for Hopper read",
    ),
    "rows that a tensor map cannot read": (
        changed(key={"weight": "fp8", "outputs": 64, "inputs": 1000}, rows={"16": {**TILE, "tma": True}}),
        "rows of 1000 bytes",
    ),
    "a key's number that is text": (changed(key={**dict(KEY), "outputs": "x"}), "its key, has a value of another type"),
    "another matmul's key": (changed(key={"outputs": 4}), "has weight, outputs and inputs; this one has outputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_files_are_refused_in_one_line(tmp_path, case):
    content, reason = WRONG[case]
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_table(path, "cache", CHECKS)
    assert str(caught.value).startswith(f"{path}: not a tuning table: ") and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.json", "bytes.json", ""):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_table(tmp_path / name, "cache")


def test_only_the_operation_checks_its_choices():
    assert len(parse_table(json.dumps(changed(op="acme_scan", rows={"16": {"lanes": 3}})), "here", "acme", CHECKS)) == 1
