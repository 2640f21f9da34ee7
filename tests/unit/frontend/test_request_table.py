"""RequestTable over both transports: records passed within a process, and messages to another process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.frontend.client import tokenizer_of
from dovetail.core.frontend.engines import OneLocalEngine, start_engines
from dovetail.core.frontend.local_engine import LocalEngine
from dovetail.core.frontend.messages import (
    Abort,
    Add,
    Control,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
)
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.frontend.request_table import Delivery, NewRequest, OpenRequest, RequestTable
from dovetail.core.interfaces import RequestOptions, SamplingParams, TokenLogprobs
from dovetail.core.tokenizer import Tokenizer

from .fake_engines import (
    COMPOSITION,
    SECONDS,
    TRANSPORTS,
    Collected,
    Engine,
    FakeLocalEngine,
    Front,
    linked,
    load,
    submit,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    model = compose(["model=tiny"], app="generate").part("model")
    return Tokenizer(model.target().source(model.config).checkpoint)


@pytest.fixture(params=TRANSPORTS, ids=["local", "process"])
def front(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[tuple[RequestTable, Engine]]:
    table = RequestTable(CheckedRouter(COMPOSITION))
    table.tokenizer = tokenizer
    with request.param(table) as engine:
        yield table, engine


def test_a_request_becomes_one_command_and_its_updates_become_text(front: Front, tokenizer: Tokenizer) -> None:
    table, engine = front
    request, collected = submit(table, SamplingParams(logprobs=1, seed=3), user="ann", hints={"tokens": 4.0})
    add = engine.received()
    assert isinstance(add, Add) and (add.id, list(add.prompt_ids)) == (request.id, [1, 2, 3])
    assert SamplingParams.model_validate(add.params) == SamplingParams(logprobs=1, seed=3)
    assert add.options == RequestOptions(user="ann", hints={"tokens": 4.0})
    assert load(table) == (1, 3) and table.busy
    ids = tuple(tokenizer.encode("def f(x):"))
    logprobs = tuple(TokenLogprobs(-0.5, ((token, -0.5),)) for token in ids)
    engine.send_step(SampleUpdate(request.id, 0, ids, logprobs=logprobs, cached=2), stats=EngineStats(running=1))
    (delta,), error, ended = collected.next()
    assert (delta.token_ids, tuple(delta.logprobs), error, ended) == (ids, logprobs, None, False)
    assert load(table) == (1, 0), "a request with output needs no more prefill"
    engine.send_step(SampleUpdate(request.id, 0, ids[:1], "length"))
    (last,), _, ended = collected.next()
    assert ended and last.finish_reason == "length" and request.cached == 0
    assert delta.text + last.text == tokenizer.decode([*ids, ids[0]])
    assert request.timing.arrival <= request.timing.first_token <= request.timing.finished
    assert load(table) == (0, 0) and not table.busy and table.stats(0).running == 1


def test_a_stop_string_across_two_updates_ends_the_sample(front: Front, tokenizer: Tokenizer) -> None:
    table, engine = front
    ids = tokenizer.encode("return value")
    text = tokenizer.decode(ids)
    cut = next(n for n in range(1, len(ids)) if len(tokenizer.decode(ids[:n])) > 2)
    shown = len(tokenizer.decode(ids[:cut]))
    stop = text[shown - 2 : shown + 2]
    request, collected = submit(table, SamplingParams(stop=(stop,)))
    assert isinstance(engine.received(), Add)
    engine.send_step(SampleUpdate(request.id, 0, tuple(ids[:cut])))
    (first,), _, ended = collected.next()
    assert not ended and first.text == text[: shown - 2], "text that may begin a stop string is held back"
    engine.send_step(SampleUpdate(request.id, 0, tuple(ids[cut:])))
    (last,), _, ended = collected.next()
    assert ended and last.finish_reason == "stop" and first.text + last.text == text[: text.index(stop)]
    finish = engine.received()
    assert finish == Finish(request.id, 0, len(first.token_ids) + len(last.token_ids))
    # The engine may have run ahead: later updates of the request are dropped.
    engine.send_step(SampleUpdate(request.id, 0, (5, 6)), SampleUpdate(request.id, 0, (7,), "length"))
    engine.reply(Reply(0))
    assert collected.empty and load(table) == (0, 0)


def test_samples_of_one_message_come_in_one_delivery(front: Front) -> None:
    table, engine = front
    request, collected = submit(table, SamplingParams(n=3))
    other, others = submit(table)
    engine.send_step(
        SampleUpdate(request.id, 0, (5,)), SampleUpdate(other.id, 0, (9,)), SampleUpdate(request.id, 2, (6,), "stop")
    )
    deltas, _, ended = collected.next()
    assert [(delta.sample, delta.token_ids) for delta in deltas] == [(0, (5,)), (2, (6,))] and not ended
    assert [delta.token_ids for delta in others.next()[0]] == [(9,)]
    assert load(table) == (4, 0)
    engine.send_step(SampleUpdate(request.id, 0, (7,), "stop"), SampleUpdate(request.id, 2, (8,)))
    deltas, _, ended = collected.next()
    assert [delta.sample for delta in deltas] == [0] and not ended, "sample 2 has already ended"
    engine.send_step(SampleUpdate(request.id, 1, (7,), "length"))
    assert collected.next()[2] and load(table) == (1, 0)


def test_an_abort_between_two_updates_is_final_and_idempotent(front: Front) -> None:
    table, engine = front
    request, collected = submit(table)
    kept, others = submit(table)
    engine.send_step(SampleUpdate(request.id, 0, (5,)))
    collected.next()
    table.abort(request)
    table.abort(request)
    assert request.ended and load(table) == (1, 3)
    engine.send_step(SampleUpdate(request.id, 0, (6,)), SampleUpdate(kept.id, 0, (7,), "stop"))
    assert others.next()[2] and collected.empty
    assert [type(engine.received()) for _ in range(3)] == [Add, Add, Abort]
    table.abort(kept)
    assert load(table) == (0, 0)


def test_the_death_of_an_engine_fails_its_requests_and_controls(front: Front) -> None:
    table, engine = front
    streams = [submit(table) for _ in range(2)]
    engine.send_step(SampleUpdate(streams[0][0].id, 0, (5,)))
    streams[0][1].next()
    answer = table.control(0, "check")
    table.fail(0, EngineDown("the engine was killed"))
    for request, collected in streams:
        deltas, error, ended = collected.next()
        assert (deltas, str(error), ended) == ([], "the engine was killed", True) and request.ended
    with pytest.raises(EngineDown, match="killed"):
        answer.result(SECONDS)
    assert load(table) == (0, 0) and not table.busy
    with pytest.raises(EngineDown):
        submit(table)
    assert not table.busy


def test_a_rejected_request_does_not_affect_others(front: Front) -> None:
    table, engine = front
    good, collected = submit(table)
    bad, refused = submit(table, SamplingParams(n=2))
    engine.send_step(
        SampleUpdate(good.id, 0, (5,)), SampleUpdate(bad.id, 0, (), "rejected", detail="no room", status=413)
    )
    assert collected.next()[0][0].token_ids == (5,)
    deltas, error, ended = refused.next()
    assert deltas == [] and ended and isinstance(error, RequestError) and (str(error), error.status) == ("no room", 413)
    engine.send_step(SampleUpdate(good.id, 0, (6,), "length"))
    assert collected.next()[2] and load(table) == (0, 0)


def test_replies_are_matched_by_number(front: Front) -> None:
    table, engine = front
    answers = [table.control(0, "load_adapter", name=name, folder="/x") for name in ("a", "b")]
    commands = [engine.received() for _ in answers]
    assert [command.arguments["name"] for command in commands if isinstance(command, Control)] == ["a", "b"]
    engine.reply(Reply(commands[1].id, error="no room", status=409))
    engine.reply(Reply(commands[0].id, 7))
    assert answers[0].result(SECONDS) == 7
    with pytest.raises(RequestError, match="no room") as refused:
        answers[1].result(SECONDS)
    assert refused.value.status == 409
    left = table.control(0, "check")
    assert not left.cancel()
    engine.reply(Reply(commands[1].id + 1, 8))
    assert left.result(SECONDS) == 8


def test_requests_that_are_submitted_together_are_checked_before_the_first_is_sent() -> None:
    def validate(new: NewRequest) -> None:
        if 99 in new.prompt_ids:
            raise RequestError("token 99")

    table = RequestTable(CheckedRouter(COMPOSITION), validate=validate)
    engine = FakeLocalEngine(table)
    collected = Collected()
    good, bad = (NewRequest([token], SamplingParams(), RequestOptions(), collected.deliver) for token in (1, 99))
    with pytest.raises(RequestError, match="token 99"):
        table.submit(good, good, bad)
    assert not table.busy and load(table) == (0, 0)
    first, second = table.submit(good, good)
    assert second.id == first.id + 1
    assert [engine.received(), engine.received()] == [
        Add(one.id, (1,), SamplingParams(), RequestOptions()) for one in (first, second)
    ]


def test_a_value_that_cannot_be_encoded_is_refused() -> None:
    table = RequestTable(CheckedRouter(COMPOSITION))
    with linked(table):
        with pytest.raises(RequestError, match="cannot be sent to the engine"):
            submit(table, SamplingParams(extra={"a": 2**70}))
        with pytest.raises(RequestError, match="cannot be sent to the engine"):
            table.control(0, "load_adapter", name="\ud800").result(SECONDS)
    assert not table.busy and load(table) == (0, 0)


class Hook:
    """Tokenizer that calls a function when it decodes token 99. Every other token is the letter "x"."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def stream(self, keep: Any = ()) -> Hook:
        return self

    def push(self, token: int) -> str:
        if token == 99:
            self._function()
        return "x"

    def finish(self) -> str:
        return ""


