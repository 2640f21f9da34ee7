"""Engines whose processes are children of this one: it starts them, hears their deaths, and starts them again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.frontend.client import EngineClient, tokenizer_of
from dovetail.core.frontend.engine_process import EngineProcess
from dovetail.core.frontend.fleet import Fleet
from dovetail.core.frontend.messages import EngineInfo, Reply, StepMessage
from dovetail.core.frontend.replicas import replica_compositions, replica_environment
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)


class OwnedEngine(EngineClient):
    def __init__(
        self,
        composition: Composition,
        *,
        max_restarts: int = 0,
        timeout: float = math.inf,
        adapters: Callable[[], Mapping[str, str] | None] = lambda: None,
        environment: Mapping[str, str] | None = None,
        **client: Any,
    ) -> None:
        """`max_restarts`: how often within an hour a dead engine is replaced; then the state is "failed". `timeout`:
        seconds of silence after which an engine that has work counts as dead. `adapters` says, each time an engine
        starts, which it shall begin with: name -> folder; None = as composed. `client`: see EngineClient."""
        super().__init__(**client)
        self.composition = composition
        self._timeout, self._environment, self._adapters = timeout, environment, adapters
        self.life = 0
        """Counts the processes that were started."""
        self._restarts = Restarts(max_restarts)
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        super().start()
        self._launch()

    async def close(self) -> None:
        """Abort what runs and end the engine's process. Idempotent."""
        if self.state != "failed":
            self.state = "stopped"
        self._fail_all(EngineDown("the server stops"))
        self._on_state()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    # Other processes that use it.

    def attach(self, link: int, life: int, addresses: Mapping[str, str]) -> None:
        """A process has bound its end of a link to that life of the engine."""
        if self._process is not None and life == self.life:
            self._process.order({"op": "attach", "link": link, **addresses})

    def detach(self, link: int) -> None:
        """It is gone: its requests are aborted."""
        if self._process is not None:
            self._process.order({"op": "detach", "link": link})

    def hangs(self, life: int, seconds: float) -> None:
        """A process that uses it heard nothing for so long."""
        if self._process is not None and life == self.life:
            self._process.end_hung(seconds)

    # In the event loop.

    def _launch(self) -> None:
        self.state, self.phase = "starting", ""
        self.life += 1
        self._process = EngineProcess(
            self.composition,
            self,
            timeout=self._timeout,
            environment=self._environment,
            adapters=self._adapters(),
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
        # An engine that could not start will not start next time either, except one that hung.
        again = allowed and (was == "ready" or process.hung_at_start)
        log.error("%s %s%s", self.name, cause, "; it is started again" if again else "")
        self._lost(cause)
        if again:
            self._launch()
        else:
            self.state = "failed"
        self._on_state()

    # From the engine's process, in the thread that hears it.

    def on_progress(self, process: EngineProcess, phase: str) -> None:
        self._call(self._on_progress, phase)

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None:
        self._call(self._on_ready, process, info, tokenizer_of(info))

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None:
        self._receive(message)

    def on_death(self, process: EngineProcess, cause: str) -> None:
        self._call(self._on_death, process, cause)


class OwnedFleet(Fleet):
    def __init__(
        self, composition: Composition, *, max_restarts: int = 0, timeout: float = math.inf, **fleet: Any
    ) -> None:
        """`max_restarts` within an hour and `timeout` are those of each replica: see `OwnedEngine`. One that fails for
        good leaves its work to the others; with max_restarts=0, or before all were ready once, or when it was the last,
        the fleet has failed with it. `fleet`: see Fleet."""
        super().__init__(composition, **fleet)
        self._max_restarts = max_restarts
        self._adapting = asyncio.Lock()
        self.clients: list[OwnedEngine] = [
            OwnedEngine(
                one,
                max_restarts=max_restarts,
                timeout=timeout,
                adapters=lambda: self._adapters if self.complete else None,
                environment=replica_environment(composition),
                **self._client_options(replica),
            )
            for replica, one in enumerate(replica_compositions(composition))
        ]

    def _changed(self, replica: int) -> None:
        client = self.clients[replica]
        if client.state == "ready":
            if self._all_ready.is_set():
                self._reports.restarted(replica)
            elif all(one.state == "ready" for one in self.clients):
                self.complete = True
                self._adapters = dict(self.info.adapters)
                self._all_ready.set()
        elif client.state != "stopped":
            self.failure = f"{client.name} {client.failure}"
            self._router.forget(replica)
            alive = any(one.state in ("ready", "starting") for one in self.clients)
            if client.state == "failed" and not (alive and self.complete and self._max_restarts):
                self.failed.set()
        self._reports.changed()

    # Adapters.

    async def load_adapter(self, name: str, folder: str) -> None:
        async with self._adapting:
            self._check_settled()
            loads = [client.control("load_adapter", name=name, folder=folder) for client in self._open()]
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
                raise RequestError(
                    f"adapter: {name!r} is not loaded; there is {', '.join(self._adapters) or 'none'}", status=404
                )
            del self._adapters[name]
            await self._unload(name)
            self._reports.changed()

    def _check_settled(self) -> None:
        """An engine that starts has been told already what to begin with."""
        self._check_ready()
        for client in self.clients:
            if client.state == "starting":
                raise EngineDown(f"{client.name} is starting: adapters can be loaded and unloaded when it is ready")

    async def _unload(self, name: str) -> None:
        """Where it is."""
        unloads = [client.control("unload_adapter", name=name) for client in self._open()]
        await asyncio.gather(*unloads, return_exceptions=True)


_HOUR = 3600.0


class Restarts:
    def __init__(self, most: int) -> None:
        """Within an hour."""
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self) -> bool:
        """Just now; whether it may be started again."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _HOUR:
            self._deaths.popleft()
        return len(self._deaths) <= self._most
