"""LocalEngine: an engine and its loop in a thread of this process. Messages are passed without encoding."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from dovetail.core.engine.checks import check_clock
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import DovetailError
from dovetail.core.frontend.engine_loop import EngineLoop, describe_engine
from dovetail.core.frontend.messages import Command, EngineInfo, EngineStats, Reply, SampleUpdate, StepMessage
from dovetail.core.interfaces import Progress

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

STEP_SECONDS = 2.0
"""Grace period for the step in flight on `stop`; after it a rank is assumed to hang, and the step is interrupted."""


class LocalEngine:
    """A Transport. `on_message` and `on_death` are called in the engine's thread."""

    def __init__(
        self,
        composition: Composition,
        on_message: Callable[[StepMessage | Reply], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.composition = composition
        self._on_death = on_death
        self._commands = _LocalCommands(on_message)
        self._ended = threading.Event()
        self._engine: Engine | None = None

    def start(self, progress: Progress) -> EngineInfo:
        """Load the engine in the calling thread, then start its loop. Raises the errors of loading."""
        check_clock(self.composition)
        began = time.perf_counter()
        engine = self._engine = start_engine(self.composition, progress)
        info = describe_engine(self.composition, engine, time.perf_counter() - began)
        threading.Thread(target=self._run, args=(engine,), name="dovetail-engine", daemon=True).start()
        return info

    @property
    def engine(self) -> Engine:
        """The engine. Only its thread may step it."""
        assert self._engine is not None, "the engine has not started"
        return self._engine

    def send(self, *commands: Command) -> None:
        self._commands.put(commands)

    def stop(self) -> None:
        """End the loop, drop all requests and free the engine's memory. Blocks."""
        if self._engine is None:
            return
        self._commands.put(None)
        # Not joined: a join that Ctrl-C interrupts marks the thread as ended (Python 3.11).
        if not self._ended.wait(STEP_SECONDS):
            self.engine.interrupt()
            self._ended.wait()
        self.engine.shutdown()

    def _run(self, engine: Engine) -> None:
        failure: BaseException = DovetailError("closed while requests ran")
        try:
            EngineLoop(engine, self._commands).run()
        except BaseException as error:
            failure = error
        try:
            self._on_death(failure)
        finally:
            self._ended.set()


class _LocalCommands:
    """The command source and only port of a loop in this process."""

    delays_launches = False

    def __init__(self, on_message: Callable[[StepMessage | Reply], None]) -> None:
        self.stopped = False
        self.updates: list[SampleUpdate] = []
        self.up_to_date = True
        self.ports: Collection[_LocalCommands] = (self,)
        self._on_message = on_message
        self._queue: queue.SimpleQueue[tuple[Command, ...] | None] = queue.SimpleQueue()

    def put(self, commands: tuple[Command, ...] | None) -> None:
        """Enqueue commands; None = stop."""
        self._queue.put(commands)

    def receive(self, seconds: float | None) -> Iterator[tuple[_LocalCommands, Command]]:
        try:
            commands = self._queue.get(block=seconds != 0.0, timeout=seconds)
            while commands is not None:
                for command in commands:
                    yield self, command
                commands = self._queue.get(block=False)
            self.stopped = True
        except queue.Empty:
            pass

    def send_step(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        updates, self.updates = self.updates, []
        self._on_message(StepMessage(updates, stats))

    def send(self, reply: Reply) -> None:
        self._on_message(reply)
