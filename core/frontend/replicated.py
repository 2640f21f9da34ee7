"""ReplicatedEngine: engine.dp engines in processes of their own, driven as one. For Python and benchmarks."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from dovetail.core.engine.counters import Counters
from dovetail.core.engine.requests import RequestBuilder
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.frontend.engine_process import EngineProcess
from dovetail.core.frontend.messages import (
    Abort,
    Control,
    EngineInfo,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
    StepMessage,
    encode_add,
    read_logprobs,
)
from dovetail.core.frontend.outputs import REASONS
from dovetail.core.frontend.replicas import FrontDoor, arrival_of, replica_compositions, replica_environment
from dovetail.core.interfaces import (
    ExecutorInfo,
    FinishReason,
    ModelSpec,
    Pooling,
    Progress,
    ReplicaLoad,
    SamplingParams,
    Sequence,
)

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_FINISH = {text: reason for reason, text in REASONS.items()}


class ReplicaError(DovetailError):
    """A replica died, or refused what it was asked, and so the run is over."""


class Figures(NamedTuple):
    """What one replica has counted since it was ready."""

    counters: Counters
    stats: EngineStats


class _Said(NamedTuple):
    replica: int
    op: str
    """"progress", "ready", "message" or "death"."""
    value: Any


@dataclass(slots=True)
class _Replica:
    process: EngineProcess
    info: EngineInfo | None = None
    samples: int = 0
    prompt_tokens: int = 0
    """Of requests that have no output yet."""
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(slots=True)
class _Running:
    """One request on a replica."""

    replica: int
    sequences: list[Sequence]
    open: set[int]
    """Samples that still run."""
    unread: int
    """Prompt tokens, until there is output."""


class _Ear:
    """Hands over what an engine's process says, which comes in a thread of its own."""

    def __init__(self, replica: int, inbox: queue.SimpleQueue[_Said]) -> None:
        self._replica, self._inbox = replica, inbox

    def on_progress(self, process: EngineProcess, phase: str) -> None:
        self._inbox.put(_Said(self._replica, "progress", phase))

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None:
        self._inbox.put(_Said(self._replica, "ready", info))

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None:
        self._inbox.put(_Said(self._replica, "message", message))

    def on_death(self, process: EngineProcess, cause: str) -> None:
        self._inbox.put(_Said(self._replica, "death", cause))


