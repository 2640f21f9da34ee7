"""The loop around one engine: it takes commands between two steps and sends the output of each step. It runs in an
engine process, over sockets, or in a thread of the user's process, over a queue. Only its thread uses the engine."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from pydantic import ValidationError

from dovetail.core.engine.engine import Engine
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import PluginError, RequestError
from dovetail.core.frontend.messages import (
    Abort,
    Add,
    Attach,
    Command,
    Control,
    Detach,
    EngineInfo,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
)
from dovetail.core.frontend.outputs import REASONS
from dovetail.core.interfaces import FinishReason, SamplingParams, Sequence
from dovetail.core.interfaces.request_values import faults
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.failure import for_user

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
_LOADING_SECONDS = 0.02
"""Interval at which an idle loop checks whether adapters have been read."""


class Port(Protocol):
    """The engine's end of the connection to one user."""

    updates: list[SampleUpdate]
    """Updates that the next `send_step` sends."""

    @property
    def up_to_date(self) -> bool:
        """Whether the user has been sent the count of all executed commands."""

    def send_step(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        """Send the updates as one StepMessage."""

    def send(self, reply: Reply) -> None: ...


class CommandSource(Protocol):
    """Source of the commands of all users."""

    stopped: bool
    """Whether the loop must end."""
    delays_launches: bool
    """Whether a launch may wait for commands (engine.late_launch)."""

    @property
    def ports(self) -> Collection[Port]: ...

    def receive(self, seconds: float | None) -> Iterator[tuple[Port, Command | Attach | Detach]]:
        """Yield commands that have arrived, waiting at most this long for the first; None = without limit. A command
        counts as executed when the next one is requested."""


class EngineLoop:
    def __init__(self, engine: Engine, commands: CommandSource) -> None:
        self._engine, self._commands = engine, commands
        self._requests = EngineRequests(engine)
        self._stats_due = 0.0
        self._loading: list[tuple[Port, int, Future[None]]] = []
        """Controls to be answered when their future is done."""

    def run(self) -> None:
        """Run until `commands` has stopped. Raises ChannelClosed if the front-end has ended, a DovetailError that names
        the failed component for any other error."""
        engine, requests = self._engine, self._requests
        try:
            while self._take_commands():
                if engine.has_work:
                    requests.note(engine.step())
                self._publish()
        except ChannelClosed:
            raise
        except (Exception, SystemExit) as error:
            raise for_user(error, engine.composition)  # noqa: B904 the cause is set

    def _take_commands(self) -> bool:
        """Execute arrived commands; wait for some if there is no work or launch can wait. False = the loop ends."""
        engine, commands = self._engine, self._commands
        idle = not engine.has_work
        if idle and (self._stats_due or not all(port.up_to_date for port in commands.ports)):
            # The last message of a busy period, so that gauges do not keep old values.
            stats, self._stats_due = engine_stats(engine), 0.0
            for port in commands.ports:
                port.send_step(stats, idle=True)
        timeout = (_LOADING_SECONDS if self._loading else None) if idle else 0.0
        while True:
            for port, command in commands.receive(timeout):
                self._execute(port, command)
            if commands.stopped:
                return False
            if self._loading:
                self._answer_loaded()
            timeout = engine.launch_delay() if commands.delays_launches else 0.0
            if not timeout:
                return True

    def _execute(self, port: Port, command: Command | Attach | Detach) -> None:
        match command:
            case Add():
                self._requests.add(port, command)
            case Abort():
                self._requests.abort(command.id)
            case Finish():
                self._requests.finish(command)
            case Control():
                reply = perform(self._engine, command)
                if isinstance(reply.value, Future):
                    self._loading.append((port, command.id, reply.value))
                else:
                    port.send(reply)
            case Attach():
                # The first message shows that the port is bound.
                port.send_step(engine_stats(self._engine), idle=not self._engine.has_work)
            case Detach():
                self._requests.abort_all(port)
                self._loading = [entry for entry in self._loading if entry[0] is not port]

    def _answer_loaded(self) -> None:
        done = [entry for entry in self._loading if entry[2].done()]
        self._loading = [entry for entry in self._loading if entry not in done]
        for port, id, future in done:
            port.send(answer(id, future.result))

    def _publish(self) -> None:
        now = time.perf_counter()
        stats = None
        if now >= self._stats_due:
            # Also without updates: a long prompt has none for many steps, and the engine would seem to hang.
            stats, self._stats_due = engine_stats(self._engine), now + _STATS_SECONDS
        for port in self._commands.ports:
            if stats is not None or port.updates:
                port.send_step(stats)


@dataclass(slots=True)
class _EngineRequest:
    """One request of a user."""

    port: Port
    id: int
    sequences: list[Sequence]
    left: int
    """Number of samples that run."""


class EngineRequests:
    """All users' requests in one engine: commands become sequences, and step events updates on the request's port."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[int, _EngineRequest] = {}
        """Number -> request."""
        self._by_uid: dict[int, _EngineRequest] = {}

    def add(self, port: Port, command: Add) -> None:
        try:
            params = SamplingParams.model_validate(command.params)
            sequences = self._engine.add(command.prompt_ids, params, command.options, number=command.id)
        except RequestError as error:
            self._reject(port, command.id, str(error), error.status)
            return
        except ValidationError as error:
            self._reject(port, command.id, faults(error), 400)
            return
        except PluginError as error:
            log.exception("request %d is refused", command.id)
            self._reject(port, command.id, str(error), 500)
            return
        request = self._requests[command.id] = _EngineRequest(port, command.id, sequences, len(sequences))
        for seq in sequences:
            self._by_uid[seq.uid] = request

    def abort(self, id: int) -> None:
        """Drop a request; no effect if it has ended."""
        if request := self._requests.pop(id, None):
            self._drop(request)

    def finish(self, command: Finish) -> None:
        """End a sample at a stop string."""
        if (request := self._requests.get(command.id)) is not None:
            seq = request.sequences[command.sample]
            self._engine.finish(seq.uid, seq.prompt_len + command.tokens, FinishReason.STOP)
            self._ended(request, seq.uid)

    def abort_all(self, port: Port) -> None:
        for request in [request for request in self._requests.values() if request.port is port]:
            self.abort(request.id)

    def note(self, events: Iterable[SequenceEvent]) -> None:
        """Turn the events of a step into updates for their users."""
        find = self._by_uid.get
        for event in events:
            uid, tokens, logprobs, prompt_logprobs, reason, detail, pooled_C, hidden, status = event
            request = find(uid)
            if request is None:
                continue
            if reason is FinishReason.REJECTED:
                del self._requests[request.id]
                self._drop(request)
                self._reject(request.port, request.id, detail, status)
                continue
            text = None if reason is None else REASONS[reason]
            cached = request.sequences[0].cached
            request.port.updates.append(
                SampleUpdate(
                    request.id, uid & 0xFF, tokens, text, hidden, logprobs, prompt_logprobs, cached, "", 0, pooled_C
                )
            )
            if reason is not None:
                self._ended(request, uid)

    def _reject(self, port: Port, id: int, detail: str, status: int) -> None:
        port.updates.append(SampleUpdate(id, 0, (), REASONS[FinishReason.REJECTED], detail=detail, status=status))

    def _drop(self, request: _EngineRequest) -> None:
        for seq in request.sequences:
            if self._by_uid.pop(seq.uid, None) is not None:
                self._engine.abort(seq.uid)

    def _ended(self, request: _EngineRequest, uid: int) -> None:
        if self._by_uid.pop(uid, None) is None:
            return
        request.left -= 1
        if not request.left:
            self._requests.pop(request.id, None)


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
    """Run an operation. If the reply's value is a Future, the final reply is `answer(id, future.result)`, once done."""
    operation = _OPERATIONS.get(command.op)
    if operation is None:
        return Reply(command.id, error=f"no operation {command.op!r}; there are {', '.join(_OPERATIONS)}")
    return answer(command.id, lambda: operation(engine, **command.arguments))


def answer(id: int, call: Callable[[], Any]) -> Reply:
    """Return a Reply with the result of the call, or with its error."""
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


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "check": _check,
    "reset_cache": Engine.reset_cache,
    "figures": _figures,
    "load_adapter": Engine.load_adapter,
    "unload_adapter": Engine.unload_adapter,
}


def describe_engine(composition: Composition, engine: Engine, seconds: float) -> EngineInfo:
    """Describe an engine that has started in `seconds`."""
    model = composition.part("model")
    checkpoint = model.target().source(model.config).checkpoint
    info = engine.info
    return EngineInfo(
        model=model.name if checkpoint is None else checkpoint.name,
        checkpoint=None if checkpoint is None else str(checkpoint.path.resolve()),
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
        tuning=info.tuning,
    )
