"""A process that dies too often within an hour is not restarted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dovetail.core.frontend import supervised
from dovetail.core.frontend.supervised import Restarts


@pytest.mark.parametrize(
    ("most", "minutes", "allowed"),
    [
        (0, [0, 90], [False, False]),
        (1, [0, 59, 61, 120, 181], [True, False, False, False, True]),
        (2, [0, 1, 2, 62], [True, True, False, True]),
    ],
)
def test_deaths_within_an_hour_count(
    most: int, minutes: list[float], allowed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(60.0 * minute for minute in minutes)
    monkeypatch.setattr(supervised, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    subject = Restarts(most)
    assert [subject.died() for _ in minutes] == allowed