def table_with_hook(function: Callable[[], None]) -> tuple[RequestTable, FakeLocalEngine]:
    table = RequestTable(CheckedRouter(COMPOSITION))
    table.tokenizer = Hook(function)  # type: ignore[assignment]
    return table, FakeLocalEngine(table)


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_a_death_while_text_is_made_is_the_last_delivery(stop: tuple[str, ...]) -> None:
    """With a stop string, Finish finds no transport."""
    table, engine = table_with_hook(lambda: table.fail(0, EngineDown("the engine was killed")))
    request, collected = submit(table, SamplingParams(stop=stop))
    engine.received()
    engine.send_step(SampleUpdate(request.id, 0, (99,)), SampleUpdate(request.id, 0, (5,), "length"))
    deltas, error, last = collected.next()
    assert (deltas, str(error), last) == ([], "the engine was killed", True)
    assert collected.empty and load(table) == (0, 0) and not table.busy
    with pytest.raises(queue.Empty):
        engine._commands.get(block=False)


def test_an_abort_while_text_is_made_prevents_the_delivery() -> None:
    table, engine = table_with_hook(lambda: table.abort(request))
    request, collected = submit(table)
    engine.send_step(SampleUpdate(request.id, 0, (99,), "length"))
    assert collected.empty and load(table) == (0, 0) and not table.busy


