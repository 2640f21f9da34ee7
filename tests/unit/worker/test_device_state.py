"""How plans change the persistent device state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dovetail.core.interfaces import Join, JoinBlob, KVGroup, PageDelta, Plane, Request, SamplingParams, StepPlan
from dovetail.core.worker.device_state import DeviceState, SlotInfo
from dovetail.core.worker.upload import Upload


def test_a_table_entry_is_sent_once_per_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would write two values of one entry in any order: a shared page's copy could lose against the page."""
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


def test_a_join_writes_its_own_slot_only() -> None:
    state = DeviceState(slots=70, max_len=16, lookahead=0, groups=(), device=torch.device("cpu"), seed=0)
    columns = state.computed_S, state.drafts_S, state.prompt_len_S, state.top_k_S
    columns += state.temperature_S, state.top_p_S, state.min_p_S, state.adapter_S, state.logprobs_S
    assert all(column.data_ptr() % 16 == 0 and column.is_contiguous() for column in (*columns, state.key_S))
    before = [column.tolist() for column in columns]
    state.drafts_S.fill_(3)
    before[1] = [3] * 71
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, logprobs=6)
    joins = [Join(69, 1, 0, 2), Join(4, 2, 0, 0)]
    infos = [SlotInfo(JoinBlob((1, 2, 3), Request(uid, (1, 2, 3), params), 0, uid)) for uid in (1, 2)]
    state.apply(StepPlan(step=0, rows=[], joins=joins), infos)
    for column, was, new in zip(columns, before, [(2, 0), 0, 3, 7, 0.5, 0.25, 0.125, (1, 2), 6], strict=True):
        was[69], was[4] = new if isinstance(new, tuple) else (new, new)
        assert column.tolist() == was
    assert state.key_S.count_nonzero() == 2 and state.key_S[4] != state.key_S[69]
    assert state.tokens_SL[[69, 4], :4].tolist() == [[1, 2, 3, 0]] * 2


def test_sections_are_aligned_like_tensors() -> None:
    sections = [(1, 2, 3), [], (4,), np.arange(5), [6, 7]]
    sent = Upload(torch.device("cpu")).send(sections)
    assert [each.tolist() for each in sent] == [list(section) for section in sections]
    assert all(each.data_ptr() % 16 == 0 for each in sent)