class ReplicatedEngine:
    """Has the methods of Engine that LLM and benchmarks call, from one thread. Which replica runs a request is the
    router's choice; numbers, and so random draws, are those that one engine would give. When a replica dies, the next
    `step` raises ReplicaError, and only `shutdown` may follow."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.on_stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
        """Told a few times a second while that replica works, within `step`."""
        self._door = FrontDoor(composition)
        self._inbox: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._waiting: deque[_Said] = deque()
        """Came while something else was waited for."""
        self._replicas: list[_Replica] = []
        self._requests: dict[int, _Running] = {}
        self._controls = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()

    # Its life.

    def start(self, progress: Progress = lambda phase, share: None) -> None:
        environment = replica_environment(self.composition)
        for number, one in enumerate(replica_compositions(self.composition)):
            process = EngineProcess(one, _Ear(number, self._inbox), environment=environment)
            self._replicas.append(_Replica(process))
        try:
            for replica in self._replicas:
                replica.process.start()
            while not all(replica.info for replica in self._replicas):
                number, op, value = self._heard(self._inbox.get())
                if op == "ready":
                    self._replicas[number].info = value
                elif op == "progress" and all(replica.info for replica in self._replicas[:number]):
                    progress(value, None)
            self.info = self._describe()
            first = self._replicas[0].info
            self._adapters = dict(first.adapters if first is not None else {})
            self._intake = RequestBuilder(self.composition, self.info.spec, self.info.max_len)
        except BaseException:
            self.shutdown()
            raise

    def _describe(self) -> ExecutorInfo:
        """Of all replicas together: the slowest phase, the fewest pages, every note."""
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        model = self.composition.part("model")
        spec: ModelSpec = model.target().spec(model.config)
        return ExecutorInfo(
            spec=spec,
            groups=(),
            num_pages={group: min(info.num_pages[group] for info in infos) for group in infos[0].num_pages},
            max_len=min(info.max_len for info in infos),
            lookahead=infos[0].lookahead,
            device=infos[0].device,
            phases={name: max(info.phases.get(name, 0.0) for info in infos) for name in infos[0].phases},
            notes=tuple(dict.fromkeys(note for info in infos for note in info.notes)),
        )

    def interrupt(self) -> None:
        """As `Engine.interrupt`. A step here waits for no replica; one that hangs is killed by `shutdown`."""

    def shutdown(self) -> None:
        """Idempotent."""
        replicas, self._replicas = self._replicas, []
        if replicas:
            with ThreadPoolExecutor(len(replicas)) as pool:
                list(pool.map(lambda replica: replica.process.stop(), replicas))

    # Requests.

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        user: str = "",
        cache_salt: str = "",
        hints: Mapping[str, float] | None = None,
        pooling: Pooling | None = None,
        adapter: str = "",
    ) -> list[Sequence]:
        """As `Engine.add`; the sequences stay as long as their prompt, with `cached` once there is output."""
        if adapter and adapter not in self._adapters:
            there = ", ".join(self._adapters) or "none"
            raise RequestError(f"adapter: {adapter!r} is not loaded; there is {there}", status=404)
        told: dict[str, Any] = {"priority": priority, "user": user, "cache_salt": cache_salt, "hints": hints or {}}
        sequences = self._intake.sequences(prompt_ids, params, deadline=deadline, pooling=pooling, **told)
        request = sequences[0].request
        loads = [
            ReplicaLoad(number, replica.samples, replica.prompt_tokens, replica.stats.kv_usage)
            for number, replica in enumerate(self._replicas)
        ]
        number = self._door.choose(arrival_of(request.prompt_ids, len(sequences), adapter=adapter, **told), loads)
        left = None if deadline is None else deadline - time.perf_counter()
        add = encode_add(
            self._encoder,
            request.uid,
            request.prompt_ids,
            request.params,
            deadline=left,
            pooling=pooling,
            adapter=adapter,
            **told,
        )
        running = _Running(number, sequences, {seq.sample for seq in sequences}, len(request.prompt_ids))
        self._requests[request.uid] = running
        replica = self._replicas[number]
        replica.samples += len(sequences)
        replica.prompt_tokens += running.unread
        replica.process.send(add)
        return sequences

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """As `Engine.finish`."""
        number, sample = uid >> 8, uid & 0xFF
        running = self._requests.get(number)
        if running is not None and sample in running.open:
            kept = keep_len - running.sequences[sample].prompt_len
            self._replicas[running.replica].process.send(self._encoder.encode(Finish(number, sample, kept)))
            self._close(number, running, sample)

    def abort(self, uid: int) -> None:
        """The client is gone: every sample of the request ends."""
        number = uid >> 8
        running = self._requests.get(number)
        if running is not None:
            self._replicas[running.replica].process.send(self._encoder.encode(Abort(number)))
            self._close(number, running, *running.open)

    def replica_of(self, uid: int) -> int:
        """Of a sequence that runs."""
        return self._requests[uid >> 8].replica

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    # Steps.

    def step(self, wait: float = 0.02) -> list[SequenceEvent]:
        """What came from any replica; waits so many seconds for something."""
        events: list[SequenceEvent] = []
        deadline = time.perf_counter() + wait
        while True:
            try:
                said = self._waiting.popleft() if self._waiting else self._next(deadline, bool(events))
            except queue.Empty:
                return events
            number, _, batch = self._heard(said)
            if batch.stats is not None:
                self._replicas[number].stats = batch.stats
                self.on_stats(number, batch.stats)
            for news in batch.news:
                if (event := self._event(news)) is not None:
                    events.append(event)

    def _next(self, deadline: float, some: bool) -> _Said:
        """Whoever has something to tell takes what else is there, and waits for nothing."""
        return self._inbox.get(block=not some, timeout=max(deadline - time.perf_counter(), 0.0))

    def _event(self, news: SampleUpdate) -> SequenceEvent | None:
        running = self._requests.get(news.id)
        if running is None:
            return None
        if news.reason == "rejected":
            uid = running.sequences[0].uid
            self._close(news.id, running, *running.open)
            return SequenceEvent(uid, (), reason=FinishReason.REJECTED, detail=news.detail)
        if news.sample not in running.open:
            return None
        self._has_read(running)
        running.sequences[0].cached = news.cached
        if news.reason is not None:
            self._close(news.id, running, news.sample)
        return SequenceEvent(
            running.sequences[news.sample].uid,
            news.tokens,
            read_logprobs(news.logprobs) if news.logprobs else (),
            read_logprobs(news.prompt_logprobs) if news.prompt_logprobs else (),
            None if news.reason is None else _FINISH[news.reason],
            pooled_C=np.frombuffer(news.pooled, "<f4") if news.pooled else None,
            hidden=news.hidden,
        )

    def _close(self, number: int, running: _Running, *samples: int) -> None:
        running.open.difference_update(samples)
        self._replicas[running.replica].samples -= len(samples)
        if not running.open:
            self._has_read(running)
            del self._requests[number]

    def _has_read(self, running: _Running) -> None:
        self._replicas[running.replica].prompt_tokens -= running.unread
        running.unread = 0

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, str]:
        """As `Engine.adapters`: those that every replica has."""
        return self._adapters

    def load_adapter(self, name: str, folder: str) -> Future[None]:
        """As `Engine.load_adapter`, on every replica or on none; done when it returns. Raises RequestError."""
        replies = self._ask("load_adapter", name=name, folder=folder)
        if refused := [reply for reply in replies if reply.error]:
            if len(refused) < len(replies):
                self._ask("unload_adapter", name=name)
            raise RequestError(refused[0].error, status=refused[0].status)
        self._adapters[name] = folder
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`."""
        for reply in self._ask("unload_adapter", name=name):
            if reply.error:
                raise RequestError(reply.error, status=reply.status)
        del self._adapters[name]

    # What they know.

    def figures(self) -> list[Figures]:
        """Of each replica. Waits for their answers."""
        answers = self._values("figures")
        return [Figures(Counters(**answer["counters"]), EngineStats(**answer["stats"])) for answer in answers]

    @property
    def counters(self) -> Counters:
        """Over all replicas. Waits for their answers."""
        found = [figures.counters for figures in self.figures()]
        return Counters(**{f.name: sum(getattr(one, f.name) for one in found) for f in fields(Counters)})

    def reset_cache(self) -> bool:
        """As `Engine.reset_cache`, of every replica."""
        for number in range(len(self._replicas)):
            self._door.forget(number)
        return all(self._values("reset_cache"))

    def check(self) -> list[dict[str, Any]]:
        """Each allocator's own integrity check; the counters of each replica."""
        return self._values("check")

    def _values(self, op: str) -> list[Any]:
        replies = self._ask(op)
        for number, reply in enumerate(replies):
            if reply.error:
                raise ReplicaError(f"replica {number}: {op}: {reply.error}")
        return [reply.value for reply in replies]

    def _ask(self, op: str, **arguments: Any) -> list[Reply]:
        """Each replica's answer. What else they say meanwhile is kept for `step`."""
        number = next(self._controls)
        for replica in self._replicas:
            replica.process.send(self._encoder.encode(Control(number, op, arguments)))
        answers: dict[int, Reply] = {}
        while len(answers) < len(self._replicas):
            said = self._heard(self._inbox.get())
            if isinstance(said.value, Reply):
                answers[said.replica] = said.value
            else:
                self._waiting.append(said)
        return [answers[replica] for replica in range(len(self._replicas))]

    @staticmethod
    def _heard(said: _Said) -> _Said:
        if said.op == "death":
            raise ReplicaError(f"replica {said.replica} {said.value}")
        return said
