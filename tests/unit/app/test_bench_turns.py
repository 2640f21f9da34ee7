"""Conversations, sampling and grammars of `app=bench`: in process, on replicas, and on a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.counters import Counters
from dovetail.core.engine.engine import Engine
from dovetail.core.interfaces import Grammar, SamplingParams, TimedRequest
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.app.bench.http import Answer
from dovetail.plugins.app.bench.inprocess import EngineTarget, TableDrive
from dovetail.plugins.app.bench.server import ServerTarget
from dovetail.plugins.app.bench.turns import BROKEN_OFF

SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 1}
JSON = SamplingParams(temperature=0.0, grammar=Grammar(kind="json_schema", value=SCHEMA))  # type: ignore[arg-type]
WARM = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
TALK = [
    TimedRequest(tuple(range(5, 45)), 6, sampling=WARM),
    TimedRequest((7, 8), 4, sampling=WARM, continues=0),
    TimedRequest((9,), 3, 0.1, continues=1),
    TimedRequest((1, 2, 3), 2),
    TimedRequest((4, 5), 40, sampling=JSON),
]
"""A conversation of three rounds, a request, and one whose grammar ends the output."""


@pytest.fixture(scope="module")
def target() -> Iterator[EngineTarget]:
    overrides = ["engine.device=cpu", "engine.max_len=128", "engine.kv_pages=100", "workload=fixed"]
    found = EngineTarget(compose(overrides, app="bench"))
    found.start(lambda phase, share: None)
    yield found
    found.close()


def test_a_conversation_in_process(target: EngineTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt holds the previous one, the model's own answer and the new message; cached pages are found again."""
    added: list[tuple[list[int], SamplingParams, int]] = []
    add, step = Engine.add, Engine.step
    answers: dict[int, list[int]] = {}

    def spy(self: Engine, ids: Any, params: Any, options: Any) -> Any:
        sequences = add(self, ids, params, options)
        added.append((list(ids), params, sequences[0].uid))
        return sequences

    def watch(self: Engine) -> Any:
        events = step(self)
        for event in events:
            answers.setdefault(event.uid, []).extend(event.tokens)
        return events

    monkeypatch.setattr(Engine, "add", spy)
    monkeypatch.setattr(Engine, "step", watch)
    ended: list[int] = []
    lines, figures = target.run(TALK, ended.append)
    first, second = (answers[uid] for _, _, uid in (added[0], added[3]))
    assert [ids for ids, _, _ in added[:3]] == [list(TALK[0].prompt_ids), [1, 2, 3], [4, 5]]
    assert added[3][0] == [*TALK[0].prompt_ids, *first, 7, 8]
    assert added[4][0] == [*added[3][0], *second, 9]
    params = added[3][1]
    assert (params.temperature, params.top_p, params.max_tokens, params.ignore_eos) == (0.8, 0.95, 4, True)
    assert [line.prompt_tokens for line in lines] == [40, 48, 53, 3, 2]
    assert [line.tokens for line in lines[:4]] == [6, 4, 3, 2] and 0 < lines[4].tokens < 40
    assert lines[1].arrival == lines[0].times[-1] and lines[2].arrival == lines[1].times[-1] + 0.1
    assert all(line.ttft > 0 and not line.failure for line in lines) and ended[-1] == 5
    assert figures["prefix_hit_rate"] > 0.4


class Table:
    """Request table of a replica: answers each request with the numbers from 100 on, from another thread."""

    on_stats: Any = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def submit(self, request: Any) -> list[Any]:
        ids, params, deliver = request.prompt_ids, request.params, request.deliver
        self.asked.append(tuple(ids))
        found = SimpleNamespace(replica=0)
        deltas = [SimpleNamespace(token_ids=(100 + i,)) for i in range(params.max_tokens)]
        refused = ValueError("too long") if len(ids) > 100 else None
        delivery = SimpleNamespace(deltas=[] if refused else deltas, error=refused, last=True)
        threading.Thread(target=deliver, args=(found, delivery)).start()
        return [found]


def test_a_conversation_on_replicas() -> None:
    figures = SimpleNamespace(counters=Counters(), stats=SimpleNamespace(preemptions=0))
    engines: Any = SimpleNamespace(table=Table(), figures=lambda: [figures], check_alive=lambda: None)
    refused = [TimedRequest((1,) * 101, 5), TimedRequest((7,), 4, continues=5)]
    drive = TableDrive(engines, [*TALK, *refused], lambda done: None)
    drive.run()
    first = (*TALK[0].prompt_ids, *range(100, 106), 7, 8)
    assert {first, (*first, *range(100, 104), 9)} < set(engines.table.asked) and len(engines.table.asked) == 6
    assert [line.failure for line in drive.timelines] == [""] * 5 + ["too long", BROKEN_OFF]
    assert drive.timelines[2].arrival >= 0.1


class Streaming(ServerTarget):
    """A server that answers with one event a token; records the bodies of the requests."""

    ids = True

    def __init__(self, send: str) -> None:
        config = BenchConfig(url="http://localhost:1/v1", model="fake", send=send)  # type: ignore[arg-type]
        super().__init__(compose(["engine.device=cpu"], app="bench"), config)
        self.asked: list[dict[str, Any]] = []
        self.start(lambda phase, share: None)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        asked = json.loads(body)
        self.asked.append(asked)
        tokens = 3 if "response_format" in asked else asked["max_tokens"]
        events: list[dict[str, Any]] = [{"choices": [{"text": f" w{100 + i}"}]} for i in range(tokens)]
        if asked.get("return_token_ids") and self.ids:
            for i, event in enumerate(events):
                event["choices"][0]["token_ids"] = [100 + i]
        usage = {"completion_tokens": tokens, "prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
        answer = Answer(b"", asyncio.get_running_loop().create_future())
        answer.status = 200
        for event in [*events, {"choices": [], "usage": usage}]:
            answer.pieces.append((asyncio.get_running_loop().time(), f"data: {json.dumps(event)}\n\n".encode()))
        return answer


def test_a_conversation_on_a_server() -> None:
    target = Streaming("ids")
    lines, figures = target.run(TALK, lambda done: None)
    assert [line.failure for line in lines] == [""] * 5 and figures["prefix_hit_rate"] == 0.4
    assert [line.tokens for line in lines] == [6, 4, 3, 2, 3]
    by_length = {len(asked["prompt"]): asked for asked in target.asked}
    first = [*TALK[0].prompt_ids, *range(100, 106), 7, 8]
    assert by_length[48]["prompt"] == first and by_length[53]["prompt"] == [*first, *range(100, 104), 9]
    assert [by_length[n].get("return_token_ids") for n in (40, 48, 53, 3)] == [True, True, None, None]
    sampled = {name: by_length[48].get(name) for name in ("temperature", "top_p", "seed", "ignore_eos", "max_tokens")}
    assert sampled == {"temperature": 0.8, "top_p": 0.95, "seed": 3, "ignore_eos": True, "max_tokens": 4}
    wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}
    assert by_length[2]["response_format"] == wanted
    text = Streaming("text")
    text.run(TALK[:3], lambda done: None)
    assert text.asked[1]["prompt"].startswith(text.asked[0]["prompt"] + " w100 w101 w102 w103 w104 w105")
    target.ids = False
    lines, _ = target.run(TALK[:3], lambda done: None)
    assert "bench.send=text" in lines[0].failure and [line.failure for line in lines[1:]] == [BROKEN_OFF] * 2
