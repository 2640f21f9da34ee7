"""`app=serve`: listens, starts the engine, stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from dovetail.core import chat_template, logs
from dovetail.core.compose import Host
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import App
from dovetail.core.serving.client import EngineDown
from dovetail.plugins.app.serve import api, keys, protocol
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.service import Service

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
_LAST_WORDS_SECONDS = 1.0
"""For answers that say why a request was cut off."""


class ServeApp(App):
    config: ServeConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        if sys.platform == "win32":
            raise ConfigError("app=serve needs Linux or macOS: its processes speak over Unix sockets")
        # What the model states is read from its folder without torch: one that is not there is reported at once.
        composition.part("model").capabilities(Host())
        logs.set_up(self.config.log_format)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        accepted = keys.load(self.config.api_key_file)
        with _listen(self.config) as sock:
            with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
                return runner.run(self._serve(composition, accepted, sock))

    async def _serve(self, composition: Composition, accepted: keys.Keys, sock: socket.socket) -> int:
        service = Service(self.config, composition)
        server = _Server(
            uvicorn.Config(
                api.build(service, accepted),
                http=protocol.bounded(self.config.receive_timeout),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                # The end of the grace period is ours: see _watch.
                timeout_graceful_shutdown=None,
                server_header=False,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop, service)
        service.client.start()
        host, port = sock.getsockname()[:2]
        log.info("listening on http://%s:%d; the engine starts", f"[{host}]" if ":" in host else host, port)
        watches = [
            asyncio.ensure_future(_until_stopped(service, server)),
            asyncio.ensure_future(_until_failed(service, server)),
            asyncio.ensure_future(service.text.threaded(chat_template.warm)),
        ]
        try:
            await server.serve(sockets=[sock])
        finally:
            for watch in watches:
                watch.cancel()
            await service.client.close()
            service.close()
        if service.client.state != "failed":
            return 0
        if not service.was_ready:
            raise DovetailError(service.client.failure)
        return 1


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again once it has ended, and the exit code would not be 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, service: Service) -> None:
        """The first time in order, the second time at once."""
        if service.draining:
            self.force_exit = True
            return
        service.draining = self.should_exit = True
        log.info("stopping: %d samples have %g s to finish", service.client.samples, service.config.grace)
        self.told.set()


async def _until_stopped(service: Service, server: _Server) -> None:
    await server.told.wait()
    await asyncio.sleep(service.config.grace)
    if service.client.samples:
        log.warning("%d samples did not finish within serve.grace=%g s", service.client.samples, service.config.grace)
    # Their answers say so, and the connections close.
    await service.client.close()
    await asyncio.sleep(_LAST_WORDS_SECONDS)
    server.force_exit = True


async def _until_failed(service: Service, server: _Server) -> None:
    client = service.client
    try:
        info = await client.wait_ready()
    except EngineDown:
        pass
    else:
        service.was_ready = True
        service.monitor.engine_ready(service.model_names[0], len(client.clients))
        replicas = f"{len(client.clients)} replicas" if len(client.clients) > 1 else "engine"
        log.info("ready: %s on %s, %s started in %.1f s", info.model, info.device, replicas, info.start_seconds)
        for note in info.notes:
            log.info("slower path: %s", note)
        # What was loaded stays: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        await client.failed.wait()
    server.should_exit = True


def _listen(config: ServeConfig) -> socket.socket:
    """Bound, not yet listening. Says at once that a port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(f"serve.host={config.host} serve.port={config.port}: cannot listen there ({error})") from None
    return sock
