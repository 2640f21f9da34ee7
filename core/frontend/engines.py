"""The engines of a composition under one request table, for callers without an event loop: `LLM` and benchmarks."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dovetail.core.engine.adapters import unknown_adapter
from dovetail.core.engine.counters import Counters
from dovetail.core.engine.requests import RequestBuilder
from dovetail.core.errors import DovetailError, EngineStopped, RequestError
from dovetail.core.frontend.engine_process import EngineProcess
from dovetail.core.frontend.messages import EngineInfo, EngineStats, Reply, StepMessage
from dovetail.core.frontend.replicas import CheckedRouter, make_lanes, replica_compositions, replica_environment
from dovetail.core.frontend.request_table import NewRequest, RequestTable
from dovetail.core.interfaces import ModelSpec, Progress
from dovetail.core.parallel.failure import for_user, remote_cause

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.frontend.local_engine import LocalEngine


class ReplicaError(DovetailError):
    """A replica died or refused an operation, which ends the run."""


class ReplicaFigures(NamedTuple):
    """Figures of one replica since it was ready."""

    counters: Counters
    stats: EngineStats


class Engines(ABC):
    """Engines that start and end together: when one fails, `failure` is set and every request fails. Thread-safe."""

    info: EngineInfo
    """Info of all engines together: the slowest phase, the fewest pages, every note. Set by `start`."""
    spec: ModelSpec
    """Set by `start`."""

    def __init__(self, composition: Composition) -> None:
        """Load nothing yet; `start` does."""
        self.composition = composition
        self.failure: BaseException | None = None
        self.closed = False
        self._router = CheckedRouter(composition)
        self.table = RequestTable(self._router, validate=self._validate)
        self.adapters: dict[str, str] = {}
        """Adapters that every engine has: name -> folder."""
        self._adapting = threading.Lock()

    def start(self, progress: Progress) -> None:
        """Load every engine."""
        try:
            self._start(progress)
            self.adapters = dict(self.info.adapters)
            self._requests = RequestBuilder(self.composition, self.spec, self.info.max_len)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every engine and free its memory; open requests fail. Idempotent."""
        if not self.closed:
            self.closed = True
            self._stop()

    @abstractmethod
    def _start(self, progress: Progress) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...

    def _validate(self, new: NewRequest) -> None:
        self.check_alive()
        adapter = new.options.adapter
        if adapter and adapter not in self.adapters:
            raise unknown_adapter(adapter, self.adapters, served=self.composition.part("adapter").name != "none")
        self._requests.request(new.prompt_ids, new.params, new.options)

    def check_alive(self) -> None:
        """Raise EngineStopped if an engine has failed."""
        if self.failure is not None:
            raise stopped(self.failure)

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
        for replica in range(self._router.replicas):
            self.table.fail(replica, stopped(self.failure))

    # Rare operations, which every engine executes between two of its steps.

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter on every engine, or on none, while requests run. Raises RequestError."""
        with self._adapting:
            answers = self._control_all("load_adapter", name=name, folder=folder)
            if refused := [error for answer in answers if (error := answer.exception()) is not None]:
                if len(refused) < len(answers):
                    self._control_all("unload_adapter", name=name)
                raise refused[0]
            self.adapters = {**self.adapters, name: folder}

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it run to their end. Raises RequestError."""
        with self._adapting:
            for answer in self._control_all("unload_adapter", name=name):
                answer.result()
            self.adapters = {known: folder for known, folder in self.adapters.items() if known != name}

    def figures(self) -> list[ReplicaFigures]:
        """Return the figures of each replica."""
        answers = self._values("figures")
        return [ReplicaFigures(Counters(**answer["counters"]), EngineStats(**answer["stats"])) for answer in answers]

    @property
    def counters(self) -> Counters:
        """Sums over all replicas."""
        return Counters.total(figures.counters for figures in self.figures())

    def reset_cache(self) -> bool:
        """Forget cached prefixes; False if an allocator cannot."""
        for replica in range(self._router.replicas):
            self.table.forget(replica)
        return all(self._values("reset_cache"))

    def check(self) -> list[Mapping[str, Any]]:
        """Run each allocator's integrity check; return the figures of each replica."""
        return self._values("check")

    def _values(self, op: str) -> list[Any]:
        values = []
        for replica, answer in enumerate(self._control_all(op)):
            try:
                values.append(answer.result())
            except RequestError as error:
                raise ReplicaError(f"replica {replica}: {op}: {error}") from None
        return values

    def _control_all(self, op: str, **arguments: Any) -> list[Future[Any]]:
        """Run an operation on all engines; return the finished futures."""
        self.check_alive()
        answers = [self.table.control(replica, op, **arguments) for replica in range(self._router.replicas)]
        for answer in answers:
            answer.exception()
        self.check_alive()
        return answers


