"""Cache hit rate: a request counts once, however long it waits and however often it enters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail.core.interfaces import SamplingParams
from dovetail.plugins.scheduler.config import FCFSConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

from .conftest import Bench

PREFIX = list(range(1, 17))


def test_a_request_that_waits_for_pages_counts_when_it_enters(bench: Callable[..., Bench]) -> None:
    it = bench(FCFSScheduler, FCFSConfig(), pages=12)
    it.add([*PREFIX, 20], max_tokens=2)
    it.run()
    it.add(list(range(30, 50)), max_tokens=14)
    it.step(2)
    waiting = it.add([*PREFIX, 21, *range(1, 21)], max_tokens=2)
    it.step(10)
    assert it.engine.scheduler.stats().waiting == 1
    counters = it.engine.counters
    assert (counters.entered_tokens, counters.cached_tokens) == (17 + 20, 0)
    it.run()
    assert waiting.cached > 0
    assert (counters.entered_tokens, counters.cached_tokens) == (17 + 20 + 37, waiting.cached)


def test_a_sequence_without_room_retries_only_after_a_change(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench(FCFSScheduler, FCFSConfig(), pages=12)
    tried: list[int] = []
    acquire = it.engine.kv.acquire
    monkeypatch.setattr(it.engine.kv, "acquire", lambda seq, **kw: tried.append(seq.uid) or acquire(seq, **kw))
    first = it.add(list(range(1, 21)), max_tokens=14)
    it.step(2)
    waiting = it.add(list(range(20, 50)), max_tokens=2)
    it.run()
    assert tried == [first.uid, waiting.uid, waiting.uid]


def test_a_preempted_sequence_counts_once(bench: Callable[..., Bench]) -> None:
    it = bench(FCFSScheduler, FCFSConfig(), pages=12)
    for start in (1, 21):
        it.add(list(range(start, start + 18)), max_tokens=20)
    it.run()
    counters = it.engine.counters
    assert it.preemptions > 0
    assert (counters.entered_tokens, counters.cached_tokens) == (36, 0)


def test_samples_of_one_request_count_once(bench: Callable[..., Bench]) -> None:
    it = bench(FCFSScheduler, FCFSConfig())
    it.engine.add(PREFIX, SamplingParams(max_tokens=3, temperature=0, n=3))
    it.run()
    assert (it.engine.counters.entered_tokens, it.engine.counters.cached_tokens) == (16, 0)
