"""Log lines while an engine starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.frontend import supervised
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.messages import EngineInfo
from dovetail.plugins.app.serve import lifecycle

INFO = EngineInfo(
    model="tiny", checkpoint=None, vocab=100, max_len=64, max_seqs=8, device="cpu", start_seconds=0.1, notes=[],
    embedding=None, hidden=8, head=True,
)  # fmt: skip


class FakeEngine:
    hung_at_start, traceback = False, ""
    engines: list[FakeEngine] = []

    def __init__(self, composition: Any, listener: Any, **options: Any) -> None:
        self.listener = listener

    def start(self) -> None:
        self.engines.append(self)

    def stop(self) -> None: ...


def test_each_phase_is_logged_once_as_it_begins_with_the_duration_of_the_previous_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeEngine, "engines", engines := [])
    monkeypatch.setattr(supervised, "EngineProcess", FakeEngine)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "dovetail")
    changes: list[str] = []
    now = 100.0

    async def report(seconds: float, message: Callable[..., None], *arguments: Any) -> None:
        nonlocal now
        now += seconds
        message(*arguments)
        await asyncio.sleep(0)

    async def start(engine: FakeEngine) -> None:
        listener = engine.listener
        await report(1.5, listener.on_progress, engine, "load weights")
        await report(2.0, listener.on_progress, engine, "load weights")
        await report(0.5, listener.on_progress, engine, "warm up")
        await report(0.1, listener.on_ready, engine, INFO)

    async def test() -> None:
        composition = compose(["app=serve", "+preset=tiny_cpu"])
        reports = Reports(changed=lambda: changes.append(fleet.phase))
        fleet = lifecycle.supervised_fleet(composition.app_part.config, composition, reports)
        fleet.start()
        await start(engines[0])
        await report(60.0, engines[0].listener.on_death, engines[0], "was killed")
        await start(engines[1])
        await fleet.close()

    asyncio.run(test())
    records = [record for record in caplog.records if hasattr(record, "phase")]
    assert [record.getMessage() for record in records] == [
        "starting: load weights (load libraries took 1.5 s)",
        "starting: warm up (load weights took 2.5 s)",
        "started (warm up took 0.1 s)",
        "starting: load libraries",
        "starting: load weights (load libraries took 1.5 s)",
        "starting: warm up (load weights took 2.5 s)",
        "started (warm up took 0.1 s)",
    ]
    assert (records[1].phase, records[1].previous, records[1].seconds) == ("warm up", "load weights", 2.5)
    assert changes.count("load weights") == 2, "an unchanged phase is not reported"