class OneLocalEngine(Engines):
    """The engine of a composition without replicas, in a thread of this process."""

    local: LocalEngine | None = None

    def _start(self, progress: Progress) -> None:
        from dovetail.core.frontend.local_engine import LocalEngine

        self.local = LocalEngine(self.composition, partial(self.table.receive, 0), self._fail)
        self.info = self.local.start(progress)
        self.spec = self.local.engine.info.spec
        self.table.connect(0, self.local)

    def _stop(self) -> None:
        if self.local is not None:
            self.local.stop()


class EngineProcesses(Engines):
    """engine.dp engines in separate processes. The router chooses the engine of each request."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        self.processes: list[EngineProcess] = []
        self.lanes = make_lanes(composition)
        """The engines' group if they share experts."""

    def _start(self, progress: Progress) -> None:
        events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        environment = replica_environment(self.composition)
        for number, one in enumerate(replica_compositions(self.composition, self.lanes)):
            listener = _ProcessListener(number, self, events.put)
            self.processes.append(EngineProcess(one, listener, environment=environment, lanes=self.lanes))
        for process in self.processes:
            process.start()
        infos: dict[int, EngineInfo] = {}
        while len(infos) < len(self.processes):
            number, what, value = events.get()
            if what == "ready":
                infos[number] = value
                self.table.connect(number, self.processes[number])
            elif what == "death":
                raise value
            elif all(earlier in infos for earlier in range(number)):
                progress(value, None)
        self.info = _together([infos[number] for number in range(len(infos))])
        model = self.composition.part("model")
        self.spec = model.target().spec(model.config)

    def _stop(self) -> None:
        self._fail(DovetailError("closed while requests ran"))
        if self.lanes is not None:
            self.lanes.end()
        with ThreadPoolExecutor(max(len(self.processes), 1)) as pool:
            list(pool.map(EngineProcess.stop, self.processes))
        if self.lanes is not None:
            self.lanes.close()


class _ProcessListener:
    """Listener of one engine process."""

    def __init__(
        self, replica: int, engines: EngineProcesses, starting: Callable[[tuple[int, str, Any]], None]
    ) -> None:
        """`starting` takes events until every engine is ready."""
        self._replica, self._engines, self._starting = replica, engines, starting

    def on_progress(self, process: EngineProcess, phase: str) -> None:
        self._starting((self._replica, "progress", phase))

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None:
        self._starting((self._replica, "ready", info))

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None:
        self._engines.table.receive(self._replica, message)

    def on_death(self, process: EngineProcess, cause: str) -> None:
        replica, traceback = self._replica, process.traceback
        if (lanes := self._engines.lanes) is not None:
            replica, cause, traceback = lanes.death(replica, cause, traceback)
        error = ReplicaError(f"replica {replica} {cause}")
        error.__cause__ = remote_cause(traceback)
        self._starting((self._replica, "death", error))
        self._engines._fail(error)


def start_engines(composition: Composition, progress: Progress = lambda phase, share: None) -> Engines:
    """Load engines: one in this process, or engine.dp > 1 in processes. Raises errors of loading after freeing all."""
    engines = OneLocalEngine(composition) if composition.engine.dp == 1 else EngineProcesses(composition)
    engines.start(progress)
    return engines


def stopped(failure: BaseException) -> EngineStopped:
    """Return the error for requests of an engine that has failed."""
    error = EngineStopped(f"the engine stopped: {for_user(failure)}")
    error.__cause__ = failure
    return error


def _together(infos: list[EngineInfo]) -> EngineInfo:
    first = infos[0]
    return msgspec.structs.replace(
        first,
        num_pages={group: min(info.num_pages[group] for info in infos) for group in first.num_pages},
        max_len=min(info.max_len for info in infos),
        max_seqs=sum(info.max_seqs for info in infos),
        phases={name: max(info.phases.get(name, 0.0) for info in infos) for name in first.phases},
        notes=list(dict.fromkeys(note for info in infos for note in info.notes)),
        tuning="+".join(sorted({info.tuning for info in infos})),
    )
