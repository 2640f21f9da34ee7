"""HTTP server of one process: uvicorn around the endpoints, with graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from dovetail.core.heap import short_collections
from dovetail.plugins.app.serve import api, protocol
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.service import Service

_KEEP_ALIVE_SECONDS = 75
FLUSH_SECONDS = 1.0
"""Time to send the error responses of requests that were cut off."""


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory that uvicorn prefers."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


def seconds_or_inf(seconds: float | None) -> float:
    """Convert an optional time limit; None = no limit."""
    return math.inf if seconds is None else seconds


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: it re-raises signals after shutdown, and the exit code would not be 0."""

    def __init__(
        self, service: Service, accepted: Keys, on_listening: Callable[[], None], *, report: bool = True
    ) -> None:
        """`report`: log mistakes in the model's files. One of several processes does."""
        self.service, self._on_listening, self.report = service, on_listening, report
        super().__init__(
            uvicorn.Config(
                api.build(service, accepted),
                http=protocol.bounded(service.config.receive_timeout, service.config.max_body_bytes),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                # The grace period is enforced by cut_off.
                timeout_graceful_shutdown=None,
                server_header=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def answer(self, sock: socket.socket, *background: Any) -> None:
        """Answer requests until `stop`, with the awaitables `background` running concurrently."""
        service = self.service
        service.client.start()
        tasks = [asyncio.ensure_future(one) for one in (*background, service.text.prepare(self.report))]
        try:
            with short_collections():
                await self.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            await service.client.close()
            service.close()

    def stop(self) -> bool:
        """Shut down gracefully; a second call closes all connections and returns False."""
        first = not self.service.draining
        self.service.draining = self.should_exit = True
        self.force_exit = not first
        return first

    async def cut_off(self) -> None:
        """End the running requests with an error, then close all connections."""
        await self.service.client.close()
        await asyncio.sleep(FLUSH_SECONDS)
        self.force_exit = True
