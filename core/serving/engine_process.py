"""The engine's process: the step loop and its sockets, in one thread."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from dovetail.core.engine.counters import Counters
from dovetail.core.engine.engine import Engine
from dovetail.core.engine.output import REASONS
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import FinishReason, SamplingParams, Sequence, TokenLogprobs
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.process import SHOW_STACKS
from dovetail.core.parallel.worker import die_with, recompose, report
from dovetail.core.serving import link as sockets
from dovetail.core.serving.protocol import (
    Abort,
    Add,
    Batch,
    Command,
    Control,
    EngineInfo,
    EngineStats,
    Finish,
    LogprobWire,
    News,
    Output,
    Reply,
)

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
_MOMENT_MS = 20
"""How long an idle loop sleeps while adapters are being read."""


def main(control_fd: int, parent: int) -> None:
    """Entry of the process, which runs until it is told to stop, or the front-end is gone."""
    die_with(parent)
    # Ctrl-C and SIGTERM are the front-end's to handle; it then ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS, all_threads=True)
    control = Channel(socket.socket(fileno=control_fd))
    engine = None
    try:
        order, _ = control.recv()
        composition = recompose(order)
        engine = Engine(composition)
        began = time.perf_counter()
        engine.start(lambda phase, share: control.send({"op": "progress", "phase": phase, "share": share}))
        if order["adapters"] is not None:
            _restore_adapters(engine, order["adapters"])
        _warm_up(engine)
        loop = StepLoop(engine, control, order["link"])
        info = _describe(composition, engine, time.perf_counter() - began)
        control.send({"op": "ready", "info": msgspec.to_builtins(info)})
        # What was loaded stays: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        loop.run()
    except ChannelClosed:
        # The front-end is gone: nobody is left to tell.
        _end(engine, 1)
    except BaseException as error:
        report(control, error)
        _end(engine, 1)
    _end(engine, 0)


def _end(engine: Engine | None, status: int) -> None:
    try:
        if engine is not None:
            engine.shutdown()
        sys.stdout.flush()
    finally:
        # Threads of collectives and allocators have nothing left to do, and some of them take seconds to say so.
        os._exit(status)


def _restore_adapters(engine: Engine, wanted: dict[str, str]) -> None:
    """What was loaded and unloaded while the engine before this one ran. A folder that is gone ends nothing but its own
    adapter."""
    for name, folder in dict(engine.adapters).items():
        if wanted.get(name) != folder:
            engine.unload_adapter(name)
    for name, folder in wanted.items():
        if name not in engine.adapters:
            try:
                engine.load_adapter(name, folder).result()
            except RequestError as error:
                log.error("adapter %s was not loaded again: %s", name, error)


def _warm_up(engine: Engine) -> None:
    """A request of our own before the first user's: kernels and libraries load when they are first used."""
    spec = engine.info.spec
    token = next(iter(spec.eos_ids), 0)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add([token] * 2, params, pooling=None if spec.head else "last")
    while engine.has_work:
        engine.step()
    engine.counters = Counters()


def _describe(composition: Composition, engine: Engine, seconds: float) -> EngineInfo:
    model = composition.part("model")
    folder = model.target().source(model.config).folder
    info = engine.info
    return EngineInfo(
        model=model.name if folder is None else folder.resolve().name,
        folder=None if folder is None else str(folder.resolve()),
        vocab=info.spec.vocab,
        max_len=info.max_len,
        max_seqs=composition.engine.max_seqs,
        device=str(info.device),
        start_seconds=seconds,
        embedding=info.spec.embedding,
        hidden=info.spec.hidden,
        head=info.spec.head,
        adapters=dict(engine.adapters),
        num_pages=dict(info.num_pages),
        lookahead=info.lookahead,
        phases=dict(info.phases),
        notes=list(info.notes),
    )


@dataclass(slots=True)
class _Link:
    """The engine's end of what joins it to one process that uses it."""

    commands: zmq.Socket[bytes]
    outputs: zmq.Socket[bytes]
    taken: int = 0
    """Commands."""
    told: int = 0
    """Of those, how many the other end knows to be carried out."""
    news: list[News] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """One request in the engine."""

    link: _Link
    id: int
    sequences: list[Sequence]
    left: int
    """Samples that still run."""


