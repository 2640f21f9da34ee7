"""Log lines while an engine starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.frontend import supervised as owned
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.messages import EngineInfo
from dovetail.plugins.app.serve import lifecycle

INFO = EngineInfo(
    model="tiny", folder=None, vocab=100, max_len=64, max_seqs=8, device="cpu", start_seconds=0.1, notes=[],
    embedding=None, hidden=8, head=True,
)  # fmt: skip


class FakeEngine:
    hung_at_start = False
    lives: list[FakeEngine] = []

    def __init__(self, composition: Any, listener: Any, **options: Any) -> None:
        self.listener = listener

    def start(self) -> None:
        self.lives.append(self)

    def stop(self) -> None: ...


def test_each_phase_is_logged_once_as_it_begins_with_the_duration_of_the_previous_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeEngine, "lives", lives := [])
    monkeypatch.setattr(owned, "EngineProcess", FakeEngine)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "dovetail")
    changes: list[str] = []
    now = 100.0

    async def says(seconds: float, message: Callable[..., None], *arguments: Any) -> None:
        nonlocal now
        now += seconds
        message(*arguments)
        await asyncio.sleep(0)

    async def starts(engine: FakeEngine) -> None:
        heard = engine.listener
        await says(1.5, heard.on_progress, engine, "load weights")
        await says(2.0, heard.on_progress, engine, "load weights")
        await says(0.5, heard.on_progress, engine, "warm up")
        await says(0.1, heard.on_ready, engine, INFO)

    async def test() -> None:
        composition = compose(["app=serve", "+preset=tiny_cpu"])
        reports = Reports(changed=lambda: changes.append(fleet.phase))
        fleet = lifecycle.owned_fleet(composition.app_part.config, composition, reports)
        fleet.start()
        await starts(lives[0])
        await says(60.0, lives[0].listener.on_death, lives[0], "was killed")
        await starts(lives[1])
        await fleet.close()

    asyncio.run(test())
    told = [record for record in caplog.records if hasattr(record, "phase")]
    assert [record.getMessage() for record in told] == [
        "starting: load weights (load libraries took 1.5 s)",
        "starting: warm up (load weights took 2.5 s)",
        "started (warm up took 0.1 s)",
        "starting: load libraries",
        "starting: load weights (load libraries took 1.5 s)",
        "starting: warm up (load weights took 2.5 s)",
        "started (warm up took 0.1 s)",
    ]
    assert (told[1].phase, told[1].previous, told[1].seconds) == ("warm up", "load weights", 2.5)
    assert changes.count("load weights") == 2, "an unchanged phase is not reported"
