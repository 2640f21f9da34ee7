"""cpu_step.py: the work of a step on the host, counted in lines of Python since seconds would depend on the machine."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.core.testing.suite import lines_run

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cpu_step.py"


@pytest.fixture(scope="module")
def cpu_step() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("cpu_step")


def lines_of_a_step(cpu_step: ModuleType, running: int, cached: int) -> float:
    """Mean of some steps after all requests have entered; a few of the steps have a new request."""
    load = cpu_step.Load(running, cached)
    while load.engine.scheduler.stats().waiting:
        load.step()
    for _ in range(20):
        load.step()
    assert load.engine.kv.stats().cached >= 0.9 * cached
    before = load.engine.counters.steps

    def steps() -> None:
        while load.engine.counters.steps < before + 20:
            load.step()

    return lines_run(steps) / 20


def test_a_step_does_not_do_more_with_more_cached_pages(cpu_step: ModuleType) -> None:
    few, many = (lines_of_a_step(cpu_step, 16, cached) for cached in (100, 10_000))
    assert many <= 1.1 * few, f"{few:.0f} lines of Python with 100 cached pages, {many:.0f} with 10000"


def test_a_step_grows_with_its_sequences_and_no_faster(cpu_step: ModuleType) -> None:
    few, many = (lines_of_a_step(cpu_step, running, 100) for running in (16, 64))
    assert 2 * few < many <= 4.5 * few, f"{few:.0f} lines of Python for 16 sequences, {many:.0f} for 64"


def test_a_scan_of_the_cache_would_be_found(cpu_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count detects what it is meant to detect."""
    step = cpu_step.Load.step

    def scanning(load: object) -> None:
        step(load)
        for _ in range(load.engine.kv.stats().cached):  # type: ignore[attr-defined]
            pass

    monkeypatch.setattr(cpu_step.Load, "step", scanning)
    with pytest.raises(AssertionError):
        test_a_step_does_not_do_more_with_more_cached_pages(cpu_step)


def test_half_of_every_new_prompt_is_found(cpu_step: ModuleType) -> None:
    load = cpu_step.Load(8, 100)
    while load.engine.scheduler.stats().waiting:
        load.step()
    counters = load.engine.counters
    assert counters.cached_tokens / counters.entered_tokens == cpu_step.SHARED / cpu_step.PROMPT == 0.5


def test_it_prints_a_line_for_each_size(cpu_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cpu_step.main(["--running", "4", "8", "--cached", "100", "--steps", "8"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert "schedule" in head
    expected = [[running, "100", to] for running in ("4", "8") for to in ("ranks", "runner")]
    assert [line.split()[:3] for line in lines] == expected
    assert all(float(value) > 0 for line in lines for value in line.split()[3:])


def test_results_with_log_probabilities(cpu_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cpu_step.main(["--running", "4", "--logprobs", "0", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].split() for line in lines] == [["4", "rows,", f"logprobs={n}"] for n in (0, 2)]


def test_the_runner_answers_every_row(cpu_step: ModuleType) -> None:
    load = cpu_step.Load(4, 100, executor=cpu_step.OneRank)
    events = []
    while load.engine.has_work:
        events += load.engine.step()
    assert len({event.uid for event in events}) == 4 and all(len(event.tokens) == 1 for event in events)
    assert load.engine.counters.output_tokens == len(events) > 4


@pytest.mark.nightly
def test_a_plan_on_its_way_to_the_ranks(
    cpu_step: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_step.timeit, "repeat", lambda call, number, repeat: [0.1])
    words = ["--plans", "20", "--gap", "0.1"]
    cpu_step.main(["--plan", "1", "4", "--readers", "1", *words])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d+) decode rows, (\d+) bytes", printed, re.M) == [("1", "176"), ("4", "344")]
    line = r"^  ring, readers: (\d), 0.1 ms between plans: send (\S+) \(\S+\), received (\S+) \(\S+\)$"
    ring = re.findall(line, printed, re.M)
    assert [readers for readers, *_ in ring] == ["1", "1"]
    assert all(0 < float(us) < 10e6 for _, *times in ring for us in times)
    monkeypatch.setattr(cpu_step, "__file__", "nothing.py")
    with pytest.raises(SystemExit, match="a reader did not start"):
        cpu_step.main(["--plan", "1", "--readers", "1", *words])