class StepLoop:
    """Takes commands between two steps; sends what each step brought as one message to each link that it concerns."""

    def __init__(self, engine: Engine, control: Channel, link: Mapping[str, str]) -> None:
        """`link`: the addresses of the first, whose number is 0."""
        self.engine, self._control = engine, control
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._links: dict[int, _Link] = {}
        """By number."""
        self._by_socket: dict[zmq.Socket[bytes], _Link] = {}
        self._requests: dict[int, _Running] = {}
        self._by_uid: dict[int, _Running] = {}
        self._stats_due = 0.0
        self._loading: list[tuple[_Link, int, Future[None]]] = []
        """Commands that are answered when this is done."""
        self._attach(0, **link)

    def run(self) -> None:
        engine = self.engine
        while self._take_commands():
            if engine.has_work:
                for event in engine.step():
                    self._note(event)
            self._publish()

    def _take_commands(self) -> bool:
        """Carry out what arrived; sleeps only while the engine has nothing to do. False = stop."""
        idle = not self.engine.has_work
        if idle and (self._stats_due or any(link.told < link.taken for link in self._links.values())):
            # The last word before silence, so that gauges do not stay where they were.
            stats, self._stats_due = self._stats(), 0.0
            for one in self._links.values():
                self._tell(one, stats, idle=True)
        patience = _MOMENT_MS if self._loading else None
        for source, _ in self._poller.poll(patience if idle else 0):
            if (link := self._by_socket.get(source)) is not None:
                self._take(link)
            elif not self._ordered():
                return False
        if self._loading:
            self._answer_loaded()
        return True

    def _take(self, link: _Link) -> None:
        while True:
            try:
                data = link.commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(link, self._decoder.decode(data))
            link.taken += 1

    def _answer_loaded(self) -> None:
        done = [entry for entry in self._loading if entry[2].done()]
        self._loading = [entry for entry in self._loading if entry not in done]
        for link, id, future in done:
            self._send(link, _reply(id, future.result))

    # Links.

    def _ordered(self) -> bool:
        """What the process that started this one says; False = stop."""
        message, _ = self._control.recv()
        match message["op"]:
            case "attach":
                self._attach(message["link"], message["commands"], message["outputs"])
                # The first word says that commands may come.
                self._tell(self._links[message["link"]], self._stats(), idle=not self.engine.has_work)
            case "detach":
                self._detach(message["link"])
            case "stop":
                return False
            case other:
                raise ValueError(f"the engine's process was sent {other!r}")
        return True

    def _attach(self, number: int, commands: str, outputs: str) -> None:
        link = _Link(self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH))
        link.outputs.linger = 1000
        sockets.bind(link.commands, commands)
        sockets.connect(link.outputs, outputs)
        self._poller.register(link.commands, zmq.POLLIN)
        self._links[number] = self._by_socket[link.commands] = link

    def _detach(self, number: int) -> None:
        """Its other end is gone, and with it whoever wanted its requests."""
        link = self._links.pop(number, None)
        if link is None:
            return
        for running in [running for running in self._requests.values() if running.link is link]:
            del self._requests[running.id]
            self._drop(running)
        self._loading = [entry for entry in self._loading if entry[0] is not link]
        self._poller.unregister(link.commands)
        del self._by_socket[link.commands]
        link.commands.close(linger=0)
        link.outputs.close(linger=0)

    # Requests.

    def _obey(self, link: _Link, command: Command) -> None:
        match command:
            case Add():
                self._add(link, command)
            case Abort():
                if running := self._requests.pop(command.id, None):
                    self._drop(running)
            case Finish():
                if (running := self._requests.get(command.id)) is not None:
                    seq = running.sequences[command.sample]
                    self.engine.finish(seq.uid, seq.prompt_len + command.tokens, FinishReason.STOP)
                    self._ended(running, seq.uid)
            case Control():
                self._control_engine(link, command)

    def _add(self, link: _Link, command: Add) -> None:
        clock = time.perf_counter()
        try:
            sequences = self.engine.add(
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
        running = self._requests[command.id] = _Running(link, command.id, sequences, len(sequences))
        for seq in sequences:
            self._by_uid[seq.uid] = running

    def _reject(self, link: _Link, id: int, detail: str, status: int) -> None:
        link.news.append(News(id, 0, (), REASONS[FinishReason.REJECTED], detail=detail, status=status))

    def _drop(self, running: _Running) -> None:
        for seq in running.sequences:
            if self._by_uid.pop(seq.uid, None) is not None:
                self.engine.abort(seq.uid)

    def _ended(self, running: _Running, uid: int) -> None:
        if self._by_uid.pop(uid, None) is None:
            return
        running.left -= 1
        if not running.left:
            self._requests.pop(running.id, None)

    def _note(self, event: SequenceEvent) -> None:
        running = self._by_uid.get(event.uid)
        if running is None:
            return
        sample = event.uid & 0xFF
        seq = running.sequences[sample]
        if event.reason is FinishReason.REJECTED:
            del self._requests[running.id]
            self._drop(running)
            self._reject(running.link, running.id, event.detail, 400)
            return
        tokens = event.tokens
        stop = event.reason is FinishReason.STOP and bool(tokens)
        hidden = stop and not seq.request.params.include_stop and tokens[-1] in seq.request.stop_ids
        running.link.news.append(
            News(
                running.id,
                sample,
                tokens,
                REASONS[event.reason] if event.reason else None,
                hidden,
                _wire(event.logprobs) if event.logprobs else [],
                _wire(event.prompt_logprobs) if event.prompt_logprobs else [],
                running.sequences[0].cached,
                pooled=b"" if event.pooled_C is None else event.pooled_C.astype("<f4", copy=False).tobytes(),
            )
        )
        if event.reason is not None:
            self._ended(running, event.uid)

    def _publish(self) -> None:
        now = time.perf_counter()
        stats = None
        if now >= self._stats_due:
            # Without news, too: a long prompt has none for many steps, and silence would look like death.
            stats, self._stats_due = self._stats(), now + _STATS_SECONDS
        for link in self._links.values():
            if stats is not None or link.news:
                self._tell(link, stats)

    def _tell(self, link: _Link, stats: EngineStats | None, *, idle: bool = False) -> None:
        self._send(link, Batch(link.news, stats, link.taken, idle))
        link.news, link.told = [], link.taken

    def _send(self, link: _Link, message: Output) -> None:
        sockets.send(link.outputs, self._encoder.encode(message))

    def _stats(self) -> EngineStats:
        scheduler, kv, counters = self.engine.scheduler.stats(), self.engine.kv.stats(), self.engine.counters
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

    def _control_engine(self, link: _Link, command: Control) -> None:
        operation = _OPERATIONS.get(command.op)
        if operation is None:
            there = ", ".join(_OPERATIONS)
            self._send(link, Reply(command.id, error=f"no operation {command.op!r}; there are {there}"))
            return
        reply = _reply(command.id, lambda: operation(self, **command.arguments))
        if isinstance(reply.value, Future):
            self._loading.append((link, command.id, reply.value))
        else:
            self._send(link, reply)


def _reply(id: int, call: Callable[[], Any]) -> Reply:
    try:
        return Reply(id, call())
    except RequestError as error:
        return Reply(id, error=str(error), status=error.status)
    except Exception as error:
        return Reply(id, error=f"{type(error).__name__}: {error}")


def _wire(logprobs: Iterable[TokenLogprobs]) -> list[LogprobWire]:
    return [(entry.logprob, list(entry.top)) for entry in logprobs]


def _check(loop: StepLoop) -> dict[str, Any]:
    loop.engine.kv.check()
    return msgspec.to_builtins(msgspec.structs.asdict(loop._stats()))


def _reset_cache(loop: StepLoop) -> bool:
    return loop.engine.reset_cache()


def _load_adapter(loop: StepLoop, name: str, folder: str) -> Future[None]:
    return loop.engine.load_adapter(name, folder)


def _unload_adapter(loop: StepLoop, name: str) -> None:
    loop.engine.unload_adapter(name)


def _figures(loop: StepLoop) -> dict[str, Any]:
    stats = msgspec.structs.asdict(loop._stats())
    return {"counters": dataclasses.asdict(loop.engine.counters), "stats": stats}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "check": _check,
    "reset_cache": _reset_cache,
    "figures": _figures,
    "load_adapter": _load_adapter,
    "unload_adapter": _unload_adapter,
}
