"""RequestTable: the open requests of one front, over any number of engines. A front (`LLM`, a server process, a
benchmark) submits a request with a callback. The table validates it, asks the router for an engine, numbers it and
sends it. Each message of an engine goes to `receive`, which turns tokens into text and calls the callback once with all
the output of the request in that message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

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
from dovetail.core.frontend.shared_counters import Load, SharedCounters
from dovetail.core.interfaces import ReplicaLoad, RequestOptions, SamplingParams
from dovetail.core.interfaces.request_values import faults, token_ids
from dovetail.core.tokenizer import Tokenizer


class Transport(Protocol):
    """Connection to one engine."""

    def send(self, *commands: Command) -> None:
        """Send commands, from any thread; the engine executes them between the same two steps if it can. Commands to a
        dead engine are dropped. Raises RequestError, before anything is sent, for a value that cannot be encoded."""


_new = tuple.__new__
"""Creates a named tuple in a third of the time of a call of its class."""


class Delivery(NamedTuple):
    """Output of one request from one message."""

    deltas: list[Delta]
    error: Exception | None = None
    """Error that ended the request."""
    last: bool = False
    """The request is complete or has failed: no delivery follows."""


Deliver = Callable[["OpenRequest", Delivery], None]
"""Takes the output of a request, in the thread that called `receive` or `fail`. Calls for one request never overlap. It
must not block or raise, since that thread serves all requests of the engine."""


class NewRequest(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    options: RequestOptions
    deliver: Deliver
    keep: Collection[str] = ()
    """Special tokens whose text is part of the output."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request from `submit` on. Written by `receive`'s thread; `unread` and `ended` under the table's lock."""

    id: int
    replica: int
    prompt_tokens: int
    deliver: Deliver
    matchers: list[StopStringMatcher]
    """One for each sample."""
    timing: Timing = field(default_factory=lambda: Timing(time.perf_counter()))
    open: set[int] = field(default_factory=set)
    """Samples without a finish reason."""
    unread: int = 0
    """Prompt tokens, as long as there is no output; then 0."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    ended: bool = False
    """The request is complete, failed or aborted."""
    undelivered: list[Delta] = field(default_factory=list)
    """Output from the part of the current message that has been processed."""


@dataclass(slots=True)
class _Replica:
    load: Load
    transport: Transport | None = None
    """None = the engine takes no requests."""
    stats: EngineStats = field(default_factory=EngineStats)
    delivering: threading.RLock = field(default_factory=threading.RLock)
    """Held while callbacks are called, so that `fail` cannot overtake a delivery of `receive`."""


def _checked(new: NewRequest) -> NewRequest:
    """Return the request with plain, valid values: an error of a router, scheduler or sampler would fail others."""
    if not isinstance(new.params, SamplingParams) or not isinstance(new.options, RequestOptions):
        given = f"{type(new.params).__name__} and {type(new.options).__name__}"
        raise RequestError(f"a request has SamplingParams and RequestOptions; given were {given}")
    try:
        params = SamplingParams.model_validate(new.params)
    except ValidationError as error:
        raise RequestError(faults(error)) from None
    return new._replace(prompt_ids=token_ids(new.prompt_ids), params=params)


class RequestTable:
    """Thread-safe. `connect` and `fail` report which engines can be reached. Messages of one engine must reach
    `receive` from one thread at a time; engines do not wait for each other. Callbacks may call `submit` and `abort`:
    only `receive` and `fail` take `delivering`, and only as their first lock."""

    def __init__(
        self,
        router: CheckedRouter,
        *,
        counters: SharedCounters | None = None,
        validate: Callable[[NewRequest], None] = lambda new: None,
    ) -> None:
        """`counters` has the loads and request numbers of all processes that use the engines; None = only this one.
        `validate` raises RequestError for a request that can never run; without it, engines refuse such requests."""
        self._router = router
        self.tokenizer: Tokenizer | None = None
        """None = deltas have tokens and no text."""
        self.on_stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
        """Called from `receive`, a few times a second while a replica works."""
        self._counters = counters or SharedCounters(1, router.replicas)
        self._validate = validate
        self._replicas = [_Replica(self._counters.load(replica)) for replica in range(router.replicas)]
        self._requests: dict[int, OpenRequest] = {}
        self._controls = count()
        self._replies: dict[int, tuple[int, Future[Any]]] = {}
        """Number of a control -> (replica, its answer)."""
        self._lock = threading.RLock()
        """Held while requests and controls are opened and closed, not while text is made. Reentrant: the garbage
        collector may close an abandoned `LLM.stream`, which aborts its request, in a thread that holds the lock."""
        self._submitting = threading.Lock()
        """Held from numbering to sending, so that request numbers rise in the order in which an engine gets them."""

    def connect(self, replica: int, transport: Transport) -> None:
        """Send requests to the replica from now on."""
        self._replicas[replica].transport = transport

    def fail(self, replica: int, error: Exception) -> None:
        """Disconnect a dead replica; its requests and controls fail with `error`."""
        state = self._replicas[replica]
        with state.delivering:
            with self._lock:
                state.transport, state.stats = None, EngineStats()
                failed = [request for request in list(self._requests.values()) if request.replica == replica]
                for request in failed:
                    del self._requests[request.id]
                    request.ended = True
                state.load.clear()
                unanswered = [number for number, (at, _) in self._replies.items() if at == replica]
                answers = [self._replies.pop(number)[1] for number in unanswered]
            for request in failed:
                request.deliver(request, Delivery([], error, True))
        for answer in answers:
            answer.set_exception(error)

    def forget(self, replica: int) -> None:
        """Notify the router that the replica's prefix cache is empty."""
        with self._lock:
            self._router.forget(replica)

    def load(self, replica: int) -> Load:
        return self._replicas[replica].load

    def stats(self, replica: int) -> EngineStats:
        """Return the latest figures of a replica."""
        return self._replicas[replica].stats

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._requests)

    def submit(self, *new: NewRequest) -> list[OpenRequest]:
        """Queue all of these requests, or none. Raises RequestError for a request that cannot run, EngineDown if no
        engine is connected, PluginError if the router fails."""
        opened: list[OpenRequest] = []
        commands: dict[int, list[Command]] = {}
        numbers: list[int] = []
        try:
            new = tuple(map(_checked, new))
            with self._submitting:
                for one in new:
                    self._validate(one)
                    numbers.append(self._counters.next_number())
                for number, one in zip(numbers, new, strict=True):
                    request = self._open(number, one)
                    opened.append(request)
                    add = Add(number, one.prompt_ids, one.params, one.options)
                    commands.setdefault(request.replica, []).append(add)
                for replica, adds in commands.items():
                    self._send(replica, *adds)
        except BaseException:
            # By number: Ctrl-C may have come after a request was opened, but before it was in `opened`.
            for number in numbers:
                if (left := self._requests.get(number)) is not None:
                    self.abort(left)
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
            replica = self._router.choose(new.prompt_ids, samples, new.options, loads)
            request = OpenRequest(number, replica, len(new.prompt_ids), new.deliver, matchers)
            request.open.update(range(samples))
            request.unread = len(new.prompt_ids)
            self._replicas[replica].load.add(samples, request.unread)
            self._requests[number] = request
        return request

    def abort(self, request: OpenRequest) -> None:
        """Drop a request; idempotent. A callback may still be running in another thread, but none begins."""
        if self._close(request):
            self._send(request.replica, Abort(request.id))

    def _send(self, replica: int, *commands: Command) -> None:
        transport = self._replicas[replica].transport
        if transport is not None:
            transport.send(*commands)

    def _close(self, request: OpenRequest) -> bool:
        """Close a request; return whether it was open."""
        with self._lock:
            if self._requests.pop(request.id, None) is None:
                return False
            request.ended = True
            self._replicas[request.replica].load.add(-len(request.matchers), -request.unread)
            request.unread = 0
            return True

    def control(self, replica: int, op: str, **arguments: Any) -> Future[Any]:
        """Run an operation of engine_loop between two steps. The future raises RequestError or the replica's error."""
        number = next(self._controls)
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # A caller that leaves must not cancel what `receive` resolves.
        with self._lock:
            if self._replicas[replica].transport is None:
                raise EngineDown(f"replica {replica} takes no requests")
            self._replies[number] = replica, answer
        try:
            self._send(replica, Control(number, op, arguments))
        except RequestError as error:
            self._answer(Reply(number, error=str(error), status=error.status))
        return answer

    def receive(self, replica: int, message: StepMessage | Reply) -> None:
        """Handle a message of a replica: deliver its updates, or resolve a control."""
        if isinstance(message, Reply):
            self._answer(message)
            return
        state = self._replicas[replica]
        if message.stats is not None:
            state.stats = message.stats
            self.on_stats(replica, message.stats)
        if not message.updates:
            return
        now = time.perf_counter()
        find, touched = self._requests.get, []
        for update in message.updates:
            request = find(update.id)
            if request is None:
                continue
            if (reason := update.reason) is not None and reason == "rejected":
                with state.delivering:
                    if self._close(request):
                        request.deliver(request, Delivery([], RequestError(update.detail, status=update.status), True))
            elif update.sample in request.open:
                delta = self._delta(request, update, now)
                if request.undelivered:
                    request.undelivered.append(delta)
                else:
                    touched.append(request)
                    request.undelivered = [delta]
        with state.delivering:
            for request in touched:
                deltas, request.undelivered = request.undelivered, []
                last = not request.open
                if last:
                    request.timing.finished = now
                # The request may have been aborted or have failed since its text was made.
                if self._close(request) if last else not request.ended:
                    request.deliver(request, _new(Delivery, (deltas, None, last)))

    def _delta(self, request: OpenRequest, update: SampleUpdate, now: float) -> Delta:
        sample, tokens, reason = update.sample, update.tokens, update.reason
        matcher = request.matchers[sample]
        request.cached = update.cached
        if tokens and request.unread:
            self._note_first_tokens(request, now)
        if reason is None and not matcher.stop:
            # Nearly every update takes this path.
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
