"""The search with a timer that takes times from a function, on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.interfaces.tuning import Tunable, make_key
from dovetail.core.ops.choices import Choices, installed, temporarily
from dovetail.core.ops.compile_server import unpack
from dovetail.core.tuning import search as module
from dovetail.core.tuning import timing
from dovetail.core.tuning.search import FINALS, Found, distinct, read_found, search, table_of
from dovetail.core.tuning.table import GpuFacts, parse_table
from dovetail.core.tuning.timing import copies, fault_of

GPU = "a GPU"


class Scan(Tunable):
    """Operation whose choice is a number of lanes; the prediction does not depend on it."""

    op, nbytes, way = "acme_scan", 1, "in order"

    def __init__(self, rows, width=8, lanes=100):
        self.rows, self.key, self._lanes = rows, make_key(width=width), lanes

    def candidates(self):
        return [{"lanes": lanes} for lanes in (range(self._lanes) if self._lanes > 0 else range(99, 9, -1))]

    def admits(self, choice):
        return choice["lanes"] != 13

    def kernel(self, choice):
        return choice["lanes"]

    def trials(self, count):
        raise AssertionError("the timer of these tests needs no operands")


class FakeTimer:
    """Timer without a device. `us`(tunable, choice) is a time; None = the choice cannot run."""

    def __init__(self, us, wrong=()):
        self.us, self.wrong, self.opened, self.compiled, self.timed = us, wrong, [], [], []

    def open(self, tunable):
        self.tunable = tunable
        self.opened.append(tunable.rows)

    def compile_all(self, jobs, seconds):
        self.jobs = [(tunable.rows, choice["lanes"]) for tunable, choice in jobs]
        return [seconds is None or i < seconds for i in range(len(jobs))]

    def microseconds(self, choices, final):
        self.timed.append((final, len(choices)))
        if not final:
            self.compiled.append([choice["lanes"] for choice in choices])
        return [self.us(self.tunable, choice) for choice in choices]

    def fault(self, choice):
        return "off by 1" if choice["lanes"] in self.wrong else None


def distance(best):
    """Times with which `best` lanes are fastest, and the default is in the middle of the others."""
    return lambda tunable, choice: 20.0 if choice is None else 10.0 + abs(choice["lanes"] - best)


def run(tunables, timer, known=None, **options):
    return [found for _, found in search(tunables, timer, GPU, known or {}, **options)]


def test_the_fastest_choice_is_found():
    timer = FakeTimer(distance(17))
    (found,) = run([Scan(4)], timer)
    assert found.best == ({"lanes": 17}, 10.0) and found.before == 20.0
    assert timer.timed == [(False, module.MOST_CANDIDATES), (True, FINALS + 1)]
    assert len(found.times) + len(found.others) == module.MOST_CANDIDATES + 1
    facts = GpuFacts("9.0", 132)
    table = table_of([found], GPU, facts, "search")
    assert list(table.flat().values()) == [{"lanes": 17}] and table.counts() == {"search": 1}
    assert parse_table(table.text(), "export.json", "acme").gpus == {GPU: facts}


def test_choices_that_fail_or_are_wrong_are_not_taken(caplog):
    def us(tunable, choice):
        return None if choice is not None and choice["lanes"] in (17, 18) else distance(17)(tunable, choice)

    (found,) = run([Scan(4)], FakeTimer(us, wrong={16}))
    assert found.best == ({"lanes": 15}, 12.0) and "'lanes': 16" in caplog.text and "off by 1" in caplog.text


def test_the_default_stays_unless_a_choice_is_clearly_faster():
    (found,) = run([Scan(4)], FakeTimer(lambda tunable, choice: 20.0 if choice is None else 19.9))
    assert found.best == (None, 20.0)
    with pytest.raises(RuntimeError, match="acme_scan {'width': 8} with 4 rows runs with no choice"):
        run([Scan(4)], FakeTimer(lambda tunable, choice: None))


def test_the_first_candidates_are_timed_and_the_best_of_other_rows():
    timer = FakeTimer(distance(12.4))
    run([Scan(4, lanes=-1), Scan(8, lanes=5), Scan(16, width=9, lanes=3)], timer, most=88)
    assert timer.compiled[0] == list(range(99, 11, -1))
    assert timer.compiled[1:] == [[0, 1, 2, 3, 4, 12], [0, 1, 2]], "13 is next best, which 8 rows do not admit"


def test_kernels_compile_once_and_the_most_promising_first():
    timer = FakeTimer(distance(1))
    run([Scan(4, lanes=4), Scan(8, lanes=3), Scan(16, width=9, lanes=2)], timer)
    assert timer.jobs == [(4, 0), (4, 1), (4, 2), (4, 3)], "lanes 0 are first for three operations, 3 last for one"
    run([Scan(4, lanes=4), Scan(8, lanes=3)], timer, compile_seconds=2)
    assert timer.compiled[-2:] == [[0, 1], [0, 1]], "those that did not compile in time are not timed"
    assert run([Scan(4)], timer, compile_seconds=0) == [], "an entry would state that the default is the fastest"


def test_the_installed_choice_is_timed_too():
    timer, slow = FakeTimer(distance(3)), {"lanes": 77}
    with temporarily(Choices({("acme_scan", GPU, make_key(width=8)): {16: slow}})):
        (found,) = run([Scan(4)], timer, most=10)
        assert installed().find("acme_scan", GPU, make_key(width=8), 4) == slow
    assert found.before == 84.0 and timer.compiled[0][0] == 77 and found.best[0] == {"lanes": 3}


def test_without_an_entry_what_the_operation_picks_ran_before():
    class Ruled(Scan):
        def unlisted(self):
            return {"lanes": 70}

    (found,) = run([Ruled(4)], FakeTimer(distance(3)), most=10)
    assert found.before == 77.0
    with temporarily(Choices({("acme_scan", GPU, make_key(width=8)): {4: None}})):
        (found,) = run([Ruled(4)], FakeTimer(distance(3)), most=10)
    assert found.before == 20.0, "the table says that the default is fastest"


def test_a_search_continues_where_it_was(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    wanted = [Scan(rows, width) for width in (8, 9) for rows in (1, 2, 4)]
    first = run(wanted, FakeTimer(distance(5)), seconds=3)
    assert 0 < len(first) < len(wanted)
    lines = [f"{found.line()}\n" for found in first]
    known = read_found([*lines, lines[0][:40]])
    assert list(known.values()) == first, "a line that was cut off is skipped"
    assert {found.way for found in first} == {"in order"}
    timer = FakeTimer(distance(5))
    both = run(wanted, timer, known)
    assert both[: len(first)] == first and len(both) == len(wanted) == len(first) + len(timer.opened)
    assert {found.best[0]["lanes"] for found in both} == {5}


def test_records_of_another_form_are_skipped(caplog):
    found = Found("acme_scan", make_key(width=8), 4, ((None, 2.5),), 2.5)
    lines = ["", "3", "{}", json.dumps({"op": 1}), "[" * 100_000, found.line()]
    wrong = ({"op": []}, {"key": {"width": []}}, {"rows": "4"}, {"before": "x"}, {"others": [[1.0, None]]}, {"way": 1})
    lines += [json.dumps(json.loads(found.line()) | {"times": [[9.0, None]]} | values) for values in wrong]
    # A table with these would not be read again.
    lines.append(found.line().replace("2.5, null", '2.5, {"lanes": NaN}'))
    matmul = {"op": "matmul", "key": {"weight": "fp8", "outputs": 64, "inputs": 64}}
    for fields in ({}, {"stages": 0}, {"split": 0}):
        tile = {"tokens": 16, "outputs": 64, "inputs": 64} | fields
        lines.append(json.dumps(json.loads(found.line()) | matmul | {"times": [[1.0, tile]]}))
    kept = list(read_found(lines).values())
    assert kept[0] == found and [one.op for one in kept[1:]] == ["matmul"]
    assert caplog.messages == ["14 lines of the tuning cache's timings are skipped: they were cut off or damaged"]


def test_equal_layers_are_tuned_once():
    first = [Scan(1), Scan(2), Scan(1, 9)]
    assert distinct([*first, Scan(2), Scan(1), Scan(1, 9)]) == first


def test_wrong_results_are_found():
    exact = torch.randn(4, 8)
    assert fault_of(exact.clone, exact, 1e-2) is None
    assert "off by" in fault_of(lambda: exact * 1.1, exact, 1e-2)
    assert "off by" in fault_of(lambda: exact * float("nan"), exact, 1e-2)
    assert "not the same bits" in fault_of(lambda: exact * (1 + 1e-4 * torch.rand(1)), exact, 1e-2)
    counter = itertools.count()
    assert "off by" in fault_of(lambda: exact * (1 + next(counter)), exact, 1e-2), "state is left behind"
    # Tokens are names: one that differs by 1 is as wrong as any other.
    drawn = torch.arange(100_000, 100_200)
    assert fault_of(drawn.clone, drawn, 1e-2) is None
    assert fault_of(lambda: torch.cat([drawn[:-1], drawn[-1:] + 1]), drawn, 1e-2) is None, "one of 200, near a border"
    assert "off by" in fault_of(lambda: torch.cat([drawn[:-9], drawn[-9:] + 1]), drawn, 1e-2)


def test_weights_exceed_the_cache():
    assert copies(1 << 20) == 200 and copies(1 << 40) == 2


def test_processes_that_compile_start_without_waiting_for_each_other(monkeypatch, caplog):
    """A process starts only once it has read what exceeds a pipe of its arguments, and it imports torch first."""
    started = []

    class Process:
        exitcode = None

        def __init__(self, target, args, daemon):
            self.args = args

        def start(self):
            gpu, device, packed, share, count, end, _ = self.args
            assert len(json.dumps([gpu, device, packed, share, count, end])) < 1000
            started.append(len(unpack(Path(packed).read_bytes())))

        def join(self, timeout):
            pass

        kill = terminate = lambda self: None

    context = SimpleNamespace(Process=Process, Array=lambda kind, size: [1] * size)
    monkeypatch.setattr(timing.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    jobs = [(Scan(4), {"lanes": lanes}) for lanes in range(5000)]
    assert timing.GraphTimer(GPU, 3).compile_all(jobs, 1.0) == [True] * 5000
    assert started == [5000] * 3
    Process.exitcode = 1
    assert timing.GraphTimer(GPU, 2).compile_all(jobs, 1.0) == [True] * 5000
    assert "2 of the 2 processes that compile kernels died (exit code 1)" in caplog.text
    context.Array = lambda kind, size: [0] * size
    with pytest.raises(RuntimeError, match="none compiled one.*__main__"):
        timing.GraphTimer(GPU, 2).compile_all(jobs, 1.0)
