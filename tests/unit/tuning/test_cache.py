"""The machine's cache: concurrent writers, files that cannot be used, and folders that cannot be written."""

from __future__ import annotations

import errno
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.interfaces.tuning import make_key
from dovetail.core.tuning import cache as module
from dovetail.core.tuning.cache import Cache, Machine, cache_folder, kernels_hash
from dovetail.core.tuning.table import GpuFacts, Subject, TuningTable

MACHINE = Machine("NVIDIA X1", GpuFacts("9.0", 10), "580.1", "2.11", "3.6", "0123")


def entry(rows: int, outputs: int = 64) -> TuningTable:
    subject = Subject("acme_scan", MACHINE.gpu, make_key(outputs=outputs))
    return TuningTable.of({(subject, rows): {"lanes": rows}}, "search")


@pytest.fixture
def cache(tmp_path):
    lines: list[str] = []
    made = Cache(MACHINE, lines.append, tmp_path / "dovetail")
    made.lines = lines
    return made


def test_entries_are_kept_and_the_newest_applies(cache):
    assert len(cache.read()) == 0
    assert cache.add(entry(1)) and cache.add(entry(2))
    newer = TuningTable.of({(subject, 2): None for subject in entry(2).entries}, "search")
    assert cache.add(newer)
    (rows,) = cache.read().entries.values()
    assert rows == {1: {"lanes": 1}, 2: None} and cache.lines == []
    assert cache.read().counts() == {"cache": 2}


def add_entries(folder: Path, first: int) -> None:
    for rows in range(first, first + 20):
        assert Cache(MACHINE, print, folder).add(entry(rows))


def test_concurrent_writers_lose_nothing(cache):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_entries, args=(cache.folder, 1 + 20 * n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    (rows,) = cache.read().entries.values()
    assert list(rows) == list(range(1, 61)) and cache.lines == []


@pytest.mark.parametrize("content", ["", "{", '{"schema": "dovetail.tuning/9", "entries": []}', "\x00" * 50])
def test_a_file_that_cannot_be_used_is_one_line_and_is_replaced(cache, content):
    cache.folder.mkdir()
    cache.table.write_text(content)
    assert len(cache.read()) == 0
    (line,) = cache.lines
    assert str(cache.table) in line and "is not used" in line and "\n" not in line
    assert cache.add(entry(1)) and len(cache.read()) == 1


def test_another_version_has_its_own_file(cache):
    assert cache.add(entry(1))
    for change in (
        {"facts": GpuFacts("9.0", 11)},
        {"driver": "590"},
        {"torch": "3"},
        {"triton": "4"},
        {"kernels": "5"},
    ):
        lines: list[str] = []
        other = Cache(replace(MACHINE, **change), lines.append, cache.folder)
        assert len(other.read()) == 0 and "another driver or version" in lines[0] and len(lines) == 1
    lines = []
    assert len(Cache(replace(MACHINE, gpu="NVIDIA X2"), lines.append, cache.folder).read()) == 0 and lines == []


def test_a_folder_that_cannot_be_written_is_one_line(cache, tmp_path):
    (tmp_path / "file").write_text("")
    cache.folder = tmp_path / "file" / "dovetail"
    assert cache.add(entry(1)) is False
    (line,) = cache.lines
    assert "is not written" in line and "\n" not in line


@pytest.mark.parametrize("call", ["replace", "write_text"])
def test_a_full_disk_keeps_the_previous_entries(cache, monkeypatch, call):
    assert cache.add(entry(1))

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os if call == "replace" else Path, call, full)
        assert cache.add(entry(2)) is False
    assert "No space left on device" in cache.lines[0] and len(cache.lines) == 1
    assert len(cache.read()) == 1 and not list(cache.folder.glob("*.new"))


def test_timings_are_appended(cache):
    assert list(cache.timed()) == []
    cache.add_timing("one")
    cache.add_timing("two")
    assert list(cache.timed()) == ["one\n", "two\n"] and cache.lines == []
    with cache.timings.open("a") as file:
        file.write("cut o")
    cache.add_timing("three")
    assert list(cache.timed())[2:] == ["cut o\n", "three\n"], "only the line that a full disk cut off is lost"


def test_the_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dovetail" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/dovetail/tuning")


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    lines: list[str] = []
    cache = Cache(MACHINE, lines.append)
    assert "no home folder: set XDG_CACHE_HOME" in lines[0]
    assert len(cache.read()) == 0 and list(cache.timed()) == [] and len(lines) == 1
    assert cache.add(entry(1)) is False and "is not written" in lines[1]


def test_the_kernels_hash_depends_on_their_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "core" / "tuning" / "cache.py"))
    sources = [tmp_path / "core/ops/kernels/matmul.py", tmp_path / "plugins/attention/triton/kernels.py"]
    found = [kernels_hash()]
    for text in ("a", "b"):
        for source in sources:
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
            found.append(kernels_hash())
            assert kernels_hash() == found[-1]
    assert len(set(found)) == 5
