"""The step loop of an engine's process: one thread that takes commands, runs steps and sends what they brought."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from dovetail.core.engine.engine import Engine
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import RequestError
from dovetail.core.frontend.messages import (
    Abort,
    Add,
    Command,
    Control,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
    write_logprobs,
)
from dovetail.core.frontend.outputs import REASONS
from dovetail.core.frontend.zmq_link import EngineEnd
from dovetail.core.interfaces import FinishReason, SamplingParams, Sequence
from dovetail.core.parallel.channel import Channel

_STATS_SECONDS = 0.25
_MOMENT = 0.02
"""Seconds that an idle loop sleeps while adapters are being read."""
_NAP = 2e-4
"""Seconds between two looks for commands where less than a millisecond, the poller's unit, is left."""


class StepLoop:
    """Takes commands between two steps; sends what each step brought as one message to each link that it concerns."""

    def __init__(self, engine: Engine, control: Channel, link: Mapping[str, str]) -> None:
        """`link`: the addresses of the first, whose number is 0."""
        self._engine, self._control = engine, control
        self._requests = Requests(engine)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._links: dict[int, EngineEnd] = {}
        """By number."""
        self._by_socket: dict[zmq.Socket[bytes], EngineEnd] = {}
        self._stats_due = 0.0
        self._loading: list[tuple[EngineEnd, int, Future[None]]] = []
        """Commands that are answered when this is done."""
        self._attach(0, **link)

    def run(self) -> None:
        """Until the process that started this one says stop."""
        engine, requests = self._engine, self._requests
        while self._take_commands():
            if engine.has_work:
                for event in engine.step():
                    requests.note(event)
            self._publish()

    def _take_commands(self) -> bool:
        """Carry out what arrived; sleeps while the engine has nothing to do, or nothing yet (`launch_delay`). False =
        stop."""
        idle = not self._engine.has_work
        if idle and (self._stats_due or not all(link.up_to_date for link in self._links.values())):
            # The last word before silence, so that gauges do not stay where they were.
            stats, self._stats_due = engine_stats(self._engine), 0.0
            for one in self._links.values():
                one.tell(stats, idle=True)
        patience = (_MOMENT if self._loading else None) if idle else 0.0
        while True:
            for source, _ in self._poll(patience):
                if source == self._control.fileno():
                    if not self._ordered():
                        return False
                elif (link := self._by_socket.get(source)) is not None:
                    # None where it was detached since the poll, with commands unread.
                    for command in link.receive():
                        self._obey(link, command)
            if self._loading:
                self._answer_loaded()
            patience = self._engine.launch_delay()
            if not patience:
                return True

    def _poll(self, patience: float | None) -> list[tuple[Any, int]]:
        """Whoever has said something, after at most so many seconds; None = whenever somebody has."""
        if patience is not None and 0.0 < patience < 1e-3:
            time.sleep(_NAP)
            patience = 0.0
        return self._poller.poll(None if patience is None else int(patience * 1e3))

    def _obey(self, link: EngineEnd, command: Command) -> None:
        match command:
            case Add():
                self._requests.add(link, command)
            case Abort():
                self._requests.abort(command.id)
            case Finish():
                self._requests.finish(command)
            case Control():
                reply = perform(self._engine, command)
                if isinstance(reply.value, Future):
                    self._loading.append((link, command.id, reply.value))
                else:
                    link.send(reply)

    def _answer_loaded(self) -> None:
        done = [entry for entry in self._loading if entry[2].done()]
        self._loading = [entry for entry in self._loading if entry not in done]
        for link, id, future in done:
            link.send(answer(id, future.result))

    def _publish(self) -> None:
        now = time.perf_counter()
        stats = None
        if now >= self._stats_due:
            # Without news, too: a long prompt has none for many steps, and silence would look like death.
            stats, self._stats_due = engine_stats(self._engine), now + _STATS_SECONDS
        for link in self._links.values():
            if stats is not None or link.news:
                link.tell(stats)

    # Links.

    def _ordered(self) -> bool:
        """What the process that started this one says; False = stop."""
        message, _ = self._control.recv()
        match message["op"]:
            case "attach":
                link = self._attach(message["link"], message["commands"], message["outputs"])
                # The first word says that commands may come.
                link.tell(engine_stats(self._engine), idle=not self._engine.has_work)
            case "detach":
                self._detach(message["link"])
            case "stop":
                return False
            case other:
                raise ValueError(f"the engine's process was sent {other!r}")
        return True

    def _attach(self, number: int, commands: str, outputs: str) -> EngineEnd:
        link = EngineEnd(self._context, commands=commands, outputs=outputs)
        self._poller.register(link.commands, zmq.POLLIN)
        self._links[number] = self._by_socket[link.commands] = link
        return link

    def _detach(self, number: int) -> None:
        """Its other end is gone."""
        link = self._links.pop(number, None)
        if link is None:
            return
        self._requests.abort_all(link)
        self._loading = [entry for entry in self._loading if entry[0] is not link]
        self._poller.unregister(link.commands)
        del self._by_socket[link.commands]
        link.close()


@dataclass(slots=True)
class _Running:
    """One request in the engine."""

    link: EngineEnd
    id: int
    sequences: list[Sequence]
    left: int
    """Samples that still run."""


