"""Records of sequences by slot, and the sets that steps test their rows against."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.interfaces import JoinBlob, Request, SamplingParams
from dovetail.core.worker.slots import DRAWS, GREEDY, Draw, Slots


def blob(params: SamplingParams, **request: Any) -> JoinBlob:
    return JoinBlob((1, 2), Request(1, (1, 2), params, **request), 0)


@pytest.mark.parametrize(
    ("options", "processors", "draw"),
    [
        ({"temperature": 0.0}, (), DRAWS[0]),
        ({"temperature": 0.7, "seed": 3}, (), DRAWS[1]),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, (), DRAWS[0]),
        ({"temperature": 0.7, "top_k": 5}, (), DRAWS[2]),
        ({"temperature": 0.7, "top_p": 0.5}, (), DRAWS[2]),
        ({"temperature": 0.7, "min_p": 0.1}, (), DRAWS[2]),
        ({"temperature": 0.0, "logprobs": 0}, (), DRAWS[3]),
        ({"temperature": 0.0}, ("penalties",), DRAWS[4]),
        ({"temperature": 0.7, "logprobs": 3}, ("penalties",), DRAWS[5]),
        ({"temperature": 0.0}, ("penalties", "slow"), None),
    ],
)
def test_the_cheapest_captured_draw_that_serves_all_rows(
    options: dict[str, Any], processors: tuple[str, ...], draw: Draw | None
) -> None:
    slots = Slots(uncaptured=("slow",))
    slots.join(0, blob(SamplingParams(temperature=0.0)))
    slots.join(1, blob(SamplingParams(**options), processors=processors))
    assert (slots.draw((0,)), slots.draw((0, 1))) == (GREEDY, draw)
    assert (slots.most_logprobs((0,)), slots.most_logprobs((0, 1))) == (None, options.get("logprobs"))


def test_a_slot_is_in_the_sets_of_its_latest_sequence() -> None:
    slots = Slots()
    wishes = SamplingParams(temperature=1.0, top_k=3, logprobs=1, prompt_logprobs=1)
    for params, request, expected in (
        (wishes, {}, {"random", "filtered", "logprobs", "prompt_logprobs"}),
        (SamplingParams(temperature=0.0), {}, set()),
        (SamplingParams(temperature=0.5), {"pooling": "mean"}, {"random", "pooling"}),
    ):
        info = slots.join(1, blob(params, **request))
        assert slots[1] is info
        assert {name for name, among in vars(slots).items() if isinstance(among, set) and among == {1}} == expected
        slots.leave(1)
    slots.join(1, JoinBlob((1,), Request(2, (1,), wishes), 0, adapter=3))
    assert slots.adapted == {1}
    slots.leave(1)
    slots.join(1, blob(wishes))
    assert not slots.adapted


def test_a_processor_is_affected_by_sequences_that_use_it_and_by_their_successors() -> None:
    slots, affected = Slots(), []
    for processors in ((), ("a",), ("b",), ("b",), (), ()):
        affected.append(set(slots.join(4, blob(SamplingParams(), processors=processors)).affected))
        slots.leave(4)
    assert affected == [set(), {"a"}, {"a", "b"}, {"b"}, {"b"}, set()]
