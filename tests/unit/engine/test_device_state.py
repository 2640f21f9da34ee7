"""Persistent device state, as plans change it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dovetail.core.engine.device_state import DeviceState
from dovetail.core.engine.upload import Upload
from dovetail.core.interfaces import KVGroup, PageDelta, Plane, StepPlan


def test_a_place_is_written_once_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU writes two entries of one place in any order: a shared page's copy could lose against the page itself."""
    sent: list[Sequence[int]] = []
    send = Upload.send

    def spy(self: Upload, sections: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sent.extend(sections)
        return send(self, sections)

    monkeypatch.setattr(Upload, "send", spy)
    group = KVGroup(id=0, layers=(0,), planes=(Plane("k", (1, 4), torch.float32),), kind="full", page_tokens=4)
    state = DeviceState(slots=2, max_len=16, lookahead=0, groups=(group,), device=torch.device("cpu"), seed=0)
    deltas = [PageDelta(0, 1, 0, 7), PageDelta(0, 0, 0, 5), PageDelta(0, 1, 1, 8), PageDelta(0, 1, 0, 9)]
    state.apply(StepPlan(step=0, rows=[], pages=deltas), [])
    assert state.tables[0][1].tolist()[:2] == [9, 8]
    (section,) = [each for each in sent if each]
    places = [tuple(section[at : at + 2]) for at in range(0, len(section), 3)]
    assert sorted(places) == [(0, 0), (1, 0), (1, 1)]
