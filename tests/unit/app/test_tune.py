"""app=tune: refused without a GPU; on an emulated one its search, cache, export and report."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.compose.cli import main
from dovetail.core.ops.choices import Choices, install
from dovetail.core.ops.kernels import launch
from dovetail.core.tuning import matmul, startup, timing
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.table import read_table
from dovetail.core.worker import dtypes
from dovetail.plugins.app.tune import app

NAME = "NVIDIA H200"
WORDS = ("app=tune", "model=tiny", "quant=none", "engine.dtype=bfloat16", "tune.rows=[4,16]")


class FakeTimer:
    """The tile with 64 outputs and the most stages is fastest, and draws with the most programs."""

    stop_after = 1 << 30
    gpu = NAME

    def __init__(self, gpu, workers):
        assert gpu == self.gpu
        self.opened = []

    def open(self, tunable):
        if len(self.opened) == self.stop_after:
            raise KeyboardInterrupt
        self.opened.append(tunable)

    def compile_all(self, jobs, seconds):
        return [True for _ in jobs]

    def microseconds(self, choices, final):
        return [9.0 if c is None else self._of(c) for c in choices]

    def _of(self, choice):
        if "programs" in choice and "outputs" not in choice:
            return 8.0 - choice["programs"] / 8192
        return 8.0 - (choice.get("outputs") == 64) - 0.1 * choice.get("stages", 4)

    def fault(self, choice):
        return None


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    properties = SimpleNamespace(name=NAME, multi_processor_count=132, major=9, minor=0, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "keep_shared_memory", lambda device: None)
    monkeypatch.setattr(dtypes, "resolve_device", lambda *given: torch.device("cuda", 0))
    monkeypatch.setattr(matmul, "this_gpu", Gpu)
    monkeypatch.setattr(timing, "GraphTimer", FakeTimer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    FakeTimer.stop_after = 1 << 30
    install(Choices())


@pytest.mark.parametrize("words", [("engine.device=cpu",), ("+preset=h200_fp8_tp1",)])
def test_without_a_gpu_it_is_refused(capsys, words, tmp_path):
    assert main(["app=tune", f"tune.export={tmp_path}/new/table.json", *words]) == 2
    assert not (tmp_path / "new").exists(), "nothing is written"
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and ("on a GPU" in err or "GPU 0" in err)


def test_the_cache_and_the_export_have_the_fastest_tiles(gpu, capsys):
    path = gpu / "export.json"
    assert main([*WORDS, f"tune.export={path}"]) == 0
    out = capsys.readouterr().out
    (cached,) = (gpu / "cache" / "dovetail" / "tuning").glob("*.json")
    tables = [read_table(one, "a test", CHECKS) for one in (path, cached)]
    assert tables[0].hash() == tables[1].hash()
    (shape, rows), *others = tables[0].entries.items()
    assert shape.gpu == NAME and list(rows) == [4, 16] and len(others) >= 3
    by_op = {subject.op: list(rows.values()) for subject, rows in tables[0].entries.items()}
    assert all(choice["outputs"] == 64 for choice in by_op["matmul"])
    assert set(by_op) == {"matmul", "draw", "draw_filtered"}
    # Four rows of so few tokens are split as by default, however many programs there are.
    assert by_op["draw"][0] is None and set(by_op["draw"][1]) == {"programs"}
    count = len(tables[0])
    assert f"{count} of {count} tuned; the entries are in {cached}" in out and "time / before" in out
    # A second run has nothing to measure.
    FakeTimer.stop_after = 0
    assert main([*WORDS]) == 0
    assert f"{count} of {count} tuned" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_measured(gpu, capsys):
    FakeTimer.stop_after = 3
    assert main([*WORDS]) == 130
    assert "3 of 14 tuned" in (out := capsys.readouterr().out) and "11 are left: the same command" in out
    (lines,) = (gpu / "cache" / "dovetail" / "tuning").glob("*.timings.jsonl")
    assert len(list(map(json.loads, lines.read_text().splitlines()))) == 3
    FakeTimer.stop_after = 11
    assert main([*WORDS]) == 0, "only the others are measured"


def full_disk(monkeypatch, folder):
    real = Path.write_text

    def write(path, *args, **options):
        if folder in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", write)


@pytest.mark.parametrize("full", ["cache", "export"])
def test_a_file_that_cannot_be_written_is_one_line_and_the_search_goes_on(gpu, capsys, monkeypatch, full):
    (gpu / "export").mkdir()
    full_disk(monkeypatch, gpu / full)
    assert main([*WORDS, f"tune.export={gpu}/export/table.json"]) == 1
    out, err = capsys.readouterr()
    assert "14 of 14 tuned; not all entries could be written" in out
    assert err.count("No space left on device") == 1 and str(gpu / full) in err
    other = gpu / ("cache/dovetail/tuning" if full == "export" else "export")
    (written,) = other.glob("*.json")
    assert sum(map(len, read_table(written, "a test", CHECKS).entries.values())) == 14


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"schema": "dovetail.bench/1"}', "its schema is 'dovetail.bench/1'"),
        ('{"schema": "dovetail.tuning/1", "entr', "cut off"),
        (None, "is a device or a pipe"),
    ],
)
def test_an_export_that_would_fail_is_refused_before_the_search(gpu, capsys, content, reason):
    path = gpu / "there.json"
    if content is None:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # A pipe without a reader cannot be opened.
    else:
        path.write_text(content)
    FakeTimer.stop_after = 0
    assert main([*WORDS, f"tune.export={path}"]) == 2
    err = capsys.readouterr().err
    assert reason in err and "choose another name" in err and len(err.splitlines()) == 1
    if content is None:
        os.close(reader)


def test_an_export_may_be_empty_and_in_the_home_folder(gpu, monkeypatch):
    monkeypatch.setenv("HOME", str(gpu))
    path = gpu / "there.json"
    path.touch()
    assert main([*WORDS, 'tune.export="~/there.json"']) == 0 and len(read_table(path, "a test", CHECKS)) == 14


def test_several_models_share_what_they_have_in_common(gpu, capsys):
    words = [word for word in WORDS if not word.startswith("model=")]
    assert main([*words, "tune.models=[tiny,tiny]"]) == 0
    assert "14 of 14 tuned" in capsys.readouterr().out
    assert main([*words, "model=tiny", "tune.models=[tiny]"]) == 2
    assert "`model=tiny` and tune.models=['tiny']: give one of them" in capsys.readouterr().err


def test_only_some_operations_are_measured(gpu, capsys):
    assert main([*WORDS, "tune.rows=[16]", "tune.ops=[matmul]"]) == 0
    out = capsys.readouterr().out
    assert "5 of 5 tuned" in out and "draw" not in out
    assert main([*WORDS, "tune.rows=[16]", "tune.ops=[attention]"]) == 2
    assert "there is no operation 'attention' for tune.rows=[16]; there are" in capsys.readouterr().err


def test_only_what_is_missing_is_measured(gpu, capsys, monkeypatch):
    path = gpu / "there.json"
    assert main([*WORDS, "tune.rows=[16]", f"tune.export={path}"]) == 0
    capsys.readouterr()
    assert main([*WORDS, "tune.missing=true", "tune.rows=[9,16,32]"]) == 0
    assert "7 of 7 tuned" in capsys.readouterr().out, "an entry for 16 rows serves 9, but not 32"
    for cached in (gpu / "cache" / "dovetail" / "tuning").iterdir():
        cached.unlink()
    assert main([*WORDS, "tune.missing=true", "tune.rows=[16]", f"engine.tune_table={path}"]) == 0
    assert "0 of 0 tuned" in capsys.readouterr().out
    shipped = read_table(path, "acme")
    monkeypatch.setattr(startup, "package_tables", lambda registry, checks: (shipped, []))
    assert main([*WORDS, "tune.missing=true", "tune.rows=[16]"]) == 0
    assert "0 of 0 tuned" in capsys.readouterr().out
    torch.cuda.get_device_properties(0).name = "NVIDIA H800"
    monkeypatch.setattr(FakeTimer, "gpu", "NVIDIA H800")
    assert main([*WORDS, "tune.missing=true", "tune.rows=[16]"]) == 0
    assert "7 of 7 tuned" in capsys.readouterr().out, "entries of a GPU that is alike were not measured on this one"


def test_no_measurement_starts_after_the_time_limit(gpu, capsys, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(app.time, "monotonic", lambda: next(clock))
    assert main([*WORDS, "tune.seconds=4"]) == 0
    assert "left: the same command continues with them" in capsys.readouterr().out
