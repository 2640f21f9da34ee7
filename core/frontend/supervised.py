"""Engines whose processes are children of this one, which starts, restarts and ends them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.core.engine.adapters import unknown_adapter
from dovetail.core.errors import EngineDown
from dovetail.core.frontend.client import EngineClient, tokenizer_of
from dovetail.core.frontend.engine_process import EngineProcess
from dovetail.core.frontend.fleet import Fleet
from dovetail.core.frontend.lanes import LaneGroup
from dovetail.core.frontend.messages import EngineInfo, Reply, StepMessage
from dovetail.core.frontend.replicas import make_lanes, replica_compositions, replica_environment
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)


class SupervisedEngine(EngineClient):
    """Client of an engine in a child process, which it restarts after a death. It is the Listener of that process."""

    def __init__(
        self,
        composition: Composition,
        *,
        max_restarts: int = 0,
        timeout: float = math.inf,
        adapters: Callable[[], Mapping[str, str] | None] = lambda: None,
        environment: Mapping[str, str] | None = None,
        lanes: LaneGroup | None = None,
        **client: Any,
    ) -> None:
        """`max_restarts`: restarts within an hour; after them the state is "failed". `timeout`: seconds without a
        message after which an engine that has work counts as hung. `adapters` returns the adapters with which an engine
        starts (name -> folder; None = those of the composition). `lanes`: its group, if it shares experts with other
        engines. `client`: see EngineClient."""
        super().__init__(**client)
        self._lanes = lanes
        self.composition = composition
        self._timeout, self._environment, self._adapters = timeout, environment, adapters
        self.incarnation = 0
        """Number of processes started so far."""
        self._restarts = Restarts(max_restarts)
        self._process: EngineProcess | None = None

    def start(self) -> None:
        super().start()
        self._launch()

    async def close(self) -> None:
        """Abort requests and end the engine process. Idempotent."""
        if self.state != "failed":
            self.state = "stopped"
        self._fail_all(EngineDown("the server stops", ran=True))
        self._on_state()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    # For other processes that use the engine.

    def attach(self, link: int, incarnation: int, addresses: Mapping[str, str]) -> None:
        """Connect a process, which has bound its end of a link to that incarnation of the engine."""
        if self._process is not None and incarnation == self.incarnation:
            self._process.send_order({"op": "attach", "link": link, **addresses})

    def detach(self, link: int) -> None:
        """Abort the requests of a process that has ended."""
        if self._process is not None:
            self._process.send_order({"op": "detach", "link": link})

    def end_hung(self, incarnation: int, seconds: float) -> None:
        """Kill an engine from which another process received nothing for `seconds` while it had work."""
        if self._process is not None and incarnation == self.incarnation:
            self._process.end_hung(seconds)

    # In the event loop.

    def _launch(self) -> None:
        self.state, self.phase = "starting", ""
        self.incarnation += 1
        self._process = EngineProcess(
            self.composition,
            self,
            timeout=self._timeout,
            environment=self._environment,
            adapters=self._adapters(),
            again=self.incarnation > 1,
            lanes=self._lanes,
        )
        self._process.start()

    def _on_ready(self, process: EngineProcess, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if process is self._process:
            self._opened(process, info, tokenizer)

    def _on_death(self, process: EngineProcess, cause: str) -> None:
        if process is not self._process:
            return
        was, self._process = self.state, None
        allowed = self._restarts.died()
        # An engine that could not start would fail again, except one that hung.
        again = allowed and (was == "ready" or process.hung_at_start)
        trace = f"\n{process.traceback}" if process.traceback else ""
        log.error("%s %s%s%s", self.name, cause, "; it is started again" if again else "", trace)
        self._lost(cause)
        if again:
            self._launch()
        else:
            self.state = "failed"
        self._on_state()

    # In the thread that receives from the engine process.

    def on_progress(self, process: EngineProcess, phase: str) -> None:
        self._call_soon(self._on_progress, phase)

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None:
        self._call_soon(self._on_ready, process, info, tokenizer_of(info))

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None:
        self._receive(message)

    def on_death(self, process: EngineProcess, cause: str) -> None:
        if self._lanes is not None and self.state != "stopped":
            first = self._lanes.death(self.replica, cause, process.traceback)
            if first.replica != self.replica:
                cause = f"ended with replica {first.replica}, which {first.cause}"
        self._call_soon(self._on_death, process, cause)


class SupervisedFleet(Fleet):
    def __init__(
        self, composition: Composition, *, max_restarts: int = 0, timeout: float = math.inf, **fleet: Any
    ) -> None:
        """`max_restarts`, `timeout`: per replica, see SupervisedEngine; replicas that share experts are not restarted,
        since all end with one. If a replica fails for good, the fleet fails too if max_restarts=0, if not all were
        ready once, or if it was the last. `fleet`: see Fleet."""
        super().__init__(composition, **fleet)
        self._lanes = make_lanes(composition)
        max_restarts = max_restarts if self._lanes is None else 0
        self._max_restarts = max_restarts
        self._adapting = asyncio.Lock()
        self._unloads: set[asyncio.Future[None]] = set()
        self.clients: list[SupervisedEngine] = [
            SupervisedEngine(
                one,
                max_restarts=max_restarts,
                timeout=timeout,
                adapters=lambda: self._adapters if self.complete else None,
                environment=replica_environment(composition),
                lanes=self._lanes,
                **self._client_options(replica),
            )
            for replica, one in enumerate(replica_compositions(composition, self._lanes))
        ]

    async def close(self) -> None:
        if self._lanes is not None:
            self._lanes.end()
        await super().close()
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None

    def _changed(self, replica: int) -> None:
        client = self.clients[replica]
        if client.state == "ready":
            if self._all_ready.is_set():
                self._reports.restarted(replica)
                for name in self._adapters.keys() - client.info.adapters.keys():
                    self._drop(name, client.name)
            elif all(one.state == "ready" for one in self.clients):
                self.complete = True
                self._adapters = dict(self.info.adapters)
                self._all_ready.set()
        elif client.state != "stopped":
            self.failure = f"{client.name} {client.failure}"
            self._table.forget(replica)
            alive = any(one.state in ("ready", "starting") for one in self.clients)
            if client.state == "failed" and not (alive and self.complete and self._max_restarts):
                self.failed.set()
        self._reports.changed()

    async def load_adapter(self, name: str, folder: str) -> None:
        async with self._adapting:
            self._check_settled()
            loads = [client.control("load_adapter", name=name, folder=folder) for client in self._ready_clients()]
            answers = await asyncio.gather(*loads, return_exceptions=True)
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            if failed:
                if len(failed) < len(answers):
                    await self._unload(name)
                raise failed[0]
            self._adapters[name] = folder
            self._reports.changed()

    async def unload_adapter(self, name: str) -> None:
        async with self._adapting:
            self._check_settled()
            if name not in self._adapters:
                raise unknown_adapter(name, self._adapters, served=True)
            del self._adapters[name]
            await self._unload(name)
            self._reports.changed()

    def _drop(self, name: str, replica: str) -> None:
        """Unload an adapter that a restarted replica could not load again: adapters are on every replica or on none."""
        log.error("adapter %s is unloaded, because %s could not load it again", name, replica)
        del self._adapters[name]
        task = asyncio.ensure_future(self._unload(name))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    def _check_settled(self) -> None:
        """Raise EngineDown while an engine starts: it has already received its list of adapters."""
        self._check_ready()
        for client in self.clients:
            if client.state == "starting":
                raise EngineDown(f"{client.name} is starting: adapters can be loaded and unloaded when it is ready")

    async def _unload(self, name: str) -> None:
        """Unload an adapter wherever it is loaded."""
        unloads = [client.control("unload_adapter", name=name) for client in self._ready_clients()]
        await asyncio.gather(*unloads, return_exceptions=True)


_HOUR = 3600.0


class Restarts:
    """Limits the restarts of a process to `most` within an hour."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self) -> bool:
        """Count a death at this moment; return whether the process may be restarted."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _HOUR:
            self._deaths.popleft()
        return len(self._deaths) <= self._most