def test_a_callback_may_abort_and_submit() -> None:
    table, engine = table_with_hook(lambda: None)
    later: list[tuple[OpenRequest, Collected]] = []

    def deliver(request: OpenRequest, delivery: Delivery) -> None:
        table.abort(other)
        later.append(submit(table))

    first, _ = submit(table, deliver=deliver)
    other, others = submit(table)
    engine.send_step(SampleUpdate(first.id, 0, (5,), "stop"), SampleUpdate(other.id, 0, (5,)))
    ((request, collected),) = later
    engine.send_step(SampleUpdate(request.id, 0, (5,), "stop"))
    assert collected.next().last and others.empty and load(table) == (0, 0)


def test_a_death_waits_for_a_delivery_in_another_thread() -> None:
    """Otherwise deltas would follow the error."""
    table, engine = table_with_hook(lambda: None)
    entered, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def deliver(request: OpenRequest, delivery: Delivery) -> None:
        if delivery.error is None:
            entered.set()
            go_on.wait(SECONDS)
        order.append(str(delivery.error))

    request, _ = submit(table, deliver=deliver)
    threads = [
        threading.Thread(target=engine.send_step, args=(SampleUpdate(request.id, 0, (5,)),), daemon=True),
        threading.Thread(target=table.fail, args=(0, EngineDown("killed")), daemon=True),
    ]
    threads[0].start()
    assert entered.wait(SECONDS)
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["None", "killed"] and load(table) == (0, 0)