class Requests:
    """SampleUpdate of a request gathers on the link that it came by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, _Running] = {}
        """By the front-end's number."""
        self._by_uid: dict[int, _Running] = {}

    def add(self, link: EngineEnd, command: Add) -> None:
        clock = time.perf_counter()
        try:
            sequences = self._engine.add(
                command.prompt_ids,
                SamplingParams(**command.params),
                priority=command.priority,
                deadline=None if command.deadline is None else clock + command.deadline,
                user=command.user,
                cache_salt=command.cache_salt,
                hints=command.hints,
                pooling=command.pooling,
                adapter=command.adapter,
                number=command.id,
            )
        except (RequestError, TypeError, ValueError) as error:
            self._reject(link, command.id, str(error), getattr(error, "status", 400))
            return
        running = self._running[command.id] = _Running(link, command.id, sequences, len(sequences))
        for seq in sequences:
            self._by_uid[seq.uid] = running

    def abort(self, id: int) -> None:
        """The client is gone."""
        if running := self._running.pop(id, None):
            self._drop(running)

    def finish(self, command: Finish) -> None:
        if (running := self._running.get(command.id)) is not None:
            seq = running.sequences[command.sample]
            self._engine.finish(seq.uid, seq.prompt_len + command.tokens, FinishReason.STOP)
            self._ended(running, seq.uid)

    def abort_all(self, link: EngineEnd) -> None:
        """Its other end is gone, and with it whoever wanted them."""
        for running in [running for running in self._running.values() if running.link is link]:
            self.abort(running.id)

    def note(self, event: SequenceEvent) -> None:
        running = self._by_uid.get(event.uid)
        if running is None:
            return
        if event.reason is FinishReason.REJECTED:
            del self._running[running.id]
            self._drop(running)
            self._reject(running.link, running.id, event.detail, 400)
            return
        running.link.news.append(
            SampleUpdate(
                running.id,
                event.uid & 0xFF,
                event.tokens,
                REASONS[event.reason] if event.reason else None,
                event.hidden,
                write_logprobs(event.logprobs) if event.logprobs else [],
                write_logprobs(event.prompt_logprobs) if event.prompt_logprobs else [],
                running.sequences[0].cached,
                pooled=b"" if event.pooled_C is None else event.pooled_C.astype("<f4", copy=False).tobytes(),
            )
        )
        if event.reason is not None:
            self._ended(running, event.uid)

    def _reject(self, link: EngineEnd, id: int, detail: str, status: int) -> None:
        link.news.append(SampleUpdate(id, 0, (), REASONS[FinishReason.REJECTED], detail=detail, status=status))

    def _drop(self, running: _Running) -> None:
        for seq in running.sequences:
            if self._by_uid.pop(seq.uid, None) is not None:
                self._engine.abort(seq.uid)

    def _ended(self, running: _Running, uid: int) -> None:
        if self._by_uid.pop(uid, None) is None:
            return
        running.left -= 1
        if not running.left:
            self._running.pop(running.id, None)


def engine_stats(engine: Engine) -> EngineStats:
    scheduler, kv, counters = engine.scheduler.stats(), engine.kv.stats(), engine.counters
    return EngineStats(
        running=scheduler.running,
        waiting=scheduler.waiting,
        preemptions=scheduler.preemptions,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        drafted=counters.drafted,
        accepted=counters.accepted,
        decode_rows=counters.decode_rows,
        pages=kv.pages,
        pages_owned=kv.owned,
        pages_cached=kv.cached,
        prefix_queries=counters.entered_tokens,
        prefix_hits=counters.cached_tokens,
        evictions=kv.evictions,
        tokens_owned=kv.owned_tokens,
        tokens_used=kv.used_tokens,
    )


def perform(engine: Engine, command: Control) -> Reply:
    """The value is a Future where it takes longer: `answer` with its result when it is done."""
    operation = _OPERATIONS.get(command.op)
    if operation is None:
        return Reply(command.id, error=f"no operation {command.op!r}; there are {', '.join(_OPERATIONS)}")
    return answer(command.id, lambda: operation(engine, **command.arguments))


def answer(id: int, call: Callable[[], Any]) -> Reply:
    """What it returns, or why it fails."""
    try:
        return Reply(id, call())
    except RequestError as error:
        return Reply(id, error=str(error), status=error.status)
    except Exception as error:
        return Reply(id, error=f"{type(error).__name__}: {error}")


def _check(engine: Engine) -> dict[str, Any]:
    engine.kv.check()
    return msgspec.to_builtins(msgspec.structs.asdict(engine_stats(engine)))


def _figures(engine: Engine) -> dict[str, Any]:
    return {"counters": dataclasses.asdict(engine.counters), "stats": msgspec.structs.asdict(engine_stats(engine))}


def _load_adapter(engine: Engine, name: str, folder: str) -> Future[None]:
    return engine.load_adapter(name, folder)


def _unload_adapter(engine: Engine, name: str) -> None:
    engine.unload_adapter(name)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "check": _check,
    "reset_cache": Engine.reset_cache,
    "figures": _figures,
    "load_adapter": _load_adapter,
    "unload_adapter": _unload_adapter,
}
