"""RequestTable: the open requests of one front, over any number of engines.

A front is whatever users talk to: `LLM`, a server process, a benchmark. It submits a request with a callback. The
table validates the request, chooses an engine, numbers it and sends it. Each message of an engine goes to `receive`,
which turns the tokens of a request into text and hands the callback everything that the message brought for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.frontend.messages import (
    Abort,
    Add,
    Command,
    Control,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
    StepMessage,
)
from dovetail.core.frontend.outputs import Delta, StopStringMatcher, Timing
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.frontend.shared_counters import Board, Load
from dovetail.core.interfaces import ReplicaLoad, RequestOptions, SamplingParams
from dovetail.core.tokenizer import Tokenizer


class Transport(Protocol):
    """The way to one engine."""

    def send(self, *commands: Command) -> None:
        """Send from any thread. The engine carries out the commands of one call between the same two steps where it
        can. Raises RequestError, before anything is sent, for a value that cannot be sent."""


_new = tuple.__new__

Deliver = Callable[["OpenRequest", list[Delta], Exception | None], None]
"""Called with what one message brought for a request, and the error that ended it. `OpenRequest.ended` is already up to
date. It is called in the thread that called `receive` or `fail`, never twice at once for one request."""


class NewRequest(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    options: RequestOptions
    deliver: Deliver
    keep: Collection[str] = ()
    """Special tokens whose text is part of the output."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request between `submit` and its end. The thread that receives from its engine writes it, except where a
    field says otherwise."""

    id: int
    replica: int
    prompt_tokens: int
    deliver: Deliver
    matchers: list[StopStringMatcher]
    """One for each sample."""
    timing: Timing = field(default_factory=lambda: Timing(time.perf_counter()))
    open: set[int] = field(default_factory=set)
    """Samples that still run."""
    unread: int = 0
    """Prompt tokens while there is no output yet, else 0."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    ended: bool = False
    """The request is complete, failed or aborted. Written under the table's lock."""
    undelivered: list[Delta] = field(default_factory=list)
    """What the message at hand has brought so far."""


@dataclass(slots=True)
class _Replica:
    load: Load
    transport: Transport | None = None
    """None = the engine takes no requests."""
    stats: EngineStats = field(default_factory=EngineStats)