@pytest.mark.parametrize(("place", "at"), [("route", 2), ("opened", 2), ("send", 1)])
def test_ctrl_c_during_submit_leaves_no_request(place: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, engine = table_with_hook(lambda: None)
    calls = 0

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            found = function(*arguments)
            if calls == at:
                raise KeyboardInterrupt
            return found

        return call

    owner, name = {"route": (table._router, "choose"), "opened": (table, "_open"), "send": (engine, "send")}[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted(getattr(owner, name)))
        collected = Collected()
        new = NewRequest([1, 2, 3], SamplingParams(), RequestOptions(), collected.deliver)
        with pytest.raises(KeyboardInterrupt):
            table.submit(new, new, new)
    assert not table.busy and load(table) == (0, 0) and collected.empty
    submit(table)


def test_the_garbage_collector_may_abort_in_a_thread_that_holds_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned LLM.stream is closed wherever the collector happens to run."""
    table, _ = table_with_hook(lambda: None)
    abandoned, _ = submit(table)

    def choose(*arguments: Any) -> int:
        table.abort(abandoned)
        return 0

    monkeypatch.setattr(table._router, "choose", choose)
    thread = threading.Thread(target=submit, args=(table,), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive() and load(table) == (1, 3)


def test_many_threads_submit_and_abort_while_updates_arrive() -> None:
    """Each request is delivered to its own callback, in order, and the counts return to zero."""
    table = RequestTable(CheckedRouter(COMPOSITION))
    engine = FakeLocalEngine(table)
    per_thread, threads = 40, 6
    failures: list[object] = []

    def user(number: int) -> None:
        for i in range(per_thread):
            request, collected = submit(table, SamplingParams(n=1 + i % 2))
            if (i + number) % 3 == 0:
                table.abort(request)
                continue
            found: dict[int, list[int]] = {}
            ended = False
            while not ended:
                deltas, error, ended = collected.next()
                for delta in deltas:
                    found.setdefault(delta.sample, []).extend(delta.token_ids)
            if error is not None or found != {n: [request.id, 1, 2, 3] for n in range(1 + i % 2)}:
                failures.append((request.id, found, error))

    users = [threading.Thread(target=user, args=(number,), daemon=True) for number in range(threads)]
    for one in users:
        one.start()
    adds = 0
    while adds < per_thread * threads:
        command = engine.received()
        if isinstance(command, Add):
            adds += 1
            samples = range(SamplingParams.model_validate(command.params).n)
            for tokens, reason in (((command.id, 1), None), ((2,), None), ((3,), "length")):
                engine.send_step(*(SampleUpdate(command.id, n, tokens, reason) for n in samples))
    for one in users:
        one.join(SECONDS)
    assert not failures and not table.busy and load(table) == (0, 0)


def test_requests_of_a_broken_engine_in_this_process_get_the_cause() -> None:
    """With a real engine, a step of which fails."""
    engines = start_engines(compose(["+preset=tiny_cpu", "engine.max_len=128"], app="generate"))
    assert isinstance(engines, OneLocalEngine)
    assert isinstance(engines.local, LocalEngine)
    engines.table.tokenizer = tokenizer_of(engines.info)

    def broken() -> list[Any]:
        raise OSError("the device fell off")

    engines.local.engine.step = broken  # type: ignore[method-assign]
    _, collected = submit(engines.table)
    _, error, ended = collected.next()
    assert ended and "the device fell off" in str(error) and isinstance(error, RuntimeError)
    with pytest.raises(RuntimeError, match="the device fell off"):
        submit(engines.table)
    engines.close()
