"""One process that answers HTTP: uvicorn around the endpoints, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from dovetail.core import chat_template
from dovetail.plugins.app.serve import api, protocol
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.service import Service

_KEEP_ALIVE_SECONDS = 75
LAST_WORDS_SECONDS = 1.0
"""For answers that say why a request was cut off."""


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """A factory of uvicorn's choice."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


def limit(seconds: float | None) -> float:
    """null: for ever."""
    return math.inf if seconds is None else seconds


def settle() -> None:
    """What was loaded stays: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()


class Front(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again once it has ended, and the exit code would not be 0."""

    def __init__(self, service: Service, accepted: Keys, on_listening: Callable[[], None]) -> None:
        self.service, self._on_listening = service, on_listening
        super().__init__(
            uvicorn.Config(
                api.build(service, accepted),
                http=protocol.bounded(service.config.receive_timeout),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                # The end of the grace period is ours: see cut_off.
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

    async def answer(self, sock: socket.socket, *watches: Any) -> None:
        """Until it is told to stop; `watches` run meanwhile."""
        service = self.service
        service.client.start()
        tasks = [asyncio.ensure_future(one) for one in (*watches, service.text.threaded(chat_template.warm))]
        try:
            await self.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            await service.client.close()
            service.close()

    def stop(self) -> bool:
        """The first time in order, the second time at once: then it returns False."""
        first = not self.service.draining
        self.service.draining = self.should_exit = True
        self.force_exit = not first
        return first

    async def cut_off(self) -> None:
        """What still runs is told so, and the connections close."""
        await self.service.client.close()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self.force_exit = True