class RequestTable:
    """Thread-safe. It knows no event loop and no engine's life: `connect` and `fail` report when one can be reached.

    Each engine's messages must reach `receive` from one thread at a time; engines do not wait for one another.
    """

    def __init__(
        self,
        router: CheckedRouter,
        *,
        board: Board | None = None,
        validate: Callable[[NewRequest], None] = lambda new: None,
    ) -> None:
        """`board` holds the loads and request numbers that several processes share; None = there is one process.
        `validate` raises RequestError for a request that can never run; without it, engines refuse such requests."""
        self.router = router
        self.tokenizer: Tokenizer | None = None
        """Turns tokens into text; None = deltas carry tokens only."""
        self.on_stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
        """Called from `receive`, a few times a second while a replica works."""
        board = board or Board(1, router.replicas)
        self._numbers: Iterator[int] = board.numbers()
        self._validate = validate
        self._replicas = [_Replica(board.load(replica)) for replica in range(router.replicas)]
        self._requests: dict[int, OpenRequest] = {}
        self._controls = count()
        self._replies: dict[int, tuple[int, Future[Any]]] = {}
        """Number of a control -> (replica, its answer)."""
        self._lock = threading.Lock()
        """Guards what opens and closes requests. Text is made outside it."""
        self._submitting = threading.Lock()
        """Held from validation to sending: numbers rise in the order in which requests reach an engine."""

    # Engines.

    def connect(self, replica: int, transport: Transport) -> None:
        """The replica takes requests from now on."""
        self._replicas[replica].transport = transport

    def fail(self, replica: int, error: Exception) -> None:
        """The replica is gone: fail its requests and what it was asked."""
        state = self._replicas[replica]
        with self._lock:
            state.transport, state.stats = None, EngineStats()
            failed = [request for request in self._requests.values() if request.replica == replica]
            for request in failed:
                del self._requests[request.id]
                request.ended = True
            state.load.clear()
            unanswered = [number for number, (asked, _) in self._replies.items() if asked == replica]
            answers = [self._replies.pop(number)[1] for number in unanswered]
        for request in failed:
            request.deliver(request, [], error)
        for answer in answers:
            answer.set_exception(error)

    def load(self, replica: int) -> Load:
        return self._replicas[replica].load

    def stats(self, replica: int) -> EngineStats:
        """The newest figures of a replica."""
        return self._replicas[replica].stats

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._requests)

    # Requests.

    def submit(self, *new: NewRequest) -> list[OpenRequest]:
        """Queue all of these requests, or none.

        Raises RequestError for one that cannot run, EngineDown where no engine takes requests, PluginError where the
        router fails."""
        opened: list[OpenRequest] = []
        commands: dict[int, list[Command]] = {}
        with self._submitting:
            numbers = []
            for one in new:
                self._validate(one)
                numbers.append(next(self._numbers))
            try:
                for number, one in zip(numbers, new, strict=True):
                    request = self._open(number, one)
                    opened.append(request)
                    add = Add(number, one.prompt_ids, one.params, one.options)
                    commands.setdefault(request.replica, []).append(add)
                for replica, adds in commands.items():
                    self._send(replica, *adds)
            except BaseException:
                for request in opened:
                    self.abort(request)
                raise
        return opened

    def _open(self, number: int, new: NewRequest) -> OpenRequest:
        samples = new.params.n if new.options.pooling is None else 1
        matchers = [StopStringMatcher(new.params, self.tokenizer, new.keep) for _ in range(samples)]
        with self._lock:
            loads = [
                ReplicaLoad(replica, state.load.samples, state.load.prompt_tokens, state.stats.kv_usage)
                for replica, state in enumerate(self._replicas)
                if state.transport is not None
            ]
            if not loads:
                raise EngineDown("no engine takes requests")
            replica = self.router.choose(new.prompt_ids, samples, new.options, loads)
            request = OpenRequest(number, replica, len(new.prompt_ids), new.deliver, matchers)
            request.open.update(range(samples))
            request.unread = len(new.prompt_ids)
            self._requests[number] = request
            self._replicas[replica].load.add(samples, request.unread)
        return request

    def abort(self, request: OpenRequest) -> None:
        """Drop a request; its callback is not called any more. Idempotent."""
        if self._close(request):
            self._send(request.replica, Abort(request.id))

    def _send(self, replica: int, *commands: Command) -> None:
        transport = self._replicas[replica].transport
        if transport is not None:
            transport.send(*commands)

    def _close(self, request: OpenRequest) -> bool:
        """Whether the request was open until now."""
        with self._lock:
            if self._requests.pop(request.id, None) is None:
                return False
            request.ended = True
            self._replicas[request.replica].load.add(-len(request.matchers), -request.unread)
            request.unread = 0
            return True

    # Rare operations.

    def control(self, replica: int, op: str, **arguments: Any) -> Future[Any]:
        """Ask one engine for an operation of core.frontend.engine_loop, which it carries out between two steps. The
        future raises RequestError, or the error with which the replica fails."""
        number = next(self._controls)
        answer: Future[Any] = Future()
        with self._lock:
            if self._replicas[replica].transport is None:
                raise EngineDown(f"replica {replica} takes no requests")
            self._replies[number] = replica, answer
        self._send(replica, Control(number, op, arguments))
        return answer

    # Messages of engines.

    def receive(self, replica: int, message: StepMessage | Reply) -> None:
        """Take a message of a replica: deliver its updates, or answer a control."""
        if isinstance(message, Reply):
            self._answer(message)
            return
        if message.stats is not None:
            self._replicas[replica].stats = message.stats
            self.on_stats(replica, message.stats)
        if not message.updates:
            return
        now = time.perf_counter()
        find, touched = self._requests.get, []
        for update in message.updates:
            request = find(update.id)
            if request is None:
                continue
            if update.reason == "rejected":
                self._reject(request, update)
            elif update.sample in request.open:
                if not request.undelivered:
                    touched.append(request)
                request.undelivered.append(self._delta(request, update, now))
        for request in touched:
            deltas, request.undelivered = request.undelivered, []
            alive = not request.ended
            if not request.open:
                request.timing.finished = now
                alive = self._close(request)
            if alive:
                request.deliver(request, deltas, None)

    def _reject(self, request: OpenRequest, update: SampleUpdate) -> None:
        if self._close(request):
            request.deliver(request, [], RequestError(update.detail, status=update.status))

    def _delta(self, request: OpenRequest, update: SampleUpdate, now: float) -> Delta:
        sample, tokens, reason = update.sample, update.tokens, update.reason
        matcher = request.matchers[sample]
        request.cached = update.cached
        if tokens and request.unread:
            self._note_first_tokens(request, now)
        if reason is None and not matcher.stop:
            # Nearly every update. Delta(...) itself would take as long as all of this.
            text, _ = matcher.push(tokens)
            return _new(Delta, (sample, text, tokens, update.logprobs, update.prompt_logprobs, None, None))
        before = matcher.tokens
        text, stopped = matcher.push(tokens[:-1] if update.hidden else tokens)
        if stopped:
            tokens = tokens[: matcher.tokens - before]
            if reason is None:
                self._send(request.replica, Finish(request.id, sample, matcher.tokens))
            reason = "stop"
        elif reason is not None:
            text += matcher.flush()
        if reason is not None:
            request.open.discard(sample)
        logprobs = update.logprobs[: len(tokens)]
        return Delta(sample, text, tokens, logprobs, update.prompt_logprobs, reason, update.pooled)

    def _note_first_tokens(self, request: OpenRequest, now: float) -> None:
        request.timing.first_token = now
        with self._lock:
            if not request.ended:
                self._replicas[request.replica].load.add(0, -request.unread)
                request.unread = 0

    def _answer(self, reply: Reply) -> None:
        with self._lock:
            _, answer = self._replies.pop(reply.id, (0, None))
        if answer is None:
            return
        if reply.error:
            answer.set_exception(RequestError(reply.error, status=reply.status))
        else:
            answer.set_result(reply.value)
